"""Interrupts by a real signal, as by Ctrl-C, at a time of the test's own (the fixture ``alarm``)."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from support.machine.waits import wait_until

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

AGAIN_SECONDS = 0.001


@contextmanager
def interrupts(test: Path) -> Iterator[Callable[[float], None]]:
    """Yield a function that has KeyboardInterrupt raised after some seconds; 0 for never.

    It is raised in the functions of the test's file and what they call: one that comes after a test that has failed
    would end pytest. One that comes inside of a callback of the garbage collector, as Hypothesis has them, or of a weak
    reference reaches no caller. It comes again then.
    """

    def interrupt(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename == str(test):
                raise KeyboardInterrupt
            frame = frame.f_back

    before, unraisable = signal.signal(signal.SIGALRM, interrupt), sys.unraisablehook
    is_set = False

    def set_alarm(seconds: float) -> None:
        nonlocal is_set
        is_set = seconds > 0
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def come_again(told: UnraisableHookArgs) -> None:
        if not isinstance(told.exc_value, KeyboardInterrupt):
            unraisable(told)
        elif is_set:
            signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)

    sys.unraisablehook = come_again
    try:
        yield set_alarm
    finally:
        set_alarm(0)
        sys.unraisablehook = unraisable
        signal.signal(signal.SIGALRM, before)


def wait_for_branches() -> None:
    """Wait for the threads of branches. One whose start was interrupted may begin late: it finds its session closed."""
    wait_until(lambda: not any(each.name.startswith("branch") and each.is_alive() for each in threading.enumerate()))
