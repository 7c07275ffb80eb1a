"""The API process's handle on the engine process: submit, abort, and a call for each frame that comes back."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import cast

from .. import errors
from ..config import EngineConfig
from ..errors import EngineDead, EngineError
from ..ipc import FrameReader, frame
from ..messages import Abort, Failed, Heartbeat, Message, Ready, Shutdown, Submit, TokenTexts, decode, encode
from ..snapshot import EngineSnapshot
from ..types import AdapterInfo
from .engine_calls import EngineCalls

_SOCKET_BUFFER = 4 << 20


class EngineClient:
    """Starts an engine process and talks to it. All methods belong to one event loop.

    Args:
        config: the engine's options.
        model_path: folder in Hugging Face format or GGUF file.

    Attributes:
        on_frame: called with the messages of each frame about sequences, in order. Set before ``start``.
        on_heartbeat: called with each heartbeat.
        on_death: called once if the engine ends without having been told to.
        stats: the last heartbeat's gauges and counters.
    """

    def __init__(self, config: EngineConfig, model_path: Path) -> None:
        self._config = config
        self._model_path = model_path
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._last_heartbeat = time.monotonic()
        self._closing = False
        self._lost_transport = asyncio.Event()
        self.on_frame: Callable[[list[Message]], None] = lambda messages: None
        self.on_heartbeat: Callable[[Heartbeat], None] = lambda heartbeat: None
        self.on_death: Callable[[EngineDead], None] = lambda error: None
        self.stats: dict[str, float] = {}
        self._calls = EngineCalls(self._send)

    @property
    def is_alive(self) -> bool:
        """Whether the engine process is connected."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """Names that are loaded, and what each stood for when it last changed."""
        return self._calls.names

    def last_heartbeat_age(self) -> float:
        """Seconds since the step loop last said that it is alive."""
        return time.monotonic() - self._last_heartbeat

    async def start(self) -> Ready:
        """Start the process and wait until its model is loaded.

        Raises:
            ModelError, ConfigError: what the engine says is wrong with the model or the options.
            EngineDead: it ended without saying why; its own output tells.
        """
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
        with theirs:
            self._process = self._spawn(theirs.fileno())
        await loop.create_connection(lambda: _Protocol(self), sock=ours)
        return await self._ready

    def describe_tokens(self, texts: TokenTexts) -> None:
        """Tell the engine what its tokens are as bytes, before the first sequence with a grammar."""
        self._send([texts])

    def submit(self, submits: Sequence[Submit]) -> None:
        """Start sequences; those of one call arrive together. EngineDead if there is no engine."""
        self._send(submits)

    def abort(self, ids: Iterable[int]) -> None:
        """End sequences. Does nothing if the engine is gone: they ended with it."""
        if self.is_alive:
            self._send([Abort(tuple(ids))])

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> None:
        """Load an adapter under a name, which may be in use with ``replace``. Returns when requests can name it.

        Raises:
            RequestError: it cannot be loaded.
            EngineDead: there is no engine, or it ended before it answered.
        """
        await self._calls.load(name, path, replace=replace)

    async def unload_adapter(self, name: str) -> None:
        """Let a name stand for nothing; requests that run go on. Raises UnknownModel, and EngineDead as above."""
        await self._calls.unload(name)

    async def list_adapters(self) -> tuple[AdapterInfo, ...]:
        """All adapters as they stand now. RequestError if the engine was started without, EngineDead as above."""
        return await self._calls.tell()

    async def take_snapshot(self) -> EngineSnapshot:
        """The engine as it stands between two steps, which may be seconds away. EngineDead as above."""
        return await self._calls.take_snapshot()

    def kill(self) -> None:
        """End the process without asking it, since it hangs. Does nothing if it is gone."""
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        """Tell the engine to leave and wait for its process, at most ten seconds, and for the end of its socket."""
        self._closing = True
        if self.is_alive:
            self._send([Shutdown()])
        if self._process is not None:
            await asyncio.to_thread(_reap, self._process)
        if self._transport is not None:  # the socket's end follows that of the process
            await self._lost_transport.wait()

    def _spawn(self, fd: int) -> subprocess.Popen[bytes]:
        # -P: without the working directory on its path, which may hold an `engine/` or `http.py` of the user's own.
        command = [sys.executable, "-P", "-m", "rootgraft.engine.core.engine_process", str(fd), str(self._model_path)]
        return subprocess.Popen([*command, json.dumps(asdict(self._config))], pass_fds=[fd], stdin=subprocess.DEVNULL)

    def _send(self, messages: Sequence[Message]) -> None:
        if not self.is_alive or self._transport is None:
            raise EngineDead("The engine is not running.")
        self._transport.write(frame(encode(messages)))

    def _connected(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def _received(self, messages: list[Message]) -> None:
        assert self._ready is not None
        if not self._ready.done():
            self._begin(messages.pop(0))
        if messages and isinstance(messages[-1], Heartbeat):
            heartbeat = messages.pop()
            assert isinstance(heartbeat, Heartbeat)
            self._last_heartbeat = time.monotonic()
            self.stats = heartbeat.stats
            self.on_heartbeat(heartbeat)
        if messages := self._calls.take(messages):
            self.on_frame(messages)

    def _begin(self, message: Message) -> None:
        """Take the engine's first message: Ready, or Failed with the reason."""
        assert self._ready is not None
        if isinstance(message, Ready):
            self._last_heartbeat = time.monotonic()
            self._calls.names = {info.name: info for info in message.adapters}
            self._ready.set_result(message)
        elif isinstance(message, Failed):
            self._closing = True
            kind: type[EngineError] = getattr(errors, message.kind)
            self._ready.set_exception(kind(message.message))

    def _lost(self) -> None:
        self._transport = None
        self._lost_transport.set()
        error = EngineDead("The engine process has ended.")
        self._calls.fail(error)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
        elif not self._closing:
            self.on_death(error)


class _Protocol(asyncio.Protocol):
    """Bytes from the engine to frames to the client's ``_received``."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._reader = FrameReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asserted: uvloop's transports have the methods, but not the base class.
        self._client._connected(cast(asyncio.Transport, transport))

    def data_received(self, data: bytes) -> None:
        for payload in self._reader.feed(data):
            self._client._received(decode(payload))

    def connection_lost(self, error: Exception | None) -> None:
        self._client._lost()


def _reap(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
