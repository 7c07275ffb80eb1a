"""How memory is managed in a process that serves: Python's collector, the C library's heap."""

from __future__ import annotations

import ctypes
import gc

_M_ARENA_MAX = -8  # of glibc's malloc.h


def share_heap() -> None:
    """Have all threads allocate from one heap, where the C library is glibc. To be called before there are others.

    It gives each thread a heap of its own, and what one has freed no other uses. Threads that come to the same work in
    turn then each keep as much as the work ever took: memory that grows for hours.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def freeze() -> None:
    """Have the collector leave alone what is there now: the objects of libraries and tokenizer, hundreds of thousands.

    To be called once all is loaded. A full collection looks at every object, so with these it would stop the process
    for a tenth of a second; and as it waits until a quarter as many new ones are there as it left the last time, so
    would megabytes of garbage, and the tuples that Python keeps for reuse until then. Hence the second collection: it
    leaves none.
    """
    gc.collect()
    gc.freeze()
    gc.collect()
