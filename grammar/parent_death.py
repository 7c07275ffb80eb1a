"""Parent death: a process that the kernel kills when its parent ends, whatever it is doing then."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when the thread that has started it ends. Linux only; elsewhere nothing.

    Args:
        parent: number of the parent process, where it is known: if that has ended already this process ends too.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
