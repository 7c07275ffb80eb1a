"""Admission: whether a waiting sequence may start, by row, adapter slot, pages, victims and shared prefix."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

from ...radix.node import common_prefix
from ..kv_cache.kv_tiers import KvTiers
from ..kv_cache.prefix_cache import Lease, PrefixCache
from ..sequence.sequence import Sequence
from ..types import Priority
from .step_plan import StepPlan


class RowTable:
    """Allocates the rows of the page table and of the sampler's state to sequences.

    Attributes:
        size: number of rows.
        free: indices of rows without a sequence; the last one in the list is taken next.
        owners: the sequence of each row in use, by the row's index.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = list(range(size - 1, -1, -1))
        self.owners: dict[int, Sequence] = {}

    def take(self, sequence: Sequence) -> int:
        """Return a free row, which is the sequence's from now on. IndexError if none is free."""
        row = self.free.pop()
        self.owners[row] = sequence
        return row

    def give_back(self, row: int) -> None:
        """Free the row of a sequence."""
        del self.owners[row]
        self.free.append(row)


class AdapterSlots(Protocol):
    """Device slots of adapters, by load id and slot index: ``lora.device_slots.SlotPool``, or a fake in tests."""

    def acquire(self, adapter: int, tenant: str) -> int:
        """Return a slot for a tenant's sequence of an adapter, held until ``release``; negative if it must wait."""

    def release(self, index: int) -> None:
        """End one sequence's use of a slot."""

    def is_ready(self, adapter: int) -> bool:
        """Return whether an adapter is in a slot."""

    def prefetch(self, adapter: int, tenant: str) -> None:
        """Load an adapter to a slot by a tenant's share, or keep its position in the queue for one."""


class SlotRequests:
    """Device slots for adapters that waiting sequences request in one step.

    Args:
        slots: slots of adapters; None if the engine has no adapters.
        most_waiting: number of adapters that may wait for a slot in one step. Adapters that are already on the device
            may always be requested.
    """

    def __init__(self, slots: AdapterSlots | None, most_waiting: int) -> None:
        self._slots = slots
        self._most_waiting = most_waiting
        self._waiting: set[int] = set()

    def acquire(self, adapter: int, tenant: str) -> int | None:
        """Return a slot for a tenant's sequence of an adapter, -1 for the base model, None if it must wait."""
        if adapter < 0 or self._slots is None:
            return -1
        is_late = len(self._waiting) >= self._most_waiting
        if adapter in self._waiting or (is_late and not self._slots.is_ready(adapter)):
            return None
        slot = self._slots.acquire(adapter, tenant)
        if slot < 0:
            self._waiting.add(adapter)
            return None
        return slot


def prefetch(slots: AdapterSlots, coming: Iterable[Sequence]) -> None:
    """Load the adapters of the next sequences, even while these sequences wait for rows or pages.

    So an adapter's waiting time for a slot counts from this call, not from the moment at which a row is free.
    """
    for adapter, tenant in {sequence.spec.adapter: sequence.spec.tenant for sequence in coming}.items():
        if adapter >= 0:
            slots.prefetch(adapter, tenant)


def num_reusable(cache: PrefixCache, sequence: Sequence) -> int:
    """Return how many tokens of a waiting sequence are in the cache."""
    return cache.match(sequence.path, sequence.tokens, sequence.reusable)


def awaits_pages(cache: PrefixCache, sequence: Sequence) -> bool:
    """Return whether KV of a waiting sequence is being read from a tier."""
    return cache.awaits_pages(sequence.id, sequence.path, sequence.tokens, sequence.reusable)


def read_ahead(cache: PrefixCache, tiers: KvTiers, coming: Iterable[Sequence]) -> None:
    """Begin to read KV of the next sequences from tiers, also while these wait for rows or pages."""
    for sequence in coming:
        if not tiers.knows(sequence.id):
            awaits_pages(cache, sequence)


def lacks_more(cache: PrefixCache, sequence: Sequence, most: int) -> bool:
    """Return whether a waiting sequence lacks more than ``most`` tokens, a prefix hit aside."""
    return sequence.num_tokens > most and sequence.num_tokens - num_reusable(cache, sequence) > most


