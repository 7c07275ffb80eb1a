"""End limit: a process that is ending ends after so many seconds, whatever its threads still wait for."""

from __future__ import annotations

import math
import os
import signal
import threading

from .error_stream import write_last_line


class EndLimit:
    """Ends the process after ``seconds``, unless it is cancelled. Its thread does not keep the process alive.

    Args:
        code: exit code.
        what: beginning of the line that reports the end on the standard error stream.
    """

    def __init__(self, seconds: float, code: int, what: str) -> None:
        self._cancelled = threading.Event()
        self._seconds, self._code, self._what = seconds, code, what
        self._alarm = False
        try:
            threading.Thread(target=self._run, name="end-limit", daemon=True).start()
        except RuntimeError:
            # Without memory for a thread the system's alarm ends the process, without the line.
            signal.alarm(max(1, math.ceil(seconds)))
            self._alarm = True

    def cancel(self) -> None:
        """Let the process live."""
        self._cancelled.set()
        if self._alarm:
            signal.alarm(0)

    def _run(self) -> None:
        if not self._cancelled.wait(self._seconds):
            write_last_line(f"{self._what} has not ended after {self._seconds:g} s: ending the process")
            os._exit(self._code)
