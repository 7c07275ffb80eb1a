"""uvicorn's HTTP protocol with limits on the time and size of a request's head, and uvicorn's options."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..errors import ErrorReply
from .guard import MAX_HEADER_BYTES

HEAD_TIMEOUT = 10.0
_MAX_HEAD_BYTES = 2 * MAX_HEADER_BYTES


class Connection(HttpToolsProtocol):
    """Closes a connection whose request line and headers are too slow or do not end.

    ``Guard`` refuses a complete head that is too large; this limit protects memory while the head arrives.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data, and count the bytes of a head."""
        in_head = self._in_head
        super().data_received(data)
        if in_head and self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._refuse(ErrorReply(431, f"The request's head is longer than {_MAX_HEAD_BYTES} bytes."))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        """End the time limit of the head."""
        self._stop_timer()
        self._in_head = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP in the shape of all other errors."""
        self._refuse(ErrorReply(400, msg, code="invalid_http"))

    def _await_head(self) -> None:
        self._stop_timer()
        self._in_head, self._head_bytes = True, 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, reply: ErrorReply) -> None:
        """Write a whole response to the socket, as there is no request for it, and close."""
        body = reply.body()
        head = [
            b"HTTP/1.1 %d Refused" % reply.status,
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"connection: close",
            b"x-request-id: %b" % uuid.uuid4().hex.encode(),
        ]
        self.transport.write(b"\r\n".join(head) + b"\r\n\r\n" + body)
        self.transport.close()


def uvicorn_options() -> dict[str, Any]:
    """Return uvicorn's options: this protocol, uvloop, and none of its own logs or headers."""
    return {
        "http": Connection,
        "ws": "none",
        "loop": "uvloop",
        "lifespan": "off",
        "log_config": None,
        "log_level": "warning",
        "access_log": False,
        "proxy_headers": False,
        "server_header": False,
        "timeout_keep_alive": 75,  # longer than load balancers keep idle connections by default
    }
