"""HTTP/1.1 by hand: requests as bytes, and the answers on a connection, each with the id of its request."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from dataclasses import dataclass, field
from typing import Any

from support.machine.waits import HANG_SECONDS

_BLOCK = 65536


def request(
    name: str,
    method: str,
    path: str,
    body: bytes | dict[str, Any] | None = None,
    *,
    key: str | None = "right",
    headers: dict[str, str] | None = None,
    chunks: bytes | None = None,
) -> bytes:
    """Return a request whose id is its name; ``chunks`` are a body with its framing."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body or b""
    fields = {"Host": "x", "X-Request-Id": name, "Content-Type": "application/json"}
    if key is not None:
        fields["Authorization"] = f"Bearer {key}"
    if chunks is not None:
        fields["Transfer-Encoding"] = "chunked"
    elif body is not None:
        fields["Content-Length"] = str(len(data))
    fields |= headers or {}
    head = "".join(f"{field}: {value}\r\n" for field, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + (data if chunks is None else chunks)


def chunked(data: bytes, size: int = 7, end: bytes = b"0\r\n\r\n") -> bytes:
    """Return a body in chunks."""
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + end


@dataclass(frozen=True)
class RawAnswer:
    """An answer; ``name`` is the id that it says it is for."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def name(self) -> str:
        return self.headers.get("x-request-id", "")


@dataclass
class Wire:
    """A connection, whose answers are parsed as they come; bytes that are no answer fail the test.

    Attributes:
        heads: which of the requests are HEAD, counted from the first one: their answers have no body.
    """

    url: str
    heads: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        host, port = self.url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=HANG_SECONDS)
        self._data = b""
        self._num_read = 0

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Send, also where the server has closed the connection by now."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(data)

    def flood(self, block: bytes, times: int) -> list[RawAnswer]:
        """Send a block again and again, and return the answers once the connection is closed."""
        for _ in range(times):
            self.send(block)
        return self.read_all()

    def read(self, count: int) -> list[RawAnswer]:
        """Return the next answers."""
        return [self._read() for _ in range(count)]

    def read_all(self) -> list[RawAnswer]:
        """Return all answers until the server closes the connection."""
        answers = []
        while self._data or self._more():
            answers.append(self._read())
        return answers

    def read_interim(self) -> int:
        """Return the status of an interim answer."""
        head = self._until(b"\r\n\r\n")
        return int(head.split()[1])

    def _read(self) -> RawAnswer:
        head = self._until(b"\r\n\r\n").decode("latin-1")
        match = re.match(r"HTTP/1\.1 (\d{3}) [^\r\n]*(\r\n|$)", head)
        assert match, f"no answer begins with {head[:100]!r}"
        lines = [line.partition(": ") for line in head.split("\r\n")[1:]]
        headers = {name.lower(): value for name, _, value in lines}
        is_head = self._num_read in self.heads
        self._num_read += 1
        return RawAnswer(int(match[1]), headers, b"" if is_head else self._body(headers))

    def _body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding") != "chunked":
            return self._take(int(headers["content-length"]))
        body = b""
        while size := int(self._until(b"\r\n"), 16):
            body += self._take(size)
            assert self._take(2) == b"\r\n"
        assert self._until(b"\r\n") == b""
        return body

    def _until(self, end: bytes) -> bytes:
        while end not in self._data:
            assert self._more(), f"the connection ended within an answer: {self._data[-300:]!r}"
        found, _, self._data = self._data.partition(end)
        return found

    def _take(self, size: int) -> bytes:
        while len(self._data) < size:
            assert self._more(), f"the connection ended within an answer: {self._data[-300:]!r}"
        found, self._data = self._data[:size], self._data[size:]
        return found

    def _more(self) -> bool:
        try:
            data = self.socket.recv(_BLOCK)
        except ConnectionResetError:
            return False
        self._data += data
        return bool(data)
