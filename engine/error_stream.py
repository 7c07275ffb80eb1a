"""Lines on the standard error stream: no process ends or stays because its disk is full or its reader takes nothing."""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress

_STREAM = 2
_WAIT_MILLISECONDS = 1000


def write_line(text: str) -> None:
    """Write a line; it is lost where the stream cannot be written."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def write_last_line(text: str) -> None:
    """Write a line before the process ends, without the stream's buffer and its lock, which a blocked thread may hold.

    If a pipe's reader reads nothing for a second, the rest of the line is not written.
    """
    data = memoryview(f"{text}\n".encode(errors="backslashreplace"))
    ready = select.poll()
    with suppress(OSError):
        ready.register(_STREAM, select.POLLOUT)
        # A pipe that is ready takes so many bytes without blocking.
        for start in range(0, len(data), select.PIPE_BUF):
            if not ready.poll(_WAIT_MILLISECONDS):
                return
            os.write(_STREAM, data[start : start + select.PIPE_BUF])
