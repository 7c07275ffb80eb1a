"""Guard: ASGI middleware before every route, for request ids, the access log, API keys, limits and uncaught errors.

Both classes are called once for each request. ``Identify`` and the rate limit headers wrap ``send``.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...engine.messages.session_calls import MAX_IMPORT_BYTES
from ...engine.serving.request import MAX_TIMEOUT
from ...tenancy.current_tenant import CURRENT_TENANT
from ..access.api_keys import Key, needed_scope
from ..access.caller import Caller, RequestFacts
from ..error_responses import error_response, speaks_anthropic
from ..errors import ErrorReply, HTTPError, reply_to
from ..generate.server_state import ServerState
from ..observe.live_page import PATHS
from ..observe.log import ACCESS, FIELDS
from ..routes.dependencies import PICKED_STATE
from ..storage.file_store import FORM_BYTES
from .allowed_hosts import PROBES, AllowedHosts
from .limited_body import CLOSE, LimitedBody, body_room, too_large

OPEN_PATHS = PROBES | PATHS
MAX_HEADER_BYTES = 32 << 10
MAX_HEADERS = 100
BODY_TIMEOUT = 30.0
FILES_PATH = "/v1/files"
IMPORT_PATH = "/v1/cache/sessions/import"
FILE_TIMEOUT = 600.0

_SECONDS = re.compile(rb"[0-9]{1,6}(\.[0-9]{1,6})?")
_QUIET_PATHS = OPEN_PATHS | {"/metrics", "/ui/state"}
_NOT_SHOWN = frozenset(
    ("/v1/models", "/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens")
)
"""Paths that list models or count tokens. The live page and clients request them repeatedly, and they generate nothing.

Their successful responses do not appear among the recent requests or the requests of a caller.
"""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_TRACE_HEADERS = ("traceparent", "tracestate")
_STARTS = ("http.response.start", "websocket.http.response.start", "websocket.accept")

logger = logging.getLogger(ACCESS)


def header(scope: Scope, name: bytes) -> bytes | None:
    """Return the first header with this lower-case name."""
    return next((value for key, value in scope["headers"] if key == name), None)


class Identify:
    """Outermost middleware: gives each request an id, logs and counts its end, answers uncaught exceptions with 500."""

    def __init__(self, app: ASGIApp, *, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        given = header(scope, b"x-request-id")
        request_id = given if given and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        facts = RequestFacts()
        scope.setdefault("state", {}).update(request_id=request_id.decode(), facts=facts)
        id_headers = (b"x-request-id", b"request-id") if speaks_anthropic(scope["path"]) else (b"x-request-id",)
        start, status = time.perf_counter(), 0

        shaped = _InShape(scope, send)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] in _STARTS:
                status = message.get("status", 101)
                message["headers"] = [*message.get("headers", ()), *((name, request_id) for name in id_headers)]
                if facts.version is not None:
                    message["headers"].append((b"x-model-version", facts.version.encode()))
            await shaped(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            reply = reply_to(error)
            if status:
                raise
            await error_response(reply, scope)(scope, receive, send_with_id)
        finally:
            route = scope.get("route")
            self._state.observers.metrics.count_http("none" if route is None else route.path, _method(scope), status)
            if facts.error is not None:
                scope["state"].get(PICKED_STATE, self._state).observers.metrics.count_error(facts.error)
            seconds = time.perf_counter() - start
            entry = {
                "request_id": request_id.decode(),
                "method": _method(scope),
                "path": scope["path"],
                "status": status,
                "seconds": round(seconds, 6),
                **facts.log_fields(),
            }
            _log(entry)
            if scope["path"] not in _QUIET_PATHS and not (scope["path"] in _NOT_SHOWN and status == 200):
                self._state.observers.recent.add(entry)


class _InShape:
    """ASGI ``send`` that converts the framework's errors, which are plain text or empty, to the server's format."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        # The head of an error in another format is held back until the error's text has arrived.
        self._head: Message | None = None
        self._text = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and _is_of_framework(self._scope, message):
            self._head = message
        elif self._head is None:
            await self._send(message)
        else:
            self._text += message.get("body", b"")
            if not message.get("more_body", False):
                await self._answer(self._head)

    async def _answer(self, head: Message) -> None:
        text = self._text.decode(errors="replace")[:200] or HTTPStatus(head["status"]).phrase
        reply = ErrorReply(head["status"], text if text.endswith(".") else f"{text}.")
        response = error_response(reply, self._scope)
        kept = [each for each in head["headers"] if each[0].lower() not in (b"content-type", b"content-length")]
        own = [each for each in response.raw_headers if each[0] in (b"content-type", b"content-length")]
        await self._send({**head, "headers": [*kept, *own]})
        await self._send({"type": "http.response.body", "body": bytes(response.body)})


def _is_open(scope: Scope) -> bool:
    """Return whether a request needs no key, because it is a GET or HEAD of an open path.

    ``POST /`` generates, so it needs one.
    """
    return scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD")


def _is_of_framework(scope: Scope, head: Message) -> bool:
    kind = next((value for name, value in head["headers"] if name.lower() == b"content-type"), b"text/plain")
    is_told = scope["method"] != "HEAD" and scope["path"] not in OPEN_PATHS
    return 400 <= head["status"] != 499 and is_told and kind.startswith(b"text/plain")


def _method(scope: Scope) -> str:
    # The handshake of a WebSocket is a GET request without a method in the scope.
    method: str = scope.get("method", "GET")
    return method


