"""Ray replica: the client of an engine process that a Ray actor hosts, on this machine or another."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from ...engine.config import EngineConfig
from ...engine.errors import EngineDead
from ...engine.serving.engine_client import EngineClient
from ...engine.serving.watched_process import WatchedProcess
from .handover import CHANNEL, CONTROL, LIVENESS, REPORT, prepare

CONNECT_SECONDS = 10.0
LAST_MESSAGES_SECONDS = 0.5
"""Seconds for which the engine's last messages are awaited after the end of its actor."""
CLOSE_SECONDS = 15.0
"""Seconds that an engine has to end its streams and its process; then its actor is killed."""


@dataclass(frozen=True, slots=True)
class HostAddress:
    """The address at which an actor waits for the gateway.

    Attributes:
        host, port: address of its ``EngineHost``.
        token: token with which each connection must begin.
    """

    host: str
    port: int
    token: bytes


class RayReplica(EngineClient):
    """Exchanges messages with an actor's engine process over separate connections, which do not pass through Ray.

    Args:
        config, model_path, heartbeat_timeout, watchdog_timeout: as in ``EngineClient``.
        address: address of the actor.
        release: ends the actor in any state. It may block.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        address: HostAddress,
        release: Callable[[], None],
        *,
        heartbeat_timeout: float,
        watchdog_timeout: float,
    ) -> None:
        self._hosted = HostedProcess(address, self._lose_host, heartbeat_timeout, watchdog_timeout)
        super().__init__(config, model_path, process=self._hosted)
        self._release = release

    async def close(self) -> None:
        """Shut the engine down and end its actor; an actor that has not ended after ``CLOSE_SECONDS`` is killed."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await super().close()
        except TimeoutError:
            if self._transport is not None:
                self._transport.abort()
        finally:
            self._hosted.close()
            await asyncio.to_thread(self._release)

    def _lose_host(self) -> None:
        """End after the actor has ended: the end of the channel asks the engine process to end."""
        # Not at once: if the process has ended, its last messages may still arrive, and its channel ends by itself.
        if self._transport is not None:
            asyncio.get_running_loop().call_later(LAST_MESSAGES_SECONDS, self._transport.abort)


class HostedProcess(WatchedProcess):
    """The engine process of an actor; the actor starts it when this client connects.

    Args:
        address: address of the actor.
        on_lost: called when the actor is gone.
        heartbeat_timeout, watchdog_timeout: as in ``Watchdog``.
    """

    def __init__(
        self, address: HostAddress, on_lost: Callable[[], None], heartbeat_timeout: float, watchdog_timeout: float
    ) -> None:
        super().__init__(heartbeat_timeout, watchdog_timeout)
        self._address = address
        self._on_lost = on_lost
        self._control: _Control | None = None

    @property
    def place(self) -> str:
        """The machine's name, for people to read."""
        return self._address.host

    async def start(self) -> tuple[socket.socket, BinaryIO]:
        """Connect to the actor, which starts the process. Raises EngineDead if it cannot be reached."""
        ends: list[socket.socket] = []
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                for purpose in (LIVENESS, CHANNEL, CONTROL):
                    ends.append(await self._connect(purpose))
        except BaseException as error:
            for end in ends:
                end.close()
            # TimeoutError is an OSError too.
            if not isinstance(error, OSError):
                raise
            where = f"{self._address.host}:{self._address.port}"
            raise EngineDead(f"The replica at {where} cannot be reached: {error or 'no answer'}.") from error
        self._control = control = _Control(self._on_lost)
        await asyncio.get_running_loop().create_connection(lambda: control, sock=ends[2])
        return ends[1], open(ends[0].detach(), "rb", buffering=0)

    async def _connect(self, purpose: bytes) -> socket.socket:
        end = socket.socket(socket.AF_INET6 if ":" in self._address.host else socket.AF_INET)
        end.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(end, (self._address.host, self._address.port))
            await loop.sock_sendall(end, self._address.token + purpose)
        except BaseException:
            end.close()
            raise
        prepare(end)
        return end

    def kill(self) -> None:
        """Let the actor kill the process. Does nothing if it has ended."""
        if self._control is not None:
            self._control.ask_to_kill()

    def reap(self) -> None:
        # The actor waits for the process to end.
        pass

    def close(self) -> None:
        """End the connection to the actor, and with it the process."""
        if self._control is not None:
            self._control.close()

    def fault_of_start(self) -> str:
        """Return where to find the reason, which is only in the process's own output."""
        return (
            f"The engine process at {self._address.host} ended while it was loading the model; its output is in "
            "Ray's logs on that machine, in the worker's files."
        )

    def _processor_seconds(self) -> float | None:
        return self._control.processor_seconds if self._control is not None else None

    def _has_main_ended(self) -> bool:
        # The actor waits for the process and reports its end.
        return False


class _Control(asyncio.Protocol):
    """The control connection: the host's reports, and the end of the connection.

    Args:
        on_end: called when the host is gone.

    Attributes:
        processor_seconds: processor time of the engine process in the last report; None before the first.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self.processor_seconds: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        whole = len(self._buffer) // REPORT.size * REPORT.size
        if whole:
            (self.processor_seconds,) = REPORT.unpack_from(self._buffer, whole - REPORT.size)
            del self._buffer[:whole]

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._on_end()

    def ask_to_kill(self) -> None:
        """Let the host kill the engine process."""
        if self._transport is not None:
            self._transport.write(b"K")

    def close(self) -> None:
        """End the connection, and with it the process."""
        if self._transport is not None:
            self._transport.close()
