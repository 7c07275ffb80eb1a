"""Whose turn it is: bands, ageing, tenants, and the cache's favourites, each with the bound that it has."""

from __future__ import annotations

import random
from array import array
from collections import defaultdict
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.core_hooks import drawn_seed, scheduler_of
from support.engine.fake_worker import FakeWorker
from support.machine.thoroughness import repeats

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.messages import Done, Submit, TokenOut
from rootgraft.engine.scheduling.fairness import CACHED_WEIGHT, INPUT_WEIGHT, OUTPUT_WEIGHT, TokenCounters
from rootgraft.engine.scheduling.tenant_queue import MAX_OVERTAKEN, WINDOW
from rootgraft.engine.scheduling.waiting_queue import PATIENCE, WaitingQueue
from rootgraft.engine.sequence.sequence import Sequence, SequenceCounts, SequenceSpec
from rootgraft.engine.types import MAX_SEED, MIN_SEED, Priority, SamplingParams
from rootgraft.radix.namespace import Namespace, Path

PATH = Path(Namespace("base"))
R, I, B = Priority  # noqa: E741


def sequence(number: int, tenant: str = "", priority: Priority = I, num_prompt: int = 4) -> Sequence:
    tokens = array("i", range(num_prompt))
    spec = SequenceSpec(frozenset(), 0, 0.0, 100, tenant=tenant)
    counts = SequenceCounts(num_cached=0)
    return Sequence(number, tokens, SamplingParams(), PATH, spec, priority=priority, counts=counts)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def in_order(queue: WaitingQueue) -> Iterator[Sequence]:
    """The queue in order of admission, after promotions, as the scheduler goes through it."""
    for each in queue.promote():
        each.priority = Priority.REALTIME
    yield from queue


def start(queue: WaitingQueue, count: int = 1) -> list[int]:
    """Admit the next ``count`` sequences, as the scheduler does."""
    started = []
    for each in in_order(queue):
        queue.admit(each)
        queue.charge_prompt(each)
        started.append(each.id)
        if len(started) == count:
            break
    return started


def test_the_earliest_deadline_is_first_and_late_ones_have_every_fourth_turn() -> None:
    clock = Clock()
    queue = WaitingQueue(None, clock, {I: 10.0}, lambda num_tokens: num_tokens / 10)
    for number, num_prompt in enumerate((10, 30, 20, 100)):  # the last one is late from the start
        queue.push(sequence(number, num_prompt=num_prompt))
    assert [each.id for each in queue.head(4)] == [1, 2, 0, 3]
    clock.now = 8.5
    for number in range(4, 12):
        queue.push(sequence(number))
    # 0 to 3 can be in time no more, in the order in which that became so.
    assert start(queue, 12) == [4, 5, 6, 3, 7, 8, 9, 1, 10, 11, 2, 0]


def test_a_class_without_a_target_goes_by_arrival_beside_one_that_has() -> None:
    queue = WaitingQueue(None, Clock(), {R: 1.0}, lambda num_tokens: num_tokens / 10)
    for number, (priority, num_prompt) in enumerate(((I, 4), (I, 90), (R, 2), (R, 8))):
        queue.push(sequence(number, priority=priority, num_prompt=num_prompt))
    assert start(queue, 4) == [3, 2, 0, 1]


def test_first_come_first_served_within_a_tenant_and_band() -> None:
    queue = WaitingQueue()
    for number in range(20):
        queue.push(sequence(number))
    assert len(queue) == 20 and [each.id for each in queue] == list(range(20))
    assert start(queue, 20) == list(range(20)) and len(queue) == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_a_queue_is_gone_through_once_whether_sequences_are_admitted_or_passed_over(
    coming: list[tuple[str, bool]],
) -> None:
    """It is read ahead in parts, and those that are admitted leave it meanwhile."""
    queue = WaitingQueue()
    for number, (tenant, _) in enumerate(coming):
        queue.push(sequence(number, tenant))
    seen = []
    for each in queue:
        seen.append(each.id)
        if coming[each.id][1]:
            queue.admit(each)
    assert sorted(seen) == list(range(len(coming)))
    for tenant in "abc":
        own = [number for number in seen if coming[number][0] == tenant]
        assert own == sorted(own)
    left = [number for number, (_, admitted) in enumerate(coming) if not admitted]
    assert sorted(each.id for each in queue) == left


