"""Waits for a state that another thread or process brings about. Imports nothing, as every test run imports it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

HANG_SECONDS = 300.0
"""Limit of whatever only guards against a hang: a machine that is busy with others takes long, and is not to blame."""


def wait_until(condition: Callable[[], bool], pause: float = 0.002) -> None:
    """Look again and again until another thread, or process, has got there. Raises AssertionError."""
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(pause)


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop go on until something has come to hold. Raises TimeoutError."""
    async with asyncio.timeout(HANG_SECONDS):
        while not condition():
            await asyncio.sleep(0.002)
