"""Model directory: finds the base model, adapter or adapter version that a request's model name refers to."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from ...engine.errors import AdapterUnavailable, RequestError, UnknownModel, quoted
from ...engine.serving.calibration import content_digest
from ...engine.serving.request_threads import on_request_thread
from ...engine.types import AdapterInfo, Pooler
from ...engine.weighted_adapters import (
    WeightedPart,
    check_parts,
    combination_name,
    is_combination,
    names_in,
    read_combination,
    requested_name,
)
from ...fleet.catalog.model_versions import ModelVersions
from ..access.caller import Caller
from .model_engine import ModelEngine
from .remote_adapters import RemoteAdapters

if TYPE_CHECKING:
    from ...engine.adapter_sources.adapter_fetcher import AdapterFetcher, FetchedAdapter
    from ...engine.config import EngineConfig
    from ...engine.serving.async_engine import AsyncEngine
    from ...engine.serving.engine_like import EngineLike
    from ...engine.text.reasoning_formats import ReasoningFormat
    from ...fleet.catalog.model_catalog import ModelCatalog
    from ..structured.tool_dialects import Dialect


class NameKind(Enum):
    """Kind of a model name.

    Attributes:
        BASE: name of the base model.
        CATALOGUE: name in the model catalogue; each request gets one of its versions.
        VERSION: one version in the catalogue, by its name in the engine.
        LOADED: name of an adapter that is loaded.
        FINDABLE: possibly an adapter in ``--lora-dir``, which the engine loads or refuses.
        REMOTE: possibly an adapter on the Hub, which ``RemoteAdapters`` has to download.
    """

    BASE = auto()
    CATALOGUE = auto()
    VERSION = auto()
    LOADED = auto()
    FINDABLE = auto()
    REMOTE = auto()


_KNOWN_KINDS = frozenset((NameKind.BASE, NameKind.CATALOGUE, NameKind.VERSION, NameKind.LOADED))


class NameEntry(NamedTuple):
    """Result of ``ModelDirectory.look_up`` for a name.

    Attributes:
        public: the name that responses contain. API keys may be restricted to such names.
        offered: whether requests may use the name; a version that is being unloaded is not offered.
    """

    kind: NameKind
    public: str
    offered: bool = True


class ModelTarget(NamedTuple):
    """The model of a request.

    Attributes:
        name: name of the model, for the response.
        adapter: the engine's name of the adapter; None for the base model.
        engine: the engine, with the tokenizer and vocabulary that the adapter uses.
        dialect: how the model's chat template writes tool calls.
        reasoning: how the model marks its thoughts; None for a model without thoughts.
        num_classes: number of rows of the adapter's own classification head; 0 for the base model's head.
    """

    name: str
    adapter: str | None
    engine: AsyncEngine
    dialect: Dialect
    reasoning: ReasoningFormat | None
    num_classes: int = 0

    @property
    def pooler(self) -> Pooler:
        """The pooled values that the model offers: those of the base model, with the adapter's own head."""
        return self.engine.pooler.with_head(self.num_classes)


