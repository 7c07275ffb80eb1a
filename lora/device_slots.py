"""Device slots: assigns adapters to slots, by numbers only. Adapters are load ids, slots are 0 .. num_slots - 1.

    empty --request--> loading --loaded--> ready, wanted --acquire--> pinned --last release--> ready, idle
      ^                   |failed                |not asked for                     ^               |
      +-------------------+                      +----------------------------------+----evicted----+--> loading

Ready slots without pins are evicted, the least recently used first. A slot that was loaded for a request that still
waits is kept. When all slots are pinned and an adapter has waited for ``patience`` steps, the slot with the fewest pins
is closed to new sequences, and the waiting adapter gets it when the sequences that hold it have ended. So no adapter
waits longer than ``patience`` steps and the longest running sequence.

Adapters with an embedding or a head of their own need far more memory than others: at most ``max_own`` of them are in
slots at one time. If the limit is reached, the next one replaces one of them, by the same rules.

A load may take long, and its slot cannot be used meanwhile. So the loads of a tenant may occupy at most as many slots
as they leave free for others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ..tenancy.tenant_shares import TenantShares

WAIT = -1
"""Result of ``acquire`` while no slot is available."""

_NONE = -1


@dataclass(slots=True)
class _Slot:
    """A device slot.

    It has the load id of the adapter that it holds or loads, the tenant for whom it is loading, and whether it is
    ready. ``heir`` is the adapter for which the slot is closed to new sequences. ``used`` and ``wanted`` are the steps
    of the slot's last use and of the last request for the slot.
    """

    adapter: int = _NONE
    tenant: str = ""
    ready: bool = False
    pins: int = 0
    heir: int = _NONE
    used: int = 0
    # The last step in which a request wanted the slot but could not acquire it.
    wanted: int = -(1 << 62)


@dataclass(frozen=True, slots=True)
class SlotState:
    """State of a slot.

    It has the load id (-1 for none), whether that adapter is loaded, the number of sequences that hold the slot, and
    whether the slot is closed to new sequences.
    """

    adapter: int
    ready: bool
    pins: int
    closing: bool


@dataclass(slots=True)
class _Wait:
    """The step since which an adapter waits for a slot, the step of its last request, and that request's tenant."""

    since: int
    requested: int
    tenant: str


