"""Loop watch: ends the process whose event loop gives no sign of life, with the exit code that restarts the server.

There are two watches. A thread counts only seconds in which it runs itself, so that a stopped process does not count as
hung; it logs where the loop hangs. A kernel timer counts the processor time of the process: it ends native code that
holds the interpreter's lock, during which no thread can run. systemd's watchdog gets each sign of life
(``WatchdogSec``).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from ...engine.end_limit import EndLimit
from ...engine.error_stream import write_last_line
from .systemd_notify import notify_watchdog

SILENT_SECONDS = 30.0
"""Without a sign of life of the loop."""
PROCESSOR_SECONDS = 60.0
"""Of processor time without one; on machines with more cores as many as these."""
EXIT_HUNG = 70
_ENDING_SECONDS = 5.0
_BEAT_SECONDS = 1.0
_TICK_SECONDS = 0.25
# One look counts at most so many seconds: where more have passed, this process itself did not run.
_MOST_SECONDS = 2 * _TICK_SECONDS


class Silence:
    """Counts the seconds in which a counter does not change, and in which the observing thread runs itself.

    Args:
        now: the monotonic clock's seconds.
    """

    def __init__(self, now: float) -> None:
        self._seen = -1
        self._before = now
        self._seconds = 0.0

    def look(self, count: int, now: float) -> float:
        """Return the seconds so far."""
        passed = min(now - self._before, _MOST_SECONDS)
        self._seconds = 0.0 if count != self._seen else self._seconds + passed
        self._seen, self._before = count, now
        return self._seconds


class LoopWatch:
    """Watches the running event loop from its start to ``close``.

    Args:
        ending: called in the watch's thread before the process is ended; may take some seconds at most.
    """

    def __init__(self, ending: Callable[[], None] = lambda: None) -> None:
        self._ending = ending
        self._closed = threading.Event()
        self._num_beats = 0
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._timer = _ProcessorTimer(max(PROCESSOR_SECONDS, os.cpu_count() or 1))
        self._handle: asyncio.TimerHandle | None = None
        self._beat()
        threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()

    def close(self) -> None:
        """End the watch. Called on the loop."""
        self._closed.set()
        self._timer.stop()
        if self._handle is not None:
            self._handle.cancel()

    def _beat(self) -> None:
        self._num_beats += 1
        self._timer.restart()
        notify_watchdog()
        self._handle = self._loop.call_later(_BEAT_SECONDS, self._beat)

    def _watch(self) -> None:
        silence = Silence(time.monotonic())
        while not self._closed.wait(_TICK_SECONDS):
            if silence.look(self._num_beats, time.monotonic()) >= SILENT_SECONDS:
                self._end()

    def _end(self) -> None:
        frame = sys._current_frames().get(self._loop_thread)
        where = "".join(traceback.format_stack(frame)) if frame is not None else ""
        write_last_line(
            f"The event loop gives no sign of life for {SILENT_SECONDS:g} s: the process ends. It is at:\n{where}"
        )
        # What is called may write to a log whose lock the loop holds.
        EndLimit(_ENDING_SECONDS, EXIT_HUNG, "What the server ends")
        try:
            self._ending()
        finally:
            os._exit(EXIT_HUNG)


class _Event(ctypes.Structure):
    """``struct sigevent`` with ``SIGEV_THREAD``: the C library calls a function on a thread of its own."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_byte * 32),
    )


class _Seconds(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Seconds), ("value", _Seconds))


class _ProcessorTimer:
    """Timer of the process's processor time, at whose end C's ``_exit`` is called. Linux only; elsewhere nothing."""

    _CLOCK_PROCESS_CPUTIME_ID = 2
    _SIGEV_THREAD = 2

    def __init__(self, seconds: float) -> None:
        self._seconds = int(seconds)
        self._timer: Any = None
        if sys.platform != "linux":
            return
        self._library = ctypes.CDLL(None, use_errno=True)
        function = ctypes.cast(self._library._exit, ctypes.c_void_p).value
        event, timer = _Event(EXIT_HUNG, 0, self._SIGEV_THREAD, function, None), ctypes.c_void_p()
        if self._library.timer_create(self._CLOCK_PROCESS_CPUTIME_ID, ctypes.byref(event), ctypes.byref(timer)) == 0:
            self._timer = timer

    def restart(self) -> None:
        """Begin to count again."""
        self._set(self._seconds)

    def stop(self) -> None:
        """Count no more."""
        self._set(0)
        if self._timer is not None:
            self._library.timer_delete(self._timer)
            self._timer = None

    def _set(self, seconds: int) -> None:
        if self._timer is not None:
            setting = _Setting(_Seconds(0, 0), _Seconds(seconds, 0))
            self._library.timer_settime(self._timer, 0, ctypes.byref(setting), None)
