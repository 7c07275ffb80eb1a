"""The sequences that wait for admission, in order of arrival; a preempted one goes back to the head."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from engine.sequence import Sequence


class WaitingQueue:
    """First come, first served. Every operation but iteration is O(1)."""

    def __init__(self) -> None:
        self._sequences: OrderedDict[int, Sequence] = OrderedDict()

    def push(self, sequence: Sequence) -> None:
        """Add at the end."""
        self._sequences[sequence.id] = sequence

    def requeue(self, sequence: Sequence) -> None:
        """Add at the head: a preempted sequence has waited already."""
        self._sequences[sequence.id] = sequence
        self._sequences.move_to_end(sequence.id, last=False)

    def remove(self, sequence: Sequence) -> None:
        """Take it out. KeyError if it is not in."""
        del self._sequences[sequence.id]

    def __iter__(self) -> Iterator[Sequence]:
        """In the order in which they should be admitted. The queue may change between two steps of the iteration."""
        return iter(tuple(self._sequences.values()))

    def __len__(self) -> int:
        return len(self._sequences)
