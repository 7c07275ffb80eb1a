"""IPC: frames over a socket, each with its length in four bytes, little-endian, and its payload.

The two processes hold the ends of an unnamed ``socketpair``, to which no other process can connect. Signs of life are
sent over a separate pipe, because another thread writes them. Each of them is the number of passes of the step loop, in
eight bytes.
"""

from __future__ import annotations

import select
import socket

MAX_FRAME = 1 << 28
LIVENESS_SECONDS = 0.25
"""Between two signs of life."""
_LENGTH = 4
_READ = 1 << 20
_MOST_READS = 32  # reads in a row, after which the engine computes a step
_LIVENESS = 8  # less than PIPE_BUF: a sign is written whole or not at all


def frame(payload: bytes) -> bytes:
    """Return a payload with its length prefix. ValueError beyond ``MAX_FRAME``."""
    if len(payload) > MAX_FRAME:
        raise ValueError(f"a frame of {len(payload)} bytes is longer than {MAX_FRAME}")
    return len(payload).to_bytes(_LENGTH, "little") + payload


class FrameReader:
    """Splits received bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads completed by ``data``. ValueError for a length beyond ``MAX_FRAME``."""
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
            with memoryview(self._buffer) as received:  # one copy: of large frames a second one takes its time
                payloads.append(bytes(received[start + _LENGTH : end]))
            start = end
        del self._buffer[:start]
        return payloads


class Channel:
    """The engine's end of the socket. Unsent bytes are buffered, so that a busy client does not stop the step loop."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._reader = FrameReader()
        self._unsent = bytearray()

    def send(self, payload: bytes) -> None:
        """Send a frame, or buffer the rest. ConnectionError if the other side is gone."""
        self._unsent += frame(payload)
        self._flush()

    def receive(self, timeout: float) -> list[bytes]:
        """Return received frames, waiting up to ``timeout`` seconds for one. ConnectionError at end of stream."""
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
        """Wait up to ``timeout`` seconds until all is sent."""
        self._socket.settimeout(timeout)
        if self._unsent:
            self._socket.sendall(self._unsent)

    def _read(self) -> list[bytes]:
        """Return the frames that are here. More than fills the socket is read, as KV of another replica is large."""
        payloads: list[bytes] = []
        for _ in range(_MOST_READS):
            try:
                data = self._socket.recv(_READ)
            except BlockingIOError:
                break
            if not data:
                # The next read meets the end again.
                if payloads:
                    break
                raise ConnectionError("the other side closed the channel")
            payloads += self._reader.feed(data)
            if len(data) < _READ:
                break
        return payloads

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass


def pack_liveness(num_passes: int) -> bytes:
    """Return a sign of life."""
    return num_passes.to_bytes(_LIVENESS, "little")


def last_liveness(signs: bytes) -> int | None:
    """Return the number in the last sign of life of ``signs``, which begin with a whole one; None if absent."""
    end = len(signs) - len(signs) % _LIVENESS
    return int.from_bytes(signs[end - _LIVENESS : end], "little") if end else None
