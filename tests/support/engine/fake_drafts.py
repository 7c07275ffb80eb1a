"""A draft model and a draft head over integers, right as often as is asked, for the engines of ``draft_engine``."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from rootgraft.engine.batch import Batch, Masks, Row, RowResult, StepResult
from support.engine.core_hooks import worker_of
from support.engine.draft_engine import EOS, VOCAB, Engine
from support.engine.fake_worker import FakeWorker, chain, next_token


class FakeDraft(FakeWorker):
    """A draft model that is right with a probability, and checks its pages as the fake device does.

    Where it is wrong it draws any token that the mask allows. Logits are as wide as the target's: a token that it lacks
    has none, and can be drawn only if the mask forces it.
    """

    num_skipped = 0

    def __init__(
        self, num_pages: int, page_size: int, right: float = 1.0, seed: int = 0, vocab_size: int = VOCAB
    ) -> None:
        super().__init__(num_pages, page_size, vocab_size=vocab_size, eos=(EOS,))
        self.num_logits = VOCAB
        self._right, self._random = right, random.Random(seed)

    def run(self, batch: Batch, pages: Any = None, masks: Callable[[], Masks] | None = None) -> StepResult:
        assert len(pages) == len(batch.rows)
        return super().run(batch, masks)

    def _content(self, row: Row, contents: list[int]) -> int:
        """What its next token follows from."""
        return contents[-1]

    def _draw(self, row: Row, contents: list[int], first: int) -> RowResult:
        assert row.num_drafts == 0
        content = self._content(row, contents)
        if not row.draws:
            return RowResult()
        allowed = self.allowed.get(first, range(self.vocab_size))
        if first not in self.forced:
            allowed = [token for token in allowed if token < self.vocab_size]
        if not allowed:
            return RowResult(failed=True)
        if self._random.random() >= self._right:
            return RowResult((self._random.choice(allowed),))
        right = next_token(content, self.vocab_size)
        return RowResult((min(allowed, key=lambda token: (token - right) % self.vocab_size),))


class FakeHead(FakeDraft):
    """A head that knows from the target's cell in front of a token what the target says after it.

    Its own cells hold a hash of all tokens but the first, each with the hidden state beside it. So a wrong page of
    either side, or a hit of its cache behind another first token, is found where it draws.

    Attributes:
        target: the target's worker, see `with_head`.
    """

    num_skipped = 1

    def __init__(self, num_pages: int, page_size: int, right: float = 1.0, seed: int = 0) -> None:
        super().__init__(num_pages, page_size, right, seed)
        self.target: FakeWorker
        self.base_digest = "head"
        self._tokens: dict[int, list[int]] = {}  # by line, all that are known or drafted
        self._beside: dict[int, list[int]] = {}  # by line, the hidden state in front of each but the first
        self._last: dict[int, int] = {}

    def run(self, batch: Batch, pages: Any = None, masks: Callable[[], Masks] | None = None) -> StepResult:
        for start in batch.starts:
            self._tokens[start.row], self._beside[start.row] = list(start.tokens), []
        for row, held in zip(batch.rows, pages, strict=True):
            self._read(row, held)
        return super().run(batch, pages, masks)

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

    def _content(self, row: Row, contents: list[int]) -> int:
        content = 0
        for token, hidden in zip(self._tokens[row.row][1:], self._beside[row.row], strict=True):
            content = chain(content, token ^ hidden)
        assert content == contents[-1], "a cell of its own holds another prefix"
        return self._last[row.row]


def with_head(head: FakeHead, **options: Any) -> Engine:
    """Return an engine whose target the head reads."""
    made = Engine.make("auto", **options, draft=head)
    head.target = worker_of(made.core)
    return made