def pages_missing(sequence: Sequence, page_size: int) -> int:
    """Return how many pages a sequence lacks to hold all its tokens and the next one."""
    held = len(sequence.lease.pages) if sequence.lease else 0
    return max(0, -(-(sequence.num_tokens + 1) // page_size) - held)


def lacks_pages(cache: PrefixCache, sequence: Sequence, running: Iterable[Sequence]) -> bool:
    """Return whether there are too few pages for the next waiting sequence, a prefix hit aside."""
    reserved = sum(pages_missing(other, cache.page_size) + 1 for other in running)
    return pages_missing(sequence, cache.page_size) + reserved > cache.available()


def try_acquire(cache: PrefixCache, sequence: Sequence, running: Iterable[Sequence]) -> Lease | None:
    """Lease the prefix hit of a sequence if pages for the rest of its tokens are available too, else return None.

    The pages that running sequences still need for their prompts, and one more page for each to grow, are reserved. So
    an admitted sequence is not preempted a step later. If no sequence runs, every page is free or evictable, and any
    sequence that fits the pool is admitted.
    """
    reserved = sum(pages_missing(other, cache.page_size) + 1 for other in running)
    fetch = cache.tiers.fetched(sequence.id) if cache.tiers else None
    lease = cache.acquire(sequence.path, sequence.tokens, sequence.reusable, fetch)
    needed = -(-(sequence.num_tokens + 1) // cache.page_size) - len(lease.pages)
    if needed + reserved > cache.available():
        cache.release(lease, sequence.tokens, lease.num_tokens)
        return None
    return lease


def preemption_victims(
    cache: PrefixCache, sequence: Sequence, running: Seq[Sequence], plan: StepPlan
) -> list[Sequence]:
    """Return the running sequences to preempt, in this order, until a waiting sequence can be admitted.

    Sequences of the batch class may be preempted for any other priority class, the last admitted first. The list is
    empty if the waiting sequence could not begin even after all of them were preempted: either pages would still be
    missing, or running sequences of other classes, such as one with a long prompt, would use up the token budget.

    Args:
        plan: plan of the step, in which the running sequences have their tokens.
    """
    victims = [other for other in reversed(running) if other.priority is Priority.BATCH]
    if sequence.priority is Priority.BATCH or not victims:
        return []
    others = [other for other in running if other.priority is not Priority.BATCH]
    if plan.room_without(victims) <= sum(map(plan.num_lacking, others)):
        return []
    reserved = sum(pages_missing(other, cache.page_size) + 1 for other in others)
    available = cache.available() + sum(len(other.lease.pages) for other in victims if other.lease)
    return victims if pages_missing(sequence, cache.page_size) + reserved <= available else []


def computed_twice(
    cache: PrefixCache, sequence: Sequence, running: Iterable[Sequence], plan: StepPlan, num_waiting: int
) -> int:
    """Return how many tokens would be computed twice if a sequence began whose prefix another one computes.

    These are the tokens of whole pages that a running sequence is computing, that the waiting sequence needs too, and
    that are not in the tree yet. Sequences that arrive together mostly share all of these pages, so the tokens are
    counted once for each sequence that could begin in the step. A sequence that waits for such pages waits for a
    bounded time, because the running sequence gets tokens in every step until its prompt is done. The result is 0 if
    the running sequence is of a later priority class, because it may be preempted.

    Args:
        plan: plan of the step, as far as it is filled.
        num_waiting: sequences in the queue, this one included.
    """
    limit = sequence.reusable
    found = shared = -1
    if not cache.sharing:
        return 0
    for other in running:
        if not other.prefilling or other.path != sequence.path or other.priority > sequence.priority:
            continue
        common = common_prefix(sequence.tokens, other.tokens, limit) // cache.page_size * cache.page_size
        if common > max(other.num_computed, shared):
            found = cache.match(sequence.path, sequence.tokens, limit) if found < 0 else found
            shared = common
    if shared <= found:
        return 0
    return (shared - found) * max(1, min(num_waiting, -(-plan.room // (sequence.num_tokens - found))))
