"""Download slots: how many downloads read from their sources at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_POLL_SECONDS = 0.05


class DownloadSlots:
    """Slots of downloads on several event loops.

    Args:
        most: downloads at a time.
    """

    def __init__(self, most: int) -> None:
        self._free = threading.BoundedSemaphore(most)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold a slot within the block, once there is one."""
        while not self._free.acquire(blocking=False):
            await asyncio.sleep(_POLL_SECONDS)
        try:
            yield
        finally:
            self._free.release()
