"""Tenant shares: a limit on what all tenants hold together, of which each may hold at most as much as is still free.

The rule is that of Choudhury and Hahne, "Dynamic Queue Length Thresholds" (1998), for queues that share a buffer: a
tenant that is alone and takes one at a time gets half, and the next tenant gets about half of the rest. Without keys
there is one tenant, which may take all.
"""

from __future__ import annotations

from collections import Counter


class TenantShares:
    """Counts what tenants hold of a bound. Belongs to one event loop.

    Args:
        most: limit on what all may hold together.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._held: Counter[str] = Counter()
        self._total = 0

    @property
    def total(self) -> int:
        return self._total

    def held(self, tenant: str) -> int:
        return self._held[tenant]

    def left_for(self, tenant: str) -> int:
        """Return how much more a tenant may take now; below 0 where others have taken some since."""
        left = self.most - self._total
        return left - self._held[tenant] if tenant else left

    def take(self, tenant: str, amount: int = 1) -> None:
        self._held[tenant] += amount
        self._total += amount

    def give_back(self, tenant: str, amount: int = 1) -> None:
        """Undo ``take``."""
        self._held[tenant] -= amount
        self._total -= amount
        if not self._held[tenant]:
            del self._held[tenant]