def test_an_earlier_band_comes_first() -> None:
    queue = WaitingQueue()
    for number, priority in enumerate([B, I, R, B, I, R]):
        queue.push(sequence(number, priority=priority))
    assert start(queue, 6) == [2, 5, 1, 4, 0, 3]


def test_it_tells_whether_one_of_an_earlier_band_waits() -> None:
    queue, first = WaitingQueue(), sequence(0)
    queue.push(sequence(1, priority=B))
    assert not queue.has_before(B)
    queue.push(first)
    assert [queue.has_before(band) for band in Priority] == [False, False, True]
    assert start(queue) == [0] and not queue.has_before(B)
    queue.requeue(first)
    assert [queue.has_before(band) for band in Priority] == [False, False, True]
    queue.remove(first)
    assert not queue.has_before(B)


def test_a_preempted_sequence_is_the_first_of_its_band() -> None:
    queue = WaitingQueue()
    first, second = sequence(0), sequence(1)
    for each in (first, second, sequence(2), sequence(3, priority=R)):
        queue.push(each)
    assert start(queue, 3) == [3, 0, 1]
    queue.requeue(first)
    queue.requeue(second)
    assert [each.id for each in queue] == [1, 0, 2]
    queue.remove(second)
    assert start(queue, 2) == [0, 2]


@pytest.mark.parametrize("priority", [I, B])
def test_who_waits_for_long_goes_over_to_the_first_band(priority: Priority) -> None:
    clock = Clock()
    queue = WaitingQueue(clock=clock)
    queue.push(sequence(0, priority=priority))
    clock.now = PATIENCE[priority] - 1
    queue.push(sequence(1, priority=R))
    assert [each.id for each in in_order(queue)] == [1, 0]
    clock.now += 1
    queue.push(sequence(2, priority=R))
    assert [each.id for each in in_order(queue)] == [1, 2, 0]
    for number in range(3, 9):
        queue.push(sequence(number, priority=R))
    assert 0 in start(queue, 3)


@pytest.mark.parametrize("priority", [I, B])
def test_waits_before_a_preemption_count_and_the_time_in_between_does_not(priority: Priority) -> None:
    clock = Clock()
    queue = WaitingQueue(clock=clock)
    first, patience = sequence(0, priority=priority), PATIENCE[priority]
    queue.push(first)
    clock.now = patience / 2
    assert start(queue) == [0]
    clock.now = 10 * patience
    queue.requeue(first)
    clock.now += patience / 4
    assert start(queue) == [0] and first.priority is priority
    clock.now = 20 * patience
    queue.requeue(first)
    queue.push(sequence(1, priority=R))
    clock.now += patience / 4 - 1
    assert [each.id for each in in_order(queue)] == [1, 0] and first.priority is priority
    clock.now += 1
    queue.push(sequence(2, priority=R))
    assert [each.id for each in in_order(queue)] == [1, 2, 0] and first.priority is R


def test_a_flood_of_earlier_bands_holds_nobody_up_for_ever() -> None:
    clock = Clock()
    queue = WaitingQueue(clock=clock)
    queue.push(sequence(0, priority=B))
    for number in range(1, 10_000):
        clock.now = number
        queue.push(sequence(number, priority=R))
        if start(queue) == [0]:
            break
    assert PATIENCE[B] <= clock.now <= PATIENCE[B] + 2


