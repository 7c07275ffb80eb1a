"""Liveness thread: shows the client that the engine process runs, whatever the step loop does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress

from ..ipc import LIVENESS_SECONDS, pack_liveness


class LivenessThread:
    """Writes the number of passes of the step loop to a pipe several times a second, as a sign of life.

    If the reader of the pipe is gone, the process is not needed any more. It is then ended after ``ORPHAN_SECONDS``,
    even if other threads still run.

    The thread needs the interpreter's lock (GIL). It gets the GIL unless native code holds it, so a long step alone
    does not stop the signs of life.

    Args:
        fd: descriptor of the pipe's writing end; the thread closes it when it ends.

    Attributes:
        num_passes: number of passes that the step loop has begun. Only the step loop writes it.
    """

    def __init__(self, fd: int, orphaned: Callable[[], object] = lambda: None) -> None:
        os.set_blocking(fd, False)  # The thread must not block if the reader does not read.
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
                with suppress(BlockingIOError):  # The pipe is full, so the reader has enough signs of life to read.
                    os.write(self._fd, pack_liveness(self.num_passes))
                self._ending.wait(LIVENESS_SECONDS)
        except OSError:
            self._orphaned()
        finally:
            os.close(self._fd)