class ModelDirectory:
    """Finds models by name: one base model, its adapters, and the versions of the catalogue.

    Belongs to the server's event loop.

    Attributes:
        names: names of the base model. Responses contain the first one by default.
        remote: loader of adapters from remote sources; None until the engine's process is started, and without
            ``--enable-lora``.
        versions: versions in the catalogue; None without ``--model-catalog``.
    """

    def __init__(self, names: tuple[str, ...], engine: ModelEngine) -> None:
        self.names = names
        self.remote: RemoteAdapters | None = None
        self.versions: ModelVersions | None = None
        self._engine = engine

    def open_sources(
        self, fetcher: AdapterFetcher, client: EngineLike, config: EngineConfig, named: Mapping[str, FetchedAdapter]
    ) -> None:
        """Allow requests and admins to load adapters from remote sources into an engine that is being started.

        Args:
            named: adapters of ``--lora-modules`` that were downloaded.
        """
        self.remote = RemoteAdapters(
            fetcher,
            client,
            lora_dir=config.lora_dir,
            # The other half of the names is reserved for the operator's adapters.
            most_names=max(1, config.max_adapters // 2),
            most_adapters=config.max_adapters,
            named=named,
        )

    async def restore_versions(
        self, catalog: ModelCatalog, fetcher: AdapterFetcher, client: EngineLike, names: tuple[str, ...]
    ) -> None:
        """Load the adapter versions of the catalogue. Raises like ``ModelVersions.restore``."""
        self.versions = ModelVersions(catalog, fetcher, client)
        await self.versions.restore(names)

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """Loaded adapters by name."""
        return self._engine.adapters

    async def findable(self) -> list[str]:
        """Return the names of adapters in ``--lora-dir`` that are not loaded until a request names them."""
        if self.remote is None or not self._engine.finds_adapters:
            return []
        names = await on_request_thread(self.remote.folder_names)
        return [name for name in names if (entry := self.look_up(name)) and entry.kind is NameKind.FINDABLE]

    def content_digest(self, adapter: str | None) -> str | None:
        """Return the digest of the weights of an adapter, or of the base model; None if the digest is not known."""

        def digest_of(name: str) -> str:
            return info.digest if (info := self.adapters.get(name)) else ""

        return content_digest(self._engine.base_digest, adapter, digest_of)

    def look_up(self, name: str) -> NameEntry | None:
        """Return the entry of a name; None for an unknown name that a request could not load either."""
        if name in self.names:
            return NameEntry(NameKind.BASE, name)
        if (versions := self.versions) is not None:
            if (public := versions.public_name(name)) is not None:
                return NameEntry(NameKind.VERSION, public, versions.is_offered(name))
            if versions.has_name(name):
                return NameEntry(NameKind.CATALOGUE, name, name in versions.served)
        if name in self.adapters:
            return NameEntry(NameKind.LOADED, name)
        if self.remote is not None and self.remote.may_name(name):
            return NameEntry(NameKind.REMOTE, name)
        return NameEntry(NameKind.FINDABLE, name) if self._engine.finds_adapters else None

    def has(self, name: str) -> bool:
        """Return whether a name is the base model's, an adapter's, the catalogue's, or combines such adapters."""
        entry = self.look_up(name)
        if entry is not None and entry.kind in _KNOWN_KINDS:
            return True
        parts = read_combination(name)
        return bool(parts) and all(self.has(part.name) for part in parts)

    def may_have(self, name: str) -> bool:
        """Return whether ``has`` is true, or a request that uses the name may load an adapter of this name."""
        return self.look_up(name) is not None

    async def find(
        self, model: str | None, caller: Caller, lora_path: str | None = None, session: str | None = None
    ) -> ModelTarget:
        """Find the model of a request that generates. An adapter that is not loaded is loaded first.

        Args:
            model: the request's field ``model``: a name; None or "" for the base model; or SGLang's ``base:adapter``.
            lora_path: SGLang's field with an adapter's name. It is ignored if ``model`` names an adapter.
            session: the request's ``prompt_cache_key``. All requests of a session get the same version of a catalogue
                name.

        Raises:
            UnknownModel: no model has the name, or the caller may not use it (with the same message); or the Hub has no
                such adapter.
            EngineError: the adapter cannot be loaded, or is not loaded yet; see ``RemoteAdapters.bring``.
            RequestError: see ``ModelEngine.serving_adapter``.
        """
        if parts := self._parts(model, lora_path):
            return await self._combine(parts, caller, session)
        name, adapter, kind = self._resolve(model, caller, lora_path, session)
        caller.facts.version = None if self.versions is None else self.versions.version_of(adapter)
        if adapter is not None and self.remote is not None:
            if kind is NameKind.REMOTE:
                await self._bring(adapter, caller, self.remote)
            elif adapter in self.adapters:
                self.remote.touch(adapter)
            elif kind is NameKind.FINDABLE and self._engine.has_replicas and await self.remote.has_folder(adapter):
                # All replicas have the same content then, also where the folder changes later.
                await self._engine.load_found(adapter)
        return await self._target(name, adapter)

    async def find_pooled(self, model: str | None, caller: Caller) -> ModelTarget:
        """Return the model of a request whose form depends on the adapter's own classification head.

        An adapter of ``--lora-dir`` is loaded first: what head it has is not known before. Raises like ``find``.
        """
        if not self._parts(model, None):
            _, adapter, kind = self._resolve(model, caller, None, None)
            if kind is NameKind.FINDABLE and adapter is not None:
                await self._load_found(adapter)
        return await self.find(model, caller)

    async def locate(self, model: str | None, caller: Caller, session: str | None = None) -> ModelTarget:
        """Find the model of a request that only counts tokens. No adapter is loaded for it. Raises like ``find``."""
        if parts := self._parts(model, None):
            check_parts(parts)
            resolved = [self._resolve_part(part, caller, session) for part in parts]
            return await self._combined(parts, [adapter for adapter, _ in resolved])
        name, adapter, _ = self._resolve(model, caller, None, session)
        return await self._target(name, adapter)

    def _parts(self, model: str | None, lora_path: str | None) -> tuple[WeightedPart, ...]:
        """Return the adapters that a model name combines; empty if it names a single model."""
        asked = model or ""
        if (base := self._base_of(asked)) is not None:
            asked = asked[len(base) + 1 :] or lora_path or ""
        entry = self.look_up(asked) if asked else None
        parts = () if entry is not None and entry.kind in _KNOWN_KINDS else read_combination(asked)
        if is_combination(asked) and not parts:
            raise RequestError(
                f"'model' must be the base model or left out if 'adapters' is given, not {quoted(asked)}.",
                param="model",
            )
        return parts

    def _base_of(self, model: str) -> str | None:
        """Return the base model's name in ``model``, which is ``base`` or ``base:adapter``; None if it has none."""
        if model in self.names or not model:
            return model
        known = self.look_up(model)
        if known is not None and known.kind in _KNOWN_KINDS:
            return None
        return max((name for name in self.names if model.startswith(f"{name}:")), key=len, default=None)

    def _resolve_part(self, part: WeightedPart, caller: Caller, session: str | None) -> tuple[str, NameKind]:
        """Return the engine's name of one adapter of a combination, and the kind of the name. Raises UnknownModel."""
        if part.name in self.names:
            raise RequestError(
                f"'adapters' must contain only adapters, not the base model {quoted(part.name)}.",
                param="model",
            )
        _, adapter, kind = self._resolve(part.name, caller, None, session)
        if adapter is None:
            raise UnknownModel(part.name)
        return adapter, kind

    async def _combine(self, parts: Sequence[WeightedPart], caller: Caller, session: str | None) -> ModelTarget:
        """Load all adapters of a combination, and return the model of the request. Raises like ``find``."""
        check_parts(parts)
        resolved = [self._resolve_part(part, caller, session) for part in parts]
        for adapter, kind in resolved:
            if kind is NameKind.REMOTE and self.remote is not None:
                await self._bring(adapter, caller, self.remote)
            elif adapter not in self.adapters:
                await self._load_found(adapter)
            elif self.remote is not None:
                self.remote.touch(adapter)
        return await self._combined(parts, [adapter for adapter, _ in resolved])

    async def _load_found(self, name: str) -> None:
        """Load an adapter of ``--lora-dir``. Raises UnknownModel if there is no folder of this name."""
        if self.remote is None or not self._engine.finds_adapters or not await self.remote.has_folder(name):
            raise UnknownModel(name)
        await self._engine.load_found(name)

    async def _combined(self, parts: Sequence[WeightedPart], adapters: Sequence[str]) -> ModelTarget:
        named = [part._replace(name=adapter) for part, adapter in zip(parts, adapters, strict=True)]
        return await self._target(requested_name(parts), combination_name(named))

    def _resolve(
        self, model: str | None, caller: Caller, lora_path: str | None, session: str | None
    ) -> tuple[str, str | None, NameKind]:
        """Return the name for the response, the engine's name of the adapter, and the kind of the name."""
        model = model or self.names[0]
        # Fast path: most requests name the base model itself.
        if model in self.names and not lora_path:
            return model, None, NameKind.BASE
        entry = self.look_up(model)
        is_sure = entry is not None and (entry.kind in _KNOWN_KINDS if entry.offered else model in self.adapters)
        if not is_sure and (bases := [name for name in self.names if model.startswith(f"{name}:")]):
            base = max(bases, key=len)
            model, lora_path = base, model[len(base) + 1 :] or lora_path
            entry = self.look_up(base)
        if entry is not None and entry.kind is NameKind.BASE:
            if not lora_path:
                return model, None, NameKind.BASE
            model, entry = lora_path, None if lora_path in self.names else self.look_up(lora_path)
        if entry is None or not entry.offered or not caller.may_use(entry.public):
            raise UnknownModel(model)
        if entry.kind is NameKind.CATALOGUE and self.versions is not None:
            return entry.public, self.versions.pick(model, caller.key.tenant, session), entry.kind
        return entry.public, model, entry.kind

    async def _bring(self, adapter: str, caller: Caller, remote: RemoteAdapters) -> None:
        self._engine.serving()
        began = time.monotonic()
        try:
            await remote.bring(adapter, caller.key.tenant, caller.timeout)
        except AdapterUnavailable:
            # If the server is shutting down, this call raises the error for that.
            self._engine.serving()
            raise
        caller.facts.adapter_seconds = round(time.monotonic() - began, 6)

    async def _target(self, name: str, adapter: str | None) -> ModelTarget:
        # The adapters of a combination have the same tokenizer, and none has a head of its own.
        first = None if adapter is None else names_in(adapter)[0]
        engine = await self._engine.serving_adapter(first)
        info = None if first is None else self.adapters.get(first)
        formats = self._engine.dialect(engine), self._engine.reasoning_format(engine)
        return ModelTarget(name, adapter, engine, *formats, 0 if info is None else info.num_classes)
