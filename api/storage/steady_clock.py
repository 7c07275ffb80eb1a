"""Steady clock: seconds since 1970 that advance evenly, regardless of changes to the system's clock.

Objects with an expiry time (files, batches) are removed when the clock reaches it. A system clock that is set forward
by mistake, or was wrong at the machine's start, must not cause the loss of a day's work. So a process reads the
system's clock once, and counts from there; time in which the machine sleeps counts too.
"""

from __future__ import annotations

import time


class SteadyClock:
    """Seconds since 1970: the system clock's time at creation plus the time that has passed since."""

    def __init__(self) -> None:
        self._origin = time.time() - _elapsed()

    def __call__(self) -> float:
        return self._origin + _elapsed()


def _elapsed() -> float:
    """Return seconds since a fixed moment. Time in which the machine sleeps counts if the system supports this."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


STEADY_CLOCK = SteadyClock()
"""The steady clock of this process."""
