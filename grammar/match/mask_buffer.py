"""Bitmask buffer of a batch: one row of packed bits for each sampling position that a grammar restricts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..vocabulary import Vocabulary
from .budget_close import BudgetCheck
from .matcher import SLOW_SECONDS
from .reasoning_matcher import AnswerMatcher

# Smallest number of rows that several threads fill. Fewer rows take less time than waking the threads.
LEAST_TOGETHER = 8

logger = logging.getLogger("rootgraft.grammar")


class MaskFill(NamedTuple):
    """The masks to fill for one matcher: one for the next token, and one for the token after each draft.

    Attributes:
        row: row of the first mask; the masks after drafts are in the rows after it.
        matcher: the matcher; it advances by the drafts up to the first one that it refuses or on which it fails.
        remaining: number of tokens that may still be generated; None for no budget.
        drafts: proposed tokens.
    """

    row: int
    matcher: AnswerMatcher
    remaining: int | None = None
    drafts: Sequence[int] = ()


class MaskBuffer:
    """Masks as rows of 32-bit words: bit ``token % 32`` of word ``token // 32`` is set if the token is allowed.

    Args:
        rows: the largest number of sampling positions of a batch.
        num_threads: number of threads on which the library fills the rows of several matchers in one call. It releases
            the interpreter's lock meanwhile.

    Attributes:
        words: int32 [rows, ceil(vocabulary / 32)], the tokens that the grammar allows; a row keeps its content until it
            is filled again.
        checks: by row, the check of the allowed tokens; only rows in which the token budget may exclude some have one.
    """

    def __init__(self, rows: int, vocabulary: Vocabulary, num_threads: int = 1) -> None:
        self._executor: Any = None
        if num_threads > 1:
            import llguidance

            self._executor = llguidance.LLExecutor(num_threads)
        self._is_slow = False
        self.words: NDArray[np.int32] = np.full((rows, vocabulary.num_words), -1, dtype=np.int32)
        self.checks: dict[int, BudgetCheck] = {}
        self._eos = vocabulary.eos
        self._ends = np.zeros(vocabulary.num_words, np.uint32)
        for token in vocabulary.eos:
            self._ends[token >> 5] |= np.uint32(1 << (token & 31))

    def fill(self, jobs: Sequence[MaskFill]) -> dict[int, Exception]:
        """Fill the rows of several matchers. Each row and each matcher belongs to one job.

        Returns:
            The failures by row. After a ``GrammarFailure`` the matcher can be rolled back; after any other exception of
            the backend the state of the matcher is unknown. The masks of such a row and of the rows of the drafts after
            it allow no token. The rows after a refused draft allow no token either.
        """
        return dict(failure for failure in map(self._fill_one, jobs) if failure is not None)

    def fill_together(self, jobs: Sequence[MaskFill]) -> None:
        """Fill the first row of each matcher on all threads, if the library can. The caller calls `fill` next.

        After a call that took long, each row is filled alone once, so that the slow matcher is found. If the library
        fails, `fill` fills all rows alone, so that only the answer that causes the failure fails.
        """
        if self._executor is None or len(jobs) < LEAST_TOGETHER or self._is_slow:
            self._is_slow = False
            return
        found = [(job, parser) for job in jobs if (parser := job.matcher.parser_to_fill()) is not None]
        if not found:
            return
        before, (num_rows, width) = perf_counter(), self.words.shape
        parsers = [(parser, job.row) for job, parser in found]
        try:
            self._executor.unsafe_compute_mask_ptr(parsers, self.words.ctypes.data, 4 * width, num_rows)
        # The library does not say which row failed: `fill` fills each row alone and finds it.
        except Exception as error:
            logger.warning("masks of %d answers could not be filled together: %s", len(found), error)
            return
        self._is_slow = perf_counter() - before > SLOW_SECONDS
        for job, _ in found:
            job.matcher.take_as_filled()

    def forced(self, row: int) -> int | None:
        """Return the only token that a row allows; an end token if it allows only end tokens; else None.

        Which end token is chosen does not change the answer. The result is also None if the row allows no token.
        """
        words = self.words[row].view(np.uint32)
        nonzero = np.flatnonzero(words)
        if not 1 <= len(nonzero) <= len(self._eos):
            return None
        word = int(words[nonzero[0]])
        if len(nonzero) == 1 and not word & (word - 1):
            return int(nonzero[0]) * 32 + word.bit_length() - 1
        if (words[nonzero] & ~self._ends[nonzero]).any():
            return None
        return next(token for token in self._eos if words[token >> 5] >> (token & 31) & 1)

    def _fill_one(self, job: MaskFill) -> tuple[int, Exception] | None:
        end = job.row + len(job.drafts) + 1
        for row in range(job.row, end):
            self.checks.pop(row, None)
        for ahead, row in enumerate(range(job.row, end)):
            try:
                if ahead and not job.matcher.accept(job.drafts[ahead - 1]):
                    self.words[row:end] = 0
                    return None
                remaining = None if job.remaining is None else job.remaining - ahead
                check = job.matcher.fill_grammar_mask(self.words[row], remaining)
                if check is not None:
                    self.checks[row] = check
            except Exception as error:  # Any exception of a backend ends only this answer.
                self.words[row:end] = 0
                return row, error
        return None
