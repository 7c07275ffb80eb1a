"""Steady clock: seconds since 1970 that pass as time does, whatever is done to the system's clock meanwhile.

What is kept until a moment (files, batches) goes when the clock says so. A clock that is set forward by mistake, or was
wrong at the machine's start, must not take a day's work with it. So a process reads the system's clock once, and counts
from there; sleep of the machine counts too.
"""

from __future__ import annotations

import time


class SteadyClock:
    """Seconds since 1970, as the system's clock had them when this was made and as time has passed since."""

    def __init__(self) -> None:
        self._origin = time.time() - _elapsed()

    def __call__(self) -> float:
        return self._origin + _elapsed()


def _elapsed() -> float:
    """Seconds since some moment, sleep of the machine included where the system counts it."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


STEADY_CLOCK = SteadyClock()
"""Of this process."""
