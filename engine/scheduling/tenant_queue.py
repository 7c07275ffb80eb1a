"""Queue of one tenant in one priority class: orders sequences by arrival and prefix hit, or by deadline.

Without a target time to first token, the next sequence is the one with the longest prefix hit among the first few of
the queue. A sequence that ``MAX_OVERTAKEN`` others have overtaken is not overtaken again.

With a target, the next sequence is the one that must start first: the estimated time of its prompt is subtracted from
its deadline, and the earliest result wins. A sequence that can no longer meet its target is late. Serving it first
would only make other sequences late too, so sequences on time are served before it. To prevent starvation, each
``LATE_TURN``-th admission goes to a late sequence, and so do all admissions while no sequence is on time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import inf

from ..sequence.sequence import Sequence
from ..types import Priority

WINDOW = 8
"""Number of sequences at the head of a tenant's queue among which the one with the longest prefix hit is admitted."""

MAX_OVERTAKEN = 16
LATE_TURN = 4

Cached = Callable[[Sequence], int] | None


@dataclass(slots=True)
class WaitingEntry:
    """Entry of a sequence in the queue. Between the sequence's admission and its end, the entry keeps its waiting time.

    Attributes:
        priority: the priority class in which the sequence waits.
        since: time at which the sequence began to wait, minus the seconds of its earlier waits.
        waited: seconds of all waits of the sequence up to its last admission.
        num_overtaken: number of sequences of the same tenant and class that arrived later and were admitted before it.
        latest_start: latest time at which the sequence can start and still meet its target; -inf without a target.
    """

    sequence: Sequence
    priority: Priority
    since: float
    waited: float = 0.0
    num_overtaken: int = 0
    latest_start: float = -inf


class TenantQueue:
    """Waiting sequences of one tenant and class, in order of arrival; those on time are also sorted by deadline."""

    def __init__(self) -> None:
        self._arrived: OrderedDict[int, WaitingEntry] = OrderedDict()
        # Latest start and id of the sequences that can meet their target, sorted.
        self._on_time: list[tuple[float, int]] = []
        # Sequences that are late, and sequences without a target.
        self._late: OrderedDict[int, WaitingEntry] = OrderedDict()
        self._num_before_late = 0  # Number of admissions since the last admission of a late sequence.

    def __len__(self) -> int:
        return len(self._arrived)

    def __iter__(self) -> Iterator[WaitingEntry]:
        """Yield the entries in order of arrival."""
        yield from self._arrived.values()

    def push(self, entry: WaitingEntry) -> None:
        """Add an entry. It is on time if it has a latest start."""
        number = entry.sequence.id
        self._arrived[number] = entry
        if entry.latest_start > -inf:
            insort(self._on_time, (entry.latest_start, number))
        else:
            self._late[number] = entry

    def remove(self, entry: WaitingEntry) -> None:
        """Remove an entry. Raises KeyError if it is not in the queue."""
        number = entry.sequence.id
        del self._arrived[number]
        if self._late.pop(number, None) is None:
            del self._on_time[bisect_left(self._on_time, (entry.latest_start, number))]

    def count_admission(self, admitted: WaitingEntry) -> None:
        """Update the counts of waiting entries for an admission. Must be called before ``admitted`` is removed."""
        if admitted.sequence.id not in self._late:
            self._num_before_late += 1
            return
        self._num_before_late = 0
        for earlier in islice(self._late.values(), WINDOW):
            if earlier is admitted:
                return
            earlier.num_overtaken += 1

    def read(self, now: float) -> Reader:
        """Return a reader of the entries in order of admission."""
        count = bisect_left(self._on_time, (now, -1))
        for _, number in self._on_time[:count]:
            self._late[number] = self._arrived[number]
        del self._on_time[:count]
        on_time = [self._arrived[number] for _, number in self._on_time]
        return Reader(on_time, self._late, self._num_before_late)


class Reader:
    """Iterator over the entries of a ``TenantQueue``. An entry may leave the queue after it was returned."""

    def __init__(self, on_time: list[WaitingEntry], late: OrderedDict[int, WaitingEntry], num_before_late: int) -> None:
        self._on_time = iter(on_time)
        self._late = _ReadAhead(late)
        self._num_before_late = num_before_late

    def next(self, cached: Cached) -> WaitingEntry | None:
        """Return the next entry; None at the end."""
        if self._num_before_late < LATE_TURN - 1 and (entry := next(self._on_time, None)) is not None:
            self._num_before_late += 1
            return entry
        self._num_before_late = 0
        late = self._late.first()
        return self._late.pop(_next(late, cached)) if late else next(self._on_time, None)


class _ReadAhead:
    """Iterates over the entries of a FIFO in order. Entries that were returned may leave the FIFO during the iteration.

    A step looks only at the first few of thousands of entries. So the FIFO is read only as far as necessary: each
    further read returns twice as many entries as the previous one.
    """

    def __init__(self, fifo: OrderedDict[int, WaitingEntry]) -> None:
        self._fifo = fifo
        self._read: set[int] = set()  # Ids of all entries that were read.
        self._entries: list[WaitingEntry] = []
        self._is_whole = False

    def first(self) -> list[WaitingEntry]:
        """Return the first ``WINDOW`` entries, or fewer if fewer are left."""
        if len(self._entries) < WINDOW and not self._is_whole:
            found = islice(self._fifo.items(), 2 * len(self._read) + WINDOW)
            new = {number: entry for number, entry in found if number not in self._read}
            self._read.update(new)
            self._entries += new.values()
            self._is_whole = not new
        return self._entries[:WINDOW]

    def pop(self, index: int) -> WaitingEntry:
        return self._entries.pop(index)


def _next(waiting: list[WaitingEntry], cached: Cached) -> int:
    """Return the index of the entry to admit next; ``waiting`` is in order of arrival."""
    if cached is None or len(waiting) == 1:
        return 0
    starving = (i for i, entry in enumerate(waiting) if entry.num_overtaken >= MAX_OVERTAKEN)
    if (first := next(starving, None)) is not None:
        return first
    hits = [cached(entry.sequence) for entry in waiting]
    return hits.index(max(hits))
