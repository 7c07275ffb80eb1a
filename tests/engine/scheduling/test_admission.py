"""Batch sequences give way: rows, pages or budget full of them keep nobody of an earlier band waiting."""

from __future__ import annotations

import random
from array import array

from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.engine.core_hooks import scheduler_of, set_clock, set_queue_clock, worker_of
from support.engine.fake_worker import FakeWorker, expected_tokens
from support.machine.thoroughness import repeats

from rootgraft.engine.batch import RowResult, StepResult
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.engine_stats import EngineStats
from rootgraft.engine.kv_cache.prefix_cache import PrefixCache
from rootgraft.engine.messages import Done, Submit, TokenOut
from rootgraft.engine.scheduling.chunk_budget import usual_chunk
from rootgraft.engine.scheduling.scheduler import Scheduler
from rootgraft.engine.scheduling.waiting_queue import PATIENCE
from rootgraft.engine.sequence.sequence import Sequence, SequenceSpec, Status
from rootgraft.engine.types import Priority, SamplingParams
from rootgraft.radix.namespace import Namespace, Path

VOCAB = 97
BANDS = st.sampled_from([Priority.REALTIME, Priority.INTERACTIVE])


class Engine:
    """An engine on integers, and all that it said. Every equation is checked in every step."""

    def __init__(
        self, num_pages: int, page_size: int, rows: int, budget: int, *, sharing: bool = True, seconds: float = 1.0
    ) -> None:
        config = EngineConfig(
            block_size=page_size,
            max_num_seqs=rows,
            max_num_batched_tokens=max(rows, budget),
            enable_prefix_caching=sharing,
        )
        self.core = EngineCore(config, FakeWorker(num_pages, page_size, vocab_size=VOCAB))
        self.longest = worker_of(self.core).max_model_len
        self.now = 0.0
        self.seconds = seconds  # of a step
        set_clock(self.core, lambda: self.now)
        set_queue_clock(self.core, lambda: self.now)
        self.prompts: list[list[int]] = []
        self.tokens: list[list[int]] = []
        self.done: set[int] = set()

    def submit(self, prompt: list[int], count: int, priority: Priority) -> int:
        number = len(self.prompts)
        self.prompts.append(prompt)
        self.tokens.append([])
        self.core.handle([Submit(number, array("i", prompt), SamplingParams(max_tokens=count), priority=priority)])
        return number

    def step(self) -> None:
        self.now += self.seconds
        for message in self.core.step():
            if isinstance(message, TokenOut):
                self.tokens[message.id] += message.tokens
            else:
                assert isinstance(message, Done) and message.id not in self.done
                self.done.add(message.id)
        self.core.check()

    def steps_until_a_token(self, number: int, limit: int) -> int:
        for count in range(1, limit + 1):
            self.step()
            if self.tokens[number]:
                return count
        raise AssertionError(f"no token after {limit} steps")

    def run(self) -> None:
        while self.core.has_work:
            self.step()
        for number, prompt in enumerate(self.prompts):
            assert self.tokens[number] == expected_tokens(prompt, len(self.tokens[number]), VOCAB)


# A batch's long prompt that is under way, and another's short one: both had the second step before the arrived one.
@example(seed=39, num_pages=34, page_size=4, rows=4, budget=30, band=Priority.REALTIME, sharing=False, before=39)
@settings(max_examples=repeats(60), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_pages=st.integers(8, 60),
    page_size=st.sampled_from([1, 4, 16]),
    rows=st.integers(1, 6),
    budget=st.integers(1, 40),
    band=BANDS,
    sharing=st.booleans(),
    before=st.integers(0, 40),
)
def test_one_that_arrives_in_a_full_engine_begins_at_once(
    seed: int, num_pages: int, page_size: int, rows: int, budget: int, band: Priority, sharing: bool, before: int
) -> None:
    """Rows, pages and budget are full of batch sequences, at any point of their lives; more of them wait."""
    rng = random.Random(seed)
    engine = Engine(num_pages, page_size, rows, budget, sharing=sharing)

    def prompt() -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(rng.randint(1, engine.longest - 1))]

    for _ in range(2 * rows):
        asked = prompt()
        engine.submit(asked, rng.randint(1, engine.longest - len(asked)), Priority.BATCH)
    for _ in range(before):
        engine.step()
    arrived = prompt()
    number = engine.submit(arrived, 1, band)
    # What the others leave, of whom each may draw a token: for a prompt beside them a usual chunk at most.
    a_step = min(max(rows, budget) - (rows - 1), usual_chunk(max(rows, budget)))
    engine.steps_until_a_token(number, 1 + -(-len(arrived) // a_step))
    engine.run()


@settings(max_examples=repeats(25), deadline=None)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 4), page_size=st.sampled_from([1, 4, 16]), band=BANDS)
def test_what_gave_way_loses_next_to_nothing(seed: int, rows: int, page_size: int, band: Priority) -> None:
    """With room in the cache it comes back as a prefix hit: a token or two are computed again."""
    rng = random.Random(seed)
    engine = Engine(4000 // page_size, page_size, rows, 32)
    for _ in range(rows):
        engine.submit([rng.randrange(VOCAB) for _ in range(rng.randint(1, 100))], 60, Priority.BATCH)
    for _ in range(40):
        engine.step()
        if rng.random() < 0.5:
            engine.submit([rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))], rng.randint(1, 4), band)
    engine.run()
    stats = engine.core.stats()
    drafts = stats["draft_tokens"] - stats["draft_tokens_accepted"]
    least = sum(len(prompt) + len(tokens) - 1 for prompt, tokens in zip(engine.prompts, engine.tokens, strict=True))
    assert stats["computed_tokens"] - drafts <= least + 2 * stats["preemptions"]
    assert all(len(engine.tokens[number]) == 60 for number in range(rows))


