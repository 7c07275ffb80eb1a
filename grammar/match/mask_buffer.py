"""Masks of a batch: a row of packed bits for each position at which a sequence with a grammar draws a token."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..vocabulary import Vocabulary
from .matcher import GrammarFailure, Matcher


class MaskFill(NamedTuple):
    """Masks to fill for one matcher: of the next token, and of the one after each draft.

    Attributes:
        row: where the first mask goes; those after drafts follow it.
        matcher: is advanced by the drafts, up to the first that it refuses or cannot be asked about.
        remaining: tokens that may still be generated, or None.
        drafts: proposed tokens.
    """

    row: int
    matcher: Matcher
    remaining: int | None = None
    drafts: Sequence[int] = ()


class MaskBuffer:
    """Rows of 32-bit words, bit ``token % 32`` of word ``token // 32`` set where a token is allowed.

    Attributes:
        words: int32 [rows, ceil(vocabulary / 32)]; a row keeps its content until it is filled again.
    """

    def __init__(self, rows: int, vocabulary: Vocabulary, threads: int = 0) -> None:
        """Room for `rows` masks.

        Args:
            rows: the largest batch.
            vocabulary: whose tokens.
            threads: fill rows on so many threads (the libraries release the interpreter lock); 0 on the caller's.
        """
        self.words: NDArray[np.int32] = np.full((rows, vocabulary.num_words), -1, dtype=np.int32)
        self._pool = ThreadPoolExecutor(threads, "grammar-mask") if threads else None

    def fill(self, jobs: Sequence[MaskFill]) -> dict[int, GrammarFailure]:
        """Fill the rows of some matchers; each row and matcher stands in one job.

        Returns:
            The failures by row. Such a row and those of the drafts behind it allow nothing; neither do those behind a
            draft that is refused.
        """
        run = self._pool.map if self._pool and len(jobs) > 1 else map
        return dict(failure for failure in run(self._fill_one, jobs) if failure is not None)

    def forced(self, row: int) -> int | None:
        """The only token that a row allows, if there is just one."""
        words = self.words[row].view(np.uint32)
        at = np.flatnonzero(words)
        if len(at) != 1:
            return None
        word = int(words[at[0]])
        return None if word & (word - 1) else int(at[0]) * 32 + word.bit_length() - 1

    def close(self) -> None:
        """Stop the threads."""
        if self._pool:
            self._pool.shutdown()

    def _fill_one(self, job: MaskFill) -> tuple[int, GrammarFailure] | None:
        for ahead in range(len(job.drafts) + 1):
            row = job.row + ahead
            try:
                job.matcher.fill_mask(self.words[row], None if job.remaining is None else job.remaining - ahead)
            except Exception as error:  # whatever a library raises is the end of this answer alone
                failure = error if isinstance(error, GrammarFailure) else GrammarFailure(repr(error))
                self.words[row : job.row + len(job.drafts) + 1] = 0
                return row, failure
            if ahead < len(job.drafts) and not job.matcher.accept(job.drafts[ahead]):
                self.words[row + 1 : job.row + len(job.drafts) + 1] = 0
                return None
        return None
