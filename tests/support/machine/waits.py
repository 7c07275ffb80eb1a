"""Waits for a state that another thread or process brings about. Imports nothing, as every test run imports it."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], seconds: float = 60.0, pause: float = 0.002) -> None:
    """Look again and again until another thread, or process, has got there."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(pause)
