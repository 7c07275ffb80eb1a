"""What all routes share: the frontend, the engine's health, the names that are served."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ...engine.errors import CapacityError, EngineDead, UnknownModel
from ...engine.types import AdapterInfo, Priority
from ..access.api_keys import Scope
from ..access.caller import Caller
from ..access.keyring import KeyRing
from ..access.overload import QueueLimits
from ..access.rate_limits import RateLimits
from ..access.request_admission import RequestAdmission
from ..config import ServerConfig
from ..observe.engine_watch import EngineWatch
from ..observe.metrics import Metrics
from ..observe.usage_ledger import UsageLedger
from ..storage.response_store import ResponseStore
from ..structured.output_check import OutputValidators
from ..structured.tool_formats import Dialect, dialect_of

if TYPE_CHECKING:
    from ...engine.serving.async_engine import AsyncEngine
    from ...engine.serving.engine_client import EngineClient
    from ...engine.text.tokenizer import Tokenizer
    from ..batches.batch_service import BatchService
    from ..batches.internal_client import InternalClient
    from ..observe.tracing import Tracer


@dataclass(slots=True)
class ServerState:
    """Made before the model is loaded; ``server`` fills in the rest when it is.

    Raises:
        ConfigError: the file with keys cannot be taken.

    Attributes:
        options: the server's options.
        metrics: where routes note what they measure.
        names: the names under which the base model is served, the first one first.
        finds_adapters: whether the engine looks for adapters that nobody has loaded (``--lora-dir``).
        frontend: None while the model is loading.
        client: None before the engine process is started.
        draining: whether the server is about to end, and takes no new work.
        validators: of structured answers. Used by ``streams`` alone.
        active: generations under way. Written by ``streams`` alone.
        version: of the server, for ``/version`` and the fingerprint.
        started: when the server began, in seconds since 1970.
        responses: those that can be asked for again.
        keys: who may ask.
        admission: whether more may be asked now. Used by ``streams`` alone.
        ledger: of usage, if one is kept. Used by ``account`` alone, as is the next one.
        batches: files and batches of clients, if they are kept.
        inner: asks the routes themselves, for batches. Set by ``create_app``.
        tracer: where traces go, if they are wanted.
        watch: snapshots of the engine, for the live page.
    """

    options: ServerConfig
    metrics: Metrics
    names: tuple[str, ...] = ("model",)
    finds_adapters: bool = False
    async_engine: AsyncEngine | None = None
    client: EngineClient | None = None
    draining: bool = False
    validators: OutputValidators = field(default_factory=OutputValidators)
    active: int = 0
    version: str = "unknown"
    started: int = field(default_factory=lambda: int(time.time()))
    keys: KeyRing = field(init=False)
    ledger: UsageLedger | None = None
    tracer: Tracer | None = None
    batches: BatchService | None = None
    inner: InternalClient | None = None
    watch: EngineWatch = field(init=False)
    admission: RequestAdmission = field(init=False)
    responses: ResponseStore = field(init=False)
    _dialect: tuple[Tokenizer, Dialect] | None = None

    def __post_init__(self) -> None:
        """Read the keys, open an empty queue and the store of responses."""
        options = self.options
        self.keys = KeyRing(options.api_key, None if options.api_key_file is None else Path(options.api_key_file))
        queue_limits = QueueLimits(options.max_queued_requests, options.max_queued_tokens, options.max_queue_seconds)
        self.admission = RequestAdmission(queue_limits, RateLimits())
        self.watch = EngineWatch()
        self.responses = ResponseStore(options.max_stored_response_bytes, options.stored_response_ttl)

    @property
    def is_healthy(self) -> bool:
        """Whether the engine runs and gave a sign of life lately."""
        if self.client is None or self.async_engine is None or not self.client.is_alive:
            return False
        return self.client.last_heartbeat_age() < self.options.heartbeat_timeout

    @property
    def is_ready(self) -> bool:
        """Whether new requests are taken."""
        return self.is_healthy and not self.draining

    @property
    def fingerprint(self) -> str:
        """OpenAI's ``system_fingerprint``: the same as long as version and model are."""
        return "fp_" + hashlib.sha256(f"{self.version}\0{self.names[0]}".encode()).hexdigest()[:10]

    def stats(self) -> dict[str, float]:
        """Gauges and counters for the metrics: the engine's last ones, and those kept here."""
        waits = {
            f"queue_seconds_{band.name.lower()}": self.admission.queue_limits.drain_seconds(band) for band in Priority
        }
        lost = 0 if self.ledger is None else self.ledger.num_lost
        batches = {} if self.batches is None else self.batches.stats()
        own = {**self.responses.stats(), **waits, **batches, "ledger_lost": lost}
        return own | ({} if self.client is None else self.client.stats)

    def serving(self) -> AsyncEngine:
        """The frontend, if new requests are taken. CapacityError or EngineDead if not."""
        if self.async_engine is None:
            raise CapacityError("The model is still being loaded.")
        if self.draining:
            raise CapacityError("The server is shutting down.")
        if not self.is_healthy:
            raise EngineDead("The engine is not running.")
        return self.async_engine

    def dialect(self) -> Dialect:
        """How the model that is served writes tool calls. Found out when it is first asked for."""
        tokenizer = self.serving().tokenizer
        if self._dialect is None or self._dialect[0] is not tokenizer:
            self._dialect = tokenizer, dialect_of(tokenizer, self.options.tool_call_parser)
        return self._dialect[1]

    def resolve(self, model: str | None, caller: Caller) -> tuple[str, str | None]:
        """The name that the answer carries, and the adapter of that name.

        UnknownModel if it is not served, or not to this caller: it cannot find out which of both.

        Where the engine looks for adapters itself, it is the one that knows which names there are.
        """
        if model is None:
            return self.names[0], None
        if model in self.names:
            return model, None
        if caller.may_use(model) and (model in self.adapters or self.finds_adapters):
            return model, model
        raise UnknownModel(model)

    def caller_named(self, tenant: str, key_name: str, path: str) -> Caller | None:
        """Who asks for a batch of this tenant's; None if the key of this name may no longer ask."""
        key = self.keys.named(key_name)
        if key is None or key.tenant != tenant or Scope.INFERENCE not in key.scopes:
            return None
        return Caller(key, "" if self.options.share_cache_between_keys else tenant, None, {}, path)

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """The adapters that are loaded, by name."""
        return {} if self.client is None else self.client.adapters
