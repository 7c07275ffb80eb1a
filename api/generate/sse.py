"""Server-sent events: an ASGI response that sends one message per item, and stops when the client disconnects."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, closing

from fastapi import Response
from starlette.types import Message, Receive, Scope, Send

from ..error_responses import error_response
from ..errors import ErrorReply, reply_to
from .streams import ClientGone, while_connected

_SEND_TIMEOUT = 60.0
# U+2028, U+2029 and U+0085 in UTF-8. Clients that read lines of text, for example by httpx's ``iter_lines``, end a line
# at them.
_LINE_ENDS = re.compile(rb"\xe2\x80[\xa8\xa9]|\xc2\x85")
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def _openai_error(reply: ErrorReply) -> bytes:
    return b"data: " + reply.body() + b"\n\n"


def without_line_ends(event: bytes) -> bytes:
    """Return an event in which characters within JSON strings that some clients take for line ends are escaped."""
    if b"\xe2\x80" in event or b"\xc2\x85" in event:
        return _LINE_ENDS.sub(lambda found: b"\\u%04x" % ord(found[0].decode()), event)
    return event


class EventStream(Response):
    """Response with the events of a generator. The generator is closed when the client disconnects.

    The response starts with the first event, so an error before the first event gets its own status. A later error
    becomes the last event. A client that reads nothing for ``_SEND_TIMEOUT`` seconds counts as disconnected.

    Args:
        events: each item is one or more complete events; an event is ``data: ...`` and an empty line.
        heartbeat: seconds without an event after which a comment is sent; it also starts the response. 0 for none.
        error_event: serializes an error that occurs after the response has started.
    """

    media_type = "text/event-stream"
    heartbeat_piece = b": ping\n\n"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        heartbeat: float = 0.0,
        error_event: Callable[[ErrorReply], bytes] = _openai_error,
    ) -> None:
        self._events = events
        self._heartbeat = heartbeat
        self._error_event = error_event
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._run(scope, receive, send))
        except (ClientGone, TimeoutError):
            return

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async with asyncio.timeout(None) as limit, aclosing(self._events) as events:
            with closing(_Body(send, start, limit, self._heartbeat, self.heartbeat_piece)) as body:
                try:
                    async for event in events:
                        await body.send(without_line_ends(event))
                except Exception as error:
                    reply = reply_to(error)
                    if not await body.has_begun():
                        await error_response(reply, scope)(scope, receive, send)
                        return
                    await body.send(without_line_ends(self._error_event(reply)))
                await body.send(b"", more=False)


class _Body:
    """Sends the pieces of the body, and heartbeats between them.

    If the client does not accept a piece within ``_SEND_TIMEOUT`` seconds, the whole response is ended. One timer
    watches all pieces, because one timer for each piece would cost more than sending it.

    Args:
        start: ASGI message that starts the response; it is sent before the first piece.
        limit: timeout around the whole response. To end the response, it is rescheduled to expire at once.
        heartbeat: seconds without a piece after which a heartbeat is sent; 0 for none.
        heartbeat_piece: bytes that are sent as a heartbeat; clients ignore them.
    """

    def __init__(
        self, send: Send, start: Message, limit: asyncio.Timeout, heartbeat: float, heartbeat_piece: bytes
    ) -> None:
        self._heartbeat_piece = heartbeat_piece
        self._send = send
        self._start: Message | None = start
        self._limit = limit
        self._heartbeat = heartbeat
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()  # Time of the last piece on the loop's clock.
        self._in_flight = False
        self._ping: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(heartbeat or _SEND_TIMEOUT, self._check)

    async def send(self, piece: bytes, *, more: bool = True) -> None:
        """Send a piece. For the last piece, ``more`` is False."""
        if self._ping is not None:
            await self._ping
        await self._write(piece, more=more)

    async def has_begun(self) -> bool:
        """Return whether the response has started. If a heartbeat is being sent, waits for it first."""
        if self._ping is not None:
            await self._ping
        return self._start is None

    def close(self) -> None:
        self._timer.cancel()
        if self._ping is not None:
            self._ping.cancel()

    async def _write(self, piece: bytes, *, more: bool) -> None:
        self._since, self._in_flight = self._loop.time(), True
        if self._start is not None:
            start, self._start = self._start, None
            await self._send(start)
        await self._send({"type": "http.response.body", "body": piece, "more_body": more})
        self._in_flight = False

    async def _beat(self) -> None:
        await self._write(self._heartbeat_piece, more=True)
        self._ping = None

    def _check(self) -> None:
        now = self._loop.time()
        if self._in_flight:
            due = self._since + _SEND_TIMEOUT
            if due <= now:
                self._limit.reschedule(now)
                return
            due = min(due, now + self._heartbeat) if self._heartbeat else due
        elif not self._heartbeat:
            due = now + _SEND_TIMEOUT
        else:
            due = self._since + self._heartbeat
            if due <= now:
                self._ping = self._loop.create_task(self._beat())
                due = now + self._heartbeat
        self._timer = self._loop.call_at(due, self._check)
