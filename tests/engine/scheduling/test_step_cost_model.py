"""The cost of a step is learnt as a linear function of its work, whatever the steps are and in whatever order."""

from __future__ import annotations

import random
from math import exp, log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootgraft.engine.batch import Batch, Row
from rootgraft.engine.scheduling.step_cost_model import StepCostModel, StepWork, num_pairs, work_of

COSTS = st.tuples(
    *[st.floats(-3, 0).map(lambda power, unit=unit: unit * 10**power) for unit in (1.0, 0.1, 1e-5, 0.1, 1e-6)]
)
SECONDS = st.floats(1e-4, 10)


def chunk(start: int, count: int) -> StepWork:
    return StepWork(0, 0, count, sum(range(start + 1, start + count + 1)))


def some_work(rng: random.Random) -> StepWork:
    rows = rng.randint(0, 32)
    of_prompt = chunk(rng.randint(0, 3000), rng.choice([0, 0, 16, 128, 512]))
    return of_prompt._replace(decode_tokens=rows, decode_context=rows * rng.randint(1, 3000))


def seconds_of(costs: tuple[float, ...], work: StepWork) -> float:
    return sum(cost * amount for cost, amount in zip(costs, (1, *work), strict=True))


@settings(max_examples=20, deadline=None)
@given(costs=COSTS, seed=st.integers(0, 2**32))
def test_a_linear_cost_is_learnt(costs: tuple[float, ...], seed: int) -> None:
    """Steps are a random mixture, most unlike the one before: the mean error is a hundredth, a fifth at most."""
    rng, model, errors = random.Random(seed), StepCostModel(), []
    for _ in range(600):
        work = some_work(rng)
        wanted = seconds_of(costs, work)
        errors.append(abs(log(model.seconds(work) / wanted)))
        model.observe(work, wanted)
    assert sum(errors[300:]) / 300 <= 0.2


@given(costs=COSTS, seed=st.integers(0, 2**32))
def test_steps_of_one_kind_are_predicted_after_a_few(costs: tuple[float, ...], seed: int) -> None:
    rng, model = random.Random(seed), StepCostModel()
    for _ in range(30):
        work = some_work(rng)
        model.observe(work, seconds_of(costs, work))
    work = some_work(rng)
    for _ in range(20):
        model.observe(work, seconds_of(costs, work))
    assert model.seconds(work) == pytest.approx(seconds_of(costs, work), rel=0.05)


@given(first=SECONDS, faster=st.floats(3, 1000), rows=st.integers(1, 64))
def test_decode_steps_do_not_blur_what_prompts_cost(first: float, faster: float, rows: int) -> None:
    model = StepCostModel()
    for start in range(0, 4096, 512):
        model.observe(chunk(start, 512), first)
    before = model.prefill_seconds(1000, 1400)
    for i in range(200):
        model.observe(StepWork(rows, rows * (512 + i)), first / faster)
    assert model.prefill_seconds(1000, 1400) == pytest.approx(before, rel=0.25)


@given(usual=SECONDS, factor=st.floats(0.1, 10))
def test_a_machine_that_changes_its_speed_is_seen_in_steps_of_any_kind(usual: float, factor: float) -> None:
    model, decode = StepCostModel(), StepWork(8, 4000)
    for _ in range(50):
        model.observe(chunk(500, 512), 10 * usual)
        model.observe(decode, usual)
    before = model.prefill_seconds(500, 1012)
    for _ in range(50):
        model.observe(decode, usual * factor)
    moved, told = log(model.prefill_seconds(500, 1012) / before), log(factor)
    assert min(0.15 * told, 1.1 * told) - 0.01 <= moved <= max(0.15 * told, 1.1 * told) + 0.01


@given(usual=SECONDS, slower=st.floats(1, 1e6))
def test_one_slow_step_moves_the_prediction_by_a_quarter_at_most(usual: float, slower: float) -> None:
    model, work = StepCostModel(), chunk(1000, 256)._replace(decode_tokens=8, decode_context=4000)
    for _ in range(40):
        model.observe(work, usual)
    model.observe(work, usual * slower)
    assert usual * 0.999 <= model.seconds(work) <= usual * 1.25


@given(outlier=st.floats(0.02, 1e3), usual=SECONDS)
def test_a_first_step_unlike_the_others_is_forgotten(outlier: float, usual: float) -> None:
    model, work = StepCostModel(), chunk(0, 512)
    model.observe(work, usual * outlier)
    assert model.seconds(work) == pytest.approx(usual * outlier, rel=0.05)
    for _ in range(60):
        model.observe(work, usual)
    assert model.seconds(work) == pytest.approx(usual, rel=0.05)


@given(seconds=st.lists(st.floats(-1, 10), min_size=1, max_size=40), seed=st.integers(0, 2**32))
def test_predictions_stay_positive_and_repeatable(seconds: list[float], seed: int) -> None:
    """Whatever the clock says, one that stands still or goes back included."""
    models = StepCostModel(), StepCostModel()
    for model in models:
        rng = random.Random(seed)
        for each in seconds:
            model.observe(some_work(rng), each)
    probe = chunk(100, 50)
    assert 0 < models[0].seconds(probe) == models[1].seconds(probe)
    assert models[0].seconds(StepWork()) > 0


@given(first=st.floats(-4, 1).map(lambda power: exp(power)), start=st.integers(0, 10**6), seconds=st.floats(1e-4, 1))
def test_a_chunk_is_the_longest_that_fits(first: float, start: int, seconds: float) -> None:
    model = StepCostModel()
    model.observe(chunk(0, 512), first)
    count = model.prefill_tokens(start, seconds)
    assert model.prefill_seconds(start, start + count) <= seconds * (1 + 1e-6)
    assert model.prefill_seconds(start, start + count + 1) >= seconds * (1 - 1e-6)


@settings(max_examples=30, deadline=None)
@given(overhead=st.floats(5, 500), seconds=st.floats(1e-5, 1e-2), seed=st.integers(0, 2**32))
def test_what_a_step_costs_beyond_its_rows_is_told_in_tokens(overhead: float, seconds: float, seed: int) -> None:
    rng, model = random.Random(seed), StepCostModel()
    for _ in range(200):
        work = chunk(0, rng.choice([10, 100, 500])) if rng.random() < 0.5 else StepWork(rng.randint(1, 30), 100)
        model.observe(work, seconds * (overhead + work.prefill_tokens + 0.2 * work.decode_tokens))
    assert model.overhead_tokens() == pytest.approx(overhead, rel=0.5, abs=5)


def test_the_work_of_a_batch() -> None:
    """Rows: a decode row at 7, one with two drafts at 100, a prompt's first 20 tokens, its next 5."""
    rows = [(7, 1, 0), (100, 3, 2), (0, 20, 0), (20, 5, 0)]
    batch = Batch(tuple(Row(i, start, [0] * n, 0, (), True, 1, drafts) for i, (start, n, drafts) in enumerate(rows)))
    pairs = sum(range(1, 21)) + sum(range(21, 26))
    assert work_of(batch) == StepWork(4, 8 + 103, 25, pairs)
    assert num_pairs(0, 25) == pairs
