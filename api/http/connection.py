"""HTTP connections: uvicorn's HTTP protocol with limits on request heads and on unread bodies; uvicorn's options."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ..errors import ErrorReply
from .descriptors import most_connections
from .guard import MAX_HEADER_BYTES
from .socket_connection import SocketConnection, may_be_socket

HEAD_TIMEOUT = 10.0
MAX_MESSAGE_BYTES = 4 << 20
PING_SECONDS = 20.0
"""Seconds between two pings of a WebSocket, and seconds that its client has to answer a ping."""
DRAIN_SECONDS = 30.0
DRAIN_BYTES = 256 << 20
_MAX_HEAD_BYTES = 2 * MAX_HEADER_BYTES
# Seconds between the first two probes of a silent client, and seconds between later probes.
_PROBE_SECONDS = (0.05, 1.0)
_PROBE = b"HTTP/1.1 102 Processing\r\n\r\n"
_MOST_WAITING = 4  # Number of pipelined requests that may wait before reading is paused.


class _UnreadCoding(ValueError):
    """Raised for a body in a transfer coding that is not decoded, and that the parser would treat as plain content."""


class _LastingTransport:
    """Transport whose ``close`` calls the connection's ``close``, which may first drain data that the client still
    sends.

    Writes after ``close`` are dropped. Without this, uvloop would raise an exception until it has reported the end of
    the connection.
    """

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self._transport = transport
        self._connection = connection

    def write(self, data: bytes) -> None:
        if not self.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        self._connection.close()

    def is_closing(self) -> bool:
        return self._connection.is_closing or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _UnframedCycle(RequestResponseCycle):
    """Response to an HTTP/1.0 request.

    HTTP/1.0 has no chunked encoding, so closing the connection ends a response of unknown length.
    """

    _has_length = True

    async def send(self, message: Any) -> None:
        """Send a part of the response. uvicorn does not use chunked encoding if ``chunked_encoding`` is False."""
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not self._has_length:
                self.chunked_encoding = False
        elif not self._has_length and message["type"] == "http.response.body":
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class Connection(HttpToolsProtocol):
    """HTTP protocol that refuses request heads that are too slow or too large, and drains bodies that are not read.

    ``Guard`` refuses a complete head that is too large. The limit in this class protects memory while a head or
    trailers arrive. Trailers are dropped, because code that reads headers must not find them there.

    A response never belongs to another request: if a malformed or slow request follows requests that are not answered
    yet, the connection ends after their responses.

    A request may be answered before its body has arrived, for example if the body is too large or the key is wrong.
    Ordinary clients send a whole body before they read the response. If a socket is closed with unread bytes, the
    connection is reset, and such a client never sees the response. So the rest of the body is received and dropped,
    within ``DRAIN_SECONDS`` and ``DRAIN_BYTES``, whether or not the connection is closed afterwards.

    A client that has closed its sending side may still wait for its response (RFC 9112, 9.6), and cannot be
    distinguished from a client that has left. So the server sends interim responses, which every client of HTTP/1.1
    ignores. If the client has left, sending the second interim response fails.

    If file descriptors run out, the connection that has been idle for the longest time is closed to make room for a new
    one.

    Attributes:
        is_closing: whether the connection will be closed after the request has been received.
        idle_since: event loop time at which the last response ended, or at which the connection began.
    """

    idle_since = 0.0
    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _in_head = True
    _in_body = False
    # Whether the data that is being parsed contains a part of a body.
    _found_body = False
    _refused = False  # True after the connection was refused. Then nothing more is parsed.
    _running: RequestResponseCycle | None = None  # The request that was started last.
    _drain_timer: asyncio.TimerHandle | None = None
    _drain_bytes = 0
    is_closing = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Store the transport of a new connection, and wait for the head of its first request."""
        super().connection_made(cast(asyncio.Transport, _LastingTransport(transport, self)))
        self._socket = transport
        self.idle_since = self.loop.time()
        self._await_head()
        if len(self.connections) > most_connections():
            self._make_room()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle the end of the client's sending side. Returns True to keep the connection open.

        It is kept if the client may be waiting for a response that has not begun.
        """
        last = self._last_unanswered()
        waits = last is not None and self._running is not None and not self._running.response_started
        if last is None or not waits or self._in_body or self.scheme == "https" or last.scope["http_version"] == "1.0":
            return False
        last.keep_alive = False
        self._stop_timer()
        self._probe(_PROBE_SECONDS[0])
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers, because the connection has ended."""
        self._stop_timer()
        self._stop_draining()
        # Pipelined requests may wait behind the request that is being answered.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data. Counts the bytes of a head, of trailers and of drained data."""
        if self._drain_timer is not None:
            self._drain_bytes += len(data)
            if self._drain_bytes > DRAIN_BYTES:
                return self._socket.close()
        if self._refused:
            return None
        in_head, self._found_body = self._in_head, False
        self._parse(data)
        if in_head != self._in_head or self._found_body or not (in_head or self._in_body):
            self._head_bytes = 0
        elif not self.is_closing and not self._refused:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                part = "head is" if in_head else "trailers are"
                self._refuse(ErrorReply(431, f"The request's {part} longer than {_MAX_HEAD_BYTES} bytes."))
        return None

    def _parse(self, data: bytes) -> None:
        """Parse data. The parser calls this object's methods for the parts that it finds."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self.parser.get_method() == b"CONNECT":
                self.send_400_response("This server is not a proxy.")
            elif self._should_upgrade() and self._is_alone() and may_be_socket(self.url, self.headers):
                self._become_socket(data[upgrade.args[0] :])
            else:
                self._parse(self._without_upgrade() + data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            is_coded = isinstance(error.__context__, _UnreadCoding)
            self.send_400_response(str(error.__context__) if is_coded else "Invalid HTTP request received.")

    def _is_alone(self) -> bool:
        """Return whether the request is a complete GET of HTTP/1.1, and no earlier request waits for its response."""
        is_get = self.parser.get_method() == b"GET" and self.parser.get_http_version() == "1.1"
        return is_get and self._last_unanswered() is None and not self.is_closing

    def _become_socket(self, data: bytes) -> None:
        """Hand the connection over to the WebSocket protocol, with the request's head and the data after it."""
        self._stop_timer()
        self.connections.discard(self)
        head = [b"GET %b HTTP/1.1" % self.url, *(b"%b: %b" % each for each in self.headers)]
        protocol = SocketConnection(self.config, self.server_state, self.app_state, self.loop)
        protocol.connection_made(self._socket)
        self._socket.set_protocol(protocol)
        protocol.data_received(b"\r\n".join(head) + b"\r\n\r\n")
        if data:
            protocol.data_received(data)

    def _without_upgrade(self) -> bytes:
        """Return the head of an upgrade request without its upgrade headers, to be parsed by a new parser.

        Such a request is answered in HTTP/1.1, as the standard allows. But the parser would leave all data after the
        head, including the body, to the other protocol. Java's HTTP client requests HTTP/2 in this way with its first
        request.
        """
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(token for token in value.split(b",") if token.strip().lower() != b"upgrade")
            if name != b"upgrade":
                lines.append(b"%b: %b" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header of the head; drop a trailer."""
        if name.lower() == b"transfer-encoding" and value.lower() != b"chunked":
            raise _UnreadCoding("Compressed bodies are not supported: Transfer-Encoding may only be chunked.")
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop the timer of the head, and start the request unless the connection is being closed."""
        self._stop_timer()
        self._in_head = False
        if self.parser.should_upgrade() or self.transport.is_closing():
            return
        super().on_headers_complete()
        self._in_body = True
        if self.expect_100_continue:
            # If the request is answered before the client is told to continue, it is not known whether the body will
            # come.
            self.cycle.keep_alive = False
        # A paused socket does not report that its client has left. So reading continues while only a few requests wait.
        if self.pipeline and len(self.pipeline) <= _MOST_WAITING:
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            cycle.__class__ = _UnframedCycle
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._found_body = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the draining of a body. The connection is then closed, or waits for the next request."""
        # The upgrade request itself has not been handled yet.
        if self.parser.should_upgrade():
            return
        self._in_body = False
        if self.expect_100_continue and not self.cycle.response_started:
            self.cycle.keep_alive = self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
        super().on_message_complete()
        if self._drain_timer is not None:
            self._stop_draining()
            if self.is_closing:
                self._socket.close()
            else:
                # Restart uvicorn's timer for the next request, because the arrival of the body has stopped the timer.
                self._unset_keepalive_if_required()
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

    def on_response_complete(self) -> None:
        """Drain the rest of the body of an answered request, unless the connection is being closed already."""
        super().on_response_complete()
        self.idle_since = self.loop.time()
        if self._in_body and self.cycle.response_complete and not self.transport.is_closing():
            self._drain()

    def close(self) -> None:
        """Close the connection. If a request is still being received, first drain its rest."""
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
        """Close the connection like uvicorn, without waiting for a body that is not read."""
        if self._drain_timer is not None:
            self._socket.close()
        else:
            # The client may or may not send the body after this response, so the connection ends with the response.
            self.expect_100_continue = False
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP with a response in the format of all other errors."""
        self._refuse(ErrorReply(400, msg, code="invalid_http"))

    def _await_head(self) -> None:
        self._stop_timer()
        self._in_head, self._head_bytes = True, 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT, self._refuse)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is being received or answered; a part of a head may have arrived."""
        return not self._in_body and self._last_unanswered() is None

    def _make_room(self) -> None:
        """Close the connection that has been idle for the longest time. If there is none, refuse this connection."""
        others = [each for each in self.connections if isinstance(each, Connection) and each is not self]
        idle = [each for each in others if each.is_idle and not each.transport.is_closing()]
        if idle:
            min(idle, key=lambda each: each.idle_since)._socket.close()
        else:
            text = "The server has too many connections: try again later."
            self._refuse(ErrorReply(503, text, code="server_overloaded"))

    def _probe(self, seconds: float) -> None:
        """Send interim responses until the response begins."""
        running = self._running
        if running is None or running.response_started or self._socket.is_closing():
            return
        self._socket.write(_PROBE)
        self.loop.call_later(seconds, self._probe, _PROBE_SECONDS[1])

    def _drain(self) -> None:
        if self._drain_timer is None:
            self._drain_bytes = 0
            self._drain_timer = self.loop.call_later(DRAIN_SECONDS, self._socket.close)

    def _stop_draining(self) -> None:
        if self._drain_timer is not None:
            self._drain_timer.cancel()
            self._drain_timer = None

    def _refuse(self, reply: ErrorReply | None = None) -> None:
        """Stop parsing, and close the connection after the responses that are due, or after ``reply`` if there are
        none.

        Args:
            reply: response to the request that is being received; None for no response.
        """
        self._stop_timer()
        broken = self.cycle if self._in_body else None
        if broken is not None and self.pipeline and self.pipeline[0][0] is broken:
            self.pipeline.popleft()
        if (before := self._last_unanswered()) not in (None, broken):
            self._refused, before.keep_alive = True, False
            self.flow.resume_reading()
        elif reply is None or self._drain_timer is not None or (broken is not None and broken.response_started):
            self._socket.close()
        else:
            self._refused = True
            if broken is not None:
                broken.disconnected = True
                broken.message_event.set()
            self._write(reply)
            self.transport.close()

    def _last_unanswered(self) -> RequestResponseCycle | None:
        """Return the last request that waits for its response or is being answered; None if there is none."""
        if self.pipeline:
            return self.pipeline[0][0]
        return None if self._running is None or self._running.response_complete else self._running

    def _write(self, reply: ErrorReply) -> None:
        """Write a complete response directly to the socket, because there is no request object for it."""
        body = reply.body()
        head = [
            b"HTTP/1.1 %d Refused" % reply.status,
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"connection: close",
            b"x-request-id: %b" % uuid.uuid4().hex.encode(),
        ]
        self.transport.write(b"\r\n".join(head) + b"\r\n\r\n" + body)


def uvicorn_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> dict[str, Any]:
    """Return uvicorn's options: these protocol classes, uvloop, and none of uvicorn's own logs or headers."""
    return {
        "http": Connection,
        "ws": SocketConnection,
        "ws_max_size": max_message_bytes,
        "ws_ping_interval": PING_SECONDS,
        "ws_ping_timeout": PING_SECONDS,
        "ws_per_message_deflate": False,
        "loop": "uvloop",
        "lifespan": "off",
        "log_config": None,
        "log_level": "warning",
        "access_log": False,
        "proxy_headers": False,
        "server_header": False,
        "timeout_keep_alive": 75,  # Longer than load balancers keep idle connections by default.
    }
