"""Process memory: glibc's malloc arenas and Python's garbage collector in long-running processes."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_M_ARENA_MAX = -8  # the number of mallopt's option in glibc's malloc.h


def share_heap() -> None:
    """Make all threads allocate from one arena, if the C library is glibc. Call before starting threads.

    By default each thread has an arena, and memory freed in one is not used by others: threads that take turns at the
    same work each keep as much as it ever took, so memory grows for hours.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage within the block, in which large libraries are imported: a tenth of that time, for nothing."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def freeze() -> None:
    """Exclude all present objects from garbage collection: hundreds of thousands of libraries and tokenizer.

    Call once all is loaded. A full collection that visits them takes 0.1 s, and runs only after as many new objects as
    a quarter of those that survived the last one, until when garbage and free tuples pile up. The second collection
    resets that count to none.
    """
    gc.collect()
    gc.freeze()
    gc.collect()
