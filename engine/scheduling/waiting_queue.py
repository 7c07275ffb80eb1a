"""Waiting queue: orders sequences for admission by priority class, by tenant and by prefix hit.

    priority class   preempted sequences first, in their order; of the others:
    |- tenant          the tenant with the lowest token counter (``fairness.TokenCounters``)
       |- sequence       of its first few the one with the longest prefix hit

A priority class comes before all later ones, so each level needs a bound against starvation. A sequence that has waited
for ``PATIENCE``, earlier waits included, moves to the first class. Between tenants the counters are the bound. Within a
tenant, a sequence that ``MAX_OVERTAKEN`` others have overtaken is overtaken no more.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

from ..sequence.sequence import Sequence
from ..types import Priority
from .fairness import TokenCounters

PATIENCE = {Priority.INTERACTIVE: 60.0, Priority.BATCH: 600.0}
"""Seconds that a sequence waits in its priority class at most, all waits together."""

WINDOW = 8
"""Sequences of a tenant, the first ones, of which the one with the longest prefix hit is admitted."""

MAX_OVERTAKEN = 16


@dataclass(slots=True)
class _Entry:
    """A sequence in the queue or, between its admission and its end, a record of how long it waited.

    Attributes:
        priority: the class in which it waits.
        since: when it began to wait, as if its earlier waits had come right before.
        waited: seconds until it was last admitted.
        num_overtaken: sequences of its tenant and class that came later and were admitted before it.
    """

    sequence: Sequence
    priority: Priority
    since: float
    waited: float = 0.0
    num_overtaken: int = 0


class WaitingQueue:
    """All waiting sequences by priority class and tenant. Reads sequences and writes none.

    ``push``, ``requeue`` and ``remove`` are O(1) in the number of sequences.

    Args:
        cached: returns how many tokens of a sequence are in the prefix cache now; None without a cache.
        clock: seconds, monotonic.
    """

    def __init__(
        self, cached: Callable[[Sequence], int] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._classes = {priority: _PriorityClass() for priority in Priority}
        self._waiting: dict[int, _Entry] = {}
        self._admitted: dict[int, _Entry] = {}
        self._cached = cached
        self._clock = clock

    def push(self, sequence: Sequence) -> None:
        """Add a new sequence."""
        entry = _Entry(sequence, sequence.priority, self._clock())
        self._waiting[sequence.id] = entry
        self._classes[entry.priority].push(entry)

    def requeue(self, sequence: Sequence) -> None:
        """Add a preempted sequence at the head of its priority class; its earlier waits count."""
        entry = self._waiting[sequence.id] = self._admitted.pop(sequence.id)
        entry.since = self._clock() - entry.waited
        self._classes[entry.priority].resume(entry)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended, waiting or admitted. KeyError if it is unknown."""
        if not self._admitted.pop(sequence.id, None):
            self._leave(sequence)

    def admit(self, sequence: Sequence) -> None:
        """Take a sequence out because it starts."""
        entry = self._waiting[sequence.id]
        entry.waited = self._clock() - entry.since
        self._classes[entry.priority].count_overtaken(entry)
        self._admitted[sequence.id] = self._leave(sequence)

    def promote(self) -> list[Sequence]:
        """Move sequences that have waited for too long to the first priority class.

        Returns:
            These sequences: the caller sets their ``priority``.
        """
        now = self._clock()
        promoted = []
        for priority, patience in PATIENCE.items():
            for entry in self._classes[priority].waiting_since(now - patience):
                self._classes[priority].remove(entry)
                entry.priority = Priority.REALTIME
                self._classes[entry.priority].push(entry)
                promoted.append(entry.sequence)
        return promoted

    def charge_prompt(self, sequence: Sequence) -> None:
        """Charge the prompt of a sequence to its tenant, once ``num_cached`` is known."""
        counters = self._classes[sequence.priority].counters
        counters.charge_prompt(sequence.spec.tenant, sequence.num_prompt, sequence.counts.num_cached)

    def charge_tokens(self, sequence: Sequence, count: int) -> None:
        self._classes[sequence.priority].counters.charge_tokens(sequence.spec.tenant, count)

    def has_before(self, priority: Priority) -> bool:
        """Return whether a sequence of an earlier priority class waits."""
        return any(not self._classes[each].is_empty for each in Priority if each < priority)

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the sequences in order of admission, each at most once.

        Between two steps of the iteration the sequence yielded last may be admitted, others may be added to later
        priority classes, and nothing else may change.
        """
        for each in self._classes.values():
            yield from each.in_order(self._cached)

    def head(self, count: int) -> tuple[Sequence, ...]:
        """Return about the next ``count`` sequences: the order of iteration, but without prefix lookups."""
        return tuple(islice(chain.from_iterable(each.in_order(None) for each in self._classes.values()), count))

    def __len__(self) -> int:
        return len(self._waiting)

    def _leave(self, sequence: Sequence) -> _Entry:
        entry = self._waiting.pop(sequence.id)
        self._classes[entry.priority].remove(entry)
        return entry


class _PriorityClass:
    """Waiting sequences of one priority class: preempted ones, and one FIFO for each tenant."""

    def __init__(self) -> None:
        self.counters = TokenCounters()
        self._preempted: OrderedDict[int, _Entry] = OrderedDict()
        self._tenants: dict[str, OrderedDict[int, _Entry]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._preempted and not self._tenants

    def push(self, entry: _Entry) -> None:
        tenant = entry.sequence.spec.tenant
        if tenant not in self._tenants:
            self.counters.join(tenant, self._tenants)
            self._tenants[tenant] = OrderedDict()
        self._tenants[tenant][entry.sequence.id] = entry

    def resume(self, entry: _Entry) -> None:
        self._preempted[entry.sequence.id] = entry
        self._preempted.move_to_end(entry.sequence.id, last=False)

    def remove(self, entry: _Entry) -> None:
        sequence = entry.sequence
        if self._preempted.pop(sequence.id, None):
            return
        fifo = self._tenants[sequence.spec.tenant]
        del fifo[sequence.id]
        if not fifo:
            del self._tenants[sequence.spec.tenant]
            self.counters.leave(sequence.spec.tenant)

    def count_overtaken(self, admitted: _Entry) -> None:
        """Count the admission of an entry for the earlier ones of its tenant."""
        if admitted.sequence.id in self._preempted:
            return
        for earlier in islice(self._tenants[admitted.sequence.spec.tenant].values(), WINDOW):
            if earlier is admitted:
                return
            earlier.num_overtaken += 1

    def waiting_since(self, latest: float) -> list[_Entry]:
        """Return the entries that have waited since ``latest`` or longer."""
        found = [entry for entry in self._preempted.values() if entry.since <= latest]
        for fifo in self._tenants.values():
            for entry in fifo.values():
                if entry.since > latest:
                    break
                found.append(entry)
        return found

    def in_order(self, cached: Callable[[Sequence], int] | None) -> Iterator[Sequence]:
        yield from [entry.sequence for entry in self._preempted.values()]
        tenants = {tenant: _ReadAhead(fifo) for tenant, fifo in self._tenants.items()}
        while tenants:
            tenant = min(tenants, key=self.counters.served)
            waiting = tenants[tenant].first()
            if waiting:
                yield tenants[tenant].pop(_next(waiting, cached)).sequence
            else:
                del tenants[tenant]


class _ReadAhead:
    """The entries of a FIFO in order, which may leave it once they are popped.

    It is read as far as entries are asked for, each time twice as far: a step looks at the first few of thousands.
    """

    def __init__(self, fifo: OrderedDict[int, _Entry]) -> None:
        self._fifo = fifo
        self._read: set[int] = set()  # ids of all that were read
        self._entries: list[_Entry] = []
        self._is_whole = False

    def first(self) -> list[_Entry]:
        """Return the first ``WINDOW`` entries, fewer where no more are left."""
        if len(self._entries) < WINDOW and not self._is_whole:
            found = islice(self._fifo.items(), 2 * len(self._read) + WINDOW)
            new = {number: entry for number, entry in found if number not in self._read}
            self._read.update(new)
            self._entries += new.values()
            self._is_whole = not new
        return self._entries[:WINDOW]

    def pop(self, index: int) -> _Entry:
        return self._entries.pop(index)


def _next(waiting: list[_Entry], cached: Callable[[Sequence], int] | None) -> int:
    """Return the index of the entry to admit next; ``waiting`` is in order of arrival."""
    if cached is None or len(waiting) == 1:
        return 0
    starving = (i for i, entry in enumerate(waiting) if entry.num_overtaken >= MAX_OVERTAKEN)
    if (first := next(starving, None)) is not None:
        return first
    hits = [cached(entry.sequence) for entry in waiting]
    return hits.index(max(hits))
