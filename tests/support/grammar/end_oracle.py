"""The fewest tokens to an end by brute force: it follows the grammar through all texts, and knows no search."""

from __future__ import annotations

import numpy as np

from rootgraft.grammar.match.matcher import Matcher
from rootgraft.grammar.vocabulary import Vocabulary

FAR = 1 << 20


class EndOracle:
    """Tells of each text of one grammar whether an end of at most so many tokens follows. Texts are told apart by
    their bytes, so each is looked at once, whatever tokens it is made of.

    Args:
        beginning: the matcher of the empty text.
        blank: a token of white space alone leads nowhere that cannot be reached without it.
        most_texts: number of texts after which it gives up with a TimeoutError.
    """

    def __init__(self, beginning: Matcher, vocabulary: Vocabulary, *, blank: bool, most_texts: int = 60_000) -> None:
        self._vocabulary = vocabulary
        self._row = np.zeros(vocabulary.num_words, dtype=np.int32)
        self._left_out = {i for i, text in enumerate(vocabulary.tokens) if blank and not text.strip()}
        self._matchers = {b"": beginning.copy()}
        self._after: dict[bytes, list[bytes]] = {}
        self._exact: dict[bytes, int] = {}
        self._missed: dict[bytes, int] = {}
        self._most_texts = most_texts

    def allowed(self, text: bytes) -> list[int]:
        """Return the tokens that the grammar allows after a text that was met."""
        self._matchers[text].fill_mask(self._row)
        return np.flatnonzero(np.unpackbits(self._row.view(np.uint8), bitorder="little")).tolist()

    def fitting(self, text: bytes, remaining: int) -> set[int]:
        """Return the tokens after which an end fits, of those that the grammar allows after a text."""
        found = set()
        for token in self.allowed(text):
            if token in self._vocabulary.eos or self.fits(self._follow(text, token), remaining - 1):
                found.add(token)
        return found

    def fits(self, text: bytes, most: int) -> bool:
        """Return whether an end of at most so many tokens follows a text."""
        return self.least(text, most) <= most

    def least(self, text: bytes, most: int) -> int:
        """Return the fewest tokens to an end, or more than ``most`` if they are more."""
        if most < 0:
            return FAR
        if text in self._exact:
            return self._exact[text]
        if self._missed.get(text, -1) >= most:
            return FAR
        if self._matchers[text].can_end:
            self._exact[text] = 0
            return 0
        best = FAR
        for after in self._texts_after(text) if most else ():
            best = min(best, 1 + self.least(after, min(most, best - 1) - 1))
        if best <= most:
            self._exact[text] = best
        else:
            self._missed[text] = most
        return best

    def _texts_after(self, text: bytes) -> list[bytes]:
        if text not in self._after:
            left_out = self._left_out.union(self._vocabulary.eos)
            tokens = [token for token in self.allowed(text) if token not in left_out]
            self._after[text] = [self._follow(text, token) for token in tokens]
        return self._after[text]

    def _follow(self, text: bytes, token: int) -> bytes:
        after = text + self._vocabulary.tokens[token]
        if after not in self._matchers:
            if len(self._matchers) >= self._most_texts:
                raise TimeoutError
            matcher = self._matchers[text].copy()
            assert matcher.accept(token)
            self._matchers[after] = matcher
        return after
