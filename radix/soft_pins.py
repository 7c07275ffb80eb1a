"""Soft pins: paths of live sessions and paths pinned by request, which are evicted last.

Like the lock of a lease, a pin ends at a node and is counted at this node and at every node above it. A pin does not
lock pages. If only pinned pages are left, they are evicted, too, from the end of the path on, and the pin shrinks to
the rest of the path::

    rank    0 ordinary  <  1 session  <  2 pin          the lowest rank goes first, within it the least recently used

A session's pages are evicted last among the pages of its tenant; pages pinned by request are evicted last of all
(``radix.tenant_eviction``).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

from .node import Node
from .tenant_eviction import TenantEviction


class PinKind(IntEnum):
    """Reason why a path is pinned. The value is the index of the count in ``Node.pins``."""

    SESSION = 0
    PIN = 1


class SoftPin:
    """A path that is evicted late, from ``RadixTree.pin`` to ``RadixTree.unpin``.

    Attributes:
        node: the node at which the pinned path ends; None once no page of it is left in the tree.
    """

    __slots__ = ("kind", "node")

    def __init__(self, node: Node, kind: PinKind) -> None:
        self.node: Node | None = node
        self.kind = kind


class SoftPins:
    """All pins of a tree, by the node at which they end. Every change takes time linear in the depth of the path.

    Attributes:
        ends: pins by their node.
        num_pages: number of pinned pages, by kind.
    """

    def __init__(self, tenant_eviction: TenantEviction) -> None:
        self.ends: dict[Node, list[SoftPin]] = {}
        self.num_pages = dict.fromkeys(PinKind, 0)
        self._tenant_eviction = tenant_eviction

    def pin(self, node: Node, kind: PinKind) -> SoftPin:
        """Pin the path that ends at a node of the tree other than the root."""
        pin = SoftPin(node, kind)
        self.ends.setdefault(node, []).append(pin)
        for each in _path(node):
            if not each.pins[kind]:
                self.num_pages[kind] += len(each.pages)
            each.pins[kind] += 1
        if node.evictable:
            self._tenant_eviction.push(node)
        return pin

    def unpin(self, pin: SoftPin) -> None:
        """End a pin, even if none of its pages is left."""
        node, pin.node = pin.node, None
        if node is None:
            return
        self.ends[node].remove(pin)
        if not self.ends[node]:
            del self.ends[node]
        for each in _path(node):
            each.pins[pin.kind] -= 1
            if not each.pins[pin.kind]:
                self.num_pages[pin.kind] -= len(each.pages)
        if node.evictable:
            self._tenant_eviction.push(node)

    def shrink(self, leaf: Node, num_pages: int) -> None:
        """Subtract the last pages of a leaf from the counts, because they will be evicted next."""
        for kind in PinKind:
            if leaf.pins[kind]:
                self.num_pages[kind] -= num_pages

    def move_up(self, leaf: Node) -> None:
        """Move the pins that end at a leaf to its parent, because the leaf will be evicted entirely."""
        self.shrink(leaf, len(leaf.pages))
        moved = self.ends.pop(leaf, [])
        parent = leaf.parent
        above = parent if parent is not None and parent.parent is not None else None
        for pin in moved:
            pin.node = above
        if above and moved:
            self.ends.setdefault(above, []).extend(moved)

    def forget(self, node: Node) -> None:
        """End the pins at a node that is about to be dropped with all nodes below it."""
        for pin in self.ends.get(node, [])[:]:
            self.unpin(pin)


def _path(node: Node) -> Iterator[Node]:
    """Yield the node and its ancestors, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent
