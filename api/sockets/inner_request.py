"""Inner request: sends an HTTP request to the server's own routes for a message of a WebSocket connection.

So the same keys, limits, checks and errors apply to a message as to an HTTP request, and the message is logged and
counted in the same way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.types import ASGIApp, Message, Scope

from ..exact_json import dumps_exact
from ..generate.socket_scope import INNER_APP

_NOT_PASSED = frozenset(
    (
        *(b"connection", b"upgrade", b"keep-alive", b"te", b"expect", b"transfer-encoding"),
        *(b"content-type", b"content-length", b"content-encoding", b"x-request-id", b"accept-encoding"),
    )
)

Emit = Callable[[str, bytes], Awaitable[None]]
"""Receives the name of an event, "" for none, and the event's data."""


@dataclass(slots=True)
class InnerAnswer:
    """The result of a request: an error, or the end of a stream.

    Attributes:
        status: HTTP status; 200 for a stream, whose events have already been passed on.
        headers: headers of an error, in lower case.
        body: body of an error.
    """

    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class InnerRequest:
    """Sends requests on behalf of one WebSocket connection, with the headers of its handshake.

    Args:
        scope: scope of the WebSocket.
        headers: further headers.
    """

    def __init__(self, scope: Scope, headers: Mapping[str, str]) -> None:
        self._app = cast(ASGIApp, scope["state"].get(INNER_APP) or scope["app"])
        kept = [each for each in scope["headers"] if each[0] not in _NOT_PASSED and not each[0].startswith(b"sec-")]
        added = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._headers = [*kept, *added, (b"content-type", b"application/json")]
        self._scheme = "https" if scope["scheme"] == "wss" else "http"
        self._ends = {name: scope.get(name) for name in ("client", "server")}

    async def post(self, path: str, body: Mapping[str, Any], emit: Emit) -> InnerAnswer:
        """Post a body. ``emit`` gets the events of a stream as they arrive. Cancelling this call ends the request."""
        exchange = _Exchange(dumps_exact(body), emit)
        await self._app(self._scope("POST", path, exchange.body), exchange.receive, exchange.send)
        return exchange.answer

    async def delete(self, path: str) -> int:
        """Send a DELETE request. Returns the status."""
        exchange = _Exchange(b"", _take_nothing)
        await self._app(self._scope("DELETE", path, b""), exchange.receive, exchange.send)
        return exchange.answer.status

    def _scope(self, method: str, path: str, body: bytes) -> Scope:
        length = [(b"content-length", b"%d" % len(body))] if body else []
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": self._scheme,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [*self._headers, *length],
            **self._ends,
            "state": {},
        }


async def _take_nothing(_name: str, _data: bytes) -> None:
    return


class _Exchange:
    """ASGI ``receive`` and ``send`` of one request: provides the body once, and splits the response into events."""

    def __init__(self, body: bytes, emit: Emit) -> None:
        self.body = body
        self.answer = InnerAnswer()
        self._is_sent = False
        self._emit = emit
        self._rest = b""

    async def receive(self) -> Message:
        if self._is_sent:
            # The request is cancelled when the client leaves.
            await asyncio.Event().wait()
        self._is_sent = True
        return {"type": "http.request", "body": self.body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.answer.status = message["status"]
            self.answer.headers = {
                name.decode().lower(): value.decode("latin-1") for name, value in message.get("headers", ())
            }
            return
        piece = message.get("body", b"")
        if self.answer.status != 200 or not self.answer.headers.get("content-type", "").startswith("text/event-stream"):
            self.answer.body += piece
            return
        *events, self._rest = (self._rest + piece).split(b"\n\n")
        for event in events:
            await self._take(event)

    async def _take(self, event: bytes) -> None:
        name, data = "", b""
        for line in event.split(b"\n"):
            if line.startswith(b"event: "):
                name = line.removeprefix(b"event: ").decode()
            elif line.startswith(b"data: "):
                data = line.removeprefix(b"data: ")
        if data and data != b"[DONE]":
            await self._emit(name, data)
