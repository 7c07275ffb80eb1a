"""Socket channel: sends and receives JSON messages over one WebSocket connection, with bounded buffers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import Receive, Send

from ..errors import ErrorReply
from ..exact_json import loads_exact

_SLOW = (1008, "Messages are not read.")


class BadMessage(Exception):
    """A message that cannot be answered. Only the request fails, and the connection stays open.

    Args:
        request_id: id of the request that the message is about, if it can be determined.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value", request_id: str = ""):
        super().__init__(message)
        self.reply = ErrorReply(400, message, param, code)
        self.request_id = request_id


class SocketChannel:
    """Messages of one accepted connection.

    If the client does not read, the tasks that send answers wait. After ``send_seconds`` the client is disconnected.
    When the client is gone, data for it is dropped, and the tasks that send are cancelled.

    Attributes:
        gone: event that is set when nothing more can be sent.
    """

    def __init__(self, receive: Receive, send: Send, send_seconds: float) -> None:
        self.gone = asyncio.Event()
        self._receive = receive
        self._send = send
        self._seconds = send_seconds
        self._close: tuple[int, str] = (1000, "")

    async def accept(self) -> None:
        """Accept the connection."""
        await self._receive()
        await self._send({"type": "websocket.accept"})

    async def messages(self) -> AsyncGenerator[dict[str, Any] | BadMessage, None]:
        """Yield the client's messages until it leaves. Text that is not a JSON object becomes a ``BadMessage``."""
        while (message := await self._receive())["type"] == "websocket.receive":
            text = message.get("text")
            yield _parsed(text.encode() if text is not None else message.get("bytes") or b"")

    async def send(self, message: bytes) -> None:
        """Send a JSON message. Waits until the client has room for it."""
        if self.gone.is_set():
            return
        try:
            async with asyncio.timeout(self._seconds):
                await self._send({"type": "websocket.send", "text": message.decode()})
        except TimeoutError:
            self.close(*_SLOW)
        except Exception:
            # The client has left. The end of its messages tells this to the reader.
            self.gone.set()

    def close(self, code: int, reason: str) -> None:
        """Request that the connection is closed with this code after its requests have ended."""
        self._close = code, reason
        self.gone.set()

    async def send_close(self) -> None:
        """Close the connection. If the client accepts no data, nothing is sent."""
        code, reason = self._close
        try:
            async with asyncio.timeout(0 if code == _SLOW[0] else self._seconds):
                await self._send({"type": "websocket.close", "code": code, "reason": reason})
        except Exception:
            return


def _parsed(data: bytes) -> dict[str, Any] | BadMessage:
    """Parse a message as strictly as a request's body."""
    try:
        value = loads_exact(data)
    except ValueError as error:
        return BadMessage(f"The message is not valid JSON: {error}.", code="invalid_json")
    if not isinstance(value, dict):
        return BadMessage("The message must be a JSON object.", code="invalid_type")
    return value
