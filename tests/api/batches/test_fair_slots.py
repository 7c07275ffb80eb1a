"""Slots of batches: as many as there are, none lost, and every tenant has its share soon."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from rootgraft.api.batches.fair_slots import FairSlots, OwnerTurns


class Crowd:
    """Requests of several owners that hold slots for a few passes of the event loop."""

    def __init__(self, count: int, least: int = 0) -> None:
        self.slots = FairSlots(count, least)
        self.held: Counter[str] = Counter()
        self.order: list[str] = []
        self.most = 0

    async def request(self, owner: str, passes: int = 3) -> None:
        async with self.slots.hold(owner):
            self.held[owner] += 1
            self.order.append(owner)
            self.most = max(self.most, self.held.total())
            try:
                for _ in range(passes):
                    await asyncio.sleep(0)
            finally:
                self.held[owner] -= 1


async def test_one_owner_alone_has_all_slots_in_order() -> None:
    crowd = Crowd(4)
    await asyncio.gather(*(crowd.request("a") for _ in range(20)))
    assert crowd.most == 4 and crowd.order == ["a"] * 20


async def test_owners_that_have_none_any_more_are_forgotten() -> None:
    crowd, turns = Crowd(2), OwnerTurns(2)
    most = 0

    async def take_turn(owner: str, running: Counter[str]) -> None:
        nonlocal most
        async with turns.hold(owner):
            running[owner] += 1
            most = max(most, running[owner])
            try:
                await asyncio.sleep(0)
            finally:
                running[owner] -= 1

    running: Counter[str] = Counter()
    for number in range(50):
        owners = [f"{number}", f"{number}", f"{number}", "steady"]
        asked = [asyncio.create_task(crowd.request(owner)) for owner in owners]
        asked += [asyncio.create_task(take_turn(owner, running)) for owner in owners]
        given_up = asyncio.create_task(take_turn("steady", running))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(*asked)
        await asyncio.gather(given_up, return_exceptions=True)
        assert len(crowd.slots) == len(turns) == 0
    assert most == 2


async def test_who_sends_one_after_another_holds_up_nobody_that_waits() -> None:
    """Though it has no slot in between, and counts as one that waits no more."""
    crowd = Crowd(1)

    async def one_by_one(owner: str) -> None:
        for _ in range(20):
            await crowd.request(owner)

    await asyncio.gather(*(one_by_one(owner) for owner in "abcd"))
    firsts = [crowd.order.index(owner) for owner in "abcd"]
    assert max(firsts) < 4
    for at in range(0, len(crowd.order) - 8, 4):
        assert set(crowd.order[at : at + 8]) == set("abcd"), crowd.order


async def test_an_owner_that_comes_late_has_its_share_at_once() -> None:
    """Behind a thousand requests of another it waits for the slots that come free next, and no longer."""
    crowd = Crowd(4)
    tasks = [asyncio.create_task(crowd.request("a")) for _ in range(1000)]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(crowd.request("b")) for _ in range(10)]
    await asyncio.gather(*tasks)
    assert crowd.order[:4] == ["a"] * 4
    assert Counter(crowd.order[4:24]) == {"a": 10, "b": 10}


async def test_an_owner_begins_while_another_holds_all() -> None:
    """With its least, and no more until some are given back; then the count holds again."""
    crowd = Crowd(4, 2)
    long = [asyncio.create_task(crowd.request("a", 50)) for _ in range(6)]
    await asyncio.sleep(0)
    short = [asyncio.create_task(crowd.request("b", 5)) for _ in range(6)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert crowd.held == {"a": 4, "b": 2}
    await asyncio.gather(*short)
    assert crowd.held["a"] == 4 and crowd.most == 6
    await asyncio.gather(*long)
    crowd.most = 0
    await asyncio.gather(*(crowd.request("a") for _ in range(9)))
    assert crowd.most == 4


async def test_more_owners_than_slots_take_turns() -> None:
    crowd = Crowd(1)
    await asyncio.gather(*(crowd.request(owner) for owner in "aaaabbbbcccc"))
    assert crowd.order == [*"abc"] * 4


async def test_a_waiter_that_is_cancelled_gets_no_slot_and_breaks_nothing() -> None:
    """Its task runs only after the slot has come free; until then the cancelled turn is still in the queue."""
    slots, crowd = FairSlots(1), Crowd(1)
    crowd.slots = slots
    async with slots.hold("a"):
        waiters = [asyncio.create_task(crowd.request(owner)) for owner in "bc"]
        await asyncio.sleep(0)
        waiters[0].cancel()
    outcomes = await asyncio.gather(*waiters, return_exceptions=True)
    assert isinstance(outcomes[0], asyncio.CancelledError) and outcomes[1] is None
    assert crowd.order == ["c"] and len(slots) == 0


async def test_cancelling_all_requests_of_an_owner_leaves_others_alone() -> None:
    """Those that hold slots, and those that wait: as when a batch is cancelled, or its time is up."""
    crowd = Crowd(4)
    tasks = [asyncio.create_task(crowd.request("a", 50)) for _ in range(16)]
    others = [asyncio.create_task(crowd.request("b")) for _ in range(16)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    assert await asyncio.gather(*others) == [None] * 16
    assert {type(each) for each in await asyncio.gather(*tasks, return_exceptions=True)} == {asyncio.CancelledError}
    assert crowd.most <= 4 and len(crowd.slots) == 0


@pytest.mark.parametrize("seed", range(5))
async def test_slots_of_those_who_leave_are_not_lost(seed: int) -> None:
    """Cancelled while they wait, hold a slot, or are just being given one."""
    rng, crowd = random.Random(seed), Crowd(3)
    tasks = [asyncio.create_task(crowd.request(rng.choice("abcd"), rng.randrange(5))) for _ in range(200)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        if rng.random() < 0.5:
            rng.choice(tasks).cancel()
    assert crowd.most <= 3 and not crowd.held.total()
    assert not [task.exception() for task in tasks if not task.cancelled() and task.exception()]
    crowd.most = 0
    await asyncio.gather(*(crowd.request("e") for _ in range(9)))
    assert crowd.most == 3
