"""Large bodies: if a request's body is large, work that is proportional to it is done on another thread.

Meanwhile the event loop can serve other requests. Validation and schema checks call Python functions for each object,
and between these calls the other thread releases the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

from ..engine.serving.request_threads import on_request_thread

LARGE_BODY = 64 << 10
"""Bytes; a smaller body is parsed and checked in some milliseconds."""

_Result = TypeVar("_Result")
_is_large: ContextVar[bool] = ContextVar("is_large", default=False)


def note_body(num_bytes: int, most_small: int = LARGE_BODY) -> None:
    """Note the size of the body of the request that this task serves, which is large above ``most_small`` bytes."""
    _is_large.set(num_bytes > most_small)


def note_more(num_bytes: int) -> None:
    """Note the size of what is stored and belongs to the request, such as earlier turns of its conversation."""
    if num_bytes > LARGE_BODY:
        _is_large.set(True)


async def beside_loop(call: Callable[[], _Result]) -> _Result:
    """Make a call, on another thread if the request's body is large, and return its result.

    Raises the errors of the call and those of ``on_request_thread``.
    """
    return await on_request_thread(call) if _is_large.get() else call()
