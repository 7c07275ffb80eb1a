"""Server state shared by all routes: engine and health, model names, keys, admission, stores, observers."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ...engine.errors import AdapterUnavailable, CapacityError, EngineDead, RequestError, UnknownModel
from ...engine.serving.replica_status import FleetStatus, ReplicaOwner
from ...engine.types import AdapterInfo, Priority
from ...fleet.catalog.model_versions import ModelVersions
from ..access.api_keys import Key, KeyRing, Scope
from ..access.caller import Caller, RequestFacts
from ..access.overload import QueueLimits
from ..access.rate_limits import RateLimits
from ..access.request_admission import Demand, RequestAdmission, Ticket
from ..batches.batch_service import BatchService
from ..config import ServerConfig
from ..errors import HTTPError
from ..observe.engine_facts import EngineFacts
from ..observe.gpu_usage import GpuCollector, open_gpus
from ..observe.live_page import EngineWatch
from ..observe.metrics import Metrics
from ..observe.replica_view import GatewaysStatus
from ..observe.tracing import Tracer, open_tracer
from ..observe.usage_ledger import UsageLedger, UsageRecorder
from ..storage.response_store import ResponseStore
from ..structured.output_check import OutputValidators
from .remote_adapters import RemoteAdapters
from .template_formats import TemplateFormats

if TYPE_CHECKING:
    from ...engine.serving.adapter_tokenizers import AdapterTokenizers
    from ...engine.serving.async_engine import AsyncEngine
    from ...engine.serving.engine_like import EngineLike
    from ...engine.serving.request import TextRequest
    from ..batches.internal_client import InternalClient
    from ..structured.reasoning_formats import ReasoningFormat
    from ..structured.tool_dialects import Dialect

_RETRY_ELSEWHERE = {"retry-after": "1", "connection": "close"}


@dataclass(slots=True)
class ServerState:
    """Shared state of the routes. ``open`` builds it, ``begin_loading`` and ``begin_serving`` add the model.

    Raises:
        ConfigError: the file with keys cannot be read.

    Attributes:
        names: names of the base model; responses carry the first one by default.
        finds_adapters: whether the engine loads unknown adapters from ``--lora-dir`` by itself.
        adapter_tokenizers: tokenizers of adapters; None without ``--enable-lora``.
        remote: adapters from sources; None until the engine's process is started, and without ``--enable-lora``.
        versions: of the catalogue; None without ``--model-catalog``.
        async_engine: None until the model is loaded.
        client: None until the engine process is started.
        draining: the server is shutting down and takes no new work.
        removed: the model is served no more; what runs may end.
        is_main: it tells what is of the whole server, of which the states of other models have a part.
        base_digest: of the model's content; "" until it is loaded.
        started: start of the server, in seconds since 1970.
        active: running generations. Written by ``generate`` alone.
        batches: files and batches of clients, None without ``--batch-dir``.
        internal_client: calls the routes for batches. Set by ``create_app``.
        ledger: of usage, None without ``--usage-ledger``.
        tracer: None without ``--otlp-traces-endpoint``.
        gpus: collector of GPU use for the metrics; None where there is none.
        watch: snapshots of the engine for the live page.
        gateways: returns the status of the gateways; None where this process answers HTTP alone.
    """

    options: ServerConfig
    metrics: Metrics
    names: tuple[str, ...] = ("model",)
    finds_adapters: bool = False
    remote: RemoteAdapters | None = None
    versions: ModelVersions | None = None
    async_engine: AsyncEngine | None = None
    client: EngineLike | None = None
    draining: bool = False
    removed: bool = False
    is_main: bool = True
    base_digest: str = ""
    version: str = "unknown"
    started: int = field(default_factory=lambda: int(time.time()))
    active: int = 0
    validators: OutputValidators = field(default_factory=OutputValidators)
    keys: KeyRing = field(init=False)
    admission: RequestAdmission = field(init=False)
    responses: ResponseStore = field(init=False)
    batches: BatchService | None = None
    internal_client: InternalClient | None = None
    ledger: UsageLedger | None = None
    tracer: Tracer | None = None
    gpus: GpuCollector | None = None
    watch: EngineWatch = field(init=False)
    gateways: Callable[[], GatewaysStatus] | None = None
    adapter_tokenizers: AdapterTokenizers | None = None
    _formats: TemplateFormats = field(init=False)
    _loading: dict[str, asyncio.Future[None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        options = self.options
        self.keys = KeyRing(options.api_key, None if options.api_key_file is None else Path(options.api_key_file))
        limits = options.max_queued_requests, options.max_queued_tokens, options.max_queue_seconds
        queue_limits = QueueLimits.before_engine(limits, lambda: {} if self.client is None else self.client.stats)
        self.admission = RequestAdmission(queue_limits, RateLimits())
        self.watch = EngineWatch()
        self._formats = TemplateFormats(options)
        self.responses = ResponseStore(options.max_stored_response_bytes, options.stored_response_ttl)

    @classmethod
    def open(cls, options: ServerConfig, version: str) -> ServerState:
        """Build the state with the stores and the tracer that the options name.

        Raises:
            ConfigError: a store cannot be opened, or OpenTelemetry is missing.
        """
        name = (options.served_model_name or ("loading",))[0]
        gpus = open_gpus()
        metrics = Metrics(name, lambda: state.stats(), prefix=options.metrics_prefix, gpus=gpus)
        state = cls(options, metrics, version=version, gpus=gpus)
        if options.usage_ledger is not None:
            state.ledger = UsageLedger(Path(options.usage_ledger))
        if options.batch_dir is not None:
            limits = options.max_stored_file_bytes, state.caller_named, options.max_file_bytes
            state.batches = BatchService(Path(options.batch_dir), *limits)
        if options.otlp_traces_endpoint is not None:
            state.tracer = open_tracer(options.otlp_traces_endpoint, version)
        return state

    @classmethod
    def beside(cls, main: ServerState, options: ServerConfig) -> ServerState:
        """Build the state of another base model of the same server, with the keys and stores of the main one."""
        name = (options.served_model_name or ("loading",))[0]
        metrics = Metrics(name, lambda: state.stats(), prefix=options.metrics_prefix)
        state = cls(options, metrics, version=main.version, is_main=False)
        state.keys, state.responses, state.validators = main.keys, main.responses, main.validators
        state.admission = RequestAdmission(state.admission.queue_limits, main.admission.limits)
        state.ledger, state.tracer, state.batches = main.ledger, main.tracer, main.batches
        return state

    def begin_loading(
        self,
        names: tuple[str, ...],
        client: EngineLike,
        *,
        finds_adapters: bool,
        remote: RemoteAdapters | None = None,
    ) -> None:
        """Take the model's names and its engine's client; metrics begin again under the first name."""
        self.names, self.client, self.finds_adapters, self.remote = names, client, finds_adapters, remote
        self._renew_metrics(client, EngineFacts())

    @property
    def is_named(self) -> bool:
        """Whether the names are the model's: they may come from its files, which are looked for first."""
        return self.client is not None

    def begin_serving(
        self, async_engine: AsyncEngine, client: EngineLike, facts: EngineFacts, base_digest: str = ""
    ) -> None:
        """Take the engine once it is ready; metrics begin again with what is known of it now."""
        self._renew_metrics(client, facts)
        self.async_engine, self.base_digest = async_engine, base_digest

    def _renew_metrics(self, client: EngineLike, facts: EngineFacts) -> None:
        prefix = self.options.metrics_prefix
        self.metrics = Metrics(
            self.names[0],
            self.stats,
            prefix=prefix,
            facts=facts,
            gpus=self.gpus,
            engines=self._engine_stats,
            fleet=self._fleet_status,
            gateways=self.gateways if self.is_main else None,
        )
        client.on_heartbeat = self.metrics.on_heartbeat

    @property
    def is_healthy(self) -> bool:
        """Whether the model is loaded and its engine process runs and does not hang."""
        return self.client is not None and self.async_engine is not None and self.client.is_alive

    @property
    def is_ready(self) -> bool:
        return self.is_healthy and not self.draining and (self.gateways is None or self.gateways().serves)

    def death(self) -> EngineDead:
        """Return the error that says why the engine is not running."""
        death = None if self.client is None else self.client.death
        return EngineDead("The engine is not running." if death is None else str(death))

    def fingerprint_of(self, version: str | None) -> str:
        """Return OpenAI's ``system_fingerprint``, a hash of server, model and version of the catalogue."""
        text = f"{self.version}\0{self.names[0]}" + (f"\0{version}" if version else "")
        return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:10]

    def stats(self) -> dict[str, float]:
        """Return gauges and counters for the metrics: the engine's last ones and the server's own."""
        queue = self.admission.queue_limits
        own = {f"queue_seconds_{priority.name.lower()}": queue.drain_seconds(priority) for priority in Priority}
        if self.is_main:
            own |= self._server_stats()
        if self.client is None or self.removed:
            return own
        health = {"engine_healthy": float(self.is_healthy), "engine_silent_seconds": self.client.silent_seconds}
        return own | health | self.client.stats

    def _server_stats(self) -> dict[str, float]:
        """Return what is counted once, however many models there are."""
        lost, waiting = (0, 0) if self.ledger is None else (self.ledger.num_lost, self.ledger.num_waiting)
        usage = {"ledger_lost": lost, "ledger_waiting": waiting}
        batches = {} if self.batches is None else self.batches.stats()
        return {**self.responses.stats(), **batches, **usage}

    def _engine_stats(self) -> Mapping[int, Mapping[str, float]]:
        return self.client.engine_stats() if isinstance(self.client, ReplicaOwner) else {}

    def _fleet_status(self) -> FleetStatus | None:
        return self.client.status() if isinstance(self.client, ReplicaOwner) else None

    @property
    def usage_recorder(self) -> UsageRecorder | None:
        """What takes the usage of requests that have ended; None where it is not kept."""
        return self.ledger

    async def admit(self, caller: Caller, requests: Sequence[TextRequest]) -> Ticket:
        """Admit the requests of one HTTP request, all or none. Raises as ``RequestAdmission.admit``."""
        return self.admission.admit(caller.key, Demand.of(requests))

    async def limit_headers(self, key: Key) -> Mapping[str, str]:
        """Return OpenAI's rate limit headers of a key."""
        return self.admission.limits.headers(key)

    def serving(self) -> AsyncEngine:
        """Return the engine.

        Raises:
            CapacityError: the model is being loaded.
            UnknownModel: it was removed.
            HTTPError: the server is shutting down; the client should connect anew, where its successor may answer.
            EngineDead: the engine is gone.
        """
        if self.async_engine is None:
            raise CapacityError("The model is still being loaded.")
        if self.draining:
            raise HTTPError(503, "The server is shutting down.", code="shutting_down", headers=_RETRY_ELSEWHERE)
        if not self.is_healthy:
            raise UnknownModel(self.names[0]) if self.removed else self.death()
        return self.async_engine

    async def engine_for(self, adapter: str | None) -> AsyncEngine:
        """Return the engine, with the tokenizer and vocabulary of an adapter that brings them.

        Raises:
            EngineError: as ``serving``.
            RequestError: the adapter's tokenizer is malformed, or does not fit its embedding; its chat template takes
                too long.
        """
        engine = await self._engine_for(adapter)
        try:
            await self._formats.prepare(engine.tokenizer)
        except RequestError as error:
            whose = "" if adapter is None else f"The adapter {adapter!r} cannot be used. "
            raise RequestError(f"{whose}{error}", param="model") from None
        return engine

    async def _engine_for(self, adapter: str | None) -> AsyncEngine:
        engine, tokenizers = self.serving(), self.adapter_tokenizers
        if adapter is None or tokenizers is None:
            return engine
        if adapter not in self.adapters and self.finds_adapters:
            await self._load_found(adapter, tokenizers)
        info = self.adapters.get(adapter)
        if info is None:
            return engine  # which loads or refuses it
        served = tokenizers.known(adapter, info)
        if served is None:
            served = await tokenizers.find_off_loop(adapter, info)
        return engine if served is engine.served else engine.with_tokenizer(served)

    async def _load_found(self, name: str, tokenizers: AdapterTokenizers) -> None:
        """Load an adapter of ``--lora-dir`` that has a tokenizer, whose vocabulary its prompts need."""
        if not (num_tokens := await tokenizers.read_own_off_loop(name, name)) or self.client is None:
            return
        load = self._loading.get(name)
        if load is None:
            call = self.client.load_adapter(name, name, num_tokens=num_tokens)
            load = self._loading[name] = asyncio.ensure_future(call)
            load.add_done_callback(lambda _: self._loading.pop(name, None))
        try:
            await asyncio.shield(load)
        except RequestError as error:
            if name not in self.adapters:  # otherwise another request has loaded it meanwhile
                raise RequestError(str(error), param="model", code=error.code) from None

    def dialect(self, engine: AsyncEngine) -> Dialect:
        """Return the tool call format of an engine's tokenizer."""
        return self._formats.dialect(engine.tokenizer)

    def reasoning_format(self, engine: AsyncEngine) -> ReasoningFormat | None:
        """Return how a model marks its thoughts."""
        return self._formats.reasoning_format(engine.tokenizer)

    def resolve(
        self, model: str | None, caller: Caller, lora_path: str | None = None, session: str | None = None
    ) -> tuple[str, str | None]:
        """Return the response's model name and the adapter of that name, None for the base model.

        With ``finds_adapters`` any other name is passed on, and the engine refuses unknown ones. One that may be loaded
        from the Hub is returned whether it is there or not.

        Args:
            model: of the request: a name, none or an empty one for the base model, or SGLang's ``base:adapter``.
            lora_path: SGLang's name of an adapter beside the base model; a model that names an adapter counts.
            session: the request's ``prompt_cache_key``, whose requests get one version of a name of the catalogue.

        Raises:
            UnknownModel: the name is not served, or not to this caller; the two cannot be told apart.
        """
        model = model or self.names[0]
        served = () if self.versions is None else self.versions.served
        if model not in self.names and model not in self.adapters and model not in served:
            bases = [name for name in self.names if model.startswith(f"{name}:")]
            if bases:
                base = max(bases, key=len)
                model, lora_path = base, model[len(base) + 1 :] or lora_path
        if model not in self.names:
            return self._adapter(model, caller, session)
        return self._adapter(lora_path, caller, session) if lora_path else (model, None)

    def _adapter(self, name: str, caller: Caller, session: str | None = None) -> tuple[str, str]:
        versions = self.versions
        if versions is not None:
            public = versions.public_name(name)
            if public is not None:  # one version, by the name that the engine has for it
                if caller.may_use(public) and versions.is_offered(name):
                    return public, name
                raise UnknownModel(name)
            if versions.has_name(name):
                if name in versions.served and caller.may_use(name):
                    return name, versions.pick(name, caller.key.tenant, session)
                raise UnknownModel(name)
        if caller.may_use(name) and (name in self.adapters or self.finds_adapters or self._may_bring(name)):
            return name, name
        raise UnknownModel(name)

    async def find_model(
        self, model: str | None, caller: Caller, lora_path: str | None = None, session: str | None = None
    ) -> tuple[str, str | None]:
        """Return what ``resolve`` does, once an adapter that has to be brought from the Hub is loaded.

        Raises:
            UnknownModel: as ``resolve``, or the Hub has no such adapter.
            EngineError: the adapter cannot be loaded, or not yet; see ``RemoteAdapters.bring``.
        """
        name, adapter = self.resolve(model, caller, lora_path, session)
        caller.facts.version = None if self.versions is None else self.versions.version_of(adapter)
        if adapter is None or self.remote is None:
            return name, adapter
        if adapter in self.adapters:
            self.remote.touch(adapter)
        elif self._may_bring(adapter):
            self.serving()
            began = time.monotonic()
            try:
                await self.remote.bring(adapter, caller.key.tenant, caller.timeout)
            except AdapterUnavailable:
                self.serving()  # which says that the server is shutting down, if that is why
                raise
            caller.facts.adapter_seconds = round(time.monotonic() - began, 6)
        return name, adapter

    def has_adapter(self, name: str) -> bool:
        """Return whether an adapter or a name of the catalogue has a name."""
        return name in self.adapters or (self.versions is not None and self.versions.has_name(name))

    def may_find(self, name: str) -> bool:
        """Return whether an adapter of a name that is not loaded may be found when a request names it."""
        return self.finds_adapters or self._may_bring(name)

    def _may_bring(self, name: str) -> bool:
        return self.remote is not None and self.remote.may_name(name)

    def caller_named(self, tenant: str, key_name: str, path: str) -> Caller | None:
        """Return the caller for a batch of this tenant; None if the key was removed or lost its scope."""
        key = self.keys.named(key_name)
        if key is None or key.tenant != tenant or Scope.INFERENCE not in key.scopes:
            return None
        return Caller(key, "" if self.options.share_cache_between_keys else tenant, None, RequestFacts(), path)

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        return {} if self.client is None else self.client.adapters
