"""Call errors: packs errors for calls between the server's processes, and unpacks them to the same class."""

from __future__ import annotations

from typing import Any

from ...engine.errors import EngineError
from ...engine.messages import Failed, failure_of
from ...engine.serving.output_processor import error_of
from ..errors import HTTPError, Rejection


def pack_error(error: EngineError | HTTPError) -> list[Any]:
    """Convert an error to values that msgpack can serialize."""
    if isinstance(error, EngineError):
        failed = failure_of(0, error)
        return ["engine", failed.kind, failed.message, failed.param, failed.code, failed.refusal]
    reason = error.reason if isinstance(error, Rejection) else None
    kind = error.kind if isinstance(error, Rejection) else None
    return ["http", error.status_code, str(error.detail), error.code, dict(error.headers or {}), reason, kind]


def unpack_error(values: list[Any]) -> EngineError | HTTPError:
    """Convert the values of ``pack_error`` back to the error."""
    what, *values = values
    if what == "engine":
        kind, message, param, code, refusal = values
        return error_of(Failed(0, kind, message, param, code, None if refusal is None else tuple(refusal)))
    status, message, code, headers, reason, kind = values
    if reason is not None:
        return Rejection(status, message, reason, float(headers["retry-after"]), kind=kind or "requests")
    return HTTPError(status, message, code=code, headers=headers)
