"""Requests that the server makes to its own routes, for a client who is not there: no socket, no key to send."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Scope

from ..access.caller import Caller
from ..errors import reply_to


class InternalClient:
    """Calls the application behind the guard, which has told who the caller is when the work was taken in.

    Args:
        app: the routes with their handlers of errors, without the guard.
        root: what routes find as ``request.app``.
    """

    def __init__(self, app: ASGIApp, root: Any) -> None:
        self._app = app
        self._root = root

    async def post(self, path: str, body: Mapping[str, Any], caller: Caller) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers in lower case and body of an answer."""
        answer = _Answer(orjson.dumps(body))
        request_id = uuid.uuid4().hex
        try:
            await self._app(self._scope(path, request_id, caller), answer.receive, answer.send)
        except Exception as error:
            reply = reply_to(error)
            return reply.status, {**reply.headers, "x-request-id": request_id}, reply.body()
        return answer.status, {**answer.headers, "x-request-id": request_id}, b"".join(answer.chunks)

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


class _Answer:
    """Both ends of one call: gives the body once, and takes what comes back."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.status = 500
        self.headers: dict[str, str] = {}
        self.chunks: list[bytes] = []

    async def receive(self) -> Message:
        if self._body is None:
            await asyncio.Event().wait()  # this client never leaves: its task is cancelled
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode().lower(): value.decode("latin-1") for name, value in message["headers"]}
        else:
            self.chunks.append(message.get("body", b""))
