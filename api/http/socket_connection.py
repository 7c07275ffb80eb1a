"""uvicorn's WebSocket protocol with bounded buffers: nothing is read from a client that does not read."""

from __future__ import annotations

from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

SOCKET_PATHS = ("/v1/responses", "/v1/stream")
_MOST_LINE = 8000  # bytes of a header that the library reads
_MOST_HEADERS = 120
_MALFORMED = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def may_be_socket(url: bytes, headers: list[tuple[bytes, bytes]]) -> bool:
    """Return whether a request to upgrade is for a WebSocket of ours, with a head that the library reads."""
    path = url.partition(b"?")[0]
    sizes = [len(url), *(len(name) + len(value) for name, value in headers)]
    has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in headers)
    is_read = url.isascii() and max(sizes) <= _MOST_LINE and len(headers) <= _MOST_HEADERS and not has_body
    return is_read and path.decode("latin-1").endswith(SOCKET_PATHS)


class SocketConnection(WebSocketsSansIOProtocol):
    """A WebSocket connection that is not read while written data waits to be sent.

    Otherwise a client could make the server fill a buffer without limit with answers to pings, or with errors.
    """

    def pause_writing(self) -> None:
        """Stop reading as well."""
        super().pause_writing()
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        """Read again, unless messages wait to be taken."""
        super().resume_writing()
        if not self.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    async def receive(self) -> Any:
        """Return the next event; the client is read again once all are taken and it reads itself."""
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            if self.writable.is_set() and not self.transport.is_closing():
                self.transport.resume_reading()
        return message

    async def run_asgi(self) -> None:
        """Answer the connection, and give up what a client does not take."""
        await super().run_asgi()
        if not self.writable.is_set():
            self.transport.abort()

    def handle_parser_exception(self) -> None:
        """Close as the fault asks, or answer a handshake that cannot be read."""
        if cast(Any, self.conn).close_sent is not None:
            super().handle_parser_exception()
        else:
            self.transport.write(_MALFORMED)
            self.transport.close()
