"""Which nodes eviction takes last: the path of a living session before other pages, and pins after all others.

A hold ends at a node and counts there and at every node above it, as a lease's lock does. It locks nothing: where
nothing else is left, held pages are evicted like all others, from the end, and the hold goes on with what stays::

    rank    0 ordinary  <  1 session  <  2 pin          the lowest rank goes first, within it the oldest use

A session delays the pages of its tenant among that tenant's own, a pin among those of all (``radix.tenant_eviction``).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

from .node import Node
from .tenant_eviction import TenantEviction


class PinKind(IntEnum):
    """Why a path is held; the index of its count in ``Node.holds``."""

    SESSION = 0
    PIN = 1


class SoftPin:
    """A path that is evicted late, from ``RadixTree.hold`` to ``RadixTree.let_go``.

    Attributes:
        node: where it ends; None once nothing of it is left in the tree.
    """

    __slots__ = ("kind", "node")

    def __init__(self, node: Node, kind: PinKind) -> None:
        self.node: Node | None = node
        self.kind = kind


class SoftPins:
    """All holds of a tree, by the node at which they end. Each change takes time linear in the depth of a path.

    Attributes:
        ends: holds by their node.
        num_pages: pages that are held, by kind.
    """

    def __init__(self, tenant_eviction: TenantEviction) -> None:
        self.ends: dict[Node, list[SoftPin]] = {}
        self.num_pages = dict.fromkeys(PinKind, 0)
        self._tenant_eviction = tenant_eviction

    def begin(self, node: Node, kind: PinKind) -> SoftPin:
        """Hold the path that ends at a node in the tree, which is not the root."""
        hold = SoftPin(node, kind)
        self.ends.setdefault(node, []).append(hold)
        for each in _path(node):
            if not each.pins[kind]:
                self.num_pages[kind] += len(each.pages)
            each.pins[kind] += 1
        if node.evictable:
            self._tenant_eviction.push(node)
        return hold

    def end(self, hold: SoftPin) -> None:
        """End a hold, of which something may be left or not."""
        node, hold.node = hold.node, None
        if node is None:
            return
        self._remove(node, hold)
        for each in _path(node):
            each.pins[hold.kind] -= 1
            if not each.pins[hold.kind]:
                self.num_pages[hold.kind] -= len(each.pages)
        if node.evictable:
            self._tenant_eviction.push(node)

    def shrink(self, leaf: Node, num_pages: int) -> None:
        """So many pages of a leaf are about to be evicted."""
        for kind in PinKind:
            if leaf.pins[kind]:
                self.num_pages[kind] -= num_pages

    def move_up(self, leaf: Node) -> None:
        """A leaf is about to be evicted as a whole: what ends there ends at its parent from now on."""
        self.shrink(leaf, len(leaf.pages))
        moved = self.ends.pop(leaf, [])
        parent = leaf.parent
        above = parent if parent is not None and parent.parent is not None else None
        for hold in moved:
            hold.node = above
        if above and moved:
            self.ends.setdefault(above, []).extend(moved)

    def forget(self, node: Node) -> None:
        """A node is about to leave the tree with all below it: end what ends there."""
        for hold in self.ends.get(node, [])[:]:
            self.end(hold)

    def _remove(self, node: Node, hold: SoftPin) -> None:
        self.ends[node].remove(hold)
        if not self.ends[node]:
            del self.ends[node]


def _path(node: Node) -> Iterator[Node]:
    """The node and those above it, but for the root."""
    while node.parent is not None:
        yield node
        node = node.parent
