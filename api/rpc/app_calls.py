"""App calls: send gRPC calls to the server's own routes, with the keys, limits, log and metrics of HTTP requests.

metadata --> headers --> the whole ASGI application --> pieces of the answer, one at a time
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import orjson
from starlette.types import ASGIApp, Message, Scope

from ...engine.serving.request import MAX_TIMEOUT
from ..exact_json import dumps_exact

logger = logging.getLogger(__name__)

_PASSED_ON = frozenset(("authorization", "x-api-key", "x-request-id", "traceparent", "tracestate", "x-slo"))
_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    415: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    431: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
    507: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_BY_CODE = {
    "timeout": grpc.StatusCode.DEADLINE_EXCEEDED,
    "engine_dead": grpc.StatusCode.UNAVAILABLE,
    "server_overloaded": grpc.StatusCode.UNAVAILABLE,
    "shutting_down": grpc.StatusCode.UNAVAILABLE,
}
"""gRPC status by error code, for an error within a stream, which has no HTTP status."""


class CallError(Exception):
    """Error of a route, as a gRPC status with trailing metadata."""

    def __init__(self, status: grpc.StatusCode, message: str, trailers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.trailers = tuple((trailers or {}).items())


def finite(name: str, value: Any) -> Any:
    """Return a field's value. Raises CallError for infinity and NaN, which JSON would turn into null."""
    if isinstance(value, float) and not math.isfinite(value):
        told = {"error-code": "invalid_value", "error-param": name[:128]}
        raise CallError(grpc.StatusCode.INVALID_ARGUMENT, f"'{name[:128]}' must be a finite number, not {value}.", told)
    return value


@dataclass(slots=True)
class RouteAnswer:
    """Response of a route: the status, the headers in lower case, and the pieces of the body."""

    status: int
    headers: Mapping[str, str]
    pieces: AsyncGenerator[bytes, None]

    async def body(self) -> bytes:
        """Return the whole body. Raises CallError if the status is an error."""
        data = b"".join([piece async for piece in self.pieces])
        if self.status >= 400:
            raise self._error(data)
        return data

    def _error(self, data: bytes) -> CallError:
        status = _STATUS.get(self.status, grpc.StatusCode.INTERNAL)
        try:
            answer = orjson.loads(data)
            # In the Open Inference Protocol, ``error`` is only the text; the code and the field are separate.
            error = answer["error"] if isinstance(answer["error"], dict) else {**answer, "message": answer["error"]}
            message, told = error["message"], {"error-code": error.get("code"), "error-param": error.get("param")}
        except (orjson.JSONDecodeError, KeyError, TypeError):
            message, told = data.decode(errors="replace") or f"HTTP {self.status}", {}
        kept = {name: self.headers[name] for name in ("x-request-id", "retry-after") if name in self.headers}
        # Metadata must be ASCII, but the client may have chosen a field's name.
        shown = {name: ascii(value)[1:-1] for name, value in told.items() if isinstance(value, str)}
        return CallError(status, message, kept | shown)


class AppCalls:
    """Sends requests to an ASGI application within the process.

    Args:
        app: the application, with all of its middleware.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def json(self, context: Any, method: str, path: str, body: Any = None) -> Any:
        """Send a request. Returns the route's parsed answer. Raises CallError."""
        async with self.open(context, method, path, body) as answer:
            data = await answer.body()
        return orjson.loads(data) if data[:1] in (b"{", b"[") else data.decode()

    async def status(self, context: Any, path: str) -> int:
        """Send a GET request. Returns the status."""
        async with self.open(context, "GET", path) as answer:
            return answer.status

    async def events(self, context: Any, path: str, body: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the server-sent events of a route as objects. Raises CallError for an error, also in an event."""
        async with self.open(context, "POST", path, body) as answer:
            if answer.status >= 400:
                await answer.body()
            rest = b""
            async for piece in answer.pieces:
                *whole, rest = (rest + piece).split(b"\n\n")
                for event in whole:
                    data = event.removeprefix(b"data: ")
                    if event.startswith(b"data: ") and data != b"[DONE]":
                        yield _checked(orjson.loads(data))

    @asynccontextmanager
    async def open(self, context: Any, method: str, path: str, body: Any = None) -> AsyncIterator[RouteAnswer]:
        """Context manager: send a request. At the end of the block its generation is aborted, as if a client left.

        Args:
            context: the context of the gRPC call, for its metadata and deadline; None for the server's own requests.
        """
        exchange = _Exchange(b"" if body is None else dumps_exact(body))
        task = asyncio.create_task(exchange.run(self._app, _scope(context, method, path, has_body=body is not None)))
        pieces = exchange.pieces()
        try:
            head = await exchange.head
            yield RouteAnswer(head["status"], _headers(head), pieces)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await pieces.aclose()


class _Exchange:
    """ASGI ``receive`` and ``send`` of one request. At most one piece waits, so a slow reader slows its stream."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._has_failed = False
        self._is_whole = False
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue(1)
        self.head: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Run the application to its end. If it is cancelled, nobody reads its answer any more."""
        try:
            await app(scope, self._receive, self._send)
        except Exception as error:
            logger.error("unexpected error", exc_info=error)
            self._has_failed = True
        if not self.head.done():
            self.head.set_result({"status": 500, "headers": []})
            self._is_whole = True
        await self._pieces.put(None)

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the pieces of the body that are not empty. Raises CallError if the application fails."""
        while (piece := await self._pieces.get()) is not None:
            yield piece
        if self._has_failed:
            raise CallError(grpc.StatusCode.INTERNAL, "Internal server error; the server's log has the details.")
        if not self._is_whole:
            text = "The answer was aborted, because the client did not read it for too long."
            raise CallError(grpc.StatusCode.ABORTED, text)

    async def _receive(self) -> Message:
        if self._body is None:
            # The task is cancelled when the client leaves.
            await asyncio.Event().wait()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.head.set_result(message)
            return
        if piece := message.get("body", b""):
            await self._pieces.put(piece)
        self._is_whole = not message.get("more_body", False)


def _headers(head: Message) -> dict[str, str]:
    return {name.decode().lower(): value.decode("latin-1") for name, value in head["headers"]}


def _checked(event: dict[str, Any]) -> dict[str, Any]:
    error = event.get("error")
    if error is None:
        return event
    default = (
        grpc.StatusCode.INVALID_ARGUMENT if error.get("type") == "invalid_request_error" else grpc.StatusCode.INTERNAL
    )
    raise CallError(_BY_CODE.get(error.get("code"), default), error["message"])


def _scope(context: Any, method: str, path: str, *, has_body: bool) -> Scope:
    headers = [(b"host", b"localhost")]
    if has_body:
        headers.append((b"content-type", b"application/json"))
    for name, value in () if context is None else context.invocation_metadata() or ():
        if name in _PASSED_ON and isinstance(value, str):
            headers.append((name.encode(), value.encode("latin-1", "replace")))
    left = None if context is None else context.time_remaining()
    if left is not None:
        # The time is rounded up, so that the deadline itself ends the call.
        headers.append((b"x-request-timeout", b"%.3f" % min(max(left, 0.0) + 0.001, MAX_TIMEOUT)))
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": None,
        "state": {},
    }
