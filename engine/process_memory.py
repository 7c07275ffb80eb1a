"""Process memory: glibc's malloc arenas and Python's garbage collector in long-running processes."""

from __future__ import annotations

import atexit
import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_M_ARENA_MAX = -8  # the number of mallopt's option in glibc's malloc.h
_TRIM_SECONDS = 60.0


def share_heap() -> None:
    """Make all threads allocate from one arena, if the C library is glibc. Call before starting threads.

    By default each thread has its own arena, and other threads do not use memory that is freed in it. If several
    threads take turns at the same work, each of them keeps as much memory as the work ever needed, so memory grows for
    hours.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


class IdleTrim:
    """Returns freed memory to the operating system when a process is idle after work, at most once a minute.

    Otherwise the arena would keep freed memory between blocks that are in use: in a long test 17 to 34 MiB.

    Args:
        trim: returns the memory, which takes some milliseconds.
        clock: seconds, monotonic.
    """

    def __init__(self, trim: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._trim, self._clock = trim, clock
        self._has_worked = False
        self._due = clock()

    def work(self) -> None:
        """Note that the process works."""
        self._has_worked = True

    def idle(self) -> None:
        """Trim, if the process has worked since the last time and that was a minute ago."""
        if self._has_worked and (now := self._clock()) >= self._due:
            self._trim()
            self._has_worked = False
            self._due = now + _TRIM_SECONDS


def freeze_at_exit() -> None:
    """Exclude all objects from the interpreter's last collection, which visits every object of every library.

    For a server it takes 0.4 s of a processor, and several seconds on a busy machine, during which the process is still
    there. A process calls it once.
    """
    atexit.register(gc.freeze)


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

    Call it once everything is loaded. A full collection that visits these objects takes 0.1 s. It runs only after the
    number of new objects has reached a quarter of the objects that survived the last full collection; until then
    garbage and free tuples accumulate. The second collection here resets that number to 0.
    """
    gc.collect()
    gc.freeze()
    gc.collect()
