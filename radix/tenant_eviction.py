"""Tenant eviction: shares the tree fairly between tenants. Pages of the tenant with the most pages are evicted first.

A tenant that fills the tree evicts its own pages. Pages of another tenant stay as long as they are at most an equal
share (max-min fairness). Groups of leaves are evicted in this order, the least recently used leaves of a group first:

    1. leaves of tenants that have not used the tree for ``IDLE_SECONDS``
    2. leaves of the tenant with the most pages, its sessions' after its ordinary ones
    3. pinned leaves of all tenants

These three groups contain all leaves without a lease.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count

from .node import Node

IDLE_SECONDS = 300.0
# Sizes are compared with a tolerance of 1/64, so that the order does not change with every page.
_SLACK = 64


LeafEntry = tuple[int, int, int, Node]


class EvictionQueue:
    """Queue of evictable leaves by rank (``Node.rank``), and within a rank by last use.

    A leaf is pushed whenever it becomes evictable or changes its rank. Its entry becomes stale when the leaf is used,
    locked or removed, or gets a child or another rank. Stale entries are dropped when they reach the top of the heap,
    and all at once when they may be the majority. So a change takes O(log n), with at most about two entries per leaf.
    """

    def __init__(self) -> None:
        self._heap: list[LeafEntry] = []
        self._serial = count()
        self._compact_at = 64

    def push(self, leaf: Node) -> None:
        """Add a leaf that has become evictable, or whose last use or rank has changed."""
        heappush(self._heap, (leaf.rank, leaf.last_use, next(self._serial), leaf))
        if len(self._heap) >= self._compact_at:
            self._compact()

    def oldest(self) -> Node | None:
        """Return the least recently used leaf of the lowest rank. It stays in the queue as long as it is evictable."""
        while self._heap:
            entry = self._heap[0]
            if _valid(entry):
                return entry[3]
            heappop(self._heap)
        return None

    def leaves(self) -> set[Node]:
        return {entry[3] for entry in self._heap if _valid(entry)}

    def _compact(self) -> None:
        newest = {entry[3]: entry for entry in self._heap if _valid(entry)}
        self._heap = list(newest.values())
        heapify(self._heap)
        self._compact_at = 2 * len(self._heap) + 64


def _valid(entry: LeafEntry) -> bool:
    rank, last_use, _, leaf = entry
    return leaf.evictable and leaf.last_use == last_use and leaf.rank == rank


class TenantShare:
    """The pages of one tenant in the tree.

    Attributes:
        num_pages: number of the tenant's pages, including leased pages.
        used: time at which the tenant last found or added a page.
        leaves: leaves of the tenant that are evictable and not pinned.
        entry: the tenant's entry in the order of tenants; None if ``leaves`` is empty.
        least, most: smallest and largest number of pages for which ``entry`` has the right position in the order of
            tenants.
    """

    __slots__ = ("entry", "least", "leaves", "most", "num_pages", "tenant", "used")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.num_pages = 0
        self.used = 0.0
        self.leaves = EvictionQueue()
        self.entry: Entry | None = None
        self.least = self.most = 0


Entry = tuple[bool, int, int, TenantShare]


class TenantEviction:
    """All tenants of a tree, and their evictable leaves. A change takes amortised O(log n) in tenants and leaves.

    The order of tenants is a heap like ``EvictionQueue``, updated only when a page is to be evicted.

    Args:
        clock: returns monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._shares: dict[str, TenantShare] = {}
        # Shares are kept in the order of their last use.
        self._active: OrderedDict[TenantShare, None] = OrderedDict()
        self._changed: dict[TenantShare, None] = {}
        self._order: list[Entry] = []
        self._serial = count()
        self._pinned = EvictionQueue()

    def use(self, node: Node) -> None:
        """Record that a lease begins or ends at a node. The root belongs to no tenant."""
        if node.origin is not None:
            self._use(self._shares[node.origin.namespace.tenant])

    def count(self, node: Node, num_pages: int) -> None:
        """Add to the page count of a node's tenant. The number is negative for lost pages."""
        assert node.origin
        tenant = node.origin.namespace.tenant
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = TenantShare(tenant)
        share.num_pages += num_pages
        if not share.least <= share.num_pages <= share.most:
            self._changed[share] = None
        if num_pages > 0:
            self._use(share)
        elif not share.num_pages:
            self._forget(share)

    def push(self, leaf: Node) -> None:
        """Add a leaf that has become evictable, or whose last use or rank has changed."""
        if leaf.pinned:
            self._pinned.push(leaf)
            return
        assert leaf.origin
        share = self._shares[leaf.origin.namespace.tenant]
        share.leaves.push(leaf)
        if share.entry is None:
            self._changed[share] = None

    def next(self) -> tuple[Node, int] | None:
        """Return the next leaf to evict pages from, and how many until the next call; None without evictable leaves."""
        self._put_in_order()
        while self._order:
            entry = self._order[0]
            share = entry[3]
            if share.entry is entry:
                if leaf := share.leaves.oldest():
                    return leaf, self._lead(entry)
                share.entry = None
            heappop(self._order)
        pinned = self._pinned.oldest()
        return None if pinned is None else (pinned, len(pinned.pages))

    def num_pages(self) -> dict[str, int]:
        return {tenant: share.num_pages for tenant, share in self._shares.items()}

    def leaves(self) -> set[Node]:
        """Return all leaves that can be evicted."""
        self._put_in_order()
        found = [entry[3] for entry in self._order if entry[3].entry is entry]
        return self._pinned.leaves().union(*(share.leaves.leaves() for share in found))

    def _use(self, share: TenantShare) -> None:
        share.used = self._clock()
        if share in self._active:
            self._active.move_to_end(share)
        else:
            self._active[share] = None
            self._changed[share] = None

    def _forget(self, share: TenantShare) -> None:
        del self._shares[share.tenant]
        self._active.pop(share, None)
        share.entry = None

    def _lead(self, entry: Entry) -> int:
        """Return how many pages the first tenant loses until another is first: all its pages if it is idle or alone."""
        active, size, _, share = entry
        following = self._order[1:3]
        if not active or not following:
            return share.num_pages
        return max(1, min(following)[1] - size, share.num_pages // _SLACK)

    def _put_in_order(self) -> None:
        """Update the entries of tenants that have gained or lost many pages, or have become active or idle."""
        since = self._clock() - IDLE_SECONDS
        while self._active and (oldest := next(iter(self._active))).used < since:
            del self._active[oldest]
            self._changed[oldest] = None
        for share in self._changed:
            if size := share.num_pages:
                share.least, share.most = size - size // _SLACK, size + size // _SLACK
                share.entry = (share in self._active, -size, next(self._serial), share)
                heappush(self._order, share.entry)
        self._changed.clear()
        if len(self._order) > 2 * len(self._shares) + 64:
            self._order = [share.entry for share in self._shares.values() if share.entry is not None]
            heapify(self._order)
