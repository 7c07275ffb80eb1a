"""Handover of a gateway's connections to an engine process on another machine. No Ray, no asyncio.

    gateway  --control-->  host process        if one side closes it, the other one ends; reports the processor time
             --channel-->  engine process      the frames of ``engine.ipc``, as over a socketpair
             --liveness->  engine process      signs of life

The host process listens for three connections, each of which begins with a token and its purpose. It passes two of them
to the engine process as file descriptors, and then only waits, so that no further process handles frames between engine
and gateway.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import struct
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from ...engine.serving.engine_spawn import spawn_engine
from ...engine.serving.watched_process import SOCKET_BUFFER

CONTROL, CHANNEL, LIVENESS = b"C", b"M", b"L"
"""Purposes of a connection."""

TOKEN_BYTES = 32
REPORT = struct.Struct("<d")
"""A report on the control connection: seconds of processor time that the engine process has used."""

ACCEPT_SECONDS = 30.0
"""Longest time in seconds that the host process waits for the gateway to connect."""

_HELLO_SECONDS = 2.0  # seconds within which a connection must send its token
_REPORT_SECONDS = 0.5
_END_SECONDS = 10.0  # seconds within which an engine process whose gateway is gone must end by itself


class EngineHost:
    """Listens for a gateway's connections, and runs one engine process with them.

    Args:
        host: address to listen on.
        token: bytes with which each connection must begin, ``TOKEN_BYTES`` long.
    """

    def __init__(self, host: str, token: bytes) -> None:
        self._token = token
        self._listener = socket.create_server((host, 0), backlog=8)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def run(self, model_path: str, options: str) -> int:
        """Accept the gateway, run the engine process until it or the control connection ends, and close the port.

        Args:
            options: an ``EngineConfig`` as JSON.

        Returns:
            The exit status of the process.

        Raises:
            TimeoutError: no gateway came.
        """
        with self._listener:
            ends = self._accept()
        with ends[CONTROL] as control, ends[CHANNEL] as channel, ends[LIVENESS] as liveness:
            process = spawn_engine(channel.fileno(), liveness.fileno(), model_path, options)
            channel.close()
            liveness.close()
            _watch(process, control)
        return process.returncode

    def _accept(self) -> dict[bytes, socket.socket]:
        """Return the three connections by purpose. Connections without the token are closed."""
        deadline = time.monotonic() + ACCEPT_SECONDS
        ends: dict[bytes, socket.socket] = {}
        while len(ends) < 3:
            self._listener.settimeout(max(0.01, deadline - time.monotonic()))
            end, _ = self._listener.accept()
            purpose = _purpose(end, self._token)
            if purpose is None or purpose in ends:
                end.close()
                continue
            prepare(end)
            ends[purpose] = end
        return ends


def prepare(end: socket.socket) -> None:
    """Configure a connection for frames: sent at once, with large buffers, and closed if the machine is gone."""
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _purpose(end: socket.socket, token: bytes) -> bytes | None:
    """Return the purpose that a connection sends after the token; None for any other beginning."""
    hello, deadline = bytearray(), time.monotonic() + _HELLO_SECONDS
    with suppress(OSError):
        while len(hello) <= TOKEN_BYTES:
            end.settimeout(max(0.001, deadline - time.monotonic()))
            part = end.recv(TOKEN_BYTES + 1 - len(hello))
            if not part:
                return None
            hello += part
    given, purpose = bytes(hello[:TOKEN_BYTES]), bytes(hello[TOKEN_BYTES:])
    return purpose if hmac.compare_digest(given, token) and purpose in (CONTROL, CHANNEL, LIVENESS) else None


def _watch(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    """Report processor time until the process ends. End the process if the gateway sends a byte or is gone."""
    ended = os.pidfd_open(process.pid)
    ends: list[int | socket.socket] = [ended, control]
    try:
        while not (ready := select.select(ends, [], [], _REPORT_SECONDS)[0]):
            with suppress(OSError):
                control.send(REPORT.pack(_processor_seconds(process.pid)), socket.MSG_DONTWAIT)
        if ended not in ready:
            _end(process, control)
    finally:
        os.close(ended)
        process.wait()


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    """End a process: at once if the gateway requests it by a byte, or by closing its channel if the gateway is gone."""
    asked = b""
    with suppress(OSError):
        asked = control.recv(1)
    try:
        process.wait(0 if asked else _END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _processor_seconds(pid: int) -> float:
    """Return the processor time that a process has used; 0 if it has just ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