def test_a_batch_sequence_that_gives_way_all_the_time_ends_nevertheless() -> None:
    """A second a step; interactive sequences arrive so that there is always one more than there are rows."""
    rng = random.Random(3)
    engine = Engine(60, 4, 2, 16)
    number = engine.submit(list(range(40)), 30, Priority.BATCH)
    for _ in range(3):
        engine.step()
    while number not in engine.done:
        while scheduler_of(engine.core).num_waiting < 3:
            engine.submit([rng.randrange(VOCAB) for _ in range(8)], 5, Priority.INTERACTIVE)
        engine.step()
        assert engine.now < PATIENCE[Priority.BATCH] + 100
    assert engine.core.stats()["preemptions"] > 0
    engine.run()


def test_a_prompt_goes_before_the_prompts_of_batch_sequences() -> None:
    engine = Engine(200, 4, 3, 8)
    for first in (1, 2):
        engine.submit([first] * 300, 1, Priority.BATCH)
    for _ in range(3):
        engine.step()
    assert engine.steps_until_a_token(engine.submit([3] * 40, 1, Priority.INTERACTIVE), 7) == 5
    engine.run()


def test_a_long_prompt_leaves_batch_streams_running() -> None:
    """It takes all the budget that they would give up, so requests behind it gain nothing by their preemption."""
    engine = Engine(4000, 4, 64, 64, seconds=0.0)
    streams = [engine.submit([number, 7], 1500, Priority.BATCH) for number in range(8)]
    engine.step()
    long = engine.submit([number % VOCAB for number in range(3000)], 1, Priority.INTERACTIVE)
    engine.step()
    short = [engine.submit([number, 8, 9], 1, Priority.INTERACTIVE) for number in range(8)]
    before = [len(engine.tokens[number]) for number in streams]
    steps = engine.steps_until_a_token(long, 100)
    said = [len(engine.tokens[number]) - count for number, count in zip(streams, before, strict=True)]
    assert min(said) >= steps - 1, "a batch stream was pushed off the device"
    assert engine.core.stats()["preemptions"] == 0
    for number in short:
        assert engine.tokens[number] or engine.steps_until_a_token(number, 2)
    engine.run()


def test_a_batch_stream_is_preempted_where_that_lets_a_request_begin() -> None:
    """All rows and all budget go to batch streams, one token each: one of them gives up its own."""
    engine = Engine(400, 4, 8, 8, seconds=0.0)
    for number in range(8):
        engine.submit([number], 100, Priority.BATCH)
    engine.step()
    assert scheduler_of(engine.core).num_running == 8
    engine.steps_until_a_token(engine.submit([1], 1, Priority.INTERACTIVE), 1)
    assert engine.core.stats()["preemptions"] == 1
    engine.run()


@settings(max_examples=repeats(40), deadline=None)
@given(seed=st.integers(0, 2**32), budget=st.integers(4, 40), page_size=st.sampled_from([1, 4]))
def test_nobody_is_preempted_for_budget_that_running_requests_take(seed: int, budget: int, page_size: int) -> None:
    """Rows and pages are plenty. What the running requests of other classes want decides, counted before each step."""
    rng = random.Random(seed)
    engine = Engine(8000 // page_size, page_size, budget, budget, seconds=0.0, sharing=False)
    scheduler = scheduler_of(engine.core)
    for _ in range(60):
        if rng.random() < 0.5 and scheduler.num_running + scheduler.num_waiting < budget:
            length = rng.choice([1, 3, 20, 100])
            priority = rng.choice([Priority.BATCH, Priority.BATCH, Priority.INTERACTIVE])
            engine.submit([rng.randrange(VOCAB) for _ in range(length)], rng.randint(1, 30), priority)
        others = [each for each in scheduler.running if each.priority is not Priority.BATCH]
        wanted = sum(each.num_tokens - each.num_computed for each in others)
        preempted = engine.core.stats()["preemptions"]
        engine.step()
        if engine.core.stats()["preemptions"] > preempted:
            assert wanted < budget, "preempted for budget that the running requests take"
    engine.run()


def test_interactive_sequences_give_way_to_nobody() -> None:
    engine = Engine(60, 4, 2, 16)
    for _ in range(2):
        engine.submit([1, 2, 3], 20, Priority.INTERACTIVE)
    for _ in range(3):
        engine.step()
    engine.submit([4, 5], 2, Priority.REALTIME)
    engine.run()
    assert engine.core.stats()["preemptions"] == 0


def test_one_that_waits_for_a_slot_makes_nobody_give_way() -> None:
    class NoSlot:
        def acquire(self, _adapter: int, _tenant: str) -> int:
            return -1

        def is_ready(self, _adapter: int) -> bool:
            return False

        def prefetch(self, _adapter: int, _tenant: str) -> None: ...

        def release(self, _index: int) -> None: ...

    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 8}
    scheduler = Scheduler(PrefixCache(20, 4), **limits, stats=EngineStats(), slots=NoSlot())

    def sequence(number: int, priority: Priority, adapter: int) -> Sequence:
        path, tokens = Path(Namespace("base")), array("i", [1, 2, 3])
        params = SamplingParams()
        return Sequence(number, tokens, params, path, SequenceSpec(frozenset(), 0, 0.0, 50, adapter), priority=priority)

    batch = sequence(0, Priority.BATCH, -1)
    scheduler.add(batch)
    step = scheduler.schedule()
    scheduler.commit(step, StepResult((RowResult(tokens=(7,)),)))
    scheduler.add(sequence(1, Priority.REALTIME, 5))
    assert len(scheduler.schedule().rows) == 1 and batch.status is Status.RUNNING
