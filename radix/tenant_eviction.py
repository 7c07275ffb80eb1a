"""Which leaf goes first where several tenants share the tree: one of the tenant that has the most in it.

So nobody loses a page while another has clearly more. A tenant that fills the tree pushes out its own pages, and what
others come back to stays as long as it takes no more than an equal share. Who needs less than that leaves the rest to
those who need more, and who is alone has all of it. In this order:

    1. leaves of tenants that have not used the tree for ``IDLE_SECONDS``: they have no share any more
    2. leaves of the tenant with the most pages, its sessions' after its ordinary ones
    3. pinned leaves, whosever they are

and in each the oldest use first. Nothing unlocked is ever kept: after these there is nothing left to evict.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count

from .lru_heap import EvictionQueue
from .node import Node

IDLE_SECONDS = 300.0
_SLACK = 64  # sizes are compared to within this part of them, so that not each page changes the order


class TenantShare:
    """What one tenant has in the tree.

    Attributes:
        tenant: whose it is.
        num_pages: its pages, those that leases go through included.
        used: when it last found or entered something.
        leaves: those of its leaves that may be evicted and are not pinned.
        entry: where it stands in the order of tenants; None when it has none of these.
        least, most: pages with which it stays there.
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
    """All tenants of a tree, and their evictable leaves. O(log n) in tenants and leaves for each change, amortised.

    The order of tenants is a heap like that of ``EvictionQueue``. It is looked at only to evict, so changes are
    gathered until then.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tenant_eviction: dict[str, TenantShare] = {}
        self._active: OrderedDict[TenantShare, None] = OrderedDict()  # in the order of their last use
        self._changed: dict[TenantShare, None] = {}
        self._order: list[Entry] = []
        self._serial = count()
        self._pinned = EvictionQueue()

    def use(self, node: Node) -> None:
        """A lease begins or ends at a node, which the root may be: that is nobody's."""
        if node.origin is not None:
            self._use(self._tenant_eviction[node.origin.namespace.tenant])

    def count(self, node: Node, num_pages: int) -> None:
        """A node has been given pages, or has lost some where the number is negative."""
        assert node.origin
        tenant = node.origin.namespace.tenant
        share = self._tenant_eviction.get(tenant)
        if share is None:
            share = self._tenant_eviction[tenant] = TenantShare(tenant)
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
        share = self._tenant_eviction[leaf.origin.namespace.tenant]
        share.leaves.push(leaf)
        if share.entry is None:
            self._changed[share] = None

    def next(self) -> tuple[Node, int] | None:
        """The leaf to evict from, and how many pages before the next look. None if nothing can be evicted."""
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
        """Pages of each tenant that has any."""
        return {tenant: share.num_pages for tenant, share in self._tenant_eviction.items()}

    def leaves(self) -> set[Node]:
        """All leaves that eviction would come to."""
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
        del self._tenant_eviction[share.tenant]
        self._active.pop(share, None)
        share.entry = None

    def _lead(self, entry: Entry) -> int:
        """Pages that the first tenant loses before it may be another's turn: all if it is idle or alone."""
        active, size, _, share = entry
        following = self._order[1:3]
        if not active or not following:
            return share.num_pages
        return max(1, min(following)[1] - size, share.num_pages // _SLACK)

    def _put_in_order(self) -> None:
        """Give each tenant that has changed its new place."""
        since = self._clock() - IDLE_SECONDS
        while self._active and (longest := next(iter(self._active))).used < since:
            del self._active[longest]
            self._changed[longest] = None
        for share in self._changed:
            if size := share.num_pages:
                share.least, share.most = size - size // _SLACK, size + size // _SLACK
                share.entry = (share in self._active, -size, next(self._serial), share)
                heappush(self._order, share.entry)
        self._changed.clear()
        if len(self._order) > 2 * len(self._tenant_eviction) + 64:
            self._order = [share.entry for share in self._tenant_eviction.values() if share.entry is not None]
            heapify(self._order)
