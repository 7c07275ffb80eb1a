"""Gateway supervisor: starts the gateways of a server, and another one in the place of each that ends or hangs.

clients --> one listening socket --> gateway-1, gateway-2: HTTP, templates, tokens, streams
                                          |  link, and HTTP for what is no generation
                                     main process: limits, ledger, stores, fleet --> replicas
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import subprocess
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ...engine.config import EngineConfig
from ...engine.serving.engine_client import SOCKET_BUFFER
from ...engine.serving.watchdog import TICK_SECONDS
from ..config import ServerConfig
from ..generate.server_state import ServerState
from ..observe.replica_view import GatewaysStatus, GatewayStatus
from .engine_share import EngineShare
from .gateway_link import GatewayLink
from .gateway_member import GatewayMember
from .gateway_spawn import ForkedGateways, GatewayProcess, GatewaySpawn
from .shared_model import SharedModel

END_SECONDS = 10.0
"""For gateways to end, once they are told to."""
RETRY_SECONDS = 2.0
"""Before another gateway is started in the place of one that has never served."""
_BACKLOG = 2048  # connections that wait for a gateway
_LAST_SECONDS = 2.0  # for a process that has closed its link to end

logger = logging.getLogger("rootgraft.gateways")


class GatewaySupervisor:
    """Keeps a number of gateways running. All methods belong to the event loop of the main process.

    Args:
        count: gateways.
        listening: the socket that all of them accept connections from.
        state: of the server.
        config: the engine's options.
        main_socket: path of the Unix domain socket on which the main process answers HTTP.
        processes: starts them; None for ``ForkedGateways``.
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
        self._members: dict[str, GatewayMember] = {}
        self._model: tuple[Mapping[str, Any], EngineShare] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False
        self._serves = False
        self._num_started = 0
        self._num_lost = 0

    @property
    def num_active(self) -> int:
        """Answers that gateways are generating."""
        return sum(member.num_active for member in self._members.values())

    def status(self) -> GatewaysStatus:
        """Return the gateways that run and what has happened to them."""
        now = time.monotonic()
        return GatewaysStatus(
            tuple(
                GatewayStatus(
                    member.name,
                    ("draining" if self._state.draining else "serving") if member.serves else "starting",
                    member.process.pid,
                    now - member.started,
                    member.silent_seconds,
                    member.num_active,
                )
                for member in self._members.values()
            ),
            self._num_started,
            self._num_lost,
            self._serves,
        )

    async def start(self) -> None:
        """Start all gateways, which answer that the model is being loaded."""
        self._listening.listen(_BACKLOG)
        for _ in range(self._count):
            await self._start_one()
        self._tick()

    async def serve(self, model: SharedModel, share: EngineShare) -> None:
        """Let the gateways serve a model, which is loaded, and wait until all that take connections already do.

        Those that are started from now on take none before they serve.
        """
        self._model = model.pack(), share
        listening = tuple(self._members.values())
        for member in listening:
            member.serve(*self._model)
        while not any(member.serves for member in self._members.values()) or any(
            member.name in self._members and not member.serves for member in listening
        ):
            await asyncio.sleep(TICK_SECONDS)
        self._serves = True

    def drain(self) -> None:
        """Let the gateways take no new requests."""
        for member in self._members.values():
            member.drain()

    def kill(self) -> None:
        """Kill all gateways."""
        self._closing = True
        for member in self._members.values():
            member.process.kill()

    async def close(self, reason: str) -> None:
        """Let the gateways end, answers that still run with an error of this text, and wait for them."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        members = list(self._members.values())
        try:
            await self._end_all(members, reason)
        finally:
            self._processes.close()

    async def _end_all(self, members: Sequence[GatewayMember], reason: str) -> None:
        for member in members:
            member.end(reason)
            if not member.serves:  # it may not listen yet
                member.process.kill()
        until = asyncio.get_running_loop().time() + END_SECONDS
        while self._members and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.02)
        await asyncio.gather(*(asyncio.to_thread(_reap, member.process) for member in members))

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
        link = GatewayLink()
        member = GatewayMember(f"gateway-{next(self._numbers)}", process, link, self._state, self._lose)
        self._num_started += 1
        await asyncio.get_running_loop().create_connection(lambda: link, sock=ours)
        if not link.is_open:  # it has ended already
            return
        self._members[member.name] = member
        member.begin(self._settings(is_loaded=self._model is not None))
        if self._model is not None:
            member.serve(*self._model)
        if self._state.draining:
            member.drain()

    def _settings(self, *, is_loaded: bool) -> dict[str, Any]:
        return {
            "engine": asdict(self._config),
            "server": asdict(self._state.options),
            "version": self._state.version,
            "main_socket": self._main_socket,
            "is_loaded": is_loaded,
        }

    def _lose(self, member: GatewayMember) -> None:
        """Start another gateway in the place of one whose link has ended."""
        self._members.pop(member.name, None)
        if self._closing:
            return
        self._num_lost += 1
        logger.warning("%s (process %d) is lost", member.name, member.process.pid)
        self._run(self._replace(member))

    async def _replace(self, member: GatewayMember) -> None:
        reaping = asyncio.create_task(asyncio.to_thread(_reap, member.process))
        if not member.serves:
            await asyncio.sleep(RETRY_SECONDS)
        while True:
            try:
                await self._start_one()
                break
            except OSError as error:  # too many processes or files
                logger.error("no gateway can be started: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
        await reaping

    def _tick(self) -> None:
        for member in tuple(self._members.values()):
            if member.hangs(time.monotonic()):
                logger.warning("%s (process %d) hangs, and is killed", member.name, member.process.pid)
                member.process.kill()
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def _run(self, job: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def settings_of(values: Mapping[str, Any]) -> tuple[EngineConfig, ServerConfig]:
    """Return the options in a gateway's settings."""
    engine, server = ({name: _plain(value) for name, value in values[what].items()} for what in ("engine", "server"))
    return EngineConfig(**engine), ServerConfig(**server)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _reap(process: GatewayProcess) -> None:
    """Wait for a process that has closed its link, and kill it if it does not end."""
    try:
        process.wait(timeout=_LAST_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
