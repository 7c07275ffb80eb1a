"""When a waiting sequence may start: are pages and slot to be had, would it compute what another is computing now?"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

from ...radix.token_runs import common_prefix
from ..kv_cache.prefix_cache import Lease, PrefixCache
from ..sequence.sequence import Sequence
from ..types import Priority


class AdapterSlots(Protocol):
    """What admission needs of the adapters' slots: ints. ``lora.device_slots.SlotPool``, or a fake in tests."""

    def acquire(self, adapter: int) -> int:
        """A slot for one more sequence of an adapter, held until ``release``; negative if it must wait."""

    def release(self, index: int) -> None:
        """A sequence is done with a slot."""

    def is_ready(self, adapter: int) -> bool:
        """Whether an adapter is in a slot."""

    def prefetch(self, adapter: int) -> None:
        """Bring an adapter to a slot, or keep its place in the line for one."""


class SlotRequests:
    """The slots that waiting sequences ask for in one step.

    Args:
        slots: of adapters; None if there are none, and no sequence has one.
        most_waiting: adapters for which a slot may be asked for in vain. Those on the device already may always ask.
    """

    def __init__(self, slots: AdapterSlots | None, most_waiting: int) -> None:
        self._slots = slots
        self._most_waiting = most_waiting
        self._waiting: set[int] = set()

    def ask(self, adapter: int) -> int | None:
        """A slot for a sequence of an adapter, -1 for the base model, which needs none; None if it must wait."""
        if adapter < 0 or self._slots is None:
            return -1
        is_late = len(self._waiting) >= self._most_waiting
        if adapter in self._waiting or (is_late and not self._slots.is_ready(adapter)):
            return None
        slot = self._slots.acquire(adapter)
        if slot < 0:
            self._waiting.add(adapter)
            return None
        return slot


def prefetch(slots: AdapterSlots, coming: Iterable[Sequence]) -> None:
    """Have the adapters of those who come next loaded, also while rows or pages are what they wait for.

    Their place in the line for slots counts from now on: it would not if they asked only when a row is free.
    """
    for adapter in {sequence.adapter: None for sequence in coming}:
        if adapter >= 0:
            slots.prefetch(adapter)


def pages_missing(sequence: Sequence, page_size: int) -> int:
    """Pages that a sequence still lacks to hold all its tokens and the next one."""
    held = len(sequence.lease.pages) if sequence.lease else 0
    return max(0, -(-(sequence.num_tokens + 1) // page_size) - held)


def try_acquire(cache: PrefixCache, sequence: Sequence, running: Iterable[Sequence]) -> Lease | None:
    """Lease the cached prefix of a sequence if the pages for the rest of its tokens are to be had as well.

    What the running sequences still need for their prompts, and one page more for each to grow into, is left to
    them: to admit a sequence and preempt it a step later would be work for nothing. With nothing running every page
    is free or evictable, and a sequence that fits the pool at all is admitted.

    Returns:
        The lease, or None (and nothing changed) if it must wait.
    """
    spoken_for = sum(pages_missing(other, cache.page_size) + 1 for other in running)
    lease = cache.acquire(sequence.path, sequence.tokens, sequence.reusable)
    needed = -(-(sequence.num_tokens + 1) // cache.page_size) - len(lease.pages)
    if needed + spoken_for > cache.available():
        cache.release(lease, sequence.tokens, lease.num_tokens)
        return None
    return lease


def giving_way(cache: PrefixCache, sequence: Sequence, running: Seq[Sequence]) -> list[Sequence]:
    """The running sequences that may be preempted to admit one that waits, the first to go first.

    Those of the last band give way to those of the others, the last admitted first. Nobody does where even all of
    them would not make room for it: what the others hold or need is too much.
    """
    late = [other for other in reversed(running) if other.priority is Priority.BATCH]
    if sequence.priority is Priority.BATCH or not late:
        return []
    spoken_for = sum(
        pages_missing(other, cache.page_size) + 1 for other in running if other.priority is not Priority.BATCH
    )
    to_be_had = cache.available() + sum(len(other.lease.pages) for other in late if other.lease)
    return late if pages_missing(sequence, cache.page_size) + spoken_for <= to_be_had else []


def prefix_in_progress(cache: PrefixCache, sequence: Sequence, running: Iterable[Sequence]) -> bool:
    """Whether a running sequence is about to compute a page that this one needs too and the tree does not hold yet.

    Then waiting is cheaper than computing it twice, and bounded: the other gets tokens in every step until its
    prompt is done. Sequences that arrive together thereby compute their common part once. Nobody waits for a sequence
    of a later band, which may be preempted.
    """
    limit = sequence.reusable
    found = -1
    for other in running:
        if not other.prefilling or other.path != sequence.path or other.priority > sequence.priority:
            continue
        common = common_prefix(sequence.tokens, other.tokens, limit) // cache.page_size * cache.page_size
        if common <= other.num_computed:
            continue
        found = cache.match(sequence.path, sequence.tokens, limit) if found < 0 else found
        if common > found:
            return True
    return False
