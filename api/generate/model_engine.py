"""Model engine: the engine of one base model, its state (serving or not), and the tokenizers of its adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ...engine.errors import CapacityError, ConfigError, EngineDead, RequestError, UnknownModel
from ...engine.serving.adapter_tokenizers import AdapterTokenizers
from ...engine.serving.replica_status import FleetStatus, ReplicaOwner
from ...engine.text.chat_template import TemplateStopped, rendered
from ...engine.text.reasoning_formats import ReasoningFormat, reasoning_format_of
from ...engine.text.tokenizer import Tokenizer
from ...engine.types import AdapterInfo
from ..config import ServerConfig
from ..errors import HTTPError
from ..structured.tool_dialects import Dialect, dialect_of

if TYPE_CHECKING:
    from ...engine.config import EngineConfig
    from ...engine.serving.async_engine import AsyncEngine
    from ...engine.serving.engine_like import EngineLike

_RETRY_ELSEWHERE = {"retry-after": "1", "connection": "close"}


class ModelEngine:
    """The engine of a base model, from the start of its process to its end. Belongs to the server's event loop.

    Attributes:
        client: client of the engine's process; None until that process is started.
        async_engine: the engine for requests; None until the model is loaded.
        tokenizers: tokenizers of adapters; None without ``--enable-lora``.
        finds_adapters: whether the engine loads unknown adapters from ``--lora-dir`` by itself.
        base_digest: digest of the model's weights; "" until the model is loaded.
        draining: whether the server is shutting down and accepts no new work.
        removed: name of the model if it was removed from the server and only finishes its running requests; else "".
    """

    def __init__(
        self, options: ServerConfig, client: EngineLike | None = None, async_engine: AsyncEngine | None = None
    ) -> None:
        self.client = client
        self.async_engine = async_engine
        self.tokenizers: AdapterTokenizers | None = None
        self.finds_adapters = False
        self.base_digest = ""
        self.draining = False
        self.removed = ""
        self._formats = TemplateFormats(options)
        self._loading: dict[str, asyncio.Future[None]] = {}

    def read_tokenizer(self, config: EngineConfig, path: Path) -> Tokenizer:
        """Load the tokenizer from the model's files, or the one that ``--tokenizer`` names. Raises ModelError."""
        other = None if config.tokenizer is None else Path(config.tokenizer)
        return Tokenizer.load(path, tokenizer_path=other, chat_template=config.chat_template)

    async def open_tokenizers(
        self, config: EngineConfig, async_engine: AsyncEngine, adapters: Iterable[AdapterInfo] = ()
    ) -> None:
        """Allow adapters to have their own tokenizers.

        Loads the tokenizers of the adapters that were loaded at the start.

        Raises:
            ConfigError: a tokenizer cannot be used.
        """
        self.tokenizers = tokenizers = AdapterTokenizers(async_engine.served, config)
        for info in adapters:
            try:
                await asyncio.to_thread(tokenizers.find, info.name, info)
            except RequestError as error:
                raise ConfigError(f"--lora-modules {info.name}: {error}") from None

    @property
    def is_healthy(self) -> bool:
        """Whether the model is loaded, and its engine process runs and does not hang."""
        return self.client is not None and self.async_engine is not None and self.client.is_alive

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """Loaded adapters by name."""
        return {} if self.client is None else self.client.adapters

    @property
    def has_replicas(self) -> bool:
        """Whether the engine is a fleet, each of whose replicas would load a folder of ``--lora-dir`` by itself."""
        return isinstance(self.client, ReplicaOwner)

    def death(self) -> EngineDead:
        """Return the error for requests to an engine that does not run, with the reason."""
        death = None if self.client is None else self.client.death
        return EngineDead("The engine is not running." if death is None else str(death))

    def serving(self) -> AsyncEngine:
        """Return the engine if it accepts requests.

        Raises:
            CapacityError: the model is loading.
            UnknownModel: the model was removed.
            HTTPError: the server is shutting down. The client should open a new connection, because another server may
                answer it.
            EngineDead: the engine has ended.
        """
        if self.async_engine is None:
            raise CapacityError("The model is still loading.")
        if self.draining:
            raise HTTPError(503, "The server is shutting down.", code="shutting_down", headers=_RETRY_ELSEWHERE)
        if not self.is_healthy:
            raise UnknownModel(self.removed) if self.removed else self.death()
        return self.async_engine

    async def serving_adapter(self, adapter: str | None) -> AsyncEngine:
        """Return the engine, with the adapter's tokenizer and vocabulary if the adapter has its own.

        Raises:
            EngineError: see ``serving``.
            RequestError: the adapter's tokenizer is malformed, or does not fit its embedding; or its chat template
                takes too long.
        """
        engine = await self._with_tokenizer(adapter)
        try:
            await self._formats.prepare(engine.tokenizer)
        except RequestError as error:
            whose = "" if adapter is None else f"The adapter {adapter!r} cannot be used. "
            raise RequestError(f"{whose}{error}", param="model") from None
        return engine

    async def _with_tokenizer(self, adapter: str | None) -> AsyncEngine:
        engine, tokenizers = self.serving(), self.tokenizers
        if adapter is None or tokenizers is None:
            return engine
        if adapter not in self.adapters and self.finds_adapters:
            await self._load_found(adapter, tokenizers)
        info = self.adapters.get(adapter)
        if info is None:
            # The adapter is not known here. The engine loads it or refuses it.
            return engine
        served = tokenizers.known(adapter, info)
        if served is None:
            served = await tokenizers.find_off_loop(adapter, info)
        return engine if served is engine.served else engine.with_tokenizer(served)

    async def load_found(self, name: str) -> None:
        """Load an adapter from ``--lora-dir``. Raises RequestError if it cannot be loaded, and like ``serving``."""
        self.serving()
        if self.client is None or self.tokenizers is None:
            raise UnknownModel(name)
        num_tokens = await self.tokenizers.read_own_off_loop(name, name)
        await self._load(name, num_tokens, self.client)

    async def _load_found(self, name: str, tokenizers: AdapterTokenizers) -> None:
        """Load an adapter from ``--lora-dir`` if it has a tokenizer, because its prompts need that tokenizer."""
        if (num_tokens := await tokenizers.read_own_off_loop(name, name)) and self.client is not None:
            await self._load(name, num_tokens, self.client)

    async def _load(self, name: str, num_tokens: int, client: EngineLike) -> None:
        """Load a folder of adapters under its name.

        Other requests that name it in the meantime wait for the same load.
        """
        load = self._loading.get(name)
        if load is None:
            if name in self.adapters:
                # Another request has loaded it since this one looked.
                return
            call = client.load_adapter(name, name, num_tokens=num_tokens)
            load = self._loading[name] = asyncio.ensure_future(call)
            load.add_done_callback(lambda _: self._loading.pop(name, None))
        try:
            await asyncio.shield(load)
        except RequestError as error:
            # Another request may have loaded the adapter by now.
            if name not in self.adapters:
                raise RequestError(str(error), param="model", code=error.code) from None

    def dialect(self, engine: AsyncEngine) -> Dialect:
        """Return the tool call format of an engine's tokenizer."""
        return self._formats.dialect(engine.tokenizer)

    def reasoning_format(self, engine: AsyncEngine) -> ReasoningFormat | None:
        """Return the model's reasoning format; None for a model without reasoning."""
        return self._formats.reasoning_format(engine.tokenizer)

    def stats(self) -> Mapping[str, float]:
        """Return the latest gauges and counters of the engine; empty before it is started."""
        return {} if self.client is None else self.client.stats

    def replica_stats(self) -> Mapping[int, Mapping[str, float]]:
        """Return the latest gauges and counters of each replica of a fleet, by the replica's index."""
        return self.client.engine_stats() if isinstance(self.client, ReplicaOwner) else {}

    def fleet_status(self) -> FleetStatus | None:
        """Return the status of a fleet's replicas; None for a single engine."""
        return self.client.status() if isinstance(self.client, ReplicaOwner) else None


