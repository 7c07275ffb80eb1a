"""Admission: decides whether a waiting sequence may start, by free rows, adapter slots, pages and its cached prefix."""

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
    """Allocates rows to sequences. A row is an index into the page table and into the sampler's state.

    Attributes:
        size: number of rows.
        free: indices of free rows. The last row in the list is allocated next.
        owners: the sequence of each row in use, by the row's index.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = list(range(size - 1, -1, -1))
        self.owners: dict[int, Sequence] = {}

    def take(self, sequence: Sequence) -> int:
        """Allocate a free row to a sequence. Returns the row's index. Raises IndexError if no row is free."""
        row = self.free.pop()
        self.owners[row] = sequence
        return row

    def give_back(self, row: int) -> None:
        """Free the row of a sequence."""
        del self.owners[row]
        self.free.append(row)


class AdapterSlots(Protocol):
    """Interface of the device slots of adapters: ``lora.device_slots.SlotPool``, or a fake in tests.

    ``adapter`` is a load id.
    """

    def acquire(self, adapter: int, tenant: str) -> int:
        """Return an adapter's slot for a tenant's sequence, held until ``release``; negative if it must wait."""

    def release(self, index: int) -> None:
        """Release a slot that one sequence has acquired."""

    def is_ready(self, adapter: int) -> bool:
        """Return whether an adapter is loaded in a slot."""

    def prefetch(self, adapter: int, tenant: str) -> None:
        """Load an adapter into a slot of a tenant's share, or keep the adapter's position in the queue for slots."""


class SlotRequests:
    """Requests for device slots by the waiting sequences that one step considers.

    Args:
        slots: device slots of adapters; None if the engine has no adapters.
        most_waiting: number of adapters that may wait for a slot in one step. Adapters that are already on the device
            may always be requested.
    """

    def __init__(self, slots: AdapterSlots | None, most_waiting: int) -> None:
        self._slots = slots
        self._most_waiting = most_waiting
        self._waiting: set[int] = set()

    def acquire(self, adapter: int, tenant: str) -> int | None:
        """Acquire a slot for a tenant's sequence. Returns -1 for the base model, and None if the sequence must wait."""
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

    So an adapter's time in the queue for slots begins with this call, and not only when a row becomes free.
    """
    for adapter, tenant in {sequence.spec.adapter: sequence.spec.tenant for sequence in coming}.items():
        if adapter >= 0:
            slots.prefetch(adapter, tenant)


def num_reusable(cache: PrefixCache, sequence: Sequence) -> int:
    """Return the number of a waiting sequence's tokens whose KV is in the prefix cache."""
    return cache.match(sequence.path, sequence.tokens, sequence.reusable)


def awaits_pages(cache: PrefixCache, sequence: Sequence) -> bool:
    """Return whether KV of a waiting sequence is being read from a tier. Starts to read it if a tier has it."""
    return cache.awaits_pages(sequence.id, sequence.path, sequence.tokens, sequence.reusable)


def read_ahead(cache: PrefixCache, tiers: KvTiers, coming: Iterable[Sequence]) -> None:
    """Start to read KV of the next sequences from the tiers, even while these sequences wait for rows or pages."""
    for sequence in coming:
        if not tiers.knows(sequence.id):
            awaits_pages(cache, sequence)


def lacks_more(cache: PrefixCache, sequence: Sequence, most: int) -> bool:
    """Return whether more than ``most`` tokens of a waiting sequence have no cached KV."""
    return sequence.num_tokens > most and sequence.num_tokens - num_reusable(cache, sequence) > most


def pages_missing(sequence: Sequence, page_size: int) -> int:
    """Return the number of pages that a sequence still needs for the KV of all its tokens and of the next token."""
    held = len(sequence.lease.pages) if sequence.lease else 0
    return max(0, -(-(sequence.num_tokens + 1) // page_size) - held)


def lacks_pages(cache: PrefixCache, sequence: Sequence, running: Iterable[Sequence]) -> bool:
    """Return whether the pool has too few pages for the next waiting sequence. A prefix hit is not considered."""
    reserved = sum(pages_missing(other, cache.page_size) + 1 for other in running)
    return pages_missing(sequence, cache.page_size) + reserved > cache.available()


def try_acquire(cache: PrefixCache, sequence: Sequence, running: Iterable[Sequence]) -> Lease | None:
    """Acquire a lease of a sequence's cached prefix.

    Returns None if the pages for the remaining tokens are not available.

    The pages that running sequences still need for their prompts, and one more page for each of them to grow, are
    reserved. So an admitted sequence is not preempted one step later. If no sequence runs, every page is free or
    evictable, so any sequence that fits the pool is admitted.
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

    Sequences of the batch class may be preempted for any other priority class; the sequence that was admitted last is
    preempted first. The list is empty if the waiting sequence could not start even after all of them were preempted. In
    that case either pages would still be missing, or running sequences of other classes, for example with a long
    prompt, would use up the token budget.

    Args:
        plan: plan of the step, in which the running sequences have already received their tokens.
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
    """Return the number of tokens that would be computed twice if a sequence started now, while another one computes
    its prefix.

    These are the tokens of full pages that a running sequence is computing, that the waiting sequence needs too, and
    that are not in the tree yet. Sequences that arrive together mostly share all of these pages, so the tokens are
    counted once for each sequence that could start in the step. A sequence that waits for such pages waits for a
    bounded time, because the running sequence gets tokens in every step until its prompt is computed. The result is 0
    if the running sequence has a later priority class, because such a sequence may be preempted.

    Args:
        plan: plan of the step, as far as it is filled.
        num_waiting: number of sequences in the queue, including this one.
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
