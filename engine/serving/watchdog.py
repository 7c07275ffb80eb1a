"""Watchdog of the engine process: decides from its signs of life and its steps whether the process hangs. No I/O.

A process that is stopped, or that waits for ever while it holds the interpreter's lock (GIL), sends no signs of life
and uses no processor time: it hangs. A process whose native code computes while it holds the GIL, or a process on an
overloaded machine, may send no signs of life either, but it uses processor time: it does not hang. A step that never
ends does not stop the signs of life, so steps have a time limit of their own. This limit is long, because long prompts
on a slow machine and the first compilation of kernels take long.
"""

from __future__ import annotations

from collections.abc import Callable

HEARTBEAT_TIMEOUT = 5.0
FLEET_HEARTBEAT_TIMEOUT = 3.0
"""Seconds without a sign of life after which a replica of a fleet counts as hung.

The time is short, because a wrong decision costs little: the sequences only pause until another replica continues them.
"""
WATCHDOG_TIMEOUT = 300.0
TICK_SECONDS = 0.1
"""Seconds between two calls of ``tick``."""
# Longest time in seconds that one tick adds. If more time has passed, this process itself was not running.
_MOST_SECONDS = 2 * TICK_SECONDS
_OVERDUE = 1.0  # Seconds of silence after which the processor time is read.
# Seconds of processor time, one tick of the kernel's clock. A silent process that has used this much is slow, not
# stopped.
_LEAST_PROCESSOR_SECONDS = 0.01


class Watchdog:
    """Counts the seconds without a sign of life, and the seconds of the current step.

    Time in which the watchdog itself did not run is not counted.

    Args:
        heartbeat_timeout: seconds without a sign of life and without processor use after which the process hangs.
        watchdog_timeout: seconds of one step after which the process hangs.
        processor_seconds: reads the processor time that the process has used; None if it is not known.

    Attributes:
        silent_seconds: seconds since the last sign of life.
        step_seconds: seconds since the last pass of the step loop.
    """

    def __init__(
        self, heartbeat_timeout: float, watchdog_timeout: float, processor_seconds: Callable[[], float | None]
    ) -> None:
        self._heartbeat_timeout = heartbeat_timeout
        self._watchdog_timeout = watchdog_timeout
        self._processor_seconds = processor_seconds
        self.silent_seconds = 0.0
        self.step_seconds = 0.0
        self._num_passes = -1
        self._last_tick: float | None = None
        self._used_before: float | None = None  # Processor time when the silence first exceeded its limit.

    def sign_of_life(self, num_passes: int) -> None:
        """Record a sign of life, with the number of passes that the step loop has made."""
        self._end_silence()
        if num_passes != self._num_passes:
            self._num_passes, self.step_seconds = num_passes, 0.0

    def tick(self, now: float) -> str | None:
        """Return why the process hangs, or None.

        Must be called every ``TICK_SECONDS`` with the monotonic time in seconds.
        """
        passed = 0.0 if self._last_tick is None else min(now - self._last_tick, _MOST_SECONDS)
        self._last_tick = now
        self.silent_seconds += passed
        self.step_seconds += passed
        self._look_at_processor()
        if self.silent_seconds > self._heartbeat_timeout - TICK_SECONDS:
            return f"it has given no sign of life for {self._heartbeat_timeout:g} seconds (--heartbeat-timeout)"
        if self.step_seconds > self._watchdog_timeout - TICK_SECONDS:
            return f"one step has taken {self._watchdog_timeout:g} seconds (--watchdog-timeout)"
        return None

    def _look_at_processor(self) -> None:
        """Reset the silence if the process uses processor time: its liveness thread then only waits to be scheduled."""
        if self.silent_seconds < min(_OVERDUE, self._heartbeat_timeout / 2):
            return
        used = self._processor_seconds()
        if used is None:
            return
        if self._used_before is None:
            self._used_before = used
        elif used - self._used_before >= _LEAST_PROCESSOR_SECONDS:
            self._end_silence()

    def _end_silence(self) -> None:
        self.silent_seconds, self._used_before = 0.0, None
