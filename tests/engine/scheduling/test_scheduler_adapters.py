"""The scheduler over adapter slots whose loads take steps: nobody starves, nobody waits for another one's load."""

from __future__ import annotations

import random
from array import array

import pytest
from support.engine.fake_worker import FakeWorker, expected_tokens

from rootgraft.engine.engine_stats import EngineStats
from rootgraft.engine.kv_cache.prefix_cache import PrefixCache
from rootgraft.engine.messages import Done, Message, TokenOut
from rootgraft.engine.scheduling.scheduler import Scheduler
from rootgraft.engine.sequence.sequence import Sequence, SequenceSpec
from rootgraft.engine.types import SamplingParams
from rootgraft.lora.device_slots import SlotPool
from rootgraft.radix.namespace import Namespace, Path

PATIENCE, LOAD, LONGEST = 6, 3, 10


def digest(adapter: int) -> str:
    return f"{adapter + 1:064x}"


class Slots(SlotPool):
    """Real slots over a device that holds digests; a load takes ``LOAD`` steps, or for ever."""

    def __init__(self, num_slots: int) -> None:
        self._pinned: dict[int, str] = {}  # as the fake worker reads it
        self.due: dict[int, int] = {}
        self.stuck = False
        self.num_loads = 0
        super().__init__(num_slots, PATIENCE, self._begin, self._put, lambda slot, _: void(self._pinned.pop(slot)))

    def _begin(self, adapter: int, _tenant: str) -> None:
        self.due[adapter] = LOAD
        self.num_loads += 1

    def _put(self, slot: int, adapter: int) -> None:
        self._pinned[slot] = digest(adapter)

    def tick(self) -> None:
        super().tick()
        self.due = {adapter: steps - (not self.stuck) for adapter, steps in self.due.items()}
        for adapter in [adapter for adapter, steps in self.due.items() if steps <= 0]:
            del self.due[adapter]
            self.loaded(adapter)


def void(_: object) -> None:
    return None


class Engine:
    """The scheduler, a worker of integers, and the step of each event of each sequence."""

    def __init__(self, num_slots: int, rows: int, num_pages: int = 400) -> None:
        self.slots = Slots(num_slots)
        self.worker = FakeWorker(num_pages, 4, adapters=self.slots)
        self.cache = PrefixCache(num_pages, 4)
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=rows,
            max_num_batched_tokens=64,
            stats=EngineStats(),
            slots=self.slots,
        )
        self.step_number = 0
        self.arrived: dict[int, int] = {}
        self.admitted: dict[int, int] = {}
        self.adapters: dict[int, int] = {}
        self.prompts: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.tokens_at: dict[int, list[int]] = {}
        self.done: set[int] = set()

    def add(self, adapter: int, max_tokens: int) -> int:
        number = len(self.arrived)
        prompt = [adapter % 5 + 1, number % 7, 3]
        namespace = Namespace("base", digest(adapter) if adapter >= 0 else None)
        self.arrived[number], self.adapters[number] = self.step_number, adapter
        self.prompts[number], self.tokens[number], self.tokens_at[number] = prompt, [], []
        self.scheduler.add(
            Sequence(
                id=number,
                tokens=array("i", prompt),
                params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
                path=Path(namespace),
                spec=SequenceSpec(stop_ids=frozenset(), seed=0, arrival=0.0, max_model_len=1000, adapter=adapter),
            )
        )
        return number

    def step(self) -> None:
        self.step_number += 1
        self.slots.tick()
        batch = self.scheduler.schedule()
        for sequence in self.scheduler.running:
            self.admitted.setdefault(sequence.id, self.step_number)
        if batch.rows:
            step = self.worker.launch(batch)
            step.draw(None)
            self.take(self.scheduler.commit(batch, step.result()))
        self.slots.check()
        self.cache.check()

    def take(self, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, TokenOut):
                self.tokens[message.id] += message.tokens
                self.tokens_at[message.id].append(self.step_number)
            else:
                assert isinstance(message, Done)
                self.done.add(message.id)

    def run(self, limit: int = 5000) -> None:
        while len(self.done) < len(self.arrived):
            assert limit, "does not come to an end"
            self.step()
            limit -= 1

    def check_tokens(self) -> None:
        for number, adapter in self.adapters.items():
            code = int(digest(adapter)[:10], 16) << 8 if adapter >= 0 else 0
            tokens = self.tokens[number]
            assert tokens == expected_tokens(self.prompts[number], len(tokens), self.worker.vocab_size, code)


