"""Which leaf was used least recently: a heap whose entries are checked only when they come up."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count

from radix.node import Node

Entry = tuple[int, int, Node]


class EvictionQueue:
    """Evictable leaves by last use.

    A leaf is pushed whenever it becomes evictable. Its entry goes stale when it is used, locked, removed or gets a
    child; stale entries are dropped when they come to the top, and all at once when they may be the majority. Hence
    O(log n) for each change, and no more than about twice as many entries as leaves.
    """

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._serial = count()
        self._compact_at = 64

    def push(self, leaf: Node) -> None:
        """Add a leaf that has become evictable, or whose last use has changed."""
        heappush(self._heap, (leaf.last_use, next(self._serial), leaf))
        if len(self._heap) >= self._compact_at:
            self._compact()

    def oldest(self) -> Node | None:
        """The evictable leaf used least recently; it stays in the queue as long as it is evictable."""
        while self._heap:
            entry = self._heap[0]
            if _valid(entry):
                return entry[2]
            heappop(self._heap)
        return None

    def leaves(self) -> set[Node]:
        """All leaves in the queue."""
        return {entry[2] for entry in self._heap if _valid(entry)}

    def _compact(self) -> None:
        newest = {entry[2]: entry for entry in self._heap if _valid(entry)}
        self._heap = list(newest.values())
        heapify(self._heap)
        self._compact_at = 2 * len(self._heap) + 64


def _valid(entry: Entry) -> bool:
    last_use, _, leaf = entry
    return leaf.evictable and leaf.last_use == last_use
