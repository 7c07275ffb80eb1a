"""A draft model changes when tokens come, never which: over integers, with drafts right, wrong and of few pages."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.core_hooks import num_followed
from support.engine.draft_engine import (
    DRAWN,
    DRAWN_OF_DRAFTER,
    VOCAB,
    Ask,
    Engine,
    FakeDraft,
    FakeHead,
    MakeEngine,
    always_drafting,
    answers_with,
    answers_without,
    open_engines,
    pool_options,
    with_head,
)
from support.engine.injected_faults import Fault
from support.machine.thoroughness import repeats

from rootgraft.engine.batch import Row, RowResult
from rootgraft.engine.messages import Abort
from rootgraft.engine.speculation.draft_cost import DraftCost
from rootgraft.engine.speculation.proposer import Proposer
from rootgraft.engine.types import SamplingParams


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeEngine]:
    always_drafting(monkeypatch)
    yield from open_engines()


@settings(max_examples=repeats(60), deadline=None)
@given(**DRAWN, **DRAWN_OF_DRAFTER, narrower=st.booleans())
def test_a_draft_model_changes_nothing_but_the_number_of_steps(
    asks, seed, page_size, budget, num_pages, draft_pages, right, length, narrower
):
    """Grammars, chunks, preemption, ends inside of drafts, pages that run out on either side, tokens it cannot read."""
    options = pool_options(num_pages, page_size, budget)
    expected = answers_without(asks, options)
    draft = FakeDraft(draft_pages // page_size + 4, page_size, right, seed, 200 if narrower else VOCAB)
    with pytest.MonkeyPatch.context() as patch:
        always_drafting(patch, length)
        drafted = Engine.make("auto", **options, draft=draft)
        assert answers_with(drafted, asks, random.Random(seed)) == expected
        drafted.close()
    assert not any(row.slot >= 0 for batch in draft.batches for row in batch.starts), "it reads base weights"


def test_a_right_draft_model_saves_steps_and_its_drafts_are_counted(engine: MakeEngine) -> None:
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


def test_only_tokens_that_it_lacks_are_computed(engine: MakeEngine) -> None:
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


def test_a_row_that_cannot_draw_has_no_further_drafts(engine: MakeEngine) -> None:
    draft = FakeDraft(200, 4)
    draft.failing_rows = {0, 1, 2, 3}
    drafted = engine(draft=draft)
    drafted.submit(0, Ask((1, 2), SamplingParams(max_tokens=30, ignore_eos=True)))
    drafted.run()
    assert len(draft.batches) == 1
    assert "drafted_model" not in drafted.core.stats()


def test_an_abort_and_an_error_give_its_pages_back(engine: MakeEngine) -> None:
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


def test_a_long_prompt_before_a_short_answer_is_not_read_twice(engine: MakeEngine) -> None:
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


@pytest.mark.parametrize("grammar", range(2))
def test_it_draws_what_the_grammar_allows(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, grammar: int) -> None:
    """A draft that is the target's draw without the mask would be refused at nearly every token."""
    monkeypatch.setattr(Proposer, "_proposals", lambda self, sequence, state: [])
    drafted = engine(draft=FakeDraft(200, 4))
    drafted.submit(0, Ask((1, 2), SamplingParams(max_tokens=60), grammar=grammar))
    drafted.run()
    stats = drafted.core.stats()
    assert stats["drafts_accepted_model"] == stats["drafted_model"] >= 3


class WithoutWords(FakeDraft):
    """Draws nothing under a mask: it has logits of none that the grammar allows, as a head may."""

    def _draw(self, row: Row, contents: list[int], first: int) -> RowResult:
        return RowResult(failed=True) if row.draws and self.allowed else super()._draw(row, contents, first)


def test_one_without_the_tokens_of_a_grammar_is_soon_left(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It draws nothing there, which counts as a wrong draft does."""
    monkeypatch.setattr(Proposer, "_proposals", lambda self, sequence, state: [])
    monkeypatch.setattr(DraftCost, "draft_length", lambda self, rates, *_: 4 if max(rates) > 0.3 else 0)
    draft = WithoutWords(200, 4)
    drafted = engine(draft=draft)
    for number in range(4):
        drafted.submit(number, Ask((number, 2), SamplingParams(max_tokens=60), grammar=1))
        drafted.run()
    assert 0 < len(draft.batches) < 30
    assert "drafted_model" not in drafted.core.stats()


@pytest.mark.parametrize("calls", [0, 1, 2, 4, 7])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_device_without_memory_for_drafts_costs_drafts_alone(
    engine: MakeEngine, kind: str, calls: int, late: bool
) -> None:
    """Of its first step, of one for several sequences, of one that goes on behind drafts; later it drafts again."""
    asks = [
        Ask((3, 1, 4, 1, 5), SamplingParams(max_tokens=90, ignore_eos=True)),
        Ask((3, 1, 4, 1, 5, 9), SamplingParams(max_tokens=80), grammar=1),
        Ask((3, 1, 4, 1, 5, 9, 2), SamplingParams(max_tokens=700, ignore_eos=True)),
    ]
    options = {"num_pages": 400, "page_size": 4, "budget": 64}
    expected = answers_without(asks, options)
    draft = FakeHead(400, 4, 0.8) if kind == "head" else FakeDraft(400, 4, 0.8)
    drafted = with_head(draft, **options) if isinstance(draft, FakeHead) else engine(**options, draft=draft)
    fault = Fault((type(draft), "compute"), calls, torch.OutOfMemoryError("CUDA out of memory."), late=late)
    with fault.injected():
        for number, ask in enumerate(asks):
            drafted.submit(number, ask)
            drafted.step()
        while not fault.was_raised:
            drafted.step()
        made, steps = len(draft.batches), drafted.core.stats()["steps"]
        found = drafted.run()
    assert found == expected
    assert len(draft.batches) > made, "it is asked again after a while"
    assert drafted.core.stats()["steps"] - steps > 60, "but not at once"
    assert num_followed(drafted.core) == 0
    drafted.close()
