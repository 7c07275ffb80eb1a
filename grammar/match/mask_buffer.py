"""Bitmask buffer of a batch: one row of packed bits for each sampling position under a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..vocabulary import Vocabulary
from .matcher import GrammarFailure
from .reasoning_matcher import AnswerMatcher


class MaskFill(NamedTuple):
    """Masks to fill for one matcher: of the next token, and of the one after each draft.

    Attributes:
        row: of the first mask; the masks after drafts follow it.
        matcher: advances by the drafts, up to the first that it refuses or fails on.
        remaining: tokens that may still be generated, or None.
        drafts: proposed tokens.
    """

    row: int
    matcher: AnswerMatcher
    remaining: int | None = None
    drafts: Sequence[int] = ()


class MaskBuffer:
    """Rows of 32-bit words, bit ``token % 32`` of word ``token // 32`` set where a token is allowed.

    Args:
        rows: the largest number of sampling positions of a batch.

    Attributes:
        words: int32 [rows, ceil(vocabulary / 32)]; a row keeps its content until it is filled again.
    """

    def __init__(self, rows: int, vocabulary: Vocabulary) -> None:
        self.words: NDArray[np.int32] = np.full((rows, vocabulary.num_words), -1, dtype=np.int32)

    def fill(self, jobs: Sequence[MaskFill]) -> dict[int, GrammarFailure]:
        """Fill the rows of some matchers; each row and matcher belongs to one job.

        Returns:
            The failures by row. Such a row and the rows of the drafts after it allow nothing; neither do the rows
            after a draft that is refused.
        """
        return dict(failure for failure in map(self._fill_one, jobs) if failure is not None)

    def forced(self, row: int) -> int | None:
        """Return the only token that a row allows; None if there are more or none."""
        words = self.words[row].view(np.uint32)
        nonzero = np.flatnonzero(words)
        if len(nonzero) != 1:
            return None
        word = int(words[nonzero[0]])
        return None if word & (word - 1) else int(nonzero[0]) * 32 + word.bit_length() - 1

    def _fill_one(self, job: MaskFill) -> tuple[int, GrammarFailure] | None:
        for ahead in range(len(job.drafts) + 1):
            row = job.row + ahead
            try:
                job.matcher.fill_mask(self.words[row], None if job.remaining is None else job.remaining - ahead)
            except Exception as error:  # whatever a backend raises ends this answer alone
                failure = error if isinstance(error, GrammarFailure) else GrammarFailure(repr(error))
                self.words[row : job.row + len(job.drafts) + 1] = 0
                return row, failure
            if ahead < len(job.drafts) and not job.matcher.accept(job.drafts[ahead]):
                self.words[row + 1 : job.row + len(job.drafts) + 1] = 0
                return None
        return None
