"""Download slots: how many downloads read from their sources at a time, and how many of them for one tenant."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ...tenancy.tenant_slots import TenantSlots


class DownloadSlots:
    """Slots of downloads on several event loops. A tenant's requests get as many as they leave to others.

    Args:
        most: downloads at a time.
        reserved: number of these slots that downloads for requests leave free for downloads of the operator and of
            admins.
    """

    def __init__(self, most: int, reserved: int) -> None:
        self._all = TenantSlots(most)
        self._of_requests = TenantSlots(most - reserved)

    @asynccontextmanager
    async def slot(self, tenant: str, *, for_request: bool) -> AsyncIterator[None]:
        """Hold a slot within the block, once there is one."""
        if not for_request:
            async with self._all.hold_async(""):
                yield
            return
        async with self._of_requests.hold_async(tenant), self._all.hold_async(""):
            yield
