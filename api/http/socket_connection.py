"""WebSocket connections: uvicorn's WebSocket protocol with bounded buffers.

A client that does not read is not read from.
"""

from __future__ import annotations

from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

SOCKET_PATHS = ("/v1/responses", "/v1/stream")
_MOST_LINE = 8000  # Largest number of bytes of a header that the library reads.
_MOST_HEADERS = 120
_MALFORMED = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def may_be_socket(url: bytes, headers: list[tuple[bytes, bytes]]) -> bool:
    """Return whether an upgrade request is for a WebSocket path, with a head that the library can read."""
    path = url.partition(b"?")[0]
    sizes = [len(url), *(len(name) + len(value) for name, value in headers)]
    has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in headers)
    is_read = url.isascii() and max(sizes) <= _MOST_LINE and len(headers) <= _MOST_HEADERS and not has_body
    return is_read and path.decode("latin-1").endswith(SOCKET_PATHS)


class SocketConnection(WebSocketsSansIOProtocol):
    """A WebSocket connection that is not read while written data waits to be sent.

    Otherwise a client could make the server fill a buffer without limit, with responses to pings or with errors.
    """

    def pause_writing(self) -> None:
        """Pause writing, and also reading."""
        super().pause_writing()
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        """Resume writing, and also reading unless received messages are still waiting."""
        super().resume_writing()
        if not self.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    async def receive(self) -> Any:
        """Return the next event. Reading resumes when all events have been returned and the client reads."""
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            if self.writable.is_set() and not self.transport.is_closing():
                self.transport.resume_reading()
        return message

    async def run_asgi(self) -> None:
        """Run the application on the connection. Afterwards, drop data that the client does not read."""
        await super().run_asgi()
        if not self.writable.is_set():
            self.transport.abort()

    def handle_parser_exception(self) -> None:
        """Close the connection with the parser's close frame, or answer a malformed handshake with 400."""
        if cast(Any, self.conn).close_sent is not None:
            super().handle_parser_exception()
        else:
            self.transport.write(_MALFORMED)
            self.transport.close()
