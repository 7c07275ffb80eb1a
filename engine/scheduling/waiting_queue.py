"""Waiting queue: orders sequences for admission by priority class, by tenant and by prefix hit.

    priority class   preempted sequences first, in their order; of the others:
    |- tenant          the tenant with the lowest token counter (``fairness.TokenCounters``)
       |- sequence       by prefix hit, or by the deadline of its first token (``tenant_queue.TenantQueue``)

Each priority class is served before all later classes, so later classes could starve. Therefore a sequence that has
waited for ``PATIENCE`` seconds, including earlier waits, moves to the first class. Among tenants, the token counters
prevent starvation.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from types import MappingProxyType

from ..sequence.sequence import Sequence
from ..types import Priority
from .fairness import TokenCounters
from .tenant_queue import Cached, TenantQueue, WaitingEntry

PATIENCE = {Priority.INTERACTIVE: 60.0, Priority.BATCH: 600.0}
"""Longest time in seconds that a sequence waits in its priority class, summed over all its waits."""
AIM = 0.9
"""Fraction of the target time to first token for which a sequence is planned.

It is less than 1, because step times vary.
"""


class WaitingQueue:
    """All waiting sequences by priority class and tenant. The queue reads sequences and does not change them.

    ``push``, ``requeue`` and ``remove`` take O(1) time in the number of sequences.

    Args:
        cached: returns the number of a sequence's tokens that are in the prefix cache now; None without a cache.
        clock: returns monotonic time in seconds.
        target_ttft: target time to first token in seconds by priority class; a class without an entry has no deadlines.
        prefill_seconds: returns a lower bound of the seconds that the prefill of the given number of tokens takes.
    """

    def __init__(
        self,
        cached: Cached = None,
        clock: Callable[[], float] = time.monotonic,
        target_ttft: Mapping[Priority, float] = MappingProxyType({}),
        prefill_seconds: Callable[[int], float] = lambda num_tokens: 0.0,
    ) -> None:
        self._target_ttft = target_ttft
        self._prefill_seconds = prefill_seconds
        self._classes = {priority: _PriorityClass() for priority in Priority}
        self._waiting: dict[int, WaitingEntry] = {}
        self._admitted: dict[int, WaitingEntry] = {}
        self._cached = cached
        self._clock = clock

    def push(self, sequence: Sequence) -> None:
        """Add a new sequence."""
        entry = WaitingEntry(sequence, sequence.priority, self._clock())
        self._waiting[sequence.id] = entry
        self._push(entry)

    def requeue(self, sequence: Sequence) -> None:
        """Add a preempted sequence at the head of its priority class. Its earlier waits count."""
        entry = self._waiting[sequence.id] = self._admitted.pop(sequence.id)
        entry.since = self._clock() - entry.waited
        self._classes[entry.priority].resume(entry)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended, whether it waits or was admitted. Raises KeyError if it is unknown."""
        if not self._admitted.pop(sequence.id, None):
            self._leave(sequence)

    def admit(self, sequence: Sequence) -> None:
        """Remove a sequence from the queue because it starts."""
        entry = self._waiting[sequence.id]
        entry.waited = self._clock() - entry.since
        self._classes[entry.priority].count_admission(entry)
        self._admitted[sequence.id] = self._leave(sequence)

    def promote(self) -> list[Sequence]:
        """Move sequences that have waited for too long to the first priority class.

        Returns:
            The moved sequences. The caller must set their ``priority``, because the queue does not write sequences.
        """
        now = self._clock()
        promoted = []
        for priority, patience in PATIENCE.items():
            for entry in self._classes[priority].waiting_since(now - patience):
                self._classes[priority].remove(entry)
                entry.priority = Priority.REALTIME
                self._push(entry)
                promoted.append(entry.sequence)
        return promoted

    def charge_prompt(self, sequence: Sequence) -> None:
        """Charge the prompt of a sequence to its tenant. Call it once the sequence's ``num_cached`` is known."""
        counters = self._classes[sequence.priority].counters
        counters.charge_prompt(sequence.spec.tenant, sequence.num_prompt, sequence.counts.num_cached)

    def charge_tokens(self, sequence: Sequence, count: int) -> None:
        self._classes[sequence.priority].counters.charge_tokens(sequence.spec.tenant, count)

    def has_before(self, priority: Priority) -> bool:
        """Return whether a sequence of a class before ``priority`` waits."""
        return any(not self._classes[each].is_empty for each in Priority if each < priority)

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the sequences in the order of admission, each at most once.

        Between two items, the sequence that was yielded last may be admitted, and others may be added to later priority
        classes. Nothing else may change.
        """
        for each in self._classes.values():
            yield from each.in_order(self._cached, self._clock)

    def head(self, count: int) -> tuple[Sequence, ...]:
        """Return about the next ``count`` sequences, in the order of iteration but without prefix lookups."""
        orders = (each.in_order(None, self._clock) for each in self._classes.values())
        return tuple(islice(chain.from_iterable(orders), count))

    def __len__(self) -> int:
        return len(self._waiting)

    def _push(self, entry: WaitingEntry) -> None:
        """Add an entry to its class. The deadline of a promoted entry counts from now, as for a new entry."""
        if (target := self._target_ttft.get(entry.priority)) is not None:
            entry.latest_start = self._clock() + AIM * target - self._prefill_seconds(entry.sequence.num_tokens)
        self._classes[entry.priority].push(entry)

    def _leave(self, sequence: Sequence) -> WaitingEntry:
        entry = self._waiting.pop(sequence.id)
        self._classes[entry.priority].remove(entry)
        return entry


class _PriorityClass:
    """Waiting sequences of one priority class: the preempted sequences, and one queue for each tenant."""

    def __init__(self) -> None:
        self.counters = TokenCounters()
        self._preempted: OrderedDict[int, WaitingEntry] = OrderedDict()
        self._tenants: dict[str, TenantQueue] = {}

    @property
    def is_empty(self) -> bool:
        return not self._preempted and not self._tenants

    def push(self, entry: WaitingEntry) -> None:
        tenant = entry.sequence.spec.tenant
        if tenant not in self._tenants:
            self.counters.join(tenant, self._tenants)
            self._tenants[tenant] = TenantQueue()
        self._tenants[tenant].push(entry)

    def resume(self, entry: WaitingEntry) -> None:
        self._preempted[entry.sequence.id] = entry
        self._preempted.move_to_end(entry.sequence.id, last=False)

    def remove(self, entry: WaitingEntry) -> None:
        sequence = entry.sequence
        if self._preempted.pop(sequence.id, None):
            return
        queue = self._tenants[sequence.spec.tenant]
        queue.remove(entry)
        if not queue:
            del self._tenants[sequence.spec.tenant]
            self.counters.leave(sequence.spec.tenant)

    def count_admission(self, admitted: WaitingEntry) -> None:
        """Update the counts of a tenant's other entries for an admission."""
        if admitted.sequence.id not in self._preempted:
            self._tenants[admitted.sequence.spec.tenant].count_admission(admitted)

    def waiting_since(self, latest: float) -> list[WaitingEntry]:
        """Return the entries whose waiting time began at ``latest`` or earlier."""
        found = [entry for entry in self._preempted.values() if entry.since <= latest]
        for queue in self._tenants.values():
            for entry in queue:
                if entry.since > latest:
                    break
                found.append(entry)
        return found

    def in_order(self, cached: Cached, clock: Callable[[], float]) -> Iterator[Sequence]:
        yield from [entry.sequence for entry in self._preempted.values()]
        now = clock()
        tenants = {tenant: queue.read(now) for tenant, queue in self._tenants.items()}
        while tenants:
            tenant = min(tenants, key=self.counters.served)
            if (entry := tenants[tenant].next(cached)) is not None:
                yield entry.sequence
            else:
                del tenants[tenant]
