"""Model service: manages one base model of a server process, with its engine, adapters and catalogue."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ...engine.checkpoint.base_digest import base_digest
from ...engine.checkpoint.config_overrides import resolve_served_model
from ...engine.config import EngineConfig
from ...engine.errors import ConfigError, EngineDead
from ...engine.serving.async_engine import AsyncEngine
from ...engine.serving.engine_client import EngineClient
from ...engine.serving.engine_like import EngineLike
from ...engine.serving.engine_spawn import SpawnEngine
from ...engine.serving.sampling_defaults import read_sampling_defaults
from ...fleet.catalog.model_catalog import ModelCatalog
from ..config import ServerConfig
from ..gateways.engine_multiplexer import EngineMultiplexer
from ..gateways.loaded_model import LoadedModel
from ..generate.server_state import ServerState
from ..models_file import ServedModel, naming_place
from ..observe.engine_facts import EngineFacts

if TYPE_CHECKING:
    from ...engine.adapter_sources.adapter_fetcher import AdapterFetcher, FetchedAdapter

_FETCHER_SECONDS = 10.0  # Seconds that the adapter fetcher may take to close.
_IDLE_SECONDS = 0.1  # Seconds between two checks whether a removed model is idle.
# Seconds in which requests may still become active that found the model before it was removed.
_GRACE_SECONDS = 2.0

logger = logging.getLogger("rootgraft.server")


class ModelService:
    """Loads one base model, lets a server state serve it, and ends it.

    Args:
        model: the model and its options.
        state: state of the model, which this service fills.
        num_engines: largest number of engine processes of all models of the server together, because they share the
            machine.
        spawn: starts the engine process, if there is only one; None for ``spawn_engine``.
        catalog: model catalogue lent by the service that this one replaces; None to open the catalogue that the options
            name.

    Attributes:
        state: state of the model.
        path: path of the model's files, without symbolic links; "" while the files are being located.
        shared: the model and its engine for gateways; None until it is loaded, and without ``--gateways``.

    Raises:
        ConfigError: sources of adapters or the catalogue cannot be used.
    """

    def __init__(
        self,
        model: ServedModel,
        state: ServerState,
        num_engines: int,
        spawn: SpawnEngine | None,
        catalog: ModelCatalog | None = None,
    ) -> None:
        self.state = state
        state.plan = model.entry.plan
        self.path = ""
        self.shared: tuple[LoadedModel, EngineMultiplexer] | None = None
        self._entry = model.entry
        self._config = model.engine
        self._options = model.server
        self._own_options = model.own_options
        self._num_engines = num_engines
        self._spawn = spawn
        self._fetcher = _open_fetcher(self._config) if self._config.enable_lora else None
        self._lending = asyncio.Lock()  # Held while the catalogue is lent.
        self._owns_catalog = catalog is None
        self._catalog = _open_catalog(self._config, self._options) if catalog is None else catalog

    async def load(self, found: Callable[[], None] = lambda: None) -> None:
        """Load the model. Its server state then serves it.

        Args:
            found: called when the model's files are located.

        Raises:
            ConfigError: an option does not fit the model.
            ModelError: the model cannot be loaded.
            EngineDead: the engine ended while it was loading.
        """
        with naming_place(self._entry):
            await self._load(found)

    async def _load(self, found: Callable[[], None]) -> None:
        files = await asyncio.to_thread(resolve_served_model, self._config)
        state = self.state
        self.path = os.path.realpath(files.source or files.path)
        found()
        names = self._options.served_model_name or (files.name,)
        for name in self._config.named_adapters.keys() & set(names):
            raise ConfigError(f"--lora-modules: {name} is the name of the base model.")
        client, named = await self._make_client(files.path)
        if self._fetcher is not None:
            state.models.open_sources(self._fetcher, client, self._config, named)
        state.limits.admission.queue_limits.target_ttft = self._config.target_ttft.seconds
        state.begin_loading(names, client, finds_adapters=self._config.lora_dir is not None)
        starting = asyncio.create_task(client.start())
        try:
            defaults = await asyncio.to_thread(read_sampling_defaults, self._config, files.path)
            tokenizer = await asyncio.to_thread(state.engine.read_tokenizer, self._config, files.path)
            ready = await starting
        finally:
            starting.cancel()
            # If the engine's start has failed too, the error of the sampling defaults or the tokenizer is the one that
            # is raised.
            await asyncio.gather(starting, return_exceptions=True)
        multiplexer = EngineMultiplexer(client) if self._options.gateways > 1 else None
        async_engine = AsyncEngine(
            client if multiplexer is None else multiplexer.open_channel(), tokenizer, ready, defaults.defaults
        )
        if self._catalog is not None and self._fetcher is not None:
            await state.models.restore_versions(self._catalog, self._fetcher, client, names)
        if self._config.enable_lora:
            await state.engine.open_tokenizers(self._config, async_engine, ready.adapters)
        state.begin_serving(async_engine, client, EngineFacts.of(self._config, ready), ready.base_digest)
        if multiplexer is not None:
            self.shared = LoadedModel(names, files.path, ready, defaults.defaults), multiplexer
        which = f"{names[0]}: " if self._entry.place else ""
        for line in (*ready.summary, *([defaults.applied] if defaults.applied else [])):
            logger.info("%s%s", which, line)
        for line in defaults.ignored:
            logger.warning("%s%s", which, line)

    def has_catalog(self, path: str | None) -> bool:
        """Return whether this service owns the catalogue of a path.

        While it does, no other service can open the catalogue.
        """
        return path is not None and self._owns_catalog and self._options.model_catalog == path

    @asynccontextmanager
    async def lending_catalog(self) -> AsyncIterator[ModelCatalog]:
        """Context manager: lend the catalogue to a service that is being loaded.

        The catalogue does not change during the block.
        """
        assert self._catalog is not None and self.state.models.versions is not None
        async with self._lending:
            await self.state.models.versions.keep()
            try:
                yield self._catalog
            finally:
                if self._owns_catalog:
                    self.state.models.versions.free()

    def give_catalog(self, other: ModelService) -> None:
        """Transfer the catalogue to the service to which it was lent. That service then changes and closes it."""
        self._owns_catalog, other._owns_catalog = False, True

    async def serves(self, model: ServedModel) -> bool:
        """Return whether this service already serves ``model`` with the same options and the same file contents."""
        if model.engine != self._config or model.own_options != self._own_options:
            return False
        files = await asyncio.to_thread(resolve_served_model, model.engine)
        is_dummy = model.engine.load_format == "dummy"
        digest = await asyncio.to_thread(base_digest, files.path, dummy=is_dummy)
        return digest == self.state.engine.base_digest

    async def _make_client(self, path: Path) -> tuple[EngineLike, Mapping[str, FetchedAdapter]]:
        """Create the client of an engine.

        Returns it and those adapters named at the start that were fetched from sources.
        """
        if self._fetcher is None:
            return engine_of(self._config, path, self._options, self._num_engines, self._spawn), {}
        from ...engine.adapter_sources.named_sources import fetch_named

        config, named = await asyncio.to_thread(fetch_named, self._config, self._fetcher)
        return engine_of(config, path, self._options, self._num_engines, self._spawn), named

    def stop_downloads(self) -> None:
        """End downloads of adapters, so that the requests that wait for them are answered."""
        if self._fetcher is not None and self.state.models.remote is not None:
            self._fetcher.stop()

    def kill(self) -> None:
        """Kill the engine. A hung engine would ignore a shutdown message."""
        if self.state.engine.client is not None:
            self.state.engine.client.kill()

    async def finish(self) -> None:
        """End a removed model after ``_GRACE_SECONDS`` without an active request, or after ``--shutdown-timeout``."""
        loop = asyncio.get_running_loop()
        until, idle = loop.time() + self._options.shutdown_timeout, 0.0
        while idle < _GRACE_SECONDS and loop.time() < until:
            await asyncio.sleep(_IDLE_SECONDS)
            idle = 0.0 if self.state.limits.active else idle + _IDLE_SECONDS
        if self.state.limits.active:
            logger.warning("cutting off %d requests of %s", self.state.limits.active, self.state.models.names[0])
        await self.close_engine("The model was removed.")
        await self.close_files()
        logger.info("%s: the engine that was replaced or removed has ended", self.state.models.names[0])

    async def close_engine(self, reason: str) -> None:
        """Close the engine. Its streams end with an error whose text is ``reason``."""
        client = self.state.engine.client
        if client is not None:
            if self.state.limits.active:
                client.on_death(EngineDead(reason))
            await client.close()

    async def close_files(self) -> None:
        """Close the catalogue and the fetcher of adapters."""
        if self.state.models.versions is not None:
            self.state.models.versions.close()
        async with self._lending:
            if self._catalog is not None and self._owns_catalog:
                self._catalog.close()
        if self._fetcher is not None:
            await _ended(self._fetcher.close, _FETCHER_SECONDS)


async def _ended(call: Callable[[], None], seconds: float) -> None:
    """Wait at most ``seconds`` for a blocking call. The call itself may continue until the process ends."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while thread.is_alive() and loop.time() < until:
        await asyncio.sleep(0.02)