@pytest.mark.parametrize(("times", "seed"), [(2, 0), (4, 1), (16, 2)])
def test_skewed_traffic_over_more_adapters_than_slots(times, seed):
    """Nine of ten arrivals want the few hot adapters, whose slots so never fall idle; the others come through.

    Each adapter that waits has a slot closed for it once its patience is over, so it waits no longer than the line for
    slots before it takes: for each ``num_slots`` of them patience, a longest sequence and a load. What it waits for
    rows is the queue's matter: there are always more than enough.
    """
    num_slots, rng = 4, random.Random(seed)
    num_adapters = times * num_slots
    engine = Engine(num_slots, rows=24)
    bound = (PATIENCE + LONGEST + LOAD + 2) * (-(-num_adapters // num_slots) + 1)
    for _ in range(400):
        while engine.scheduler.num_waiting < 20:
            hot = rng.random() < 0.9
            engine.add(rng.randrange(num_slots if hot else num_adapters), rng.randint(1, LONGEST))
        engine.step()
    engine.run()
    waits = dict.fromkeys(range(num_adapters), 0)
    for number, adapter in engine.adapters.items():
        waits[adapter] = max(waits[adapter], engine.admitted[number] - engine.arrived[number])
    assert max(waits.values()) <= bound
    assert len(set(engine.adapters.values())) > num_adapters // 2
    engine.check_tokens()


def test_waiting_for_a_row_does_not_lose_the_place_in_the_line_for_a_slot():
    """Rows fall free more seldom than a waiting adapter is forgotten; each time hot sequences are there to take one."""
    engine = Engine(num_slots=1, rows=2)
    engine.add(0, 40)
    for _ in range(20):
        engine.step()
    engine.add(0, 40)
    rare = engine.add(1, 2)
    for _ in range(60):
        engine.add(0, 40)
    while rare not in engine.done:
        engine.step()
        assert engine.step_number < 200
    engine.run()
    engine.check_tokens()


def test_no_running_stream_waits_for_a_load():
    """Sequences of loaded adapters and of the base get a token in every step, whatever is loaded meanwhile."""
    engine = Engine(num_slots=3, rows=8)
    streams = [engine.add(-1, 60), engine.add(0, 60), engine.add(1, 60)]
    while any(not engine.tokens[number] for number in streams):
        engine.step()
    engine.slots.stuck = True
    stuck = [engine.add(2, 5), engine.add(3, 5)]
    while any(number not in engine.done for number in streams):
        engine.step()
        assert not any(engine.tokens[number] for number in stuck)
    for number in streams:
        steps = engine.tokens_at[number]
        assert steps == list(range(steps[0], steps[0] + 60))
    engine.slots.stuck = False
    engine.run()
    engine.check_tokens()


def test_the_adapters_of_those_who_come_next_are_loaded_while_they_wait_for_rows():
    engine = Engine(num_slots=3, rows=2)
    first = [engine.add(-1, 30), engine.add(0, 30)]
    while any(not engine.tokens[number] for number in first):
        engine.step()
    later = [engine.add(1, 3), engine.add(2, 3)]
    for _ in range(LOAD + 1):
        engine.step()
    assert engine.scheduler.num_waiting == 2
    assert engine.slots.is_ready(1) and engine.slots.is_ready(2)
    engine.run()
    ended = max(engine.tokens_at[number][-1] for number in first)
    assert all(engine.admitted[number] <= ended + 1 for number in later)
    assert engine.slots.num_loads == 3
    engine.check_tokens()


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_with_preemption(seed):
    """Few pages, few slots: all end, each with the tokens of its own adapter, and no slot is held when all is over."""
    rng = random.Random(seed)
    engine = Engine(num_slots=2, rows=6, num_pages=14)
    for _ in range(120):
        if rng.random() < 0.5:
            engine.add(rng.randint(-1, 2), rng.randint(12, 30))
        engine.step()
    engine.run()
    assert engine.scheduler._stats.preemptions > 0 and engine.slots.num_pinned == 0
    engine.check_tokens()
