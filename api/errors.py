"""Errors: maps exceptions to HTTP error responses with a status and a body in OpenAI's format.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

An unexpected exception becomes a 500 response without the cause, which is only logged.
"""

from __future__ import annotations

import errno
import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from ..engine.errors import (
    AdapterUnavailable,
    CapacityError,
    ContextTooLong,
    DeadlineExceeded,
    EngineDead,
    EngineError,
    GrammarRefused,
    RequestError,
    UnknownModel,
    shortened,
)
from ..fleet.errors import CatalogUnavailable

logger = logging.getLogger(__name__)
_MOST_QUOTED = 40

_RETRY = {"retry-after": "1"}
_INTERNAL = "internal_error"
_RETRY_LATER = {"retry-after": "5"}
_LONGEST_RETRY = 3600
MAX_FAULTS = 1 << 10
"""Largest number of validation errors of a body that are collected.

Each of them costs memory and time, and only the first one is reported.
"""
MOST_FAULTS: ContextVar[int] = ContextVar("most_faults", default=MAX_FAULTS)
"""Number of validation errors of the current request's body that are collected.

It is larger if the errors name unknown fields that will be dropped.
"""
# Largest number of characters of a field's name in an error. The client may have invented the name.
_LONGEST_PARAM = 400


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """Status, headers and error object of a response.

    Attributes:
        details: further fields of the error object, which OpenAI does not have.
        overflow: for a prompt that is too long, its number of tokens and the model's context length.
        kind: overrides ``type``.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    details: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    kind: str | None = None
    overflow: tuple[int, int] | None = None

    @property
    def type(self) -> str:
        """OpenAI's error type. For a rate limit, it is ``requests`` or ``tokens``."""
        if self.kind is not None:
            return self.kind
        return "server_error" if self.status >= 500 else "invalid_request_error"

    @property
    def word(self) -> str:
        """The code, or the type if there is no code. Metrics and the log classify errors by this word."""
        return self.code or self.type

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return orjson.dumps({"error": {**error, **self.details}})

    def response(self) -> Response:
        return Response(self.body(), self.status, dict(self.headers), "application/json")


class HTTPError(HTTPException):
    """HTTP error that does not concern the content of a request, for example a wrong key or a body that is too large.

    It is derived from Starlette's exception, which FastAPI passes on when it reads bodies.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.code = code


class Rejection(HTTPError):
    """Refusal of a valid request: 429 if its key or tenant is over a limit, 503 if the server is overloaded.

    Args:
        reason: label of the reason in metrics, one of ``REASONS``.
        seconds: seconds for the Retry-After header.
        kind: the kind of the rate limit of a 429, ``requests`` or ``tokens``.
    """

    REASONS = (
        *("requests_per_minute", "tokens_per_minute", "tenant_share"),
        *("max_queued_requests", "max_queued_tokens", "queue_slow", "target_ttft"),
    )

    def __init__(self, status: int, message: str, reason: str, seconds: float, *, kind: str = "requests") -> None:
        retry = min(_LONGEST_RETRY, max(1, math.ceil(seconds)))
        code = "rate_limit_exceeded" if status == 429 else "server_overloaded"
        super().__init__(status, message, code=code, headers={"retry-after": str(retry)})
        self.reason = reason
        self.kind = kind if status == 429 else None


def reply_to(error: Exception) -> ErrorReply:
    """Convert any exception to a reply. Logs unexpected exceptions."""
    reply = _known_reply(error)
    if reply is not None:
        return reply
    logger.error("unexpected error", exc_info=error)
    message = (
        str(error) if isinstance(error, EngineError) else "Internal server error; the server's log has the details."
    )
    return ErrorReply(500, message, code=_INTERNAL)


def error_code(error: Exception) -> str:
    """Return the code of an exception's reply, for metrics and the log. It is one of a fixed set of words."""
    reply = _known_reply(error)
    return _INTERNAL if reply is None else reply.word


def reply_to_fields(error: ValidationError) -> ErrorReply:
    """Convert pydantic's error about a part of a body to a reply, as if the part were the whole body."""
    return _reply_to_invalid([{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)])


def _known_reply(error: Exception) -> ErrorReply | None:
    """Convert an expected exception to a reply. Returns None for an unexpected exception."""
    match error:
        case UnknownModel():
            return ErrorReply(404, str(error), error.param, error.code)
        case GrammarRefused():
            details = {"keyword": error.keyword, "pointer": error.pointer, "reason": error.reason}
            return ErrorReply(400, str(error), error.param, "invalid_value", details)
        case ContextTooLong():
            overflow = (error.num_prompt, error.limit)
            return ErrorReply(400, str(error), error.param, error.code, overflow=overflow)
        case RequestError():
            return ErrorReply(400, str(error), error.param, error.code or ("invalid_value" if error.param else None))
        case AdapterUnavailable():
            return ErrorReply(503, str(error), code="adapter_unavailable", headers=_RETRY_LATER)
        case CapacityError():
            return ErrorReply(503, str(error), code="server_overloaded", headers=_RETRY)
        case DeadlineExceeded():
            return ErrorReply(504, str(error), code="timeout")
        case EngineDead():
            return ErrorReply(503, str(error), code="engine_dead", headers=_RETRY)
        case CatalogUnavailable(is_full=True):
            return ErrorReply(507, str(error), code="storage_full")
        case CatalogUnavailable():
            return ErrorReply(503, str(error), code="storage_unavailable")
        case RequestValidationError():
            return _reply_to_invalid(error.errors())
        case HTTPException():
            return _reply_to_http(error)
    if lacks_memory(error):
        text = "The server has no memory for this request now: try again later."
        return ErrorReply(503, text, code="server_overloaded", headers=_RETRY)
    return None


