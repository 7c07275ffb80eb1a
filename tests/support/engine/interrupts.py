"""Interrupts by a real signal, as by Ctrl-C, at a time of the test's own (the fixture ``alarm``)."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

interrupted = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Mark of tests with interrupts: one that comes inside of the garbage collector's callbacks is printed, not raised."""


@contextmanager
def interrupts() -> Iterator[Callable[[float], None]]:
    """Yield a function that has KeyboardInterrupt raised after some seconds; 0 for never."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)

    def set_alarm(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)

    try:
        yield set_alarm
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
