"""uvicorn's HTTP protocol with limits on a request's head and on what comes of it after its answer; its options."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..errors import ErrorReply
from .guard import MAX_HEADER_BYTES

HEAD_TIMEOUT = 10.0
DRAIN_SECONDS = 30.0
DRAIN_BYTES = 256 << 20
_MAX_HEAD_BYTES = 2 * MAX_HEADER_BYTES


class _LastingTransport:
    """A transport whose ``close`` is the connection's, which may first drain what the client still sends.

    What is written once it is closed is dropped: uvloop would raise until it has told of the end of the connection.
    """

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self._transport = transport
        self._connection = connection

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        self._connection.close()

    def is_closing(self) -> bool:
        return self._connection.is_closing or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(HttpToolsProtocol):
    """Closes a connection whose request line and headers are too slow or do not end, and drains what is not read.

    ``Guard`` refuses a complete head that is too large; the limit here protects memory while the head arrives.

    A request may be answered before its body has come: it is too large, its key is wrong. Ordinary clients send all of
    a body before they read the answer, and a socket that is closed with unread bytes resets the connection, so that
    they would never see it. The rest of such a body is received and dropped, within ``DRAIN_SECONDS`` and
    ``DRAIN_BYTES``, whether the connection is to be closed after it or not.

    Attributes:
        is_closing: whether it is to be closed once the request has been received.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _in_head = True
    _in_body = False
    _refused = False  # nothing more is parsed
    _drain_timer: asyncio.TimerHandle | None = None
    _drain_bytes = 0
    is_closing = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection and await its first request's head."""
        super().connection_made(cast(asyncio.Transport, _LastingTransport(transport, self)))
        self._socket = transport
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """End all timers with the connection."""
        self._stop_timer()
        self._stop_draining()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data, and count the bytes of a head and those that are drained."""
        if self._drain_timer is not None:
            self._drain_bytes += len(data)
            if self._drain_bytes > DRAIN_BYTES:
                return self._socket.close()
            if self._refused:
                return None
        in_head = self._in_head
        super().data_received(data)
        if in_head and self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._refuse(ErrorReply(431, f"The request's head is longer than {_MAX_HEAD_BYTES} bytes."))
        return None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        """End the time limit of the head."""
        self._stop_timer()
        self._in_head, self._in_body = False, True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End the draining of a body: its connection is closed now, or waits for the next request."""
        self._in_body = False
        super().on_message_complete()
        if self._drain_timer is not None:
            self._stop_draining()
            if self.is_closing:
                self._socket.close()
            else:  # as uvicorn does after a response; the body has ended that wait
                self._unset_keepalive_if_required()
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

    def on_response_complete(self) -> None:
        """Drain the body of a request that has been answered, unless the connection is being closed already."""
        super().on_response_complete()
        if self._in_body and self.cycle.response_complete and not self.transport.is_closing():
            self._drain()

    def close(self) -> None:
        """Close the connection; if it is in the middle of a request, after the rest of that has been drained."""
        if self._socket.is_closing() or self.is_closing:
            return
        if not self._refused and not (self._in_body and self.cycle.response_complete):
            self._socket.close()
            return
        self.is_closing = True
        self.flow.resume_reading()
        if self._socket.can_write_eof():
            self._socket.write_eof()
        self._drain()

    def shutdown(self) -> None:
        """Close the connection as uvicorn does, without waiting for a body that nobody reads."""
        if self._drain_timer is not None:
            self._socket.close()
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP in the shape of all other errors; in a body that is drained it has been answered."""
        if self._drain_timer is None:
            self._refuse(ErrorReply(400, msg, code="invalid_http"))
        else:
            self._socket.close()

    def _await_head(self) -> None:
        self._stop_timer()
        self._in_head, self._head_bytes = True, 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _drain(self) -> None:
        if self._drain_timer is None:
            self._drain_bytes = 0
            self._drain_timer = self.loop.call_later(DRAIN_SECONDS, self._socket.close)

    def _stop_draining(self) -> None:
        if self._drain_timer is not None:
            self._drain_timer.cancel()
            self._drain_timer = None

    def _refuse(self, reply: ErrorReply) -> None:
        """Write a whole response to the socket, as there is no request for it, and close."""
        self._stop_timer()
        self._refused = True
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
