"""Liveness thread of the engine process: tells the client that the process runs, whatever the step loop does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress

from ..ipc import LIVENESS_SECONDS, pack_liveness


class LivenessThread:
    """Writes the number of the step loop's passes to a pipe, several times a second, until the reader is gone.

    A process whose reader is gone has no use: it ends ``ORPHAN_SECONDS`` later, whatever its other threads are doing.

    The interpreter gives it its turn while the step loop waits, or computes in code that releases the interpreter.

    Args:
        fd: the pipe's end, which it closes at the end of the thread.

    Attributes:
        num_passes: written by the step loop alone.
    """

    def __init__(self, fd: int, orphaned: Callable[[], object] = lambda: None) -> None:
        os.set_blocking(fd, False)  # a reader that sleeps must not keep the thread
        self.num_passes = 0
        self._fd = fd
        self._orphaned = orphaned
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                with suppress(BlockingIOError):  # the reader has signs enough
                    os.write(self._fd, pack_liveness(self.num_passes))
                self._ending.wait(LIVENESS_SECONDS)
        except OSError:
            self._orphaned()
        finally:
            os.close(self._fd)