def engine_of(
    config: EngineConfig, path: Path, options: ServerConfig, num_engines: int = 1, spawn: SpawnEngine | None = None
) -> EngineLike:
    """Create the client of the engine: of a single process, or of a fleet with or without Ray.

    Fleets are imported only when they are needed. On a server of several models, each model has a fleet, even if the
    fleet is a single process: a process that ends is then restarted without an effect on the other models.

    Args:
        num_engines: largest number of engine processes of the whole server.
        spawn: see ``EngineClient``.
    """
    if options.ray_address is not None:
        from ...fleet.on_ray.ray_fleet import ray_fleet

        return ray_fleet(config, path, options.fleet_options, num_engines)
    if options.is_fleet or num_engines > 1:
        from ...fleet.local_fleet import local_fleet

        return local_fleet(config, path, options.fleet_options, max(options.most_replicas, num_engines))
    timeouts = options.silence_seconds, options.watchdog_timeout
    return EngineClient(config, path, heartbeat_timeout=timeouts[0], watchdog_timeout=timeouts[1], spawn=spawn)


def _open_catalog(config: EngineConfig, options: ServerConfig) -> ModelCatalog | None:
    if options.model_catalog is None:
        return None
    if not config.enable_lora:
        raise ConfigError("--model-catalog needs --enable-lora, because it holds versions of adapters.")
    return ModelCatalog.open(Path(options.model_catalog))


def _open_fetcher(config: EngineConfig) -> AdapterFetcher:
    """Create the fetcher of adapters. It is imported here, so that servers without adapters do not import it."""
    from ...engine.adapter_sources.adapter_fetcher import AdapterFetcher

    return AdapterFetcher.of(config)
