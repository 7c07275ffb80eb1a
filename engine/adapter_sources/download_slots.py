"""Download slots: limit the downloads that run at one time, in total and for each tenant."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ...tenancy.tenant_slots import TenantSlots


class DownloadSlots:
    """Slots for downloads on several event loops. A tenant may use free slots as long as others do not need them.

    Args:
        most: largest number of downloads at one time.
        reserved: number of these slots that downloads for requests leave free for downloads of the operator and of
            admins.
    """

    def __init__(self, most: int, reserved: int) -> None:
        self._all = TenantSlots(most)
        self._of_requests = TenantSlots(most - reserved)

    @asynccontextmanager
    async def slot(self, tenant: str, *, for_request: bool) -> AsyncIterator[None]:
        """Acquire a slot, and hold it inside the block."""
        if not for_request:
            async with self._all.hold_async(""):
                yield
            return
        async with self._of_requests.hold_async(tenant), self._all.hold_async(""):
            yield
