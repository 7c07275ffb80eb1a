"""Error responses in the format of their route's protocol: OpenAI's, Anthropic's, Ollama's, TGI's or Triton's.

{"type": "error", "error": {"type": "invalid_request_error", "message": ...}, "request_id": ...}    Anthropic
{"error": "...", "code": ..., "param": ...}                                                         Ollama, Triton
{"error": "...", "error_type": "validation", "code": ..., "param": ...}                             TGI
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from ..engine.errors import EngineError, shortened
from .errors import ErrorReply, HTTPError, reply_to

MESSAGES_PATH = "/v1/messages"
OLLAMA_FOLDER = "/api/"
INFERENCE_FOLDERS = ("/v2/health/", "/v2/models/", "/v2/repository/")
TGI_PATHS = ("/generate", "/generate_stream", "/", "/info")

HANDLED = (EngineError, RequestValidationError, HTTPException)
"""Errors that a route may raise deliberately. Any other error is a bug."""

_LONGEST_PATH = 100
_METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")
_OVERLOADED = 529  # Anthropic's status for an overloaded server. Anthropic's clients retry after it.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}
# This code tells the client that it must send whole conversations.
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": []}


def speaks_anthropic(path: str) -> bool:
    """Return whether a path belongs to Anthropic's protocol."""
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


def speaks_ollama(path: str) -> bool:
    """Return whether a path belongs to Ollama's protocol."""
    return path.startswith(OLLAMA_FOLDER)


def speaks_tgi(path: str) -> bool:
    """Return whether a path belongs to the protocol of Text Generation Inference (TGI)."""
    return path in TGI_PATHS


def speaks_inference(path: str) -> bool:
    """Return whether a path belongs to the Open Inference Protocol."""
    return path == "/v2" or path.startswith(INFERENCE_FOLDERS)


class TextErrorBody(BaseModel):
    """Body of an error of Ollama's and Triton's routes."""

    error: str
    code: str | None
    param: str | None


def text_body(reply: ErrorReply) -> bytes:
    """Serialize an error in the format of Ollama and Triton, with this server's code and field added."""
    return orjson.dumps({"error": reply.message, "code": reply.code, "param": reply.param, **reply.details})


def tgi_body(reply: ErrorReply) -> bytes:
    """Serialize an error in the format of Text Generation Inference, with this server's code and field added."""
    kind = "generation" if reply.status >= 500 else "validation"
    if reply.status in (429, 503):
        kind = "overloaded"
    return orjson.dumps(
        {"error": reply.message, "error_type": kind, "code": reply.code, "param": reply.param, **reply.details}
    )


def anthropic_body(reply: ErrorReply, request_id: str) -> bytes:
    """Serialize an error in Anthropic's format."""
    default = "api_error" if reply.status >= 500 else "invalid_request_error"
    message = reply.message
    if reply.overflow is not None:
        # Clients parse this text of Anthropic's, and remove as many tokens as the difference of the two numbers. A
        # prompt whose length equals the model's context leaves no room for an answer, so it counts as one token too
        # long.
        num_prompt, limit = reply.overflow
        message = f"prompt is too long: {max(num_prompt, limit + 1)} tokens > {limit} maximum"
    error: dict[str, Any] = {"type": _TYPES.get(reply.status, default), "message": message}
    if (reply.param, reply.code) == ("thread", "unsupported_parameter"):
        error["details"] = _NO_THREADS
    return orjson.dumps({"type": "error", "error": error, "request_id": request_id})


def error_response(reply: ErrorReply, scope: Scope) -> Response:
    """Build the response for an error. Also records the error's code for the log and the metrics."""
    scope["state"]["facts"].error = reply.word
    path = scope["path"]
    if speaks_ollama(path) or speaks_inference(path):
        return Response(text_body(reply), reply.status, dict(reply.headers), "application/json")
    if speaks_tgi(path):
        status = 422 if reply.status == 400 else reply.status
        return Response(tgi_body(reply), status, dict(reply.headers), "application/json")
    if not speaks_anthropic(path):
        return reply.response()
    if reply.code in ("server_overloaded", "shutting_down"):
        reply = replace(reply, status=_OVERLOADED)
    body = anthropic_body(reply, scope["state"]["request_id"])
    return Response(body, reply.status, dict(reply.headers), "application/json")


async def handle(request: Request, error: Exception) -> Response:
    """Respond to an error of a route, or to a request whose path or method has no route."""
    reply = reply_to(error)
    if reply.code == "unknown_url" and not isinstance(error, HTTPError):
        reply = replace(reply, message=_missing_route(request))
    elif reply.code == "method_not_allowed":
        reply = _with_methods(reply, request)
    return error_response(reply, request.scope)


def _with_methods(reply: ErrorReply, request: Request) -> ErrorReply:
    """Add the path's methods to the error's text and to its ``Allow`` header. Each method is a separate route."""
    methods = ", ".join(method for method in _METHODS if _is_route(request, method, request.scope["path"]))
    message = f"Method {request.method} is not allowed on this route; allowed: {methods}."
    return replace(reply, message=message, headers={"allow": methods}) if methods else reply


def _missing_route(request: Request) -> str:
    """Return an error text for a missing route. It names an existing route that differs in ``/v1`` or in slashes."""
    path = request.scope["path"]
    missing = f"There is no route {request.method} {shortened(path, _LONGEST_PATH)}"
    whole = "/" + "/".join(filter(None, path.split("/")))
    bare = "/" + whole.removeprefix("/").removeprefix("v1/")
    for near in (f"/v1{bare}", bare):
        if _is_route(request, request.method, near):
            is_of_openai = near.startswith("/v1/") and near != whole
            end = " The base URL of OpenAI's clients ends in /v1." if is_of_openai else ""
            return f"{missing}; there is {shortened(near, _LONGEST_PATH)}.{end}"
    return f"{missing}."


def _is_route(request: Request, method: str, path: str) -> bool:
    """Return whether the application of the request has a route for this method and path."""
    scope = {**request.scope, "method": method, "path": path}
    return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)
