"""Server state: the objects that routes use to serve one base model, and the objects that the whole server shares.

ServerState --> ModelEngine      the engine, and whether it serves
            --> ModelDirectory   names, adapters, versions
            --> ServerLimits     keys, admission, running generations
            --> Stores           responses, batches, usage
            --> Observers        metrics, traces, live page
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

from ...engine.types import Priority
from ...tenancy.tenant_shares import TenantShares
from ..access.overload import QueueLimits
from ..access.rate_limits import RateLimits
from ..access.request_admission import RequestAdmission
from ..access.server_limits import ServerLimits, open_keys
from ..access.socket_limits import SocketLimits
from ..config import ServerConfig
from ..fallback_plan import FallbackPlan
from ..observe.engine_facts import EngineFacts
from ..observe.gpu_usage import open_gpus
from ..observe.metrics import Metrics
from ..observe.observers import Observers
from ..observe.tracing import open_tracer
from .model_directory import ModelDirectory
from .model_engine import ModelEngine
from .stores import Stores

if TYPE_CHECKING:
    from ...engine.serving.async_engine import AsyncEngine
    from ...engine.serving.engine_like import EngineLike


class ServerState:
    """State of one base model. ``open`` builds it; ``begin_loading`` and ``begin_serving`` add the model.

    Args:
        names: names of the base model.
        engine: the model's engine; None to create one that is not started yet.
        main: the main state of the server, whose keys, rate limits and stores this state uses; None if this is the main
            state.

    Raises:
        ConfigError: the file with keys cannot be read.

    Attributes:
        options: options of the server and of this model.
        version: version of the server.
        started: start of the server, in seconds since 1970.
        plan: the models that may answer instead of this one: its fallbacks, and the routes to other models.
        is_main: whether this state reports the metrics of the whole server. Only one state does.
    """

    def __init__(
        self,
        options: ServerConfig,
        metrics: Metrics,
        *,
        names: tuple[str, ...] = ("model",),
        engine: ModelEngine | None = None,
        version: str = "unknown",
        main: ServerState | None = None,
    ) -> None:
        self.options = options
        self.version = version
        self.started = int(time.time())
        self.is_main = main is None
        self.engine = ModelEngine(options) if engine is None else engine
        self.models = ModelDirectory(names, self.engine)
        most = options.max_queued_requests, options.max_queued_tokens, options.max_queue_seconds
        queue = QueueLimits.before_engine(most, self.engine.stats)
        rates = RateLimits() if main is None else main.limits.admission.limits
        keys = open_keys(options) if main is None else main.limits.keys
        self.limits: ServerLimits = ServerLimits(
            keys, RequestAdmission(queue, rates), shares_cache=options.share_cache_between_keys
        )
        own_sockets = SocketLimits(TenantShares(options.max_websockets))
        self.sockets: SocketLimits = own_sockets if main is None else main.sockets
        self.stores: Stores = Stores.in_memory(options) if main is None else main.stores
        self.plan = FallbackPlan()
        self.observers: Observers = Observers(metrics, None if main is None else main.observers.tracer)

    @classmethod
    def open(cls, options: ServerConfig, version: str) -> ServerState:
        """Build the state with the stores and the tracer that the options name.

        Raises:
            ConfigError: a store cannot be opened, or OpenTelemetry is missing.
        """
        gpus = open_gpus()
        metrics = Metrics(_first_name(options), lambda: state.stats(), prefix=options.metrics_prefix, gpus=gpus)
        state = cls(options, metrics, version=version)
        state.observers.gpus = gpus
        state.stores = Stores.open(options, state.limits.caller_named)
        if options.otlp_traces_endpoint is not None:
            state.observers.tracer = open_tracer(options.otlp_traces_endpoint, version)
        return state

    @classmethod
    def beside(cls, main: ServerState, options: ServerConfig) -> ServerState:
        """Build the state of another base model of the same server. It uses the keys and stores of the main state."""
        metrics = Metrics(_first_name(options), lambda: state.stats(), prefix=options.metrics_prefix)
        state = ServerState(options, metrics, version=main.version, main=main)
        return state

    def begin_loading(self, names: tuple[str, ...], client: EngineLike, *, finds_adapters: bool) -> None:
        """Set the model's names and its engine's client. The metrics are reset, with the first name as their label."""
        self.engine.client, self.engine.finds_adapters = client, finds_adapters
        self.models.names = names
        self._renew_metrics(client, EngineFacts())

    def begin_serving(
        self, async_engine: AsyncEngine, client: EngineLike, facts: EngineFacts, base_digest: str = ""
    ) -> None:
        """Set the engine once it is ready.

        The metrics are reset, with the facts about the engine that are known now.
        """
        self._renew_metrics(client, facts)
        self.engine.async_engine, self.engine.base_digest = async_engine, base_digest

    def _renew_metrics(self, client: EngineLike, facts: EngineFacts) -> None:
        observers = self.observers
        observers.metrics = Metrics(
            self.models.names[0],
            self.stats,
            prefix=self.options.metrics_prefix,
            facts=facts,
            gpus=observers.gpus,
            engines=self.engine.replica_stats,
            fleet=self.engine.fleet_status,
            gateways=observers.gateways if self.is_main else None,
        )
        client.on_heartbeat = observers.metrics.on_heartbeat

    @property
    def is_named(self) -> bool:
        """Whether the model's names are known. They may come from the model's files, which have to be located first."""
        return self.engine.client is not None

    @property
    def is_ready(self) -> bool:
        """Whether new requests are accepted."""
        gateways = self.observers.gateways
        return self.engine.is_healthy and not self.engine.draining and (gateways is None or gateways().serves)

    def fingerprint_of(self, version: str | None) -> str:
        """Return OpenAI's ``system_fingerprint``: a hash of server version, model name and catalogue version."""
        text = f"{self.version}\0{self.models.names[0]}" + (f"\0{version}" if version else "")
        return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:10]

    def stats(self) -> dict[str, float]:
        """Return gauges and counters for the metrics: the engine's latest values, and the server's own."""
        queue, client = self.limits.admission.queue_limits, self.engine.client
        own = {f"queue_seconds_{priority.name.lower()}": queue.drain_seconds(priority) for priority in Priority}
        # The values of the stores are the same for all models, so only the main state reports them.
        if self.is_main:
            own |= self.stores.stats()
        if client is None or self.engine.removed:
            return own
        health = {"engine_healthy": float(self.engine.is_healthy), "engine_silent_seconds": client.silent_seconds}
        return own | health | client.stats


def _first_name(options: ServerConfig) -> str:
    """Return the model name in the metrics until the model's own name is known."""
    return (options.served_model_name or ("loading",))[0]
