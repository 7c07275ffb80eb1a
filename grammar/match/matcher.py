"""Grammar matcher: follows one answer token by token; masks, drafts, and an early end within the budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..vocabulary import Vocabulary
from .backends import BackendState, LlguidanceBackend, Row
from .budget_close import BudgetCheck, BudgetClose

# A mask that took at least this processor time in seconds counts as slow: filled during the forward pass of a step, it
# delays the step. Processor time is measured, as a mask may also wait for kernels or for the step loop, and such waits
# do not predict the time of the next mask.
SLOW_SECONDS = 0.003


class GrammarFailure(Exception):
    """The backend met a limit of its own in the middle of an answer. The answer ends with an error."""


class _Prepared(NamedTuple):
    """A mask filled ahead of time. It is valid while the tokens and the number of remaining tokens do not change."""

    remaining: int | None
    row: Row
    check: BudgetCheck | None


class Matcher:
    """Follows one answer under a grammar.

    The answer ends with an end token, which counts as an accepted token; `rollback` can undo it. A rollback restores
    the former state completely, even after a failure of the backend.

    A lexer of the library that has failed keeps failing in all copies of its state, including those of other answers.
    So after a failure the state is rebuilt from the grammar, for this answer alone. The answer fails only if the
    rebuilt state fails too. An answer with a rebuilt state gets no more drafts.

    Not thread-safe: one thread at a time uses a matcher. In the engine these threads take turns:

    - The step thread, between steps: `accept`, `rollback`, `draft`, `admits`, `is_slow` and all properties.
    - The mask thread (``grammar-masks``), from the launch of a step until its masks are collected: `fill_mask`, and
      `accept` for the drafts of the step.
    - The thread of slow masks (``grammar-slow-masks``), from submission until its future is done: `prepare`. Meanwhile
      the scheduler does not plan the sequence, so neither of the other threads uses its matcher.

    Args:
        beginning: the state of the grammar before any token; never changed.
        rebuild: returns another such state that shares nothing with ``beginning``.
        open_ended: whether the answer is free text that may end anywhere.
        is_slow: whether masks of the grammar are known to take long.
    """

    def __init__(
        self,
        beginning: BackendState,
        vocabulary: Vocabulary,
        budget_close: BudgetClose,
        rebuild: Callable[[], BackendState],
        *,
        open_ended: bool = False,
        is_slow: bool = False,
    ) -> None:
        self._prepared: _Prepared | None = None
        self._is_filled = False
        self._slow_masks = self._slow_searches = is_slow
        self._tokens: list[int] = []
        self._open_ended = open_ended
        self._rebuild = rebuild
        self._is_rebuilt = False
        self._state = beginning.copy()
        self._vocabulary = vocabulary
        self._budget_close = budget_close
        self._ended = False

    @property
    def num_tokens(self) -> int:
        """Number of accepted tokens, the end token included."""
        return len(self._tokens)

    @property
    def is_done(self) -> bool:
        return self._ended

    @property
    def can_end(self) -> bool:
        return self._ended or self._state.can_end()

    @property
    def is_whole(self) -> bool:
        """Whether an answer that is cut off here is complete. Free text that could go on is not complete."""
        return self._ended or (not self._open_ended and self._state.can_end())

    @property
    def may_go_on(self) -> bool:
        """Whether text other than white space may come next."""
        if self._ended:
            return False
        row: Row = np.zeros(self._vocabulary.num_words, dtype=np.int32)
        self._state.fill(row)
        return bool((row & ~self._vocabulary.derived(_blank_row)).any())

    @property
    def is_open_ended(self) -> bool:
        """Whether the answer is free text with structured parts, which may end almost anywhere."""
        return self._open_ended

    @property
    def may_draft(self) -> bool:
        """Whether the next tokens may be drafts: not after a mask filled ahead of time, nor after a failure."""
        return not (self._ended or self._is_rebuilt or self._prepared is not None)

    @property
    def failure(self) -> str | None:
        """Why the backend can allow no further token; None if it has not failed."""
        return self._state.failure()

    def fill_mask(self, row: Row, remaining: int | None = None) -> None:
        """Write the bitmask of the tokens that may come next, least significant bit first.

        If the token budget is nearly used up, this takes long, as each token is tested. The engine uses
        `fill_grammar_mask` instead, and the sampler tests only the token that it has drawn.

        Args:
            row: int32 [ceil(vocabulary / 32)], contiguous; overwritten.
            remaining: number of tokens that may still be generated, this one included. A token after which no end fits
                is not allowed. None for no budget.

        Raises:
            GrammarFailure: the backend has failed, or allows no token at all.
        """
        check = self.fill_grammar_mask(row, remaining)
        if check is not None:
            row[:] = check.limits()

    def parser_to_fill(self) -> Any | None:
        """Return the library's parser if the library can fill the next row together with the rows of other answers.

        Returns None if the row is not the parser's own mask, or if it takes long.
        """
        state = self._state
        if self._ended or self._slow_masks or self._prepared is not None or not isinstance(state, LlguidanceBackend):
            return None
        if state.failure() is not None:
            return None
        return state.parser

    def take_as_filled(self) -> None:
        """Record that the library has filled the row of the next `fill_grammar_mask`, unless the tokens change first.

        Must be called only after the library has filled the row, as another answer of the same call may make it fail.
        """
        self._is_filled = True

    def fill_grammar_mask(self, row: Row, remaining: int | None = None) -> BudgetCheck | None:
        """Write the bitmask of the tokens that the grammar allows next, without regard to the budget.

        Returns:
            The check that determines after which of these tokens an end fits in the budget; None if one fits after all.

        Raises:
            GrammarFailure: see `fill_mask`.
        """
        if self._prepared is not None and self._prepared.remaining == remaining:
            row[:] = self._prepared.row
            return self._prepared.check
        searches = remaining is not None and self._budget_close.must_search(remaining)
        before = time.thread_time()
        check = self._fill(row, remaining)
        is_slow = time.thread_time() - before > SLOW_SECONDS
        if searches:
            self._slow_searches |= is_slow
        else:
            self._slow_masks = is_slow
        return check

    def is_slow(self, remaining: int) -> bool:
        """Return whether the next mask is likely to take long, because earlier ones did. Then call `prepare` for it."""
        return self._slow_searches if self._budget_close.must_search(remaining) else self._slow_masks

    def prepare(self, remaining: int | None) -> None:
        """Fill the next mask ahead of time. `fill_mask` uses it if the tokens have not changed by then.

        `fill_mask` reports errors. No draft is proposed after such a mask, as the mask after the draft would take as
        long.
        """
        row: Row = np.zeros(self._vocabulary.num_words, dtype=np.int32)
        try:
            check = self.fill_grammar_mask(row, remaining)
        except Exception:
            return  # Any exception of a backend is ignored here, as `fill_mask` meets it again.
        self._prepared = _Prepared(remaining, row, check)

    def _fill(self, row: Row, remaining: int | None) -> BudgetCheck | None:
        if self._ended:
            self._allow_only_end(row)
            return None
        if not self._is_filled:
            self._state.fill(row)
        self._is_filled = False
        if self._state.failure() is not None:
            self._replay()
            self._state.fill(row)
        failure = self._state.failure()
        if failure is not None:
            raise GrammarFailure(failure)
        if not row.any():
            raise GrammarFailure("no token is allowed")
        return None if remaining is None else self._budget_close.check(self._state, row, remaining)

    @property
    def num_shortest(self) -> int | None:
        """Number of tokens of the shortest answer without its end token, which is the least budget; None if unknown."""
        return self._budget_close.num_shortest

    def accept(self, token: int) -> bool:
        """Advance by a token. Returns False, and changes nothing, if the grammar does not allow the token here."""
        return self._accept(token, self._advance)

    def replay(self, token: int, remaining: int) -> bool:
        """Advance by a token that was drawn elsewhere. Returns False, and accepts nothing, if it is not allowed.

        This has the effect of `fill_grammar_mask` and `accept` in less time, as the mask is known to have allowed the
        token.
        """
        self.replan(remaining)
        return self.accept(token)

    def replan(self, remaining: int) -> None:
        """Search an end within the budget, with the same effect as `fill_grammar_mask`."""
        if not self._ended and self._budget_close.must_search(remaining):
            self._fill(np.zeros(self._vocabulary.num_words, dtype=np.int32), remaining)

    def _accept(self, token: int, advance: Callable[[int], bool]) -> bool:
        if self._ended:
            return False
        self._prepared = None
        self._is_filled = False
        if token in self._vocabulary.eos:
            self._ended = self._state.can_end()
            self._tokens += [token] * self._ended
            return self._ended
        if not 0 <= token < len(self._vocabulary.tokens) or not advance(token):
            return False
        self._budget_close.follow(token, free=self._open_ended and self._state.can_end())
        self._tokens.append(token)
        return True

    def _advance(self, token: int) -> bool:
        """Advance the backend by a drawn token. If the backend refuses it, find out whether a limit is the cause."""
        if self._state.accept(token):
            return True
        if self._state.failure() is None:
            # A lexer that meets a limit between two masks refuses tokens, and reports the reason only at the next mask.
            self._state.fill(np.zeros(self._vocabulary.num_words, dtype=np.int32))
            if self._state.failure() is None:
                return False
        self._replay()
        return self._state.accept(token)

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` tokens, the end token included.

        Raises:
            ValueError: fewer tokens than ``count`` were accepted.
        """
        if not 0 <= count <= self.num_tokens:
            raise ValueError(f"cannot take back {count} of {self.num_tokens} tokens")
        if not count:
            return
        self._prepared = None
        self._is_filled = False
        del self._tokens[self.num_tokens - count :]
        if self._ended:
            self._ended = False
            count -= 1
        self._budget_close.rollback(count)
        if self._state.failure() is None:
            self._state.rollback(count)
        else:
            self._replay()

    def admits(self, tokens: Sequence[int]) -> int:
        """Return how many leading tokens of a draft, from a source other than the grammar, may come next.

        The state is left unchanged.
        """
        if not self.may_draft:
            return 0
        start = self.num_tokens
        for token in tokens:
            # A token may be refused because of a limit of the backend. Then the draft is shorter and nothing else
            # changes.
            if token in self._vocabulary.eos or not self._accept(token, self._state.accept):
                break
        admitted = self.num_tokens - start
        self.rollback(admitted)
        if self._state.failure() is not None:
            self._replay()
        return admitted

    def _replay(self) -> None:
        """Rebuild the state from the grammar and the accepted tokens."""
        self._state = self._rebuild()
        self._is_rebuilt = True
        for token in self._tokens:
            self._state.accept(token)

    def copy(self) -> Matcher:
        """Return an independent matcher at the same position of the answer."""
        close = self._budget_close.copy()
        other = Matcher(self._state, self._vocabulary, close, self._rebuild, open_ended=self._open_ended)
        other._tokens, other._ended, other._is_rebuilt = list(self._tokens), self._ended, self._is_rebuilt
        other._slow_masks, other._slow_searches = self._slow_masks, self._slow_searches
        return other

    def draft(self, limit: int) -> list[int]:
        """Return a draft: at most ``limit`` tokens of the text that must come next. The state is left unchanged.

        The grammar forces only the text, and the tokenization is a guess. So the tokens must be verified under the mask
        like any other draft.
        """
        if not self.may_draft or limit < 1:
            return []
        forced = self._state.forced()
        # The last token is left out, as the model may choose a longer token that begins with the same text.
        tokens = self._vocabulary.tokenize_forced(forced, bpe=True)[:-1] if forced else []
        return tokens[:limit]

    def _allow_only_end(self, row: Row) -> None:
        row[:] = 0
        for token in self._vocabulary.eos:
            _allow(row, token)


def _blank_row(vocabulary: Vocabulary) -> Row:
    """Return the mask of end tokens and white space."""
    row: Row = np.zeros(vocabulary.num_words, dtype=np.int32)
    for token, text in enumerate(vocabulary.tokens):
        if token in vocabulary.eos or (text and not text.strip() and token not in vocabulary.special):
            _allow(row, token)
    return row


def _allow(row: Row, token: int) -> None:
    row.view(np.uint32)[token >> 5] |= np.uint32(1 << (token & 31))
