"""Large bodies: if a request's body is large, the work that is proportional to its size runs on another thread.

So the event loop can serve other requests in the meantime. Validation and schema checks call Python functions for each
object, and between these calls the other thread releases the interpreter's lock (GIL).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

from ..engine.serving.request_threads import on_request_thread

LARGE_BODY = 64 << 10
"""Size in bytes. A smaller body is parsed and checked in a few milliseconds."""

_Result = TypeVar("_Result")
_is_large: ContextVar[bool] = ContextVar("is_large", default=False)


def note_body(num_bytes: int, most_small: int = LARGE_BODY) -> None:
    """Record the size of the body of this task's request. The body counts as large above ``most_small`` bytes."""
    _is_large.set(num_bytes > most_small)


def note_more(num_bytes: int) -> None:
    """Record the size of stored data that belongs to this task's request, such as earlier turns of its conversation."""
    if num_bytes > LARGE_BODY:
        _is_large.set(True)


async def beside_loop(call: Callable[[], _Result]) -> _Result:
    """Call a function, on another thread if the request's body is large. Returns its result.

    Raises the errors of the call, and those of ``on_request_thread``.
    """
    return await on_request_thread(call) if _is_large.get() else call()
