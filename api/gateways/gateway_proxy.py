"""Gateway proxy: ASGI middleware that forwards all requests without generation to the main process.

So files, batches, stored responses, adapters, the catalogue and the metrics have one owner, whichever gateway a client
uses.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator

import aiohttp
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from yarl import URL

from ..access.caller import RequestFacts
from ..error_responses import MESSAGES_PATH, TGI_PATHS, error_response
from ..errors import ErrorReply
from ..generate.socket_scope import INNER_APP
from ..generate.streams import ClientGone, while_connected

OWN_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", MESSAGES_PATH, "/api/chat", "/api/generate", *TGI_PATHS[:3]}
)
"""Paths that a gateway answers itself."""

# Headers that belong to one connection, and headers that this process's HTTP server adds.
_OF_CONNECTION = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"expect", b"upgrade", b"te", b"date"})
# Headers that the HTTP client would add to a request that lacks them.
_ADDED_BY_CLIENT = ("accept", "accept-encoding", "user-agent", "content-type")
_CHUNK = 1 << 16


class GatewayProxy:
    """Forwards requests to the main process over its Unix domain socket, and streams bodies in both directions.

    Args:
        app: the gateway's own application, which answers the requests that are not forwarded.
        path: the socket's path.
        root_path: the path prefix under which a reverse proxy publishes the server.
    """

    def __init__(self, app: ASGIApp, path: str, root_path: str) -> None:
        self._app = app
        self._path = path
        self._root = root_path.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            # Each request of a WebSocket connection passes through this proxy again, with its own path.
            scope.setdefault("state", {})[INNER_APP] = self
        if scope["type"] != "http" or self._is_own(scope["path"]):
            await self._app(scope, receive, send)
            return
        sent = _Sent(send)
        body = _Body(receive)
        try:
            await while_connected(body.after, self._exchange(scope, body, sent))
        except ClientGone:
            return
        except (aiohttp.ClientError, OSError):
            if sent.began:
                raise
            scope.setdefault("state", {}).update(request_id=uuid.uuid4().hex, facts=RequestFacts())
            reply = ErrorReply(503, "The server's main process does not answer.", code="engine_dead")
            await error_response(reply, scope)(scope, receive, send)

    async def close(self) -> None:
        """Close the connections to the main process."""
        if self._session is not None:
            await self._session.close()

    def _is_own(self, path: str) -> bool:
        if self._root and path.startswith(f"{self._root}/"):
            path = path.removeprefix(self._root)
        return path in OWN_PATHS

    async def _exchange(self, scope: Scope, body: _Body, send: _Sent) -> None:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(self._path, limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=_ADDED_BY_CLIENT,
            )
        query = scope["query_string"]
        target = (scope["raw_path"] + (b"?" + query if query else b"")).decode("ascii")
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in _OF_CONNECTION
        ]
        has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        if not has_body:
            await body.skip()
        request = self._session.request(
            scope["method"],
            URL(f"http://main{target}", encoded=True),
            headers=headers,
            data=body.chunks() if has_body else None,
            allow_redirects=False,
        )
        async with request as answer:
            head = [(name.lower(), value) for name, value in answer.raw_headers if name.lower() not in _OF_CONNECTION]
            await send({"type": "http.response.start", "status": answer.status, "headers": head})
            async for chunk in answer.content.iter_chunked(_CHUNK):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class _Sent:
    """ASGI ``send`` that records whether a response has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.began = False

    async def __call__(self, message: Message) -> None:
        self.began = True
        await self._send(message)


class _Body:
    """The body of a request in pieces, and an ASGI ``receive`` for the messages after the body."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._complete = asyncio.Event()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the pieces of the body. Raises ClientGone if the client disconnects before the end of the body."""
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            more = message.get("more_body", False)
            if chunk := message.get("body", b""):
                yield chunk
        self._complete.set()

    async def skip(self) -> None:
        """Receive the empty body of a request that has none."""
        async for _ in self.chunks():
            pass

    async def after(self) -> Message:
        """Receive the next message after the whole body."""
        await self._complete.wait()
        return await self._receive()
