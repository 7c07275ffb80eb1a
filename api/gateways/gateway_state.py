"""Gateway state: the server state of a gateway. The main process owns its adapters, limits, ledger and metrics."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ...engine.errors import EngineDead, EngineError
from ...engine.types import AdapterInfo
from ...engine.weighted_adapters import names_in
from ..access.api_keys import Key
from ..access.caller import Caller
from ..access.request_admission import Demand, Ticket
from ..access.server_limits import ServerLimits
from ..config import ServerConfig
from ..errors import HTTPError
from ..generate.model_directory import ModelDirectory, ModelTarget
from ..generate.model_engine import ModelEngine
from ..generate.server_state import ServerState
from ..generate.streams import ledger_model
from ..observe.tracing import open_tracer
from .gateway_client import GatewayClient, GatewayLedger, GatewayTicket
from .relayed_metrics import RelayedMetrics

if TYPE_CHECKING:
    from ...engine.serving.async_engine import AsyncEngine
    from ...engine.serving.request import TextRequest

_MOST_ADAPTERS = 10_000  # Largest number of adapter names that are stored, each with its tokenizer.


class GatewayEngine(ModelEngine):
    """The engine as a gateway sees it. The main process reports whether the engine runs.

    Attributes:
        known: adapters that requests of this gateway have named, in their state at that time. Only ``GatewayDirectory``
            writes it.
    """

    def __init__(self, options: ServerConfig, client: GatewayClient) -> None:
        super().__init__(options)
        self._main = client
        self.known: dict[str, AdapterInfo] = {}

    @property
    def is_healthy(self) -> bool:
        return self.async_engine is not None and self._main.death is None

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        return self.known

    def death(self) -> EngineDead:
        return EngineDead("The engine is not running." if self._main.death is None else str(self._main.death))


class GatewayDirectory(ModelDirectory):
    """Finds models for a gateway. The main process resolves every name that may be an adapter's.

    Args:
        enable_lora: whether requests may name adapters.
    """

    def __init__(self, engine: GatewayEngine, client: GatewayClient, *, enable_lora: bool) -> None:
        super().__init__(("model",), engine)
        self._gateway_engine = engine
        self._main = client
        self._enable_lora = enable_lora

    async def find(
        self, model: str | None, caller: Caller, lora_path: str | None = None, session: str | None = None
    ) -> ModelTarget:
        """Resolve a model name. The gateway resolves names of the base model, and the main process all other names."""
        self._engine.serving()
        if not self._enable_lora or (not lora_path and (not model or model in self.names)):
            return await super().find(model, caller, lora_path, session)
        facts = caller.facts
        found = await self._main.call("find_model", caller.key.name, model, caller.timeout, lora_path, session)
        name, adapter, facts.version, facts.adapter_seconds, info = found
        if info is not None:
            known = self._gateway_engine.known
            if len(known) >= _MOST_ADAPTERS:
                known.clear()
            known[names_in(adapter)[0]] = AdapterInfo(*info)
        return await self._target(name, adapter)


class GatewayLimits(ServerLimits):
    """Checks API keys in the gateway, and lets the main process admit requests, because only that process counts the
    limits.

    Args:
        own: limits of this process, of which only the keys are used.
        state: the state of the gateway.
    """

    def __init__(self, own: ServerLimits, client: GatewayClient, state: ServerState) -> None:
        super().__init__(own.keys, own.admission, shares_cache=state.options.share_cache_between_keys)
        self._main = client
        self._state = state
        self._numbers = itertools.count(1)
        self._tickets: dict[int, GatewayTicket] = {}

    async def admit(self, caller: Caller, requests: Sequence[TextRequest]) -> Ticket:
        """Admit the requests of one HTTP request by the limits of the main process. Raises the same errors."""
        demand = Demand.of(requests, is_strict=caller.is_strict)
        ticket = GatewayTicket(self._main, next(self._numbers), self._ended)
        self._tickets[ticket.number] = ticket
        adapter, model = requests[0].adapter, ledger_model(self._state, caller)
        try:
            asked = int(demand.priority), demand.prompts, demand.marks, demand.may_be_deferred, demand.is_strict
            await self._main.call("admit", ticket.number, caller.key.name, asked, model, adapter)
        except BaseException:
            # The request is cancelled in this process, but the main process may still admit it.
            ticket.close()
            raise
        return ticket

    async def limit_headers(self, key: Key) -> Mapping[str, str]:
        """Return OpenAI's rate limit headers for a key; none if the key was removed or the main process is gone."""
        try:
            headers: Mapping[str, str] = await self._main.call("limit_headers", key.name)
        except (EngineError, HTTPError):
            return {}
        return headers

    def progress(self) -> list[tuple[int, int]]:
        """Return (ticket, tokens) for the tokens of running requests that were not yet reported to the main process."""
        return [
            (number, ticket.news())
            for number, ticket in self._tickets.items()
            if ticket.num_generated > ticket.num_told
        ]

    def _ended(self, ticket: GatewayTicket) -> None:
        self._tickets.pop(ticket.number, None)


class GatewayState(ServerState):
    """Server state for the routes that a gateway answers itself, which are the routes that generate.

    Args:
        client: connection to the main process.
        enable_lora: whether requests may name adapters.

    Raises:
        ConfigError: the file with keys cannot be read, or OpenTelemetry is missing.

    Attributes:
        relayed: the metrics, which are sent to the main process.
        main_limits: the same object as ``limits``, with its more specific type.
    """

    def __init__(self, options: ServerConfig, client: GatewayClient, version: str, *, enable_lora: bool) -> None:
        self.relayed = RelayedMetrics()
        engine = GatewayEngine(options, client)
        super().__init__(options, self.relayed, engine=engine, version=version)
        self.models = GatewayDirectory(engine, client, enable_lora=enable_lora)
        self.limits = self.main_limits = GatewayLimits(self.limits, client, self)
        self.stores.relay = None if options.usage_ledger is None else GatewayLedger(client)
        if options.otlp_traces_endpoint is not None:
            self.observers.tracer = open_tracer(options.otlp_traces_endpoint, version)

    def serve(self, names: tuple[str, ...], async_engine: AsyncEngine) -> None:
        """Serve the model, which has been loaded."""
        self.models.names, self.engine.async_engine = names, async_engine