class SlotPool:
    """Assigns slots to adapters. Only this class changes the assignment.

    Args:
        num_slots: number of slots.
        patience: number of steps that an adapter waits before a slot is closed to new sequences of other adapters.
        load: starts to load an adapter into host memory for ``install``, given its load id and the tenant whose share
            is used; a call of ``loaded`` or ``failed`` follows, perhaps at once.
        install: writes an adapter into a slot: (slot, load id).
        clear: called when an adapter leaves a slot: (slot, load id).
        max_own: number of slots for adapters with an embedding or a head of their own.
        brings_own: returns whether an adapter, given by load id, has an embedding or a head of its own.
    """

    def __init__(
        self,
        num_slots: int,
        patience: int,
        load: Callable[[int, str], None],
        install: Callable[[int, int], None],
        clear: Callable[[int, int], None],
        max_own: int | None = None,
        brings_own: Callable[[int], bool] = lambda _adapter: False,
    ) -> None:
        if num_slots < 1 or patience < 1:
            raise ValueError(f"{num_slots} slots and a patience of {patience} steps; both must be at least 1")
        self._slots = [_Slot() for _ in range(num_slots)]
        self._patience = patience
        self._load = load
        self._install = install
        self._clear = clear
        self._max_own = num_slots if max_own is None else max_own
        self._brings_own = brings_own
        self._loading = TenantShares(num_slots)
        self._of: dict[int, int] = {}
        self._waits: dict[int, _Wait] = {}
        self._step = 0

    @property
    def num_pinned(self) -> int:
        return sum(1 for slot in self._slots if slot.pins)

    @property
    def num_resident(self) -> int:
        return sum(1 for slot in self._slots if slot.ready)

    def pins(self, adapter: int) -> int:
        index = self._of.get(adapter)
        return 0 if index is None else self._slots[index].pins

    def is_ready(self, adapter: int) -> bool:
        index = self._of.get(adapter)
        return index is not None and self._slots[index].ready

    def is_loading(self, adapter: int) -> bool:
        """Return whether an adapter's slot waits for ``loaded`` or ``failed``."""
        index = self._of.get(adapter)
        return index is not None and not self._slots[index].ready

    def states(self) -> list[SlotState]:
        return [SlotState(slot.adapter, slot.ready, slot.pins, slot.heir != _NONE) for slot in self._slots]

    def tick(self) -> None:
        """Begin a step, and forget adapters that no longer request a slot."""
        self._step += 1
        stale = [a for a, wait in self._waits.items() if self._step - wait.requested > self._patience]
        for adapter in stale:
            self._forget_wait(adapter)

    def acquire(self, adapter: int, tenant: str = "") -> int:
        """Return a slot for one more sequence of an adapter, held until ``release``; ``WAIT`` if none is free.

        After ``WAIT`` the caller calls again in a later step. Until then the load in progress, or the adapter's
        position in the queue for slots, is kept.

        Args:
            tenant: tenant whose share of the loads is used.
        """
        index = self._request(adapter, tenant)
        if index == WAIT:
            self._starve(adapter, tenant)
            return WAIT
        slot = self._slots[index]
        if not slot.ready or slot.heir != _NONE:
            slot.wanted = self._step
            return WAIT
        slot.pins += 1
        slot.used = self._step
        slot.wanted = -(1 << 62)
        return index

    def release(self, index: int) -> None:
        """Release one hold of a slot. Raises ValueError if the slot is not held."""
        slot = self._slots[index]
        if not slot.pins:
            raise ValueError(f"slot {index} is not held")
        slot.pins -= 1
        slot.used = self._step
        if not slot.pins and slot.heir != _NONE:
            heir, slot.heir = slot.heir, _NONE
            if any(other == index for other, _ in self._slots_for(heir)):
                self._give(index, heir, self._waits[heir].tenant)

    def prefetch(self, adapter: int, tenant: str = "") -> None:
        """Load an adapter for a sequence that cannot run yet, as ``acquire`` does, but without holding a slot.

        Call this in each step while the sequence waits for something else. Otherwise the position in the queue is lost.
        """
        index = self._request(adapter, tenant)
        if index == WAIT:
            self._starve(adapter, tenant)
        elif not self._slots[index].pins:
            self._slots[index].wanted = self._step

    def loaded(self, adapter: int) -> None:
        """Install an adapter that ``load`` has loaded, unless its slot was given to another adapter meanwhile."""
        index = self._of.get(adapter)
        if index is not None and not self._slots[index].ready:
            self._install(index, adapter)
            self._slots[index].ready = True
            self._loading.give_back(self._slots[index].tenant)

    def failed(self, adapter: int) -> None:
        """Free the slot of an adapter that could not be loaded."""
        index = self._of.get(adapter)
        if index is not None and not self._slots[index].ready:
            self._empty(index)
        self._forget_wait(adapter)

    def drop(self, adapter: int) -> None:
        """Remove an adapter permanently. Raises ValueError if a sequence still holds its slot."""
        self._forget_wait(adapter)
        index = self._of.get(adapter)
        if index is None:
            return
        if self._slots[index].pins:
            raise ValueError(f"adapter {adapter} is still used in slot {index}")
        self._empty(index)

    def clear(self) -> None:
        """Empty all slots, including slots in use, whose sequences have ended.

        Adapters are loaded again on request.
        """
        for index in range(len(self._slots)):
            self._empty(index)
        self._waits.clear()

    def check(self) -> None:
        """Raise AssertionError if slots and index contradict each other."""
        held = {slot.adapter: index for index, slot in enumerate(self._slots) if slot.adapter != _NONE}
        assert held == self._of, f"slots {held}, index {self._of}"
        loading = Counter(slot.tenant for slot in self._slots if slot.adapter != _NONE and not slot.ready)
        assert all(self._loading.held(tenant) == count for tenant, count in loading.items()), f"loads {loading}"
        assert self._loading.total == loading.total(), f"{self._loading.total} loads, of these {loading} in slots"
        for index, slot in enumerate(self._slots):
            assert not slot.pins or slot.ready, f"slot {index} has {slot.pins} pins and is not ready"
            assert slot.pins or slot.heir == _NONE, f"slot {index} is closed for {slot.heir} without being used"
            assert slot.heir == _NONE or slot.heir in self._waits, f"slot {index} is closed for nobody who waits"

    def _request(self, adapter: int, tenant: str) -> int:
        """Return the adapter's slot, which is ready or loading, or WAIT."""
        index = self._of.get(adapter)
        if index is None:
            index = self._victim(adapter) if self._loading.left_for(tenant) >= 1 else WAIT
            if index == WAIT:
                return WAIT
            self._give(index, adapter, tenant)
            # The adapter has no slot if its load failed at once.
            index = self._of.get(adapter, WAIT)
        return index

    def _slots_for(self, adapter: int) -> list[tuple[int, _Slot]]:
        """Return the slots that an adapter may get, with their indices."""
        slots = list(enumerate(self._slots))
        if not self._brings_own(adapter):
            return slots
        own = [(index, slot) for index, slot in slots if slot.adapter != _NONE and self._brings_own(slot.adapter)]
        return own if len(own) >= self._max_own else slots

    def _victim(self, adapter: int) -> int:
        """Return an empty slot, else the least recently used slot that may be evicted, else WAIT."""
        best, best_used = WAIT, 1 << 62
        for index, slot in self._slots_for(adapter):
            if slot.adapter == _NONE:
                return index
            if slot.ready and not slot.pins and not self._is_wanted(slot) and slot.used < best_used:
                best, best_used = index, slot.used
        return best

    def _is_wanted(self, slot: _Slot) -> bool:
        return self._step - slot.wanted <= self._patience

    def _give(self, index: int, adapter: int, tenant: str) -> None:
        """Empty a slot and start loading an adapter for it."""
        self._empty(index)
        self._waits.pop(adapter, None)
        for slot in self._slots:
            if slot.heir == adapter:
                slot.heir = _NONE
        slot = self._slots[index]
        slot.adapter, slot.tenant, slot.wanted, slot.used = adapter, tenant, self._step, self._step
        self._of[adapter] = index
        self._loading.take(tenant)
        self._load(adapter, tenant)

    def _empty(self, index: int) -> None:
        slot = self._slots[index]
        if slot.adapter == _NONE:
            return
        del self._of[slot.adapter]
        if slot.ready:
            self._clear(index, slot.adapter)
        else:
            self._loading.give_back(slot.tenant)
        self._slots[index] = _Slot()

    def _starve(self, adapter: int, tenant: str) -> None:
        """Record that an adapter waits. After ``patience`` steps, close a slot for this adapter."""
        wait = self._waits.setdefault(adapter, _Wait(self._step, self._step, tenant))
        wait.requested, wait.tenant = self._step, tenant
        if self._loading.left_for(tenant) < 1:
            return
        if self._step - wait.since < self._patience or any(slot.heir == adapter for slot in self._slots):
            return
        open_slots = [slot for _, slot in self._slots_for(adapter) if slot.pins and slot.heir == _NONE]
        if open_slots:
            min(open_slots, key=lambda slot: (slot.pins, slot.used)).heir = adapter

    def _forget_wait(self, adapter: int) -> None:
        self._waits.pop(adapter, None)
        for slot in self._slots:
            if slot.heir == adapter:
                slot.heir = _NONE
