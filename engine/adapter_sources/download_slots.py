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
        reserved: slots of these that downloads for requests leave free, for those of the operator and of admins.
    """

    def __init__(self, most: int, reserved: int) -> None:
        self._lock = threading.Lock()
        self._free = most
        self._free_for_requests = most - reserved

    @asynccontextmanager
    async def slot(self, *, for_request: bool) -> AsyncIterator[None]:
        """Hold a slot within the block, once there is one."""
        while not self._took(for_request):
            await asyncio.sleep(_POLL_SECONDS)
        try:
            yield
        finally:
            with self._lock:
                self._free += 1
                self._free_for_requests += for_request

    def _took(self, for_request: bool) -> bool:
        with self._lock:
            if not self._free or (for_request and not self._free_for_requests):
                return False
            self._free -= 1
            self._free_for_requests -= for_request
            return True
