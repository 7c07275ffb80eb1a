"""Process watch: reads an engine process's signs of life, and reports once if the process hangs or has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import BinaryIO

from ..ipc import last_liveness
from .watchdog import TICK_SECONDS, Watchdog

ENDED = "The engine process has ended."
# Largest number of bytes of signs of life that one read returns; this is the capacity of a pipe.
_SIGNS_AT_ONCE = 1 << 16


class ProcessWatch:
    """Watches one process. Belongs to one event loop.

    Args:
        watchdog: decides from the signs of life whether the process hangs.
        has_main_ended: returns whether the process's main thread has ended.

    Attributes:
        on_end: called once with the reason as text. Must be set before ``start``.
    """

    def __init__(self, watchdog: Watchdog, has_main_ended: Callable[[], bool]) -> None:
        self.watchdog = watchdog
        self.on_end: Callable[[str], None] = lambda reason: None
        self._ask_main_ended = has_main_ended
        # The reading end of the pipe; None before ``open`` and after the pipe's end.
        self._liveness: BinaryIO | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._main_ended = False

    def open(self, liveness: BinaryIO) -> None:
        """Start reading the process's signs of life. The process is watched only after ``start``."""
        self._liveness = liveness
        asyncio.get_running_loop().add_reader(liveness.fileno(), self._read_liveness)

    def start(self) -> None:
        """Start the watchdog's checks, one every ``TICK_SECONDS`` until the process hangs or has ended.

        The socket of a killed process closes only when the last thread of the process ends. For a thread of low
        priority this may take a second while other processes use the cores. So the process counts as ended when its
        main thread has ended. The end is reported one check later, so that all messages of the process are read first.
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
        """Stop the checks. Does nothing if they are stopped already."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._close_liveness()

    def _read_liveness(self) -> None:
        """Read the signs of life that have arrived.

        The end of the pipe is not reported, because the connection ends too.
        """
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
