"""Which adapter has which device slot. Ints only: adapters are load ids, slots are 0 .. num_slots - 1.

    empty --request--> loading --loaded--> ready, wanted --acquire--> pinned --last release--> ready, idle
      ^                   |failed                |not asked for                     ^               |
      +-------------------+                      +----------------------------------+----evicted----+--> loading

A ready slot without pins may go to another adapter, the longest unused first; one that was loaded for an adapter that
still waits is kept for it. When all slots are pinned and an adapter has waited for ``patience`` steps, the slot with
the fewest pins is closed to new sequences: when its running ones are done it goes to the one that waited. So no adapter
waits longer than ``patience`` steps and the longest running sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

WAIT = -1
"""What ``acquire`` returns when there is no slot yet."""

_NOBODY = -1


@dataclass(slots=True)
class _Slot:
    """Attributes: adapter, the load id it holds or loads; heir, for whom it is closed; used, wanted: steps."""

    adapter: int = _NOBODY
    ready: bool = False
    pins: int = 0
    heir: int = _NOBODY
    used: int = 0
    wanted: int = -(1 << 62)  # last step in which its adapter was asked for and not yet acquired


@dataclass(frozen=True, slots=True)
class SlotState:
    """How a slot stands: the load id that it holds or waits for (-1 for none), whether that is there, sequences that
    hold it, and whether it takes no more of them.
    """

    adapter: int
    ready: bool
    pins: int
    closing: bool


@dataclass(slots=True)
class _Wait:
    """Since which step an adapter waits for a slot, and in which it last asked."""

    since: int
    asked: int


class SlotPool:
    """The only writer of device slots.

    Args:
        num_slots: slots.
        patience: steps after which a waiting adapter gets a slot closed for it.
        load: start to bring an adapter to where ``install`` finds it; ``loaded`` or ``failed`` follows, perhaps at
            once. Called with the load id.
        install: write an adapter into a slot: (slot, load id).
        clear: an adapter leaves a slot: (slot, load id).
    """

    def __init__(
        self,
        num_slots: int,
        patience: int,
        load: Callable[[int], None],
        install: Callable[[int, int], None],
        clear: Callable[[int, int], None],
    ) -> None:
        if num_slots < 1 or patience < 1:
            raise ValueError(f"{num_slots} slots and a patience of {patience} steps; both must be at least 1")
        self._slots = [_Slot() for _ in range(num_slots)]
        self._patience = patience
        self._load = load
        self._install = install
        self._clear = clear
        self._of: dict[int, int] = {}
        self._waits: dict[int, _Wait] = {}
        self._step = 0

    @property
    def num_pinned(self) -> int:
        """Slots that a running sequence uses."""
        return sum(1 for slot in self._slots if slot.pins)

    @property
    def num_resident(self) -> int:
        """Slots whose adapter is ready."""
        return sum(1 for slot in self._slots if slot.ready)

    def pins(self, adapter: int) -> int:
        """Running sequences that hold this adapter's slot."""
        index = self._of.get(adapter)
        return 0 if index is None else self._slots[index].pins

    def is_ready(self, adapter: int) -> bool:
        """Whether an adapter is in a slot."""
        index = self._of.get(adapter)
        return index is not None and self._slots[index].ready

    def states(self) -> list[SlotState]:
        """All slots as they stand."""
        return [SlotState(slot.adapter, slot.ready, slot.pins, slot.heir != _NOBODY) for slot in self._slots]

    def tick(self) -> None:
        """A step begins."""
        self._step += 1
        stale = [a for a, wait in self._waits.items() if self._step - wait.asked > self._patience]
        for adapter in stale:
            self._forget_wait(adapter)

    def acquire(self, adapter: int) -> int:
        """A slot for one more sequence of an adapter, held until ``release``; ``WAIT`` if it must wait.

        To be asked again in a later step; a request for the slot, or a place in the line for one, is kept meanwhile.
        """
        index = self._request(adapter)
        if index == WAIT:
            self._starve(adapter)
            return WAIT
        slot = self._slots[index]
        if not slot.ready or slot.heir != _NOBODY:
            slot.wanted = self._step
            return WAIT
        slot.pins += 1
        slot.used = self._step
        slot.wanted = -(1 << 62)
        return index

    def release(self, index: int) -> None:
        """A sequence is done with a slot. ValueError if nobody holds it."""
        slot = self._slots[index]
        if not slot.pins:
            raise ValueError(f"slot {index} is not held")
        slot.pins -= 1
        slot.used = self._step
        if not slot.pins and slot.heir != _NOBODY:
            self._give(index, slot.heir)

    def prefetch(self, adapter: int) -> None:
        """Bring an adapter to a slot for a sequence that cannot take it yet: as ``acquire``, but nothing is held.

        To be called in each step while the sequence waits for something else, or its place in the line is lost.
        """
        index = self._request(adapter)
        if index == WAIT:
            self._starve(adapter)
        elif not self._slots[index].pins:
            self._slots[index].wanted = self._step

    def loaded(self, adapter: int) -> None:
        """What ``load`` was asked for is there. Ignored if its slot went to another adapter meanwhile."""
        index = self._of.get(adapter)
        if index is not None and not self._slots[index].ready:
            self._install(index, adapter)
            self._slots[index].ready = True

    def failed(self, adapter: int) -> None:
        """An adapter cannot be loaded: its slot is free again."""
        index = self._of.get(adapter)
        if index is not None and not self._slots[index].ready:
            self._empty(index)
        self._forget_wait(adapter)

    def drop(self, adapter: int) -> None:
        """An adapter is gone for good. ValueError if a sequence still holds its slot."""
        self._forget_wait(adapter)
        index = self._of.get(adapter)
        if index is None:
            return
        if self._slots[index].pins:
            raise ValueError(f"adapter {adapter} is still used in slot {index}")
        self._empty(index)

    def check(self) -> None:
        """Raise AssertionError if slots and index contradict each other."""
        held = {slot.adapter: index for index, slot in enumerate(self._slots) if slot.adapter != _NOBODY}
        assert held == self._of, f"slots {held}, index {self._of}"
        for index, slot in enumerate(self._slots):
            assert not slot.pins or slot.ready, f"slot {index} has {slot.pins} pins and is not ready"
            assert slot.pins or slot.heir == _NOBODY, f"slot {index} is closed for {slot.heir} without being used"
            assert slot.heir == _NOBODY or slot.heir in self._waits, f"slot {index} is closed for nobody who waits"

    def _request(self, adapter: int) -> int:
        """The adapter's slot, ready or loading, or WAIT."""
        index = self._of.get(adapter)
        if index is None:
            index = self._victim()
            if index == WAIT:
                return WAIT
            self._give(index, adapter)
            index = self._of.get(adapter, WAIT)  # none again if the load failed at once
        return index

    def _victim(self) -> int:
        """A slot that may go to another adapter: an empty one, else the longest unused, or WAIT."""
        best, best_used = WAIT, 1 << 62
        for index, slot in enumerate(self._slots):
            if slot.adapter == _NOBODY:
                return index
            if slot.ready and not slot.pins and not self._is_wanted(slot) and slot.used < best_used:
                best, best_used = index, slot.used
        return best

    def _is_wanted(self, slot: _Slot) -> bool:
        return self._step - slot.wanted <= self._patience

    def _give(self, index: int, adapter: int) -> None:
        """Take a slot from whoever has it, and start to load an adapter for it."""
        self._empty(index)
        self._waits.pop(adapter, None)
        for slot in self._slots:
            if slot.heir == adapter:
                slot.heir = _NOBODY
        slot = self._slots[index]
        slot.adapter, slot.wanted, slot.used = adapter, self._step, self._step
        self._of[adapter] = index
        self._load(adapter)

    def _empty(self, index: int) -> None:
        slot = self._slots[index]
        if slot.adapter == _NOBODY:
            return
        del self._of[slot.adapter]
        if slot.ready:
            self._clear(index, slot.adapter)
        self._slots[index] = _Slot()

    def _starve(self, adapter: int) -> None:
        """Note that an adapter waits; after ``patience`` steps close a slot for it."""
        wait = self._waits.setdefault(adapter, _Wait(self._step, self._step))
        wait.asked = self._step
        if self._step - wait.since < self._patience or any(slot.heir == adapter for slot in self._slots):
            return
        open_slots = [slot for slot in self._slots if slot.pins and slot.heir == _NOBODY]
        if open_slots:
            min(open_slots, key=lambda slot: (slot.pins, slot.used)).heir = adapter

    def _forget_wait(self, adapter: int) -> None:
        self._waits.pop(adapter, None)
        for slot in self._slots:
            if slot.heir == adapter:
                slot.heir = _NOBODY
