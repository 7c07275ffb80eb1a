"""Process link: sends engine messages and commands as frames between the main process and a gateway.

    1 byte: 0, then a frame of ``engine.messages``
    1 byte: 1, then a msgpack list of commands, each the list [name, value, ...]

Commands that are sent in one pass of the event loop are in one frame. So the other side gets all of them or, if this
process is killed, none of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgpack

from ...engine.ipc import FrameReader, frame
from ...engine.messages import Message, decode, encode

_MESSAGES = b"\0"
_COMMANDS = b"\1"


class ProcessLink(asyncio.Protocol):
    """One end of a link. Belongs to one event loop.

    Attributes:
        on_messages: called with the messages of each frame that contains engine messages.
        on_command: called with the name and the values of each command.
        on_closed: called when the other end is gone.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader()
        self._told: list[list[Any]] = []  # Commands that are sent at the end of this pass of the event loop.
        self.on_messages: Callable[[list[Message]], None] = lambda messages: None
        self.on_command: Callable[[str, list[Any]], None] = lambda name, values: None
        self.on_closed: Callable[[], None] = lambda: None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Dispatch the frames in ``data``."""
        for payload in self._reader.feed(data):
            if payload[:1] == _MESSAGES:
                self.on_messages(decode(payload[1:]))
            else:
                for name, *values in msgpack.unpackb(payload[1:], strict_map_key=False):
                    self.on_command(name, values)

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None
        self.on_closed()

    def send(self, messages: Sequence[Message]) -> None:
        """Send messages of the engine, after the commands given before. Does nothing if the other end is gone."""
        self.flush()
        self._write(_MESSAGES + encode(messages))

    def tell(self, name: str, *values: Any) -> None:
        """Send a command at the end of this pass of the event loop. Does nothing if the other end is gone."""
        if not self._told:
            asyncio.get_running_loop().call_soon(self.flush)
        self._told.append([name, *values])

    def flush(self) -> None:
        """Send the waiting commands."""
        if self._told:
            told, self._told = self._told, []
            self._write(_COMMANDS + cast(bytes, msgpack.packb(told)))

    def close(self) -> None:
        """Close this end after everything was sent."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def _write(self, payload: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(payload))
