"""Main supervisor: starts the gateways of a server, and replaces each gateway that ends or hangs.

clients --> one listening socket --> gateway-1, gateway-2: HTTP, templates, tokens, streams
                                          |  link for generation; HTTP forwarded for other requests
                                     main process: limits, ledger, stores, fleet --> replicas
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ...engine.config import EngineConfig
from ...engine.serving.background_tasks import BackgroundTasks
from ...engine.serving.watchdog import TICK_SECONDS
from ...engine.serving.watched_process import SOCKET_BUFFER
from ..config import ServerConfig
from ..generate.server_state import ServerState
from ..observe.replica_view import GatewaysStatus, GatewayStatus
from .engine_multiplexer import EngineMultiplexer
from .loaded_model import LoadedModel
from .main_connection import MainConnection
from .main_spawn import ForkedGateways, GatewayProcess, GatewaySpawn
from .process_link import ProcessLink

END_SECONDS = 10.0
"""Seconds that gateways have to end after they were told to. Afterwards they are killed."""
RETRY_SECONDS = 2.0
"""Seconds before a gateway is replaced that has never served."""
LAST_SECONDS = 2.0
"""Seconds that a process has to end after it has closed its connection to the main process."""
_BACKLOG = 2048  # Largest number of connections that may wait for a gateway.

logger = logging.getLogger("rootgraft.gateways")


class GatewaySupervisor:
    """Keeps a number of gateways running. All methods belong to the event loop of the main process.

    Args:
        count: number of gateways.
        listening: the socket from which all gateways accept connections.
        state: the state of the server.
        config: the engine's options.
        main_socket: path of the Unix domain socket on which the main process answers HTTP.
        processes: starts gateways; None for ``ForkedGateways``.
    """

    def __init__(
        self,
        count: int,
        listening: socket.socket,
        state: ServerState,
        config: EngineConfig,
        main_socket: str,
        processes: GatewaySpawn | None = None,
    ) -> None:
        self._count = count
        self._listening = listening
        self._state = state
        self._config = config
        self._main_socket = main_socket
        self._processes = ForkedGateways() if processes is None else processes
        self._numbers = itertools.count(1)
        self._gateways: dict[str, MainConnection] = {}
        self._model: tuple[Mapping[str, Any], EngineMultiplexer] | None = None
        self._tasks = BackgroundTasks()
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False
        self._serves = False
        self._num_started = 0
        self._num_lost = 0

    @property
    def num_active(self) -> int:
        """Number of answers that the gateways are generating."""
        return sum(gateway.num_active for gateway in self._gateways.values())

    def status(self) -> GatewaysStatus:
        """Return the running gateways, and the numbers of their starts and losses."""
        now = time.monotonic()
        return GatewaysStatus(
            tuple(
                GatewayStatus(
                    gateway.name,
                    ("draining" if self._state.engine.draining else "serving") if gateway.serves else "starting",
                    gateway.process.pid,
                    now - gateway.started,
                    gateway.silent_seconds,
                    gateway.num_active,
                )
                for gateway in self._gateways.values()
            ),
            self._num_started,
            self._num_lost,
            self._serves,
        )

    async def start(self) -> None:
        """Start all gateways. Until ``serve``, they answer that the model is being loaded."""
        self._listening.listen(_BACKLOG)
        for _ in range(self._count):
            await self._start_one()
        self._tick()

    async def serve(self, model: LoadedModel, engine: EngineMultiplexer) -> None:
        """Let the gateways serve a model, which has been loaded.

        Waits until all gateways that accept connections serve it.

        Gateways that are started later accept no connections before they serve the model.
        """
        self._model = model.pack(), engine
        listening = tuple(self._gateways.values())
        for gateway in listening:
            gateway.serve(*self._model)
        while not any(gateway.serves for gateway in self._gateways.values()) or any(
            gateway.name in self._gateways and not gateway.serves for gateway in listening
        ):
            await asyncio.sleep(TICK_SECONDS)
        self._serves = True

    def drain(self) -> None:
        """Tell the gateways to accept no new requests."""
        for gateway in self._gateways.values():
            gateway.drain()

    def kill(self) -> None:
        """Kill all gateways."""
        self._closing = True
        for gateway in self._gateways.values():
            gateway.process.kill()

    async def close(self, reason: str) -> None:
        """End the gateways, and wait for their end. Running answers end with an error whose text is ``reason``."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        gateways = dict(self._gateways)  # also those that end while this waits for the tasks
        self._tasks.cancel()
        await self._tasks.wait()
        gateways |= self._gateways
        try:
            await self._end_all(list(gateways.values()), reason)
        finally:
            self._processes.close()

    async def _end_all(self, gateways: Sequence[MainConnection], reason: str) -> None:
        for gateway in gateways:
            gateway.end(reason)
            if not gateway.serves:
                # The gateway is killed, because it may not read its link yet.
                gateway.process.kill()
        until = asyncio.get_running_loop().time() + END_SECONDS
        while self._gateways and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.02)
        await asyncio.gather(*(asyncio.to_thread(_reap, gateway.process) for gateway in gateways))

    async def _start_one(self) -> None:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
        with theirs:
            try:
                process = await self._processes.spawn(self._listening.fileno(), theirs.fileno())
            except BaseException:
                ours.close()
                raise
        link = ProcessLink()
        gateway = MainConnection(f"gateway-{next(self._numbers)}", process, link, self._state, self._lose)
        self._num_started += 1
        await asyncio.get_running_loop().create_connection(lambda: link, sock=ours)
        if not link.is_open:
            # The gateway has already ended.
            return
        self._gateways[gateway.name] = gateway
        gateway.begin(self._settings(is_loaded=self._model is not None))
        if self._model is not None:
            gateway.serve(*self._model)
        if self._state.engine.draining:
            gateway.drain()

    def _settings(self, *, is_loaded: bool) -> dict[str, Any]:
        return {
            "engine": asdict(self._config),
            "server": asdict(self._state.options),
            "version": self._state.version,
            "main_socket": self._main_socket,
            "is_loaded": is_loaded,
        }

    def _lose(self, gateway: MainConnection) -> None:
        """Start another gateway to replace one whose link has ended."""
        self._gateways.pop(gateway.name, None)
        if self._closing:
            return
        self._num_lost += 1
        logger.warning("%s (process %d) is lost", gateway.name, gateway.process.pid)
        # Not in the task, which never runs if it is cancelled before its first step: the process would stay a zombie.
        reaping = asyncio.get_running_loop().run_in_executor(None, _reap, gateway.process)
        self._tasks.begin(self._replace(gateway, reaping))

    async def _replace(self, gateway: MainConnection, reaping: asyncio.Future[None]) -> None:
        if not gateway.serves:
            await asyncio.sleep(RETRY_SECONDS)
        while True:
            try:
                await self._start_one()
                break
            except OSError as error:
                # The system has no more processes or descriptors.
                logger.error("no gateway can be started: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
        await asyncio.shield(reaping)

    def _tick(self) -> None:
        for gateway in tuple(self._gateways.values()):
            if gateway.hangs(time.monotonic()):
                logger.warning("killing %s (process %d), which hangs", gateway.name, gateway.process.pid)
                gateway.process.kill()
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)


def settings_of(values: Mapping[str, Any]) -> tuple[EngineConfig, ServerConfig]:
    """Parse the engine's and the server's options in a gateway's settings."""
    engine, server = ({name: _plain(value) for name, value in values[what].items()} for what in ("engine", "server"))
    return EngineConfig(**engine), ServerConfig(**server)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _reap(process: GatewayProcess) -> None:
    """Wait for a process that has closed its link. Kill it if it does not end within ``LAST_SECONDS``."""
    try:
        process.wait(timeout=LAST_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
