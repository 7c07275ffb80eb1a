"""Masks of a batch: one row of packed bits for each sequence that has a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from grammar.matcher import GrammarFailure, Matcher
from grammar.vocabulary import Vocabulary


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

    def fill(self, jobs: Sequence[tuple[int, Matcher, int | None]]) -> dict[int, GrammarFailure]:
        """Fill the rows of some matchers.

        Args:
            jobs: (row, matcher, tokens that may still be generated or None); each row and matcher once.

        Returns:
            The failures by row; such a row allows nothing.
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

    def _fill_one(self, job: tuple[int, Matcher, int | None]) -> tuple[int, GrammarFailure] | None:
        row, matcher, remaining = job
        try:
            matcher.fill_mask(self.words[row], remaining)
        except GrammarFailure as failure:
            self.words[row] = 0
            return row, failure
        return None
