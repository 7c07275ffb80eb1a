"""Device slots against random schedules: pinned stay, nobody starves, ints agree with what was installed."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.machine.thoroughness import repeats

from rootgraft.lora.device_slots import WAIT, SlotPool

PATIENCE = 5


class Device:
    """What is in the slots, and which loads run; loads end when told to."""

    def __init__(self, num_slots: int, *, at_once: bool = False, max_own: int | None = None) -> None:
        self.held: dict[int, int] = {}
        self.loading: list[int] = []
        self.at_once = at_once
        self.num_loads = 0
        self.pool = SlotPool(
            num_slots, PATIENCE, self.load, self.install, self.clear, max_own, lambda adapter: adapter % 3 == 0
        )

    def load(self, adapter: int, _tenant: str) -> None:
        self.num_loads += 1
        if self.at_once:
            self.pool.loaded(adapter)
        else:
            self.loading.append(adapter)

    def install(self, slot: int, adapter: int) -> None:
        assert slot not in self.held and adapter not in self.held.values()
        self.held[slot] = adapter

    def clear(self, slot: int, adapter: int) -> None:
        assert self.held.pop(slot) == adapter

    def finish(self) -> None:
        """All loads end."""
        loading, self.loading = self.loading, []
        for adapter in loading:
            self.pool.loaded(adapter)


class Slots(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.device = Device(3, max_own=1)
        self.pool = self.device.pool
        self.running: list[tuple[int, int]] = []  # (adapter, slot)

    @rule(adapter=st.integers(0, 6), tenant=st.sampled_from(("", "a", "b")))
    def acquire(self, adapter, tenant):
        slot = self.pool.acquire(adapter, tenant)
        if slot != WAIT:
            assert self.device.held[slot] == adapter
            self.running.append((adapter, slot))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data):
        adapter, slot = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        assert self.device.held[slot] == adapter
        self.pool.release(slot)

    @rule(adapter=st.integers(0, 6), tenant=st.sampled_from(("", "a", "b")))
    def prefetch(self, adapter, tenant):
        self.pool.prefetch(adapter, tenant)

    @rule()
    def tick(self):
        self.pool.tick()

    @precondition(lambda self: self.device.loading)
    @rule(data=st.data(), works=st.booleans())
    def load_ends(self, data, works):
        adapter = self.device.loading.pop(data.draw(st.integers(0, len(self.device.loading) - 1)))
        if works:
            self.pool.loaded(adapter)
        else:
            self.pool.failed(adapter)

    @rule(adapter=st.integers(0, 6))
    def drop(self, adapter):
        if any(running == adapter for running, _ in self.running):
            with pytest.raises(ValueError, match="still used"):
                self.pool.drop(adapter)
        else:
            self.pool.drop(adapter)
            assert adapter not in self.device.held.values()

    @rule()
    def clear(self):
        """After a step that raised: nobody holds a slot, and loads go on."""
        self.pool.clear()
        self.running.clear()
        assert not self.device.held and not self.pool.num_resident

    @invariant()
    def agrees(self):
        self.pool.check()
        assert len(self.device.held) <= 3
        held = [state.adapter for state in self.pool.states() if state.adapter >= 0]
        assert sum(adapter % 3 == 0 for adapter in held) <= 1, "one at a time brings an embedding of its own"
        for adapter, slot in self.running:
            assert self.device.held[slot] == adapter
            assert self.pool.pins(adapter) == sum(1 for other, _ in self.running if other == adapter)
        assert self.pool.num_pinned == len({slot for _, slot in self.running})
        assert self.pool.num_resident == len(self.device.held)


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=repeats(150), stateful_step_count=60)


def test_the_longest_unused_goes_first():
    device = Device(3, at_once=True)
    slots = [device.pool.acquire(adapter) for adapter in range(3)]
    for order in (1, 0, 2):
        device.pool.tick()
        device.pool.release(slots[order])
    for newcomer, gone in ((10, 1), (11, 0), (12, 2)):
        assert device.pool.acquire(newcomer) == slots[gone]


def test_a_resident_adapter_is_not_loaded_again():
    device = Device(2, at_once=True)
    for _ in range(5):
        for adapter in (4, 7):
            device.pool.release(device.pool.acquire(adapter))
    assert device.num_loads == 2


def test_a_prefetched_adapter_stays_until_it_is_asked_for():
    device = Device(2)
    device.pool.prefetch(1)
    device.pool.prefetch(2)
    device.pool.prefetch(3)
    device.finish()
    assert sorted(device.held.values()) == [1, 2]
    assert device.pool.acquire(3) == WAIT
    assert device.pool.acquire(1) != WAIT


def test_a_slot_that_nobody_asks_for_any_more_is_freed():
    device = Device(1)
    device.pool.prefetch(1)
    device.finish()
    for _ in range(PATIENCE + 1):
        assert device.pool.acquire(2) == WAIT
        device.pool.tick()
    device.pool.acquire(2)
    device.finish()
    assert device.pool.acquire(2) == 0


def test_a_waiter_that_is_gone_closes_no_slot():
    device = Device(1, at_once=True)
    device.pool.acquire(1)
    for _ in range(PATIENCE + 1):
        device.pool.acquire(2)
        device.pool.tick()
    assert device.pool.acquire(1) == WAIT  # closed for 2
    for _ in range(PATIENCE + 1):
        device.pool.tick()
    assert device.pool.acquire(1) == 0  # 2 has not asked for long


def test_the_slot_that_fewest_sequences_hold_is_closed():
    device = Device(2, at_once=True)
    slots = [device.pool.acquire(adapter) for adapter in (1, 1, 2)]
    device.pool.tick()
    device.pool.release(slots[2])
    assert device.pool.acquire(2) == slots[2]  # used last, and by one
    for _ in range(PATIENCE + 1):
        assert device.pool.acquire(3) == WAIT
        device.pool.tick()
    assert [state.closing for state in device.pool.states()] == [False, True]


def test_who_gets_another_slot_first_leaves_the_one_that_was_closed_for_it():
    device = Device(2, at_once=True)
    first, second = device.pool.acquire(1), device.pool.acquire(2)
    for _ in range(PATIENCE + 1):
        assert device.pool.acquire(3) == WAIT
        device.pool.tick()
    assert [state.closing for state in device.pool.states()] == [True, False]
    device.pool.release(second)
    assert device.pool.acquire(3) == second
    assert device.pool.acquire(1) == first, "it is open again"
    device.pool.release(first)
    device.pool.release(first)
    device.pool.check()
    assert device.held == {first: 1, second: 3}


def test_who_waited_before_all_slots_were_emptied_waits_anew():
    device = Device(1, at_once=True)
    device.pool.acquire(1)
    for _ in range(PATIENCE - 1):
        assert device.pool.acquire(2) == WAIT
        device.pool.tick()
    device.pool.clear()
    assert device.pool.acquire(1) == 0
    assert device.pool.acquire(2) == WAIT
    device.pool.tick()
    assert device.pool.acquire(2) == WAIT and device.pool.acquire(1) == 0  # not closed for 2 yet


def test_adapters_with_own_embeddings_take_turns_in_the_slots_that_are_theirs():
    device = Device(3, at_once=True, max_own=1)
    first, plain = device.pool.acquire(0), device.pool.acquire(1)
    assert device.pool.acquire(3) == WAIT and device.pool.acquire(2) not in (WAIT, first, plain)
    for _ in range(PATIENCE + 1):
        assert device.pool.acquire(3) == WAIT
        device.pool.tick()
    device.pool.acquire(3)
    assert device.pool.acquire(0) == WAIT and device.pool.acquire(1) == plain  # the first slot alone is closed
    device.pool.release(first)
    assert device.pool.acquire(3) == first


@pytest.mark.parametrize("max_own", [1, 2])
def test_no_more_than_so_many_even_where_slots_were_closed_for_several(max_own):
    device = Device(3, at_once=True, max_own=max_own)
    slots = [device.pool.acquire(adapter) for adapter in (1, 2, 4)]
    for _ in range(2 * PATIENCE + 2):
        for adapter in (0, 3, 6):
            assert device.pool.acquire(adapter) == WAIT
        device.pool.tick()
    for slot in slots:
        device.pool.release(slot)
    for adapter in (0, 3, 6):
        device.pool.acquire(adapter)
    assert sum(adapter % 3 == 0 for adapter in device.held.values()) == max_own
    device.pool.check()


def test_release_of_a_slot_that_is_not_held():
    with pytest.raises(ValueError, match="not held"):
        Device(1).pool.release(0)


@pytest.mark.parametrize(("num_slots", "patience"), [(0, 1), (1, 0)])
def test_sizes_are_checked(num_slots, patience):
    with pytest.raises(ValueError, match="at least 1"):
        SlotPool(num_slots, patience, *[lambda *_: None] * 3)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_adapters", [4, 8, 40])
def test_nobody_starves(seed, num_adapters):
    """Four adapters are asked for so often that their slots never fall idle; the others come through all the same.

    Sequences run for at most ``longest`` steps, loads take up to 3. An adapter waits no longer than in a fair line for
    slots: each round costs the patience, a longest sequence and a load.
    """
    num_slots, longest, rows = 4, 12, 16
    rng = random.Random(seed)
    device = Device(num_slots, max_own=2)
    waiting: list[tuple[int, int]] = []  # (adapter, arrival)
    running: list[tuple[int, int]] = []  # (slot, end)
    rounds = -(-num_adapters // (num_slots // 2))  # every third adapter has two slots
    bound = (PATIENCE + longest + 4) * (rounds + 1)
    slowest = 0
    for step in range(600):
        device.pool.tick()
        if step % 3 == 0:
            device.finish()
        for slot, _ in [row for row in running if row[1] <= step]:
            device.pool.release(slot)
        running = [row for row in running if row[1] > step]
        while len(waiting) < 24:
            hot = rng.random() < 0.9
            waiting.append((rng.randrange(num_slots if hot else num_adapters), step))
        left = []
        for adapter, arrival in waiting:
            slot = device.pool.acquire(adapter) if len(running) < rows else WAIT
            if slot == WAIT:
                left.append((adapter, arrival))
            else:
                slowest = max(slowest, step - arrival)
                running.append((slot, step + rng.randint(1, longest)))
        waiting = left
        device.pool.check()
        assert all(step - arrival <= bound for _, arrival in waiting), (step, waiting)
    assert slowest <= bound


@pytest.mark.parametrize(("num_slots", "most"), [(1, 1), (2, 1), (4, 2), (9, 5)])
def test_loads_of_one_tenant_leave_slots_to_others(num_slots: int, most: int) -> None:
    """Loads that do not end: another tenant's adapter has a slot at once, where there is more than one."""
    device = Device(num_slots)
    for _ in range(3 * PATIENCE):
        device.pool.tick()
        assert all(device.pool.acquire(adapter, "slow") == WAIT for adapter in range(100, 120))
        device.pool.check()
    assert len(device.loading) == most
    for adapter in (1, 2):
        assert device.pool.acquire(adapter, "other") == WAIT
    assert device.loading[most:] == [1, 2][: min(num_slots - most, 1 + num_slots // 9)]
    device.finish()
    assert device.pool.acquire(1, "other") >= 0 or num_slots == 1
    device.pool.check()


def test_without_tenants_all_slots_load_at_once() -> None:
    device = Device(4)
    assert all(device.pool.acquire(adapter) == WAIT for adapter in range(1, 9))
    assert device.loading == [1, 2, 3, 4]
