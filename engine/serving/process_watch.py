"""Process watch: reads an engine process's signs of life, and reports once that it hangs or has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import BinaryIO

from ..ipc import last_liveness
from .watchdog import TICK_SECONDS, Watchdog

ENDED = "The engine process has ended."
_SIGNS_AT_ONCE = 1 << 16  # Largest number of bytes of signs of life in one read: the capacity of a pipe.


class ProcessWatch:
    """Watches one process. Belongs to one event loop.

    Args:
        watchdog: determines whether the process hangs.
        has_main_ended: returns whether its main thread has ended.

    Attributes:
        on_end: called once, with the reason as a message. Set before ``start``.
    """

    def __init__(self, watchdog: Watchdog, has_main_ended: Callable[[], bool]) -> None:
        self.watchdog = watchdog
        self.on_end: Callable[[str], None] = lambda reason: None
        self._ask_main_ended = has_main_ended
        self._liveness: BinaryIO | None = None  # This side's end of the pipe, until the process or the connection ends.
        self._timer: asyncio.TimerHandle | None = None
        self._main_ended = False

    def open(self, liveness: BinaryIO) -> None:
        """Start reading the process's signs of life. The process is watched only after ``start``."""
        self._liveness = liveness
        asyncio.get_running_loop().add_reader(liveness.fileno(), self._read_liveness)

    def start(self) -> None:
        """Start the checks by the watchdog, one in each ``TICK_SECONDS`` until the process hangs or has ended.

        The socket of a killed process closes when its last thread ends. For a thread of low priority this may take a
        second while other processes use the cores. So the process counts as ended when its main thread has. This is
        reported only at the check after the one that finds it, so that all that the process has sent is read first.
        """
        if self._main_ended:
            return self.on_end(ENDED)
        self._main_ended = self._ask_main_ended()
        reason = self.watchdog.tick(time.monotonic())
        if reason is not None:
            return self.on_end(f"The engine process hangs: {reason}.")
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self.start)
        return None

    def stop(self) -> None:
        """End the checks. Does nothing if they have ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._close_liveness()

    def _read_liveness(self) -> None:
        """Read the signs of life that have arrived. The end of the pipe is ignored: the connection ends too."""
        assert self._liveness is not None
        signs = self._liveness.read(_SIGNS_AT_ONCE)
        if not signs:
            self._close_liveness()
        elif (num_passes := last_liveness(signs)) is not None:
            self.watchdog.sign_of_life(num_passes)

    def _close_liveness(self) -> None:
        if self._liveness is not None:
            asyncio.get_running_loop().remove_reader(self._liveness.fileno())
            self._liveness.close()
            self._liveness = None
