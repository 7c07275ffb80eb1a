"""Slots by tenant: shares of them, the order of who waits, and turns that are given up."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.machine.waits import HANG_SECONDS

from rootgraft.tenancy.tenant_slots import ShareFull, TenantSlots, Turn


def held(turns: list[Turn]) -> int:
    return sum(turn.holds for turn in turns)


@pytest.mark.parametrize(
    ("count", "shares"), [(1, [1, 0]), (2, [1, 1, 0]), (4, [2, 1, 1, 0]), (32, [16, 8, 4, 2, 1, 1])]
)
def test_a_tenant_holds_half_and_the_next_as_much_as_is_left(count: int, shares: list[int]) -> None:
    slots = TenantSlots(count)
    assert [held([slots.ask(name) for _ in range(40)]) for name in "abcdef"[: len(shares)]] == shares
    assert slots.num_held == sum(shares)


def test_without_keys_one_tenant_holds_all() -> None:
    slots = TenantSlots(4)
    assert held([slots.ask("") for _ in range(9)]) == 4 and slots.num_waiting == 5


def test_who_holds_the_fewest_is_next_and_of_several_who_was_served_longest_ago() -> None:
    slots = TenantSlots(1)
    first = slots.ask("a")
    waiting = [slots.ask(tenant) for tenant in "aaabbc"]
    order = []
    while first is not None:
        slots.leave(first)
        first = next((turn for turn in waiting if turn.holds), None)
        order.append(first.tenant if first is not None else "")
    assert order == [*"bcabaa", ""]


def test_turns_that_wait_are_parted_too() -> None:
    slots = TenantSlots(1, 8)
    slots.ask("a")
    for tenant, share in (("a", 4), ("b", 2), ("c", 1)):
        turns = [slots.ask(tenant) for _ in range(share)]
        with pytest.raises(ShareFull):
            slots.ask(tenant)
        slots.leave(turns[0])
        slots.ask(tenant)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_every_turn_is_granted_in_the_end_and_no_slot_is_lost(steps: list[tuple[str, bool]]) -> None:
    slots, turns = TenantSlots(4), []
    for tenant, asks in steps:
        if asks or not turns:
            turns.append(slots.ask(tenant))
        else:
            slots.leave(turns.pop(0))
        assert slots.num_held == held(turns) <= 4
        assert all(turn.granted.done() == turn.holds for turn in turns)
    while turns:
        done = [turn for turn in turns if turn.holds]
        assert done, "somebody waits while nobody holds a slot"
        turns.remove(done[0])
        slots.leave(done[0])
    assert (slots.num_held, slots.num_waiting) == (0, 0)


def test_a_thread_waits_for_its_turn() -> None:
    slots, came = TenantSlots(1), threading.Event()
    first = slots.ask("a")

    def work() -> None:
        with slots.hold("b"):
            came.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert not came.is_set()
    slots.leave(first)
    thread.join(HANG_SECONDS)
    assert came.is_set() and slots.num_held == 0


async def test_a_task_that_is_cancelled_waits_no_longer_and_keeps_nothing() -> None:
    slots = TenantSlots(1)

    async def work() -> None:
        async with slots.hold_async("a"):
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(work()) for _ in range(3)]
    while slots.num_waiting < 2:
        await asyncio.sleep(0)
    for task in (tasks[2], tasks[0], tasks[1]):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (slots.num_held, slots.num_waiting) == (0, 0)