def _log(entry: Mapping[str, Any]) -> None:
    level = logging.WARNING if entry["status"] >= 500 else logging.INFO
    level = logging.DEBUG if entry["path"] in _QUIET_PATHS else level
    if logger.isEnabledFor(level):
        logger.log(level, orjson.dumps(entry).decode(), extra={FIELDS: entry})


class Guard:
    """Middleware for keys, scopes and limits.

    It refuses a request before its route is called or its body has arrived.
    """

    def __init__(self, app: ASGIApp, *, state: ServerState) -> None:
        self._app = app
        self._state = state
        options = state.options
        self._bodies = body_room(options.max_request_bytes)
        self._hosts = AllowedHosts(
            app, keys=state.limits.keys, names=options.allowed_hosts, origins=options.allowed_origins
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        if (refusal := self._hosts.fault(scope)) is not None:
            await error_response(refusal, scope)(scope, receive, send)
            return
        tenant = ""
        try:
            self._check_headers(scope)
            if not _is_open(scope):
                key = self._key(scope)
                scope["state"]["caller"] = self._caller(scope, key)
                tenant = key.tenant
                CURRENT_TENANT.set(tenant)
                send = self._with_limit_headers(key, send)
        except HTTPError as error:
            await error_response(reply_to(error), scope)(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Uploaded files are written to the disk, so they do not count against the memory for bodies.
        room = None if self._is_upload(scope) else self._bodies
        body = LimitedBody(receive, room, tenant, *self._limits(scope))
        try:
            await self._app(scope, body, send)
        finally:
            body.give_back()

    def _is_upload(self, scope: Scope) -> bool:
        return scope["path"] == FILES_PATH and self._state.options.batch_dir is not None

    def _limits(self, scope: Scope) -> tuple[int, float]:
        """Return the size limit of the body in bytes, and the seconds within which the body must arrive."""
        options = self._state.options
        if self._is_upload(scope):
            return options.max_file_bytes + FORM_BYTES, FILE_TIMEOUT
        if scope["path"] == IMPORT_PATH:
            return MAX_IMPORT_BYTES, FILE_TIMEOUT
        return options.max_request_bytes, BODY_TIMEOUT

    def _check_headers(self, scope: Scope) -> None:
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size > MAX_HEADER_BYTES or len(scope["headers"]) > MAX_HEADERS:
            limits = f"at most {MAX_HEADERS} headers with {MAX_HEADER_BYTES} bytes"
            raise HTTPError(431, f"The request has too many headers; the limit is {limits}.", headers=CLOSE)
        encoding = header(scope, b"content-encoding")
        if encoding is not None and encoding.lower() != b"identity":
            raise HTTPError(415, "Compressed bodies are not supported: remove Content-Encoding.", headers=CLOSE)
        length = header(scope, b"content-length")
        most, _ = self._limits(scope)
        if length is not None and length.isdigit() and int(length) > most:
            raise too_large(most)

    def _key(self, scope: Scope) -> Key:
        """Return the request's API key.

        Raises HTTPError: 401 for an unknown key, 403 if the key lacks the path's scope.
        """
        scheme, _, token = (header(scope, b"authorization") or b"").partition(b" ")
        key = self._state.limits.keys.find(token.strip() if scheme.lower() == b"bearer" else b"")
        if key is None and (own := header(scope, b"x-api-key")) is not None:
            key = self._state.limits.keys.find(own.strip())
        if key is None:
            raise HTTPError(
                401,
                "The API key is missing or wrong: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if key.name:
            scope["state"]["facts"].key, scope["state"]["facts"].tenant = key.name, key.tenant
        if (needed := needed_scope(scope["path"])) not in key.scopes:
            raise HTTPError(403, f"This needs an API key with the scope '{needed}'.", code="insufficient_scope")
        return key

    def _caller(self, scope: Scope, key: Key) -> Caller:
        options = self._state.options
        given = header(scope, b"x-request-timeout")
        timeouts = [options.request_timeout, None if given is None else _seconds(given)]
        return Caller(
            key,
            "" if options.share_cache_between_keys else key.tenant,
            min((timeout for timeout in timeouts if timeout is not None), default=None),
            scope["state"]["facts"],
            scope["path"],
            {name: value.decode("latin-1") for name in _TRACE_HEADERS if (value := header(scope, name.encode()))},
            is_strict=_is_strict(header(scope, b"x-slo")),
        )

    def _with_limit_headers(self, key: Key, send: Send) -> Send:
        """Return a ``send`` that adds the key's rate limit headers to the response.

        If the key has no limits, return ``send``.
        """
        if key.requests_per_minute is None and key.tokens_per_minute is None:
            return send
        state = self._state

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = await state.limits.limit_headers(key)
                added = [(name.encode(), value.encode()) for name, value in headers.items()]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        return send_with_limits


def _is_strict(value: bytes | None) -> bool:
    if value in (None, b"strict"):
        return value is not None
    raise HTTPError(400, "The header x-slo must be 'strict' or absent.", code="invalid_header")


def _seconds(value: bytes) -> float:
    if _SECONDS.fullmatch(value) and 0 < float(value) <= MAX_TIMEOUT:
        return float(value)
    raise HTTPError(
        400,
        f"The header x-request-timeout must be a number of seconds, above 0 and at most {MAX_TIMEOUT:.0f}.",
        code="invalid_header",
    )
