"""A draft model changes when tokens come, never which: over integers, with drafts right, wrong and of few pages."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.core_hooks import num_followed
from support.engine.draft_engine import ASKS, EOS, VOCAB, Ask, Engine, compute_all_drafts
from support.engine.fake_worker import FakeWorker

from rootgraft.engine.batch import Batch, Row, RowResult, StepResult
from rootgraft.engine.messages import Abort, Failed
from rootgraft.engine.speculation.draft_cost import DraftCost
from rootgraft.engine.types import SamplingParams


class FakeDraft(FakeWorker):
    """A draft model that is right with a probability, and checks its pages as the fake device does."""

    def __init__(self, num_pages: int, page_size: int, right: float = 1.0, seed: int = 0, **options: Any) -> None:
        super().__init__(num_pages, page_size, **{"vocab_size": VOCAB, "eos": (EOS,)} | options)
        self._right, self._random = right, random.Random(seed)

    num_skipped = 0

    def run(self, batch: Batch, pages: Any = None) -> StepResult:
        assert len(pages) == len(batch.rows)
        return super().run(batch)

    def _draw(self, row: Row, contents: list[int], first: int) -> RowResult:
        assert row.num_drafts == 0
        result = super()._draw(row, contents, first)
        if not row.draws or self._random.random() < self._right:
            return result
        return replace(result, tokens=(self._random.randrange(self.vocab_size),))


def always_drafting(monkeypatch: pytest.MonkeyPatch, length: int = 4) -> None:
    """Let the draft model draft so many tokens for every row, whatever that costs."""
    compute_all_drafts(monkeypatch)
    monkeypatch.setattr(DraftCost, "draft_length", lambda self, rates, rows, seconds, most: min(length, most))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made = []
    always_drafting(monkeypatch)

    def make(*args: Any, **options: Any) -> Engine:
        made.append(Engine.make(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@settings(max_examples=60, deadline=None)
@given(
    asks=ASKS,
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from([1, 4, 16]),
    budget=st.sampled_from([4, 9, 64]),
    num_pages=st.sampled_from([100, 140, 1000]),
    draft_pages=st.sampled_from([20, 60, 1000]),
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    length=st.sampled_from([1, 3, 16]),
    narrower=st.booleans(),
)
def test_a_draft_model_changes_nothing_but_the_number_of_steps(
    asks, seed, page_size, budget, num_pages, draft_pages, right, length, narrower
):
    """Grammars, chunks, preemption, ends inside of drafts, pages that run out on either side, tokens it cannot read."""
    options = {"num_pages": num_pages // page_size + 4, "page_size": page_size, "budget": budget}
    plain = Engine.make("off", **options)
    for number, ask in enumerate(asks):
        plain.submit(number, ask)
    expected = plain.run()
    plain.close()
    rng = random.Random(seed)
    draft = FakeDraft(draft_pages // page_size + 4, page_size, right, seed, vocab_size=200 if narrower else VOCAB)
    with pytest.MonkeyPatch.context() as patch:
        always_drafting(patch, length)
        drafted = Engine.make("auto", **options, draft=draft)
        for number, ask in enumerate(asks):
            drafted.submit(number, ask)
            for _ in range(rng.choice([0, 0, 1, 5])):
                drafted.step()
        assert drafted.run() == expected
        for end in drafted.ends.values():
            assert isinstance(end, Failed) or end.usage.drafted <= end.usage.completion
        drafted.close()
    assert not any(row.slot >= 0 for batch in draft.batches for row in batch.starts), "it reads base weights"


def test_a_right_draft_model_saves_steps_and_its_drafts_are_counted(engine: Any) -> None:
    ask = Ask((1, 2, 3), SamplingParams(max_tokens=51, ignore_eos=True))
    plain = engine("off")
    plain.submit(0, ask)
    expected = plain.run()
    drafted = engine(draft=FakeDraft(200, 4))
    drafted.submit(0, ask)
    assert drafted.run() == expected
    stats = drafted.core.stats()
    assert stats["steps"] == 11  # the prompt with its token, then five at a time
    assert stats["drafts_accepted_model"] == stats["drafted_model"] == 40


def test_only_tokens_that_it_lacks_are_computed(engine: Any) -> None:
    """Accepted drafts are in its pool already; a prompt that it knows is a hit of its own prefix cache."""
    draft = FakeDraft(200, 4)
    drafted = engine(draft=draft)
    prompt = tuple(range(40))
    drafted.submit(0, Ask(prompt, SamplingParams(max_tokens=21, ignore_eos=True)))
    drafted.run()
    computed = sum(batch.num_tokens for batch in draft.batches)
    assert computed == 40 + 1 + 3 + 3 * (2 + 3)  # all known tokens, then the last draft and the target's own token
    draft.batches.clear()
    drafted.submit(1, Ask((*prompt, 7), SamplingParams(max_tokens=6, ignore_eos=True)))
    drafted.run()
    assert draft.batches[0].rows[0].start == 40


def test_a_row_that_cannot_draw_has_no_further_drafts(engine: Any) -> None:
    draft = FakeDraft(200, 4)
    draft.failing_rows = {0, 1, 2, 3}
    drafted = engine(draft=draft)
    drafted.submit(0, Ask((1, 2), SamplingParams(max_tokens=30, ignore_eos=True)))
    drafted.run()
    assert len(draft.batches) == 1
    assert "drafted_model" not in drafted.core.stats()


def test_an_abort_and_an_error_give_its_pages_back(engine: Any) -> None:
    drafted = engine(draft=FakeDraft(200, 4))
    for number in range(3):
        drafted.submit(number, Ask((number, 2), SamplingParams(max_tokens=30, ignore_eos=True)))
    for _ in range(4):
        drafted.step()
    assert num_followed(drafted.core) == 3
    drafted.core.handle([Abort((0, 1))])
    drafted.run()
    drafted.core.check()
    assert num_followed(drafted.core) == 0


def test_a_long_prompt_before_a_short_answer_is_not_read_twice(engine: Any) -> None:
    draft = FakeDraft(400, 4)
    drafted = engine(num_pages=400, draft=draft)
    drafted.submit(0, Ask(tuple(range(200)) * 2, SamplingParams(max_tokens=20, ignore_eos=True)))
    drafted.run()
    assert not draft.batches
    drafted.submit(1, Ask(tuple(range(100)), SamplingParams(max_tokens=20, ignore_eos=True)))
    drafted.run()
    assert draft.batches


def test_a_draft_model_that_does_not_pay_is_tried_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftCost, "draft_length", lambda self, rates, rows, seconds, most: 0)
    draft = FakeDraft(400, 4)
    drafted = Engine.make("auto", num_pages=400, draft=draft)
    for number in range(4):
        drafted.submit(number, Ask((number, 2), SamplingParams(max_tokens=400, ignore_eos=True)))
    drafted.run()
    steps = drafted.core.stats()["steps"]
    assert 1 <= len(draft.batches) <= 4 * (2 + steps // 128)
    assert all(len(batch.rows) == 1 for batch in draft.batches), "for one row"
    drafted.close()
