"""A draft head reads the target's hidden states: over integers, where a cell's content stands for them."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.core_hooks import worker_of
from support.engine.draft_engine import ASKS, EOS, VOCAB, Ask, Engine, compute_all_drafts
from support.engine.fake_worker import FakeWorker, chain, next_token

from rootgraft.engine.batch import Batch, Row, RowResult, StepResult
from rootgraft.engine.messages import Failed
from rootgraft.engine.speculation.draft_cost import DraftCost
from rootgraft.engine.types import SamplingParams


class FakeHead(FakeWorker):
    """A head that knows from the target's cell in front of a token what the target says after it.

    Its own cells hold a hash of all tokens but the first, each with the hidden state beside it. So a wrong page of
    either side, or a hit of its cache behind another first token, is found where it draws.
    """

    num_skipped = 1

    def __init__(self, num_pages: int, page_size: int, right: float = 1.0, seed: int = 0) -> None:
        super().__init__(num_pages, page_size, vocab_size=VOCAB, eos=(EOS,))
        self._right, self._random = right, random.Random(seed)
        self.target: FakeWorker
        self.base_digest = "head"
        self._tokens: dict[int, list[int]] = {}  # by line, all that are known or drafted
        self._beside: dict[int, list[int]] = {}  # by line, the hidden state in front of each but the first
        self._last: dict[int, int] = {}

    def run(self, batch: Batch, pages: Any = None) -> StepResult:
        for start in batch.starts:
            self._tokens[start.row], self._beside[start.row] = list(start.tokens), []
        for row, held in zip(batch.rows, pages, strict=True):
            self._read(row, held)
        return super().run(batch)

    def _read(self, row: Row, held: Seq[int]) -> None:
        tokens, beside = self._tokens[row.row], self._beside[row.row]
        tokens[row.start + 1 :] = row.tokens
        del beside[row.start :]
        truth = [0]
        for token in tokens:
            truth.append(chain(truth[-1], token))
        beside += truth[len(beside) + 1 : row.start + 1]  # of a hit: what was read then
        for position in range(row.start, row.start + len(row.tokens)):
            hidden = self.target.cells[self._cell(list(held), position)] if held else self._last[row.row]
            assert hidden == truth[position + 1], "not the hidden state in front of the token"
            beside.append(hidden)
        self._last[row.row] = chain(beside[-1], tokens[-1])

    def _weights(self, row: int, position: int) -> int:
        return self._beside[row][position]

    def _draw(self, row: Row, contents: list[int], first: int) -> RowResult:
        content = 0
        for token, hidden in zip(self._tokens[row.row][1:], self._beside[row.row], strict=True):
            content = chain(content, token ^ hidden)
        assert content == contents[-1], "a cell of its own holds another prefix"
        if not row.draws:
            return RowResult()
        drawn = next_token(self._last[row.row], self.vocab_size)
        if self._random.random() >= self._right:
            drawn = self._random.randrange(self.vocab_size)
        return RowResult((drawn,))


def engine(head: FakeHead, **options: Any) -> Engine:
    made = Engine.make("auto", **options, draft=head)
    head.target = worker_of(made.core)
    return made


@settings(max_examples=60)
@given(
    asks=ASKS,
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from([1, 4, 16]),
    budget=st.sampled_from([4, 9, 64]),
    num_pages=st.sampled_from([100, 140, 1000]),
    draft_pages=st.sampled_from([20, 60, 1000]),
    right=st.sampled_from([0.0, 0.5, 1.0]),
    length=st.sampled_from([1, 3, 16]),
)
def test_a_head_changes_nothing_but_the_number_of_steps(
    asks: list[Ask],
    seed: int,
    page_size: int,
    budget: int,
    num_pages: int,
    draft_pages: int,
    right: float,
    length: int,
) -> None:
    """Grammars, chunks, prefix hits, preemption, pages that run out on either side."""
    options = {"num_pages": num_pages // page_size + 4, "page_size": page_size, "budget": budget}
    plain = Engine.make("off", **options)
    for number, ask in enumerate(asks):
        plain.submit(number, ask)
    expected = plain.run()
    plain.close()
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        compute_all_drafts(patch)
        patch.setattr(DraftCost, "draft_length", lambda self, rates, rows, seconds, most: min(length, most))
        drafted = engine(FakeHead(draft_pages // page_size + 4, page_size, right, seed), **options)
        for number, ask in enumerate(asks):
            drafted.submit(number, ask)
            for _ in range(rng.choice([0, 0, 1, 5])):
                drafted.step()
        assert drafted.run() == expected
        for end in drafted.ends.values():
            assert isinstance(end, Failed) or end.usage.drafted <= end.usage.completion
        drafted.close()


@pytest.mark.parametrize("first", [1, 7])
def test_a_right_head_saves_steps_and_a_cached_prompt_is_read_by_no_one_twice(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    compute_all_drafts(monkeypatch)
    monkeypatch.setattr(DraftCost, "draft_length", lambda self, rates, rows, seconds, most: min(4, most))
    head = FakeHead(200, 4)
    drafted = engine(head)
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
