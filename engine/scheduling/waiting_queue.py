"""The sequences that wait for admission, and whose turn it is.

    band          first those that were preempted, in their order; of the others:
    |- tenant       the tenant that was served least so far (``fairness.TokenCounters``)
       |- sequence    of its first few the one with the most tokens in the prefix cache

A band comes before all later ones, so each step down needs a bound. A sequence that has waited for ``PATIENCE``, the
times before it was preempted included, goes over to the first band. Between tenants the counters are the bound. Within
a tenant, a sequence that ``MAX_OVERTAKEN`` others have overtaken is overtaken no more.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain, islice

from ..sequence.sequence import Sequence
from ..types import Priority
from .fairness import TokenCounters

PATIENCE = {Priority.INTERACTIVE: 60.0, Priority.BATCH: 600.0}
"""Seconds that a sequence waits in its band at most, all in all."""

WINDOW = 8
"""Of how many sequences of a tenant the best cached one is taken."""

MAX_OVERTAKEN = 16


class WaitingQueue:
    """All that waits, by band and tenant. ``push``, ``requeue`` and ``remove`` are O(1) in the number of sequences.

    Args:
        cached: how many tokens of a sequence are in the prefix cache now; None if there is no cache.
        clock: seconds, monotonic.
    """

    def __init__(
        self, cached: Callable[[Sequence], int] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bands = {priority: _Band() for priority in Priority}
        self._since: dict[int, float] = {}
        self._cached = cached
        self._clock = clock

    def push(self, sequence: Sequence) -> None:
        """Add a sequence that has just come."""
        self._since[sequence.id] = self._clock()
        self._bands[sequence.priority].push(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Add a preempted sequence: it is the first of its band, and what it has waited already counts."""
        self._since[sequence.id] = self._clock() - sequence.waited
        self._bands[sequence.priority].resume(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take it out. KeyError if it is not in."""
        del self._since[sequence.id]
        self._bands[sequence.priority].remove(sequence)

    def admit(self, sequence: Sequence) -> None:
        """Take it out because it starts."""
        sequence.waited = self._clock() - self._since[sequence.id]
        self._bands[sequence.priority].count_overtaken(sequence)
        self.remove(sequence)

    def charge_prompt(self, sequence: Sequence) -> None:
        """Count the prompt of a sequence against its tenant, once ``num_cached`` is known."""
        counters = self._bands[sequence.priority].counters
        counters.charge_prompt(sequence.tenant, sequence.num_prompt, sequence.num_cached)

    def charge_tokens(self, sequence: Sequence, count: int) -> None:
        """Count tokens that were drawn against the sequence's tenant."""
        self._bands[sequence.priority].counters.charge_tokens(sequence.tenant, count)

    def served(self, tenant: str, priority: Priority) -> float:
        """What a tenant has been served in a band, by the counters."""
        return self._bands[priority].counters.served(tenant)

    def has_before(self, priority: Priority) -> bool:
        """Whether anything waits in an earlier band than this one."""
        return any(not self._bands[band].is_empty for band in Priority if band < priority)

    def __iter__(self) -> Iterator[Sequence]:
        """In the order in which they should be admitted, each at most once.

        Between two steps of the iteration the sequence that came last may be admitted, others may come to later bands,
        and nothing else may happen.
        """
        self._promote()
        for band in self._bands.values():
            yield from band.in_turn(self._cached)

    def head(self, count: int) -> tuple[Sequence, ...]:
        """About those that come next, at most ``count``: as iteration gives them, but without a look at the cache."""
        return tuple(islice(chain.from_iterable(band.in_turn(None) for band in self._bands.values()), count))

    def __len__(self) -> int:
        return len(self._since)

    def _promote(self) -> None:
        """Let those who have waited for too long go over to the first band."""
        now = self._clock()
        for priority, patience in PATIENCE.items():
            for sequence in self._bands[priority].waiting_since(now - patience, self._since):
                self._bands[priority].remove(sequence)
                sequence.priority = Priority.REALTIME
                self._bands[Priority.REALTIME].push(sequence)


class _Band:
    """What waits in one band: preempted sequences, and a flow for each tenant of whom something waits."""

    def __init__(self) -> None:
        self.counters = TokenCounters()
        self._resumed: OrderedDict[int, Sequence] = OrderedDict()
        self._flows: dict[str, OrderedDict[int, Sequence]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._resumed and not self._flows

    def push(self, sequence: Sequence) -> None:
        if sequence.tenant not in self._flows:
            self.counters.join(sequence.tenant, self._flows)
            self._flows[sequence.tenant] = OrderedDict()
        self._flows[sequence.tenant][sequence.id] = sequence

    def resume(self, sequence: Sequence) -> None:
        self._resumed[sequence.id] = sequence
        self._resumed.move_to_end(sequence.id, last=False)

    def remove(self, sequence: Sequence) -> None:
        if self._resumed.pop(sequence.id, None):
            return
        flow = self._flows[sequence.tenant]
        del flow[sequence.id]
        if not flow:
            del self._flows[sequence.tenant]
            self.counters.leave(sequence.tenant)

    def count_overtaken(self, sequence: Sequence) -> None:
        """Note for those who came before ``sequence`` that it starts and they do not."""
        if sequence.id in self._resumed:
            return
        for earlier in islice(self._flows[sequence.tenant].values(), WINDOW):
            if earlier is sequence:
                return
            earlier.num_overtaken += 1

    def waiting_since(self, latest: float, since: dict[int, float]) -> list[Sequence]:
        """Those who have waited since ``latest`` or longer."""
        found = [sequence for sequence in self._resumed.values() if since[sequence.id] <= latest]
        for flow in self._flows.values():
            for sequence in flow.values():
                if since[sequence.id] > latest:
                    break
                found.append(sequence)
        return found

    def in_turn(self, cached: Callable[[Sequence], int] | None) -> Iterator[Sequence]:
        yield from tuple(self._resumed.values())
        flows = {tenant: list(flow.values()) for tenant, flow in self._flows.items()}
        while flows:
            tenant = min(flows, key=self.counters.served)
            waiting = flows[tenant]
            yield waiting.pop(_best(waiting[:WINDOW], cached))
            if not waiting:
                del flows[tenant]


def _best(waiting: list[Sequence], cached: Callable[[Sequence], int] | None) -> int:
    """Which of these, in order of arrival, comes first."""
    if cached is None or len(waiting) == 1:
        return 0
    patient = (i for i, sequence in enumerate(waiting) if sequence.num_overtaken >= MAX_OVERTAKEN)
    if (first := next(patient, None)) is not None:
        return first
    counts = [cached(sequence) for sequence in waiting]
    return counts.index(max(counts))
