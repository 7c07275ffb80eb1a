"""One tenant floods the cache with ever new prompts: another one that comes back to its own finds them all the same."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from support.engine.core_hooks import cache_of
from support.engine.fake_worker import FakeWorker

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.messages import Done, Submit
from rootgraft.engine.types import Priority, SamplingParams, Usage

PAGE, PAGES = 4, 256
PROMPTS, LENGTH = 10, 10 * PAGE  # what the victim comes back to: a little less than half of the pool
LEAST = 0.8


class World:
    """An engine, a victim that asks some prompts again and again, and one that floods."""

    def __init__(self) -> None:
        config = EngineConfig(block_size=PAGE, max_num_seqs=8, max_num_batched_tokens=64)
        self.core = EngineCore(config, FakeWorker(PAGES, PAGE, vocab_size=1000))
        self.random = random.Random(3)
        self.prompts = [self.fresh(LENGTH) for _ in range(PROMPTS)]
        self.number = 0

    def fresh(self, length: int) -> array[int]:
        return array("i", (self.random.randrange(1000) for _ in range(length)))

    def submit(self, prompt: array[int], tenant: str, **fields: Any) -> int:
        self.number += 1
        params = SamplingParams(max_tokens=4)
        fields = {"tenant": tenant, "cache_tenant": tenant} | fields
        self.core.handle([Submit(self.number, prompt, params, **fields)])
        return self.number

    def run(self, number: int) -> Usage:
        """Steps until a sequence is done; others may still run then."""
        while True:
            for message in self.core.step():
                if isinstance(message, Done) and message.id == number:
                    return message.usage

    def hit_rate(self, rounds: int, flood: Iterator[dict[str, Any]], each: int, **fields: Any) -> float:
        """What part of the victim's prompts is cached from the second round on, with so many of the flood to each."""
        prompt = cached = 0
        for turn in range(rounds):
            for asked in self.random.sample(self.prompts, len(self.prompts)):
                for _ in range(each):
                    self.submit(tenant="flood", **next(flood))
                usage = self.run(self.submit(asked, "victim", **fields))
                prompt += usage.prompt if turn else 0
                cached += usage.cached if turn else 0
        self.core.check()
        return cached / prompt


def flood_of(world: World, **fields: Any) -> Iterator[dict[str, Any]]:
    """Prompts that nobody has sent before, of up to twice the victim's length."""
    for number in count():
        named = {name: value(number) if callable(value) else value for name, value in fields.items()}
        yield {"prompt": world.fresh(world.random.randint(1, 2 * LENGTH)), **named}


def alone() -> float:
    return World().hit_rate(3, iter(()), 0)


FLOODS: dict[str, dict[str, Any]] = {
    "fresh prompts": {},
    "sessions": {"session": str},
    "pins": {"pin_seconds": 600.0},
    "sessions and pins": {"session": str, "pin_seconds": 600.0},
    "salts": {"salt": str},
    "an earlier band": {"priority": Priority.REALTIME},
}


@pytest.mark.parametrize("each", [1, 4])
@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_leaves_the_victim_its_hits(name: str, each: int) -> None:
    world = World()
    assert world.hit_rate(4, flood_of(world, **FLOODS[name]), each) >= LEAST * alone()
    assert cache_of(world.core).num_evicted > PAGES


def test_where_tenants_share_the_flood_does_push_them_out() -> None:
    """What the victim has is no more its own than the other's, and the test above would notice."""
    world = World()
    assert world.hit_rate(4, flood_of(world, cache_tenant=""), 4, cache_tenant="") < LEAST * alone()


def test_many_that_flood_leave_an_equal_share_to_each() -> None:
    world = World()
    del world.prompts[3:]
    floods = flood_of(world, cache_tenant=lambda number: f"flood {number % 5}")
    assert world.hit_rate(9, floods, 4) >= LEAST * alone()
