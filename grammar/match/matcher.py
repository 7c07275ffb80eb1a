"""Grammar matcher: follows one answer token by token; masks, drafts, and an early end within the budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..vocabulary import Vocabulary
from .backends import BackendState, LlguidanceBackend, Row
from .budget_close import BudgetCheck, BudgetClose

# Processor time in seconds from which a mask delays the step during whose forward pass it is filled. Processor time is
# measured because time in which kernels or the step loop have the core or the interpreter does not predict the next
# mask.
SLOW_SECONDS = 0.003


class GrammarFailure(Exception):
    """The backend ran into a limit of its own in the middle of an answer: the answer is an error, not an end."""


class _Prepared(NamedTuple):
    """A mask filled ahead of time, valid while no token comes or goes and for one number of remaining tokens."""

    remaining: int | None
    row: Row
    check: BudgetCheck | None


class Matcher:
    """Follows one answer under a grammar.

    The answer ends with an end token, which counts as one accepted token; `rollback` may undo it. A rollback leaves no
    trace, not even of a failure of the backend.

    A lexer that has failed keeps failing in all copies of its state, including those of other answers. So after a
    failure the state is rebuilt from the grammar, for this answer alone. The answer fails only if the rebuilt state
    fails too. An answer with a rebuilt state gets no more drafts.

    Threads: not thread-safe; one thread uses a matcher at a time. In the engine these threads take turns: - The step
        thread, between steps: `accept`, `rollback`, `draft`, `admits`, `is_slow` and all properties. - The mask thread
        (``grammar-masks``), from the launch of a step until its masks are collected: `fill_mask`, and `accept` for the
        drafts of the step. - The thread of slow masks (``grammar-slow-masks``), from submission until its future is
        done: `prepare`. The sequence is not planned meanwhile, so neither of the other threads uses its matcher.

    Args:
        beginning: the state of the grammar before any token; never changed.
        rebuild: returns another such state, which shares nothing with ``beginning``.
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
        """Accepted tokens, the end token included."""
        return len(self._tokens)

    @property
    def is_done(self) -> bool:
        return self._ended

    @property
    def can_end(self) -> bool:
        return self._ended or self._state.can_end()

    @property
    def is_whole(self) -> bool:
        """Whether an answer cut off here is complete, and not free text that would have gone on."""
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
        """Whether drafts may follow: not behind a mask filled ahead or a failure of the backend."""
        return not (self._ended or self._is_rebuilt or self._prepared is not None)

    @property
    def failure(self) -> str | None:
        """Why the backend can allow no further token, or None."""
        return self._state.failure()

    def fill_mask(self, row: Row, remaining: int | None = None) -> None:
        """Write the bitmask of the tokens that may come next, least significant bit first.

        If the budget is nearly used up this takes long, as each token is tested. The engine uses `fill_grammar_mask`
        instead, and the sampler tests the token that it has drawn.

        Args:
            row: int32 [ceil(vocabulary / 32)], contiguous; overwritten.
            remaining: tokens that may still be generated, this one included: a token after which no end fits is not
                allowed. None: no budget.

        Raises:
            GrammarFailure: if the backend has failed, or allows no token at all.
        """
        check = self.fill_grammar_mask(row, remaining)
        if check is not None:
            row[:] = check.limits()

    def parser_to_fill(self) -> Any | None:
        """Return the library's parser if it can fill the next row together with the rows of other answers.

        Returns None if the row differs from the parser's, or takes long.
        """
        state = self._state
        if self._ended or self._slow_masks or self._prepared is not None or not isinstance(state, LlguidanceBackend):
            return None
        if state.failure() is not None:
            return None
        return state.parser

    def take_as_filled(self) -> None:
        """Note that the parser has filled the row of the next `fill_grammar_mask`, unless the tokens change before it.

        Must be called only after the library has filled the row, as another answer may make the library fail.
        """
        self._is_filled = True

    def fill_grammar_mask(self, row: Row, remaining: int | None = None) -> BudgetCheck | None:
        """Write the bitmask of the tokens that the grammar allows next.

        Returns:
            The check of which of these tokens leave room for an end in the budget; None if all do.

        Raises:
            GrammarFailure: as `fill_mask`.
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
        """Return whether the next mask is likely to take long, as earlier ones did: better to `prepare` it."""
        return self._slow_searches if self._budget_close.must_search(remaining) else self._slow_masks

    def prepare(self, remaining: int | None) -> None:
        """Fill the next mask ahead of time for `fill_mask`, which uses it if the tokens have not changed by then.

        `fill_mask` reports errors. No draft is proposed after such a mask, as the next mask would take as long.
        """
        row: Row = np.zeros(self._vocabulary.num_words, dtype=np.int32)
        try:
            check = self.fill_grammar_mask(row, remaining)
        except Exception:
            return  # whatever a backend raises: `fill_mask` meets it again
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
        """Tokens of the shortest answer, its end token excluded: the least budget that completes; None if unknown."""
        return self._budget_close.num_shortest

    def accept(self, token: int) -> bool:
        """Advance by a token. Returns False, and changes nothing, if the grammar does not allow it here."""
        return self._accept(token, self._advance)

    def replay(self, token: int, remaining: int) -> bool:
        """Advance by a token that was drawn elsewhere. Returns False, and nothing is accepted, if it is not allowed.

        The effect is that of `fill_grammar_mask` and `accept`, in less time: the mask is known to have allowed the
        token.
        """
        self.replan(remaining)
        return self.accept(token)

    def replan(self, remaining: int) -> None:
        """Search an end within the budget, as `fill_grammar_mask` does."""
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
        """Advance the backend by a token that was drawn: where it refuses, a limit is ruled out as the reason."""
        if self._state.accept(token):
            return True
        if self._state.failure() is None:
            # A lexer that meets a limit between two masks refuses tokens, and says why with the next mask only.
            self._state.fill(np.zeros(self._vocabulary.num_words, dtype=np.int32))
            if self._state.failure() is None:
                return False
        self._replay()
        return self._state.accept(token)

    def rollback(self, count: int) -> None:
        """Undo the last tokens, the end token included.

        Raises:
            ValueError: there are fewer tokens.
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
        """Return how many leading tokens of a text draft may come next; the state is left as it is."""
        if not self.may_draft:
            return 0
        start = self.num_tokens
        for token in tokens:
            # Refused because of a limit, a draft is only shorter.
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
        """Return an independent matcher at the same position."""
        close = self._budget_close.copy()
        other = Matcher(self._state, self._vocabulary, close, self._rebuild, open_ended=self._open_ended)
        other._tokens, other._ended, other._is_rebuilt = list(self._tokens), self._ended, self._is_rebuilt
        other._slow_masks, other._slow_searches = self._slow_masks, self._slow_searches
        return other

    def draft(self, limit: int) -> list[int]:
        """Return a draft: at most `limit` tokens of the text that must come next; the state is left as it is.

        The grammar forces the text only, and the tokenization is a guess. So the tokens must be verified under the mask
        like any draft.
        """
        if not self.may_draft or limit < 1:
            return []
        forced = self._state.forced()
        # The last token could be longer than the forced text: leave it open.
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
