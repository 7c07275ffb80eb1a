"""Model services: manages all base models of a server process; adds, replaces and removes them while the server runs::

SIGHUP --read options--> new and changed models --load in addition--> names move to the new models --> old models end
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from ...engine.errors import ConfigError, EngineError
from ...engine.serving.background_tasks import BackgroundTasks
from ...engine.serving.engine_spawn import SpawnEngine
from ...fleet.catalog.model_catalog import ModelCatalog
from ..gateways.engine_multiplexer import EngineMultiplexer
from ..gateways.loaded_model import LoadedModel
from ..generate.model_router import ModelRouter
from ..generate.server_state import ServerState
from ..models_file import ServedModel
from .model_service import ModelService

logger = logging.getLogger("rootgraft.server")


ModelReader = Callable[[], Sequence[ServedModel]]
"""Type of a function that reads the models to serve again.

It raises ConfigError or ModelError if something is wrong.
"""


class ModelServices:
    """The services of all models of a server. Belongs to the server's event loop.

    Args:
        models: models with which the server starts; the state of the first one is ``main``.
        main: state of the whole server, and of its first model.
        read_again: reads the models file again and returns its models.
        spawn: starts the engine process of a model that has only one; None for ``spawn_engine``.

    Attributes:
        router: finds the server state of a request's model.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        main: ServerState,
        read_again: ModelReader,
        spawn: SpawnEngine | None = None,
    ) -> None:
        self._main = main
        self._read_again = read_again
        self._spawn = spawn
        states = [main, *(ServerState.beside(main, each.server) for each in models[1:])]
        num_engines = sum(each.server.most_replicas for each in models)
        self._services = [
            ModelService(model, state, num_engines, spawn) for model, state in zip(models, states, strict=True)
        ]
        self._jobs = BackgroundTasks()  # Background tasks: the end of removed models, and reloads.
        self._reload = asyncio.Lock()
        self.router = ModelRouter(states)
        self.router.on_removed = self._end

    @property
    def served(self) -> list[ModelService]:
        """The services of the models that were not removed."""
        return [service for service in self._services if not service.state.engine.removed]

    @property
    def num_active(self) -> int:
        """Number of requests that are being answered."""
        return sum(service.state.limits.active for service in self._services)

    @property
    def sick(self) -> ServerState | None:
        """The state of a model whose engine does not run; None if all engines run."""
        return next((service.state for service in self.served if not service.state.engine.is_healthy), None)

    async def load(self, found: Callable[[], None]) -> None:
        """Load all models at the same time. Errors of ``ModelService.load`` are raised after all loads have ended."""
        loads = [asyncio.create_task(service.load(found)) for service in self._services]
        try:
            await asyncio.gather(*loads)
        finally:
            for load in loads:
                load.cancel()
            await asyncio.gather(*loads, return_exceptions=True)

    def loaded_model(self) -> tuple[LoadedModel, EngineMultiplexer]:
        """Return the server's only model, which must be loaded, and its engine, for use by gateways."""
        [service] = self._services
        assert service.shared is not None
        return service.shared

    def begin_reload(self) -> None:
        """Start to read the models again and serve the new list. If a model cannot be loaded, the old list stays."""
        self._jobs.begin(self._reloaded())

    async def _reloaded(self) -> None:
        async with self._reload:
            logger.info("reading the models again")
            try:
                models = await asyncio.to_thread(self._read_again)
                if models[0].entry.options is None:
                    raise ConfigError("the file no longer has a list of models.")
                await self._apply(models)
            except EngineError as error:
                logger.error("the models are not changed: %s", error)

    async def _apply(self, models: Sequence[ServedModel]) -> None:
        """Serve these models. If one cannot be loaded, no old model is removed, because it may be the one to be
        replaced.
        """
        num_engines = sum(each.server.most_replicas for each in models)
        kept: list[ModelService] = []
        for model in models:
            try:
                kept.append(await self._serving(model) or await self._replaced(model, num_engines))
            except EngineError as error:
                logger.error("cannot serve a model of the file: %s", error)
        if len(kept) == len(models):
            for service in self.served:
                if service not in kept:
                    logger.info("%s is no longer served", ", ".join(service.state.models.names))
                    self.router.remove(service.state.models.names[0])

    async def _serving(self, model: ServedModel) -> ModelService | None:
        """Return the service that serves exactly this model; None if there is none."""
        for service in self.served:
            if await service.serves(model):
                service.state.plan = model.entry.plan
                return service
        return None

    async def _replaced(self, model: ServedModel, num_engines: int) -> ModelService:
        """Load a model, and transfer its names from the services that have them. Raises like ``ModelService.load``."""
        holder = next((each for each in self._services if each.has_catalog(model.server.model_catalog)), None)
        if holder is not None and holder.state.engine.removed:
            place = model.entry.place
            raise ConfigError(
                f"{place}: --model-catalog is still used by a removed model, until its requests have ended."
            )
        async with nullcontext() if holder is None else holder.lending_catalog() as catalog:
            service = await self._loaded(model, num_engines, catalog)
            self._services.append(service)
            self.router.put(service.state)
            if holder is not None:
                holder.give_catalog(service)
        logger.info("%s is served anew", ", ".join(service.state.models.names))
        return service

    async def _loaded(self, model: ServedModel, num_engines: int, catalog: ModelCatalog | None) -> ModelService:
        """Load a model. Returns its service. Raises like ``ModelService.load``."""
        state = ServerState.beside(self._main, model.server)
        service = ModelService(model, state, num_engines, self._spawn, catalog)
        try:
            await service.load()
        except BaseException:
            await service.close_engine("The model is not loaded.")
            await service.close_files()
            raise
        return service

    def _end(self, state: ServerState) -> None:
        """Start to end a model that was removed."""
        self._jobs.begin(self._ended(next(each for each in self._services if each.state is state)))

    async def _ended(self, service: ModelService) -> None:
        await service.finish()
        self._services.remove(service)

    def drain(self) -> None:
        """Refuse new requests from now on."""
        for state in (self._main, *(service.state for service in self._services)):
            state.engine.draining = True

    def stop_downloads(self) -> None:
        """End downloads of adapters, so that the requests that wait for them are answered."""
        for service in self._services:
            service.stop_downloads()

    def kill(self) -> None:
        """Kill all engines."""
        for service in self._services:
            service.kill()

    async def close_engines(self, reason: str) -> None:
        """Close all engines. Their streams end with an error whose text is ``reason``."""
        self._jobs.cancel()
        await self._jobs.wait()
        await asyncio.gather(*(service.close_engine(reason) for service in self._services))

    async def close_files(self) -> None:
        """Close the catalogues and the fetchers of adapters."""
        await asyncio.gather(*(service.close_files() for service in self._services))
