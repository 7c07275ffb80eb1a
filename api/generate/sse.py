"""Server-sent events: an ASGI response that sends one message per step and stops when the client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, closing

from fastapi import Response
from starlette.types import Receive, Scope, Send

from ..error_responses import error_response
from ..errors import reply_to
from .streams import ClientGone, while_connected

_SEND_TIMEOUT = 60.0
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(Response):
    """Response with the events of a generator, which is closed when the client disconnects.

    The response starts with the first event, so an error before it has its own status. A later error becomes the last
    event. A client that reads nothing for a minute counts as gone.

    Args:
        events: one or more whole events per item, each ``data: ...`` and an empty line.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self._events = events
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._run(scope, receive, send))
        except (ClientGone, TimeoutError):
            return

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with asyncio.timeout(None) as limit, aclosing(self._events) as events:
            try:
                event = await anext(events)
            except Exception as error:
                await error_response(reply_to(error), scope)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with closing(_Body(send, limit)) as body:
                await body.send(event)
                try:
                    async for event in events:
                        await body.send(event)
                except Exception as error:
                    await body.send(b"data: " + reply_to(error).body() + b"\n\n")
                await body.send(b"", more=False)


class _Body:
    """Sends the body's pieces; a piece that takes longer than ``_SEND_TIMEOUT`` ends ``limit``.

    One timer watches all pieces, as one for each would cost more than sending it.
    """

    def __init__(self, send: Send, limit: asyncio.Timeout) -> None:
        self._send = send
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._began: float | None = None  # begin of the piece in flight
        self._timer = self._loop.call_later(_SEND_TIMEOUT, self._check)

    async def send(self, piece: bytes, *, more: bool = True) -> None:
        """Send a piece, the last one without ``more``."""
        self._began = self._loop.time()
        await self._send({"type": "http.response.body", "body": piece, "more_body": more})
        self._began = None

    def close(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        now = self._loop.time()
        due = (now if self._began is None else self._began) + _SEND_TIMEOUT
        if due <= now:
            self._limit.reschedule(now)
        else:
            self._timer = self._loop.call_at(due, self._check)