def test_the_tenant_who_was_served_least_comes_next() -> None:
    queue = WaitingQueue()
    for number in range(8):
        queue.push(sequence(number, "many", num_prompt=5))
    assert start(queue, 2) == [0, 1]
    for number in range(8, 10):
        queue.push(sequence(number, "few", num_prompt=5))
    # Lifted to what "many" has been served, it takes turns with it from here on.
    assert start(queue, 4) == [2, 8, 3, 9]


def test_one_that_comes_when_all_others_have_left_begins_where_they_were() -> None:
    """A tenant whose sequences have all begun is not behind one that was never there."""
    queue = WaitingQueue()
    for number in range(3):
        queue.push(sequence(number, "many", num_prompt=5))
    assert start(queue, 3) == [0, 1, 2]
    for number in range(3, 6):
        queue.push(sequence(number, "new", num_prompt=5))
    for number in range(6, 9):
        queue.push(sequence(number, "many", num_prompt=5))
    assert start(queue, 6) == [3, 6, 4, 7, 5, 8]


def test_a_pause_is_not_saved_up() -> None:
    counters = TokenCounters()
    counters.join("a", [])
    counters.charge_prompt("a", 100, 0)
    counters.join("b", ["a"])
    assert counters.served("b") == 100 * INPUT_WEIGHT
    counters.charge_tokens("b", 1)
    assert counters.served("b") == 100 * INPUT_WEIGHT + OUTPUT_WEIGHT
    counters.leave("b")
    counters.leave("a")
    counters.join("c", [])
    assert counters.served("c") == counters.served("a")
    counters.charge_prompt("c", 100, 100)
    assert counters.served("c") == pytest.approx(counters.served("a") + 100 * CACHED_WEIGHT)


def test_what_is_in_the_cache_comes_first_and_overtakes_a_bounded_number_of_times() -> None:
    queue = WaitingQueue(lambda each: each.id % 2)
    for number in range(6):
        queue.push(sequence(number))
    assert start(queue, 6) == [1, 3, 5, 0, 2, 4]
    queue.push(sequence(0))
    overtaken = 0
    for number in range(1, 1000, 2):
        queue.push(sequence(number))
        [started] = start(queue)
        if started == 0:
            break
        overtaken += 1
    assert overtaken == MAX_OVERTAKEN


@settings(max_examples=repeats(60))
@given(seed=st.integers(0, 2**32))
def test_nobody_is_overtaken_more_often_than_the_bound(seed: int) -> None:
    """Random arrivals with random luck in the cache: by later ones of the own tenant, as counted from outside."""
    rng = random.Random(seed)
    luck: dict[int, int] = {}
    queue = WaitingQueue(lambda each: luck[each.id])
    waiting: list[Sequence] = []
    overtaken: dict[int, int] = defaultdict(int)
    for number in range(200):
        luck[number] = rng.choice([0, 0, 1, number])
        each = sequence(number, rng.choice("ab"))
        queue.push(each)
        waiting.append(each)
        if rng.random() < 0.8 and waiting:
            [started] = start(queue)
            [found] = [each for each in waiting if each.id == started]
            earlier = [each for each in waiting if each.id < started and each.spec.tenant == found.spec.tenant]
            assert len(earlier) < WINDOW
            for each in earlier:
                overtaken[each.id] += 1
            waiting.remove(found)
        if waiting and rng.random() < 0.1:
            gone = rng.choice(waiting)
            queue.remove(gone)
            waiting.remove(gone)
        assert sorted(each.id for each in queue) == sorted(each.id for each in waiting)
    assert max(overtaken.values(), default=0) <= MAX_OVERTAKEN


