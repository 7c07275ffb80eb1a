"""Frames over a stream socket: a length of four bytes (little-endian), then that many bytes.

The two processes hold the ends of one ``socketpair``: there is no name that a third could connect to.
"""

from __future__ import annotations

import select
import socket

MAX_FRAME = 1 << 28
_LENGTH = 4


def frame(payload: bytes) -> bytes:
    """A payload with its length in front. ValueError if it is longer than ``MAX_FRAME``."""
    if len(payload) > MAX_FRAME:
        raise ValueError(f"a frame of {len(payload)} bytes is longer than {MAX_FRAME}")
    return len(payload).to_bytes(_LENGTH, "little") + payload


class FrameReader:
    """Cuts what a socket delivers into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that are whole after these bytes. ValueError for a length beyond ``MAX_FRAME``."""
        self._buffer += data
        payloads = []
        start = 0
        while len(self._buffer) - start >= _LENGTH:
            length = int.from_bytes(self._buffer[start : start + _LENGTH], "little")
            if length > MAX_FRAME:
                raise ValueError(f"a frame of {length} bytes is longer than {MAX_FRAME}")
            end = start + _LENGTH + length
            if len(self._buffer) < end:
                break
            payloads.append(bytes(self._buffer[start + _LENGTH : end]))
            start = end
        del self._buffer[:start]
        return payloads


class Channel:
    """The engine's end: never waits for the other side, but on purpose.

    What the other side has not taken yet is kept here, so that a client whose event loop is busy for a moment does
    not stop the step loop.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._reader = FrameReader()
        self._unsent = bytearray()

    def send(self, payload: bytes) -> None:
        """Send a frame, or keep what the socket does not take now. ConnectionError if the other side is gone."""
        self._unsent += frame(payload)
        self._flush()

    def receive(self, timeout: float) -> list[bytes]:
        """The frames that have come, waiting up to ``timeout`` seconds for one. ConnectionError at the end."""
        deadline_passed = False
        while not deadline_passed:
            writers = [self._socket] if self._unsent else []
            readable, writable, _ = select.select([self._socket], writers, [], timeout)
            if writable:
                self._flush()
            if readable:
                return self._read()
            deadline_passed = not writable
        return []

    def drain(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds until everything is sent."""
        self._socket.settimeout(timeout)
        if self._unsent:
            self._socket.sendall(self._unsent)

    def _read(self) -> list[bytes]:
        data = self._socket.recv(1 << 20)
        if not data:
            raise ConnectionError("the other side closed the channel")
        return self._reader.feed(data)

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
