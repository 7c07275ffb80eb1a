"""Loop watch: ends the process if its event loop gives no sign of life, with the exit code for which it is restarted.

There are two watches. The first one is a thread. It counts only seconds in which the thread itself runs, so that a
stopped process does not count as hung. It logs where the loop hangs. The second one is a kernel timer that counts the
processor time of the process. It also ends a process whose native code holds the interpreter's lock (GIL), so that no
other thread can run. systemd's watchdog gets each sign of life (``WatchdogSec``).
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
"""Seconds without a sign of life of the loop after which the thread ends the process."""
PROCESSOR_SECONDS = 60.0
"""Seconds of processor time without a sign of life after which the timer ends the process.

With more cores, their number.
"""
EXIT_HUNG = 70
_ENDING_SECONDS = 5.0
_BEAT_SECONDS = 1.0
_TICK_SECONDS = 0.25
# Longest time in seconds that one observation adds. If more time has passed, this process itself was not running.
_MOST_SECONDS = 2 * _TICK_SECONDS


class Silence:
    """Counts the seconds in which a counter does not change while the observing thread runs.

    Args:
        now: monotonic time in seconds.
    """

    def __init__(self, now: float) -> None:
        self._seen = -1
        self._before = now
        self._seconds = 0.0

    def look(self, count: int, now: float) -> float:
        """Return the seconds for which ``count`` has not changed, given the current time."""
        passed = min(now - self._before, _MOST_SECONDS)
        self._seconds = 0.0 if count != self._seen else self._seconds + passed
        self._seen, self._before = count, now
        return self._seconds


class LoopWatch:
    """Watches the running event loop from its creation to ``close``.

    Args:
        ending: called in the watch's thread before the process is ended; it may take a few seconds at most.
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
        """End the watch. Must be called on the loop."""
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
        write_last_line(f"The event loop has hung for {SILENT_SECONDS:g} s: ending the process. Its stack:\n{where}")
        # The called function may write to a log whose lock the loop's thread holds, so the wait has a limit.
        EndLimit(_ENDING_SECONDS, EXIT_HUNG, "What the server ends")
        try:
            self._ending()
        finally:
            os._exit(EXIT_HUNG)


class _Event(ctypes.Structure):
    """``struct sigevent`` with ``SIGEV_THREAD``, for which the C library calls a function on a new thread."""

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
    """Kernel timer of the process's processor time; on expiry C's ``_exit`` is called.

    Only on Linux; elsewhere it does nothing.
    """

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
        """Restart the timer."""
        self._set(self._seconds)

    def stop(self) -> None:
        """Stop and delete the timer."""
        self._set(0)
        if self._timer is not None:
            self._library.timer_delete(self._timer)
            self._timer = None

    def _set(self, seconds: int) -> None:
        if self._timer is not None:
            setting = _Setting(_Seconds(0, 0), _Seconds(seconds, 0))
            self._library.timer_settime(self._timer, 0, ctypes.byref(setting), None)