@settings(max_examples=repeats(15))
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 6),
    longest=st.integers(1, 40),
    most=st.integers(1, 30),
    shares=st.lists(st.integers(1, 10), min_size=2, max_size=4),
    sharing=st.booleans(),
)
def test_the_bound_of_fair_queueing_holds(
    seed: int, rows: int, longest: int, most: int, shares: list[int], sharing: bool
) -> None:
    """Theorem 4.8 of the paper, on the real scheduler: backlogged tenants are served alike, up to 2 U."""
    rng = random.Random(seed)
    config = EngineConfig(
        block_size=4, max_num_seqs=rows, max_num_batched_tokens=64, num_gpu_blocks_override=200,
        enable_prefix_caching=sharing,
    )  # fmt: skip
    core = EngineCore(config, FakeWorker(200, 4, vocab_size=997))
    tenants = [str(number) for number in range(len(shares))]
    owner: dict[int, str] = {}
    for number in range(150):
        owner[number] = rng.choices(tenants, shares)[0]
        stem = [rng.randrange(5)] * rng.randrange(longest)
        prompt = [*stem, *(rng.randrange(997) for _ in range(longest - len(stem)))]
        params = SamplingParams(max_tokens=rng.randint(1, most))
        core.handle([Submit(number, array("i", prompt), params, tenant=owner[number])])
    bound = max(INPUT_WEIGHT * longest, OUTPUT_WEIGHT * rows * (longest + most))
    waiting = dict(owner)
    served = dict.fromkeys(tenants, 0.0)
    gaps: dict[tuple[str, str], list[float]] = {(a, b): [] for a in tenants for b in tenants if a < b}
    while core.has_work:
        backlogged = set(waiting.values())
        messages = core.step()
        for each in scheduler_of(core).running:
            if waiting.pop(each.id, None):
                served[each.spec.tenant] += INPUT_WEIGHT * (each.num_prompt - each.counts.num_cached)
                served[each.spec.tenant] += CACHED_WEIGHT * each.counts.num_cached
        for message in messages:
            if isinstance(message, Done) and waiting.pop(message.id, None):  # began and ended in one step
                usage = message.usage
                served[owner[message.id]] += INPUT_WEIGHT * (usage.prompt - usage.cached) + CACHED_WEIGHT * usage.cached
            if isinstance(message, TokenOut):
                served[owner[message.id]] += OUTPUT_WEIGHT * len(message.tokens)
        for (a, b), history in gaps.items():
            if {a, b} <= backlogged:
                history.append(served[a] - served[b])
    for history in gaps.values():
        assert max(history, default=0) - min(history, default=0) <= 2 * bound


def test_two_tenants_with_very_different_demand_get_the_same() -> None:
    """Ten times as many requests of one tenant: while both wait, what they are served differs by less than 10 %."""
    core = EngineCore(
        EngineConfig(block_size=4, max_num_seqs=8, num_gpu_blocks_override=400), FakeWorker(400, 4, vocab_size=997)
    )
    rng = random.Random(1)
    for number in range(1100):
        prompt = array("i", [rng.randrange(997) for _ in range(20)])
        tenant = "few" if number % 11 == 10 else "many"
        core.handle([Submit(number, prompt, SamplingParams(max_tokens=10), tenant=tenant)])
    tokens = {"few": 0, "many": 0}
    while tokens["few"] < 800:
        for message in core.step():
            if isinstance(message, TokenOut):
                tokens["few" if message.id % 11 == 10 else "many"] += len(message.tokens)
    assert abs(tokens["few"] - tokens["many"]) < 0.1 * tokens["few"]


def test_an_engine_of_each_seed_draws_seeds_of_its_own() -> None:
    """Requests without a seed get one of the engine's: -1 is no other spelling of 1."""

    def first(seed: int) -> int:
        return drawn_seed(EngineCore(EngineConfig(seed=seed), FakeWorker(50, 16)))

    seeds = (MIN_SEED, -2, -1, 0, 1, 2, MAX_SEED)
    assert [first(seed) for seed in seeds] == [first(seed) for seed in seeds]
    assert len({first(seed) for seed in seeds}) == len(seeds)