def faults_of(error: ValidationError) -> list[dict[str, Any]]:
    """Return pydantic's errors about a body. If there are too many, return a single error with their number."""
    most = MOST_FAULTS.get()
    if error.error_count() <= most:
        return [dict(each) for each in error.errors(include_url=False)]
    reason = f"has {error.error_count()} errors; they are listed one by one only if there are at most {most}"
    return [{"type": "rejected", "loc": (), "msg": reason}]


def lacks_memory(error: Exception) -> bool:
    """Return whether the system refused memory or a thread, as with ``ulimit -v``. orjson reports that as malformed
    JSON.
    """
    match error:
        case MemoryError():
            return True
        case OSError():
            return error.errno == errno.ENOMEM
        case RuntimeError():
            return str(error) == "can't start new thread"
        case json.JSONDecodeError():
            return error.msg.startswith("Not enough memory")
    return False


def _reply_to_http(error: HTTPException) -> ErrorReply:
    code = error.code if isinstance(error, HTTPError) else None
    message = str(error.detail)
    if error.status_code == 404 and not isinstance(error, HTTPError):
        message, code = "There is no such route.", "unknown_url"
    elif error.status_code == 405:
        message, code = "This method is not allowed on this route.", "method_not_allowed"
    elif message == HTTPStatus(error.status_code).phrase:
        message = f"{message}."
    kind = error.kind if isinstance(error, Rejection) else None
    return ErrorReply(error.status_code, message, code=code, headers=error.headers or {}, kind=kind)


def _reply_to_invalid(errors: Sequence[Mapping[str, Any]]) -> ErrorReply:
    """Convert pydantic's first error to a reply whose message names the field."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return ErrorReply(400, f"The body is not valid JSON: {first['ctx']['error']}.", code="invalid_json")
    context = first.get("ctx", {})
    param = _param([*first["loc"][1:], *context.get("field", ())])
    name = f"'{param}'" if param else "The body"
    wanted = _wanted(first["type"], context)
    match first["type"]:
        case "missing":
            return ErrorReply(400, f"{name} is required.", param, "missing_required_parameter")
        case "extra_forbidden":
            return ErrorReply(400, f"{name} is not a parameter of this request.", param, "unknown_parameter")
        case "unsupported":
            return ErrorReply(400, f"{name} is not supported: {first['msg']}", param, "unsupported_parameter")
        case "rejected":
            return ErrorReply(400, f"{name} {first['msg']}.", param, "invalid_value")
        case kind if kind.endswith("_type"):
            given = _json_type(first["input"])
            return ErrorReply(400, f"{name} must be {wanted}, not {given}.", param, "invalid_type")
    given = _beginning(first["input"])
    return ErrorReply(400, f"{name} must be {wanted}, not {given}.", param, "invalid_value")


def _beginning(value: Any) -> str:
    """Return the beginning of a value's JSON. Only as many characters as needed are serialized."""
    found = ""
    for piece in json.JSONEncoder(ensure_ascii=False).iterencode(value):
        found += piece
        if len(found) > _MOST_QUOTED:
            return found[:_MOST_QUOTED] + "..."
    return found


_WANTED = {
    "int_type": "an integer of at most 64 bits",
    "int_parsing": "an integer",
    "bool_parsing": "true or false",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "a JSON object",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "string_too_short": "at least {min_length} characters long",
    "string_too_long": "at most {max_length} characters long",
    "too_short": "a list of at least {items}",
    "too_long": "a list of at most {items}",
    "literal_error": "one of {expected}",
}


def _wanted(kind: str, context: Mapping[str, Any]) -> str:
    count = context.get("min_length" if kind == "too_short" else "max_length")
    return _WANTED.get(kind, "valid").format(**context, items=f"{count} item" if count == 1 else f"{count} items")


def _param(location: Sequence[str | int]) -> str | None:
    """Convert a path such as ``("messages", 0, "content")`` to ``messages[0].content``. Parts in ``<>`` are left out.

    If the result has more than 400 characters, its middle is left out.
    """
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not part.startswith("<") and part != "[key]":
            text += f".{part}" if text else part
    return shortened(text, _LONGEST_PARAM) or None


_JSON_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "a boolean"),
    (int, "an integer"),
    (float, "a number with a fraction or an exponent"),
    (str, "a string"),
    (list, "a list"),
    (dict, "an object"),
)


def _json_type(value: Any) -> str:
    return next((name for cls, name in _JSON_TYPES if isinstance(value, cls)), "null")
