"""Server-sent events: one ASGI message for all that came in one step, and an end when the client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import Response
from starlette.types import Receive, Scope, Send

from api.errors import reply_to
from api.streams import ClientGone, while_connected

DONE = b"data: [DONE]\n\n"
_SEND_TIMEOUT = 60.0
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(Response):
    """A response whose body are the events of a generator, which is closed as soon as nobody reads them.

    The response starts with the first event: what fails before it still gets a status of its own. An error after it
    is the last event. A client that takes nothing for a minute counts as gone.

    Args:
        events: one or more whole events, ``data: ...`` with an empty line after each, per item.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self._events = events
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop when the client is gone."""
        try:
            await while_connected(receive, self._run(scope, receive, send))
        except (ClientGone, TimeoutError):
            return

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                event = await anext(events)
            except Exception as error:
                await reply_to(error).response()(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _send(send, event)
            try:
                async for event in events:
                    await _send(send, event)
            except TimeoutError:
                raise
            except Exception as error:
                await _send(send, b"data: " + reply_to(error).body() + b"\n\n")
            await _send(send, b"", more=False)


async def _send(send: Send, body: bytes, *, more: bool = True) -> None:
    async with asyncio.timeout(_SEND_TIMEOUT):
        await send({"type": "http.response.body", "body": body, "more_body": more})
