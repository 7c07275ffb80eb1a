"""Parent death: a process that the kernel kills when its parent ends, whatever it is doing then."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends. Has an effect only on Linux.

    If the parent has already ended when this is called, this process ends at once.

    Args:
        parent: process id of the parent, as the parent has passed it. It cannot be read here, because a process whose
            parent has ended gets another parent.
    """
    _set(signal.SIGKILL)
    if sys.platform == "linux" and os.getppid() != parent:
        os._exit(0)


def outlive_parent() -> None:
    """Undo ``end_with_parent``."""
    _set(0)


def _set(number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
