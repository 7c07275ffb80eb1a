"""Process watch: reads the signs of life of an engine process, and tells once that it hangs or has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import BinaryIO

from ..ipc import last_liveness
from .watchdog import TICK_SECONDS, Watchdog

ENDED = "The engine process has ended."
_SIGNS_AT_ONCE = 1 << 16  # bytes of signs of life in one read: all that a pipe holds


class ProcessWatch:
    """Watches one process. Belongs to one event loop.

    Args:
        watchdog: finds whether it hangs.
        has_main_ended: tells whether its main thread has ended.

    Attributes:
        on_end: called once, with the reason for people. Set before ``start``.
    """

    def __init__(self, watchdog: Watchdog, has_main_ended: Callable[[], bool]) -> None:
        self.watchdog = watchdog
        self.on_end: Callable[[str], None] = lambda reason: None
        self._ask_main_ended = has_main_ended
        self._liveness: BinaryIO | None = None  # our end of the pipe, until the process or the connection ends
        self._timer: asyncio.TimerHandle | None = None
        self._main_ended = False

    def open(self, liveness: BinaryIO) -> None:
        """Begin to read the process's signs of life. It is not watched before ``start``."""
        self._liveness = liveness
        asyncio.get_running_loop().add_reader(liveness.fileno(), self._read_liveness)

    def start(self) -> None:
        """Let the watchdog look at the process, and again after each ``TICK_SECONDS`` until it hangs or has ended.

        The socket of a process that was killed closes with its last thread, for which one of low priority may need a
        second where other processes fill the cores. What it has sent is read until the second look.
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
        """End the watch. Does nothing if it has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._close_liveness()

    def _read_liveness(self) -> None:
        """Take the signs of life that have come. Their end alone means nothing: that of the connection follows."""
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
