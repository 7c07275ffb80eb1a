"""LRU heap: evictable leaves by rank and last use, with lazy deletion."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count

from .node import Node

Entry = tuple[int, int, int, Node]


class EvictionQueue:
    """Evictable leaves by rank (``Node.rank``), and within a rank by last use.

    A leaf is pushed whenever it becomes evictable or changes its rank. Its entry goes stale when the leaf is used,
    locked, removed, gets a child or another rank; stale entries are dropped at the top of the heap, and all at once
    when they may be the majority. So a change is O(log n), with at most about two entries per leaf.
    """

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._serial = count()
        self._compact_at = 64

    def push(self, leaf: Node) -> None:
        """Add a leaf that has become evictable, or whose last use or rank has changed."""
        heappush(self._heap, (leaf.rank, leaf.last_use, next(self._serial), leaf))
        if len(self._heap) >= self._compact_at:
            self._compact()

    def oldest(self) -> Node | None:
        """Return the least recently used leaf of the lowest rank; it stays in the queue while it is evictable."""
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


def _valid(entry: Entry) -> bool:
    rank, last_use, _, leaf = entry
    return leaf.evictable and leaf.last_use == last_use and leaf.rank == rank
