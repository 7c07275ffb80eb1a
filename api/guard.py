"""What stands before every route: request ids, keys, limits on what is read, and the last word on errors.

Both classes are plain ASGI middleware: one call a request, and none for each chunk of a stream.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Iterable

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import HTTPError, reply_to

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
MAX_HEADER_BYTES = 32 << 10
MAX_HEADERS = 100
BODY_TIMEOUT = 30.0

_QUIET_PATHS = OPEN_PATHS | {"/metrics"}
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_CLOSE = {"connection": "close"}

logger = logging.getLogger("api.access")


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of this lower-case name."""
    return next((value for key, value in scope["headers"] if key == name), None)


class Identify:
    """Outermost: gives each request its id, logs its end, and answers what nobody else caught with a 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = header(scope, b"x-request-id")
        request_id = asked if asked and _REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex.encode()
        facts: dict[str, object] = {}
        scope.setdefault("state", {}).update(request_id=request_id.decode(), facts=facts, tenant="")
        start, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            reply = reply_to(error)
            if status:
                raise
            await reply.response()(scope, receive, send_with_id)
        finally:
            _log(scope, request_id, status, time.perf_counter() - start, facts)


def _log(scope: Scope, request_id: bytes, status: int, seconds: float, facts: dict[str, object]) -> None:
    level = logging.DEBUG if scope["path"] in _QUIET_PATHS else logging.INFO
    if logger.isEnabledFor(level):
        entry = {
            "request_id": request_id.decode(),
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 6),
            **facts,
        }
        logger.log(level, orjson.dumps(entry).decode())


class Guard:
    """Keys and limits. Refuses before a route sees anything, and while a body is being read.

    Args:
        keys: one of them must come as a bearer token; none: no key is asked for.
        max_body: bytes of a body that are read at most.
        share_between_keys: whether requests with different keys belong to one tenant.
    """

    def __init__(
        self, app: ASGIApp, *, keys: Iterable[str] = (), max_body: int = 4 << 20, share_between_keys: bool = False
    ) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._max_body = max_body
        self._share = share_between_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request, or answer it with what is wrong."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_headers(scope)
            if scope["path"] not in OPEN_PATHS:
                scope["state"]["tenant"] = self._tenant(scope)
        except HTTPError as error:
            await reply_to(error).response()(scope, receive, send)
            return
        await self._app(scope, _LimitedBody(receive, self._max_body), send)

    def _check_headers(self, scope: Scope) -> None:
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size > MAX_HEADER_BYTES or len(scope["headers"]) > MAX_HEADERS:
            limits = f"at most {MAX_HEADERS} headers with {MAX_HEADER_BYTES} bytes"
            raise HTTPError(431, f"The request has too many headers: {limits} are read.", headers=_CLOSE)
        encoding = header(scope, b"content-encoding")
        if encoding is not None and encoding.lower() != b"identity":
            raise HTTPError(415, "Compressed bodies are not read: leave out Content-Encoding.", headers=_CLOSE)
        length = header(scope, b"content-length")
        if length is not None and length.isdigit() and int(length) > self._max_body:
            raise _too_large(self._max_body)

    def _tenant(self, scope: Scope) -> str:
        """Who sends the request: the start of its key's digest, or nobody where no keys are in use."""
        if not self._digests:
            return ""
        scheme, _, token = (header(scope, b"authorization") or b"").partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            raise HTTPError(
                401,
                "The API key is missing or wrong: send it as 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return "" if self._share else digest.hex()[:16]


class _LimitedBody:
    """An ASGI receive that counts the body's bytes and gives up when they come too slowly or are too many."""

    def __init__(self, receive: Receive, max_body: int) -> None:
        self._receive = receive
        self._left = max_body
        self._max_body = max_body
        self._deadline = asyncio.get_running_loop().time() + BODY_TIMEOUT
        self._complete = False

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            text = f"The body did not come within {BODY_TIMEOUT:.0f} seconds."
            raise HTTPError(408, text, headers=_CLOSE) from None
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise _too_large(self._max_body)
        self._complete = not message.get("more_body", False)
        return message


def _too_large(limit: int) -> HTTPError:
    return HTTPError(413, f"The body is too large: at most {limit} bytes are read.", headers=_CLOSE)
