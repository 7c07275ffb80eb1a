"""Internal client: sends batch requests to the server's own routes by ASGI, without a socket or an API key."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from ...tenancy.current_tenant import CURRENT_TENANT
from ..access.caller import Caller
from ..errors import reply_to
from ..exact_json import dumps_exact


class InternalClient:
    """Calls the routes without the guard, for a caller that was identified when the batch was created.

    Args:
        app: the routes with their error handlers, without the guard.
        root: the application that routes get as ``request.app``.
    """

    def __init__(self, app: ASGIApp, root: Any) -> None:
        self._app = app
        self._root = root

    async def post(self, path: str, body: Mapping[str, Any], caller: Caller) -> tuple[int, Mapping[str, str], bytes]:
        """Send a request. Returns (status, headers with names in lower case, body)."""
        CURRENT_TENANT.set(caller.key.tenant)
        exchange = _Exchange(dumps_exact(body))
        request_id = uuid.uuid4().hex
        try:
            await self._app(self._scope(path, request_id, caller), exchange.receive, exchange.send)
        except Exception as error:
            reply = reply_to(error)
            return reply.status, {**reply.headers, "x-request-id": request_id}, reply.body()
        return exchange.status, {**exchange.headers, "x-request-id": request_id}, b"".join(exchange.chunks)

    def _scope(self, path: str, request_id: str, caller: Caller) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": None,
            "server": None,
            "app": self._root,
            "state": {"request_id": request_id, "facts": caller.facts, "caller": caller},
        }


class _Exchange:
    """ASGI ``receive`` and ``send`` of one request: provides the body once, and collects the response."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.status = 500
        self.headers: dict[str, str] = {}
        self.chunks: list[bytes] = []

    async def receive(self) -> Message:
        if self._body is None:
            # An internal client never disconnects. If it gives up, the task of the request is cancelled.
            await asyncio.Event().wait()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode().lower(): value.decode("latin-1") for name, value in message["headers"]}
        else:
            self.chunks.append(message.get("body", b""))
