"""Memory for pages of the KV pool, taken before a step writes them."""

from __future__ import annotations

import os
import sys
import threading
import time

from ..batch import Batch
from .kv_pool import KvPool

_AHEAD_TOKENS, _AHEAD_BYTES = 1 << 15, 1 << 30  # of the pool, whichever are fewer
_IDLE = 0.25  # seconds without a step
_POLITE = 10  # added to the niceness of a thread that has time


class KvPrefault:
    """Keeps memory ready for the pages that come next, on a CPU.

    A page's memory is handed out by the operating system when it is first written. In a virtual machine, where the host
    may have to find it first, a GiB can take seconds, in steps that each wait for tenths of them. So it is taken while
    the engine has nothing to do, or once little is left; but only so much beyond the highest page in use, for most
    pools are never filled. Pages that were never used are handed out in order (``PageAllocator``).

    Args:
        kv: the pool.
        page_bytes: bytes of a page.
    """

    def __init__(self, kv: KvPool, page_bytes: int) -> None:
        self._kv = kv
        self._ahead = min(_AHEAD_TOKENS // kv.page_size, _AHEAD_BYTES // page_bytes)
        # Written by the engine's thread: pages up to the highest in use, and the time of the last step.
        self._used, self._stepped = 0, -_IDLE
        # Written by the thread that takes it: pages that have memory.
        self._taken = 0
        self._thread: threading.Thread | None = None
        self._begin()

    def reach(self, batch: Batch) -> None:
        """A step is about to write these pages."""
        self._stepped = time.monotonic()
        self._used = max(self._used, *(1 + max(row.new_pages) for row in batch.rows if row.new_pages), 0)
        if self._taken < self._wanted() and (self._thread is None or not self._thread.is_alive()):
            self._begin()

    def _wanted(self) -> int:
        return min(self._used + self._ahead, self._kv.num_pages)

    def _begin(self) -> None:
        """Start a thread, which ends when all is taken: one that waited for more would keep the pool alive."""
        if sys.platform == "linux":  # elsewhere niceness is that of the whole process
            self._thread = threading.Thread(target=self._take, name="kv-ahead", daemon=True)
            self._thread.start()

    def _take(self) -> None:
        os.nice(_POLITE)
        while self._taken < self._wanted():
            is_busy = time.monotonic() - self._stepped < _IDLE
            if is_busy and self._taken >= min(self._used + self._ahead // 4, self._kv.num_pages):
                time.sleep(_IDLE)
            else:
                self._taken = self._kv.populate(self._taken)
