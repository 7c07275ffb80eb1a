"""Where steps end: at a prompt's end where that costs little; and who begins though another computes its prefix."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.core_hooks import scheduler_of, set_clock, worker_of
from support.engine.fake_worker import FakeWorker, expected_tokens
from support.machine.thoroughness import repeats

from rootgraft.engine.batch import Batch, Row, StepHandle
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.messages import Submit, TokenOut
from rootgraft.engine.scheduling.step_plan import StepPlan
from rootgraft.engine.types import Priority, SamplingParams

VOCAB, PAGE = 97, 16


class Engine:
    """An engine over integers on a machine whose steps take a millisecond for a token and for ``overhead`` more."""

    def __init__(self, budget: int = 640, rows: int = 64, num_pages: int = 800, overhead: float = 20.0) -> None:
        config = EngineConfig(
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            block_size=PAGE,
            target_itl_ms="0",
            speculative_config='{"method": "off"}',
        )
        worker = FakeWorker(num_pages, PAGE, vocab_size=VOCAB)
        self.core = EngineCore(config, worker)
        self.now, launch = 0.0, worker.launch

        def timed_launch(batch: Batch) -> StepHandle:
            self.now += (overhead + batch.num_tokens) / 1000
            return launch(batch)

        worker.launch = timed_launch  # type: ignore[method-assign]
        set_clock(self.core, lambda: self.now)
        self.prompts: list[array[int]] = []
        self.tokens: list[list[int]] = []

    def submit(self, prompt: list[int] | int, max_tokens: int = 1, priority: Priority = Priority.INTERACTIVE) -> int:
        """Send a request: its prompt, or how many tokens of its own it has."""
        number = len(self.prompts)
        rng = random.Random(number)
        tokens = prompt if isinstance(prompt, list) else [number % VOCAB, *_tokens(rng, prompt - 1)]
        self.prompts.append(array("i", tokens))
        self.tokens.append([])
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.core.handle([Submit(number, self.prompts[-1], params, priority=priority)])
        return number

    def learn(self) -> None:
        """Compute prompts of several sizes, and decode, so that costs are known."""
        for _ in range(3):
            for size in (40, 400, 9, 200, 3, 600):
                self.submit(size, max_tokens=8)
                self.run()

    def step(self) -> Batch:
        for message in self.core.step():
            if isinstance(message, TokenOut):
                self.tokens[message.id] += message.tokens
        self.core.check()
        batch: Batch = worker_of(self.core).batches[-1]
        return batch

    def run(self) -> list[Batch]:
        """Run to the end and return the steps; every answer is that of its prompt alone."""
        batches = []
        while self.core.has_work:
            batches.append(self.step())
        for prompt, tokens in zip(self.prompts, self.tokens, strict=True):
            assert tokens == expected_tokens(prompt, len(tokens), VOCAB)
        return batches


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def chunks(batch: Batch) -> list[Row]:
    """The rows of a step that compute parts of prompts, in the order in which they were planned."""
    return [row for row in batch.rows if len(row.tokens) > 1 or not row.draws]


def num_chunk_tokens(batch: Batch) -> int:
    return sum(len(row.tokens) for row in chunks(batch))


def usual(budget: int) -> int:
    """Four fifths, rounded up."""
    return -(-4 * budget // 5)


def test_prompts_that_come_together_are_not_cut() -> None:
    engine = Engine()
    for _ in range(32):
        engine.submit(93, max_tokens=20)
    batches = [batch for batch in engine.run() if chunks(batch)]
    assert [len(chunks(batch)) for batch in batches] == [6, 6, 6, 6, 6, 2]
    assert [batch.num_tokens for batch in batches[:3]] == [558, 6 + 558, 12 + 558]
    assert all(row.draws for batch in batches for row in batch.rows)


@pytest.mark.parametrize(
    ("size", "alone", "beside"),
    [
        (512, [512], [512]),
        (640, [640], [512, 128]),
        (639, [639], [639]),
        (641, [640, 1], [512, 129]),
        (1300, [640, 640, 20], [512, 512, 276]),
        (1152, [640, 512], [512, 512, 128]),
        (1151, [640, 511], [512, 639]),
    ],
)
def test_a_long_prompt_is_cut_at_the_usual_chunk_only_where_another_sequence_draws(
    size: int, alone: list[int], beside: list[int]
) -> None:
    for with_stream, wanted in [(False, alone), (True, beside)]:
        engine = Engine()
        if with_stream:
            engine.submit(5, max_tokens=50)
            engine.step()
        number = engine.submit(size)
        sizes = []
        while not engine.tokens[number]:
            sizes.append(engine.step().num_tokens - with_stream)
        assert sizes == wanted


def test_of_two_long_prompts_the_later_one_gets_what_the_end_of_the_first_leaves() -> None:
    engine = Engine()
    engine.submit(1000)
    engine.submit(1000)
    assert [[len(row.tokens) for row in batch.rows] for batch in engine.run()] == [[640], [360, 152], [640], [208]]


@pytest.mark.parametrize(("short", "wanted"), [(10, [10, 600]), (40, [40, 600]), (41, [41, 471]), (256, [256, 256])])
def test_a_short_prompt_passes_one_whose_end_takes_more_than_a_usual_chunk(short: int, wanted: list[int]) -> None:
    engine = Engine()
    engine.submit(1240)
    engine.step()
    engine.submit(short)
    assert [len(row.tokens) for row in engine.step().rows] == wanted


@settings(max_examples=repeats(40), deadline=None)
@given(
    budget=st.integers(8, 90),
    rows=st.integers(1, 8),
    longest=st.sampled_from([4, 30, 200]),
    num_pages=st.sampled_from([30, 300]),
    seed=st.integers(0, 2**32),
)
def test_only_the_end_of_a_prompt_goes_beyond_the_usual_chunk(
    budget: int, rows: int, longest: int, num_pages: int, seed: int
) -> None:
    """Nor does a step have more than its budget, or leave room while a prompt waits for it."""
    rng, engine = random.Random(seed), Engine(budget, rows, num_pages)
    for _ in range(30):
        for _ in range(rng.choice([0, 0, 1, 4])):
            engine.submit(rng.randint(1, longest), rng.randint(1, 12), Priority(rng.randrange(3)))
        if not engine.core.has_work:
            continue
        batch = engine.step()
        parts, total = chunks(batch), num_chunk_tokens(batch)
        is_cut = any(not row.draws for row in parts)
        assert batch.num_tokens <= budget
        if is_cut and any(row.draws for row in batch.rows):
            assert total <= usual(budget)
        elif total > usual(budget) and not is_cut:
            assert total - len(parts[-1].tokens) < usual(budget)
        if is_cut and num_pages == 300:
            assert total >= usual(budget) or batch.num_tokens == budget
    engine.run()


@settings(max_examples=20, deadline=None)
@given(streams=st.integers(1, 9), size=st.integers(2, 40))
def test_a_prompt_advances_beside_as_many_streams_as_there_may_be(streams: int, size: int) -> None:
    """Single tokens are not counted as prompts: of a step of ten tokens nine streams leave one."""
    engine = Engine(budget=10, rows=10)
    for _ in range(streams):
        engine.submit(1, max_tokens=200)
    engine.step()
    number = engine.submit(size)
    rest = size
    while not engine.tokens[number]:
        wanted = rest if rest <= 10 - streams else min(10 - streams, 8)
        assert engine.step().num_tokens == streams + wanted
        rest -= wanted


@settings(max_examples=repeats(40), deadline=None)
@given(budget=st.integers(10, 100), seed=st.integers(0, 2**32))
def test_what_is_taken_back_can_be_given_again(budget: int, seed: int) -> None:
    rng, engine = random.Random(seed), Engine(budget=10, rows=10)
    for _ in range(6):
        engine.submit(100)
    while len(scheduler_of(engine.core).running) < 3:
        engine.submit(2, max_tokens=50)
        engine.step()
    running = scheduler_of(engine.core).running
    plan, given_now = StepPlan(budget, 0.0), {}
    for _ in range(10):
        sequence = rng.choice(running)
        plan.take_back(sequence)
        given_now.pop(sequence.id, None)
        count, draws = rng.randint(1, 3), rng.random() < 0.5
        if rng.random() < 0.7:
            given_now[sequence.id] = (sequence, count, draws)
            plan.give(sequence, 0, count, draws=draws)
        fresh = StepPlan(budget, 0.0)
        for other, size, does_draw in given_now.values():
            fresh.give(other, 0, size, draws=does_draw)
        assert (plan.budget, plan.room, plan.num_drawing) == (fresh.budget, fresh.room, fresh.num_drawing)
        assert plan.share(0, 1000) == fresh.share(0, 1000)
        assert plan.room_without(running) == StepPlan(budget, 0.0).room == usual(budget)
        assert plan.room_without([]) == plan.room


def burst(common: int, own: int, count: int, overhead: float, budget: int = 640) -> tuple[list[Batch], int]:
    """Answer ``count`` prompts with a common prefix, on a machine whose steps cost as much as ``overhead`` tokens.

    Returns:
        The steps, and how many tokens of the prefix were computed again.
    """
    engine = Engine(budget, overhead=overhead)
    engine.learn()
    shared = _tokens(random.Random(5), common)
    for number in range(count):
        engine.submit([*shared, number, *_tokens(random.Random(number), own - 1)])
    batches = engine.run()
    return batches, sum(batch.num_tokens for batch in batches) - common - count * own


@pytest.mark.parametrize(
    ("common", "own", "count", "overhead"), [(16, 93, 32, 200), (16, 300, 2, 60), (64, 20, 2, 200)]
)
def test_nobody_waits_for_a_short_prefix(common: int, own: int, count: int, overhead: float) -> None:
    batches, again = burst(common, own, count, overhead)
    begun = len(batches[0].rows)
    assert begun == min(count, -(-512 // (common + own)))
    assert again == (begun - 1) * common


@pytest.mark.parametrize(
    ("common", "own", "count", "overhead"),
    [(48, 93, 32, 200), (96, 400, 2, 200), (400, 20, 2, 200), (1600, 5, 4, 200), (16, 93, 32, 60), (16, 300, 2, 15)],
)
def test_a_prefix_worth_the_wait_is_computed_once(common: int, own: int, count: int, overhead: float) -> None:
    """A long one anywhere, a short one where a step costs little beyond its tokens."""
    batches, again = burst(common, own, count, overhead)
    assert len(batches[0].rows) == 1
    assert again == 0


@settings(max_examples=repeats(15), deadline=None)
@given(
    pages=st.integers(1, 20),
    own=st.integers(1, 200),
    count=st.integers(2, 20),
    overhead=st.floats(1, 500),
    budget=st.sampled_from([64, 640, 2000]),
)
def test_little_is_computed_again(pages: int, own: int, count: int, overhead: float, budget: int) -> None:
    """No more than takes half of a step's cost beyond its tokens, and no more than an eighth of a usual chunk."""
    _, again = burst(pages * PAGE, own, count, overhead, budget)
    assert 0 <= again <= min(usual(budget) / 8, 0.75 * overhead)