class TemplateFormats:
    """Determines the formats of tool calls and of reasoning from chat templates, once for each tokenizer.

    Args:
        options: options that may name the formats, and that contain variables of the template.
    """

    def __init__(self, options: ServerConfig) -> None:
        self._options = options
        self._dialects: WeakKeyDictionary[Tokenizer, Dialect] = WeakKeyDictionary()
        self._reasoning: WeakKeyDictionary[Tokenizer, ReasoningFormat | None] = WeakKeyDictionary()
        self._stopped: WeakKeyDictionary[Tokenizer, str] = WeakKeyDictionary()

    async def prepare(self, tokenizer: Tokenizer) -> None:
        """Determine the results of the other methods on another thread, or in another process if the template takes
        long.

        Raises:
            RequestError: the template was stopped at a limit, now or before.
        """
        if tokenizer in self._dialects:
            return
        if (reason := self._stopped.get(tokenizer)) is None:
            try:
                # This renders the template some dozens of times. Each render may take milliseconds.
                await rendered(lambda: self.dialect(tokenizer), at_once=False)
                return
            except TemplateStopped as error:
                reason = self._stopped[tokenizer] = str(error)
        raise RequestError(reason, param="model")

    def dialect(self, tokenizer: Tokenizer) -> Dialect:
        """Return the tool call format. The first call derives it from the chat template."""
        if tokenizer not in self._dialects:
            found = dialect_of(tokenizer, self._options.tool_call_parser)
            self._dialects[tokenizer] = replace(found, defaults=self._options.template_kwargs)
        return self._dialects[tokenizer]

    def reasoning_format(self, tokenizer: Tokenizer) -> ReasoningFormat | None:
        """Return the reasoning format, or None. The first call derives it from the chat template."""
        if tokenizer not in self._reasoning:
            self._reasoning[tokenizer] = reasoning_format_of(tokenizer, self._options.reasoning_parser)
        return self._reasoning[tokenizer]
