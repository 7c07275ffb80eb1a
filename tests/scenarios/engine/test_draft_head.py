"""A draft head reads the target's hidden states: over integers, where a cell's content stands for them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.draft_engine import (
    DRAWN,
    DRAWN_OF_DRAFTER,
    Ask,
    FakeHead,
    always_drafting,
    answers_with,
    answers_without,
    pool_options,
    with_head,
)
from support.machine.thoroughness import repeats

from rootgraft.engine.types import SamplingParams


@settings(max_examples=repeats(60))
@given(**DRAWN, **DRAWN_OF_DRAFTER, overlaps=st.booleans())
def test_a_head_changes_nothing_but_the_number_of_steps(
    asks: list[Ask],
    seed: int,
    page_size: int,
    budget: int,
    num_pages: int,
    draft_pages: int,
    right: float,
    length: int,
    overlaps: bool,
) -> None:
    """Grammars, chunks, prefix hits, preemption, pages that run out on either side; steps planned ahead or not."""
    options = pool_options(num_pages, page_size, budget)
    expected = answers_without(asks, options)
    with pytest.MonkeyPatch.context() as patch:
        always_drafting(patch, length)
        head = FakeHead(draft_pages // page_size + 4, page_size, right, seed)
        drafted = with_head(head, **options, overlaps=overlaps)
        assert answers_with(drafted, asks, random.Random(seed)) == expected
        drafted.close()


@pytest.mark.parametrize("first", [1, 7])
def test_a_right_head_saves_steps_and_a_cached_prompt_is_read_by_no_one_twice(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    always_drafting(monkeypatch)
    head = FakeHead(200, 4)
    drafted = with_head(head)
    params = SamplingParams(max_tokens=21, ignore_eos=True)
    drafted.submit(0, Ask((1, *range(2, 40)), params))
    drafted.run()
    stats = drafted.core.stats()
    assert stats["drafts_accepted_model"] == stats["drafted_model"] >= 16
    head.batches.clear()
    drafted.submit(1, Ask((first, *range(2, 40), 50), replace(params, max_tokens=12)))
    drafted.run()
    read = head.batches[0].rows[0]
    assert read.start == (38 if first == 1 else 0), "behind another first token its cells are others"
    drafted.close()


def test_a_right_head_outweighs_steps_that_are_planned_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that computes while the host plans, a step planned ahead has no drafts: its gain is counted."""
    always_drafting(monkeypatch)
    drafted = with_head(FakeHead(200, 4), overlaps=True)
    drafted.submit(0, Ask((1, *range(2, 40)), SamplingParams(max_tokens=60, ignore_eos=True)))
    drafted.run()
    stats = drafted.core.stats()
    assert stats["drafts_accepted_model"] == stats["drafted_model"] >= 40
    drafted.close()
