"""Masks that take long: their sequences sit out steps, everybody else goes on, and nothing else changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.core_hooks import set_slow_mask_thread
from support.engine.draft_engine import ASKS, Ask, Engine
from support.machine.thoroughness import repeats

from rootgraft.engine.messages import Abort, Done
from rootgraft.engine.types import FinishReason, SamplingParams
from rootgraft.grammar.match.matcher import Matcher


class Later:
    """A thread that fills masks when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[None], Callable[..., None], tuple[Any, ...]]] = []

    def submit(self, work: Callable[..., None], *args: Any) -> Future[None]:
        future: Future[None] = Future()
        self.waiting.append((future, work, args))
        return future

    def work(self, count: int = 1_000) -> None:
        for _ in range(min(count, len(self.waiting))):
            future, work, args = self.waiting.pop(0)
            if future.set_running_or_notify_cancel():
                work(*args)
                future.set_result(None)

    def shutdown(self, *, cancel_futures: bool) -> None:
        assert cancel_futures


def later(engine: Engine) -> Later:
    """Put the filling of slow masks into the test's hands."""
    thread = Later()
    set_slow_mask_thread(engine.core, thread)
    return thread


@settings(max_examples=repeats(60), deadline=None)
@given(
    asks=ASKS,
    seed=st.integers(0, 2**32),
    share=st.sampled_from([0.2, 0.8, 1.0]),
    page_size=st.sampled_from([1, 4]),
    num_pages=st.sampled_from([100, 140, 1000]),
    method=st.sampled_from(["auto", "off"]),
    overlaps=st.booleans(),
)
def test_slow_masks_change_nothing_but_the_number_of_steps(asks, seed, share, page_size, num_pages, method, overlaps):
    """Any masks may be slow and come at any time: with chunks, drafts, preemption and steps planned ahead."""
    options = {"num_pages": num_pages // page_size + 4, "page_size": page_size, "budget": 9}
    plain = Engine.make("off", **options)
    for number, ask in enumerate(asks):
        plain.submit(number, ask)
    expected = plain.run()
    plain.close()
    rng = random.Random(seed)
    slow = Engine.make(method, **options, overlaps=overlaps)
    thread = later(slow)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Matcher, "is_slow", lambda self, remaining: rng.random() < share)
        patch.setattr("rootgraft.engine.core.engine_core._PAUSE", 0.0)
        for number, ask in enumerate(asks):
            slow.submit(number, ask)
            slow.step()
        steps = 0
        while slow.core.has_work:
            slow.step()
            thread.work(rng.choice([0, 0, 1, 3]))
            steps += 1
            assert steps < 20_000
    assert slow.run() == expected
    slow.close()


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr(Matcher, "is_slow", lambda self, remaining: True)
    monkeypatch.setattr("rootgraft.engine.core.engine_core._PAUSE", 0.0)
    engine = Engine.make("off")
    yield engine
    engine.close()


def test_nobody_else_waits_for_a_slow_mask(slow):
    thread = later(slow)
    slow.submit(0, Ask((1, 2), SamplingParams(max_tokens=20), grammar=2))
    slow.submit(1, Ask((3, 4), SamplingParams(max_tokens=20, ignore_eos=True)))
    while 1 not in slow.ends:
        slow.step()
    assert slow.tokens[0] == []
    for done in (1, 2):
        thread.work()
        slow.step()
        assert len(slow.tokens[0]) == done


def test_a_sequence_can_be_aborted_while_its_mask_is_filled(slow):
    thread = later(slow)
    for number in range(2):
        slow.submit(number, Ask((1, 2), SamplingParams(max_tokens=20), grammar=2))
    thread.work(1)
    slow.step()
    slow.core.handle([Abort((0, 1))])
    slow.step()
    assert [(type(end), end.reason) for end in slow.ends.values()] == [(Done, FinishReason.ABORT)] * 2
    thread.work()
    assert not slow.core.has_work
    assert slow.core.stats()["pages_private"] == 0


def test_a_mask_of_a_step_under_way_is_left_to_that_step(monkeypatch):
    """The thread of the step and the other one must not meet on a matcher."""
    monkeypatch.setattr("rootgraft.engine.core.engine_core._PAUSE", 0.0)
    engine = Engine.make("off", overlaps=True)
    thread = later(engine)
    engine.submit(0, Ask((1, 2), SamplingParams(max_tokens=20), grammar=2))
    engine.step()  # the second step is launched ahead, its mask taken for a quick one
    monkeypatch.setattr(Matcher, "is_slow", lambda self, remaining: True)
    engine.step()
    assert [len(engine.tokens[0]), len(thread.waiting)] == [2, 1]
    engine.step()
    assert len(engine.tokens[0]) == 2
    engine.close()
