"""Parent death: a process that the kernel kills when its parent ends, whatever it is doing then."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that has started it ends. Linux only; elsewhere nothing."""
    _set(signal.SIGKILL)


def outlive_parent() -> None:
    """Undo ``end_with_parent``."""
    _set(0)


def _set(number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
