"""Write admission: decides by evidence which pages of KV are written to the tiers while the engine computes.

Writing a page takes a fortieth of the time of computing it, and is in vain if the page never comes again. So pages are
written on credit. A tenant earns credit for forty pages with each page that it reads from a tier, or that it computes
again after the page had left the pool unwritten. Beside that all tenants have one credit together, which is spent once.
Without credit a page waits in the pool for a pause of the engine, and what leaves the pool before is remembered by its
key alone (a *ghost*), so that its return is noticed. So the writing takes at most the time of a fixed number of pages
and as much as hits save, and a page whose return was not foreseen is computed once more.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from .block_keys import BlockId
from .tier_index import TierIndex

WRITES_OF_A_HIT = 40
"""So many pages are written in the time in which one is computed, which a hit saves."""
WRITTEN_POOLS = 5
"""So many times the pages of the pool are written before anything has come again: a load that needs four pools is
written whole in its first round."""
MOST_GHOSTS = 1 << 16  # keys; of larger tiers a sample of the keys is remembered
_MOST_TENANTS = 1 << 12  # whose credit is known


class WriteAdmission:
    """Decides which pages to write at once, by what has come again so far. Called by one thread.

    Args:
        tier_pages: number of pages that the largest tier has room for.
        pool_pages: number of pages of the pool; None if it is not known.
        clock: seconds, monotonic.

    Attributes:
        num_ghost_hits: number of blocks computed again that had left the pool unwritten, of those that are remembered.
        num_unwritten: number of blocks that left the pool unwritten.
    """

    def __init__(
        self, tier_pages: int, pool_pages: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_ghost_hits = self.num_unwritten = 0
        self._most = max(1, tier_pages if pool_pages is None else min(tier_pages, WRITTEN_POOLS * pool_pages))
        self._common = self._most
        self._earned: OrderedDict[str, int] = OrderedDict()  # by tenant, the one that earned last at the end
        # Shares of tenants bound the ghosts as they bound a tier, so no tenant pushes the ghosts of another one out.
        self._ghosts = TierIndex(MOST_GHOSTS, clock)
        # One in so many keys is remembered (spatially hashed sampling), so that the ghosts cover as much as the tier.
        self._sampled = 1
        while self._sampled * MOST_GHOSTS < tier_pages:
            self._sampled *= 2

    def admits(self, block: BlockId, num_pages: int = 1) -> bool:
        """Return whether to write a block that no tier has at once, and not only in a pause of the engine.

        Args:
            num_pages: number of pages that take as many bytes as the block.
        """
        tenant = block.origin.namespace.tenant
        if self._ghosts.remove(block.key) is not None:
            self.num_ghost_hits += 1
            self.want(tenant, num_pages * self._sampled)
            self._spend(tenant, num_pages)
            return True
        return self._spend(tenant, num_pages)

    def want(self, tenant: str, num_pages: int) -> None:
        """Note that a tenant has wanted pages again that had left the pool."""
        self._earned[tenant] = min(self._most, self._earned.get(tenant, 0) + WRITES_OF_A_HIT * num_pages)
        self._earned.move_to_end(tenant)
        if len(self._earned) > _MOST_TENANTS:
            self._earned.popitem(last=False)

    def lose(self, block: BlockId) -> None:
        """Note that a block left the pool unwritten."""
        self.num_unwritten += 1
        if int.from_bytes(block.key[:4], "little") % self._sampled == 0:
            self._ghosts.make_room(1)
            self._ghosts.add(block.key, block.origin.namespace.tenant, 1)

    def clear(self) -> None:
        """Forget the keys of what left the pool."""
        for key in tuple(self._ghosts):
            self._ghosts.remove(key)

    def check(self) -> None:
        """Raise AssertionError if a count is out of its bounds."""
        self._ghosts.check()
        assert 0 <= self._common <= self._most
        assert all(0 < credit <= self._most for credit in self._earned.values())
        assert len(self._earned) <= _MOST_TENANTS

    def _spend(self, tenant: str, num_pages: int) -> bool:
        """Take credit for pages: first the tenant's own, then that of all. False, and nothing is taken, without it."""
        earned = self._earned.get(tenant, 0)
        if earned + self._common < num_pages:
            return False
        own = min(earned, num_pages)
        self._common -= num_pages - own
        if own == earned:
            self._earned.pop(tenant, None)
        else:
            self._earned[tenant] = earned - own
        return True
