"""Tier index: records the blocks that a tier holds and their sizes, and chooses which to evict when it is full.

The order of eviction is that of the tree (``radix.tenant_eviction``): first blocks of tenants that have not used the
tier for a while, then blocks of the tenant that has the most bytes, the least recently used first. So a tenant that
fills a tier evicts its own blocks, as long as others have no more than an equal share.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

IDLE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class TierEntry:
    """One block of a tier: whose it is, and its size."""

    tenant: str
    num_bytes: int


class TierIndex:
    """Blocks by key. Not thread-safe.

    Args:
        capacity: most bytes.
        clock: seconds, monotonic.

    Attributes:
        num_bytes: bytes of all blocks.
    """

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity = capacity
        self.num_bytes = 0
        self._clock = clock
        self._entries: dict[bytes, TierEntry] = {}
        self._order: dict[str, OrderedDict[bytes, None]] = {}  # by tenant, the least recently used first
        self._bytes: dict[str, int] = {}
        self._used: OrderedDict[str, float] = OrderedDict()  # tenants in the order of their last use

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._entries)

    def get(self, key: bytes) -> TierEntry | None:
        return self._entries.get(key)

    def tenants(self) -> dict[str, int]:
        """Return the bytes of each tenant."""
        return dict(self._bytes)

    def touch(self, key: bytes) -> bool:
        """Note a use of a block. False if it is not here."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        self._order[entry.tenant].move_to_end(key)
        self._use(entry.tenant)
        return True

    def add(self, key: bytes, tenant: str, num_bytes: int) -> None:
        """Add a block, for which there must be room: see ``victims``."""
        self.remove(key)
        self._entries[key] = TierEntry(tenant, num_bytes)
        self._order.setdefault(tenant, OrderedDict())[key] = None
        self._bytes[tenant] = self._bytes.get(tenant, 0) + num_bytes
        self.num_bytes += num_bytes
        self._use(tenant)

    def remove(self, key: bytes) -> TierEntry | None:
        """Remove a block. Returns what it was, None if it is not here."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        del self._order[entry.tenant][key]
        self._bytes[entry.tenant] -= entry.num_bytes
        self.num_bytes -= entry.num_bytes
        if not self._order[entry.tenant]:
            del self._order[entry.tenant], self._bytes[entry.tenant]
            self._used.pop(entry.tenant, None)
        return entry

    def make_room(self, num_bytes: int) -> list[tuple[bytes, TierEntry]] | None:
        """Remove blocks until so many bytes fit. Returns those removed; None, and none is, if they never fit."""
        if num_bytes > self.capacity:
            return None
        removed = []
        while self.num_bytes + num_bytes > self.capacity:
            tenant = self._poorest_claim()
            key = next(iter(self._order[tenant]))
            entry = self.remove(key)
            assert entry is not None
            removed.append((key, entry))
        return removed

    def check(self) -> None:
        """Raise AssertionError if the sums are wrong."""
        assert self.num_bytes == sum(entry.num_bytes for entry in self._entries.values()) <= self.capacity
        assert self._entries.keys() == {key for order in self._order.values() for key in order}
        assert self._bytes.keys() == self._order.keys() == self._used.keys()

    def _poorest_claim(self) -> str:
        """Return the tenant whose block goes next."""
        oldest, used = next(iter(self._used.items()))
        if used < self._clock() - IDLE_SECONDS:
            return oldest
        return max(self._bytes, key=self._bytes.__getitem__)

    def _use(self, tenant: str) -> None:
        self._used[tenant] = self._clock()
        self._used.move_to_end(tenant)
