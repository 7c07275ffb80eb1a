"""Slots of batches: as many as there are, none lost, and every tenant has its share soon."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from rootgraft.api.batches.fair_slots import FairSlots


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
    crowd.most = 0
    await asyncio.gather(*(crowd.request("e") for _ in range(9)))
    assert crowd.most == 3
