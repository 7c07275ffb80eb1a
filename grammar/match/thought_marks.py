"""Marks of a thought: search in the bytes of tokens, tokens that spell a mark, and masks within a thought."""

from __future__ import annotations

from functools import cached_property, lru_cache

import numpy as np

from ..vocabulary import Vocabulary
from .backends import Row


class ThoughtMark:
    """A mark that begins or ends a thought, such as ``</think>``: one special token, or text over several tokens.

    The mark is found in the bytes of the tokens by the algorithm of Knuth, Morris and Pratt, however the tokens cut it.

    Attributes:
        tokens: the mark as the model's tokenizer probably tokenizes it.
        most_closing: number of tokens of the longest `closing`.
        longest: number of tokens of the longest spelling.
    """

    def __init__(self, vocabulary: Vocabulary, text: str) -> None:
        self._vocabulary = vocabulary
        self._data = text.encode()
        self._fallback = _fallbacks(self._data)
        self.tokens = vocabulary.tokenize_named(text, bpe=True)
        # A special token is drawn as a whole, and its text cannot be composed of other tokens.
        self._is_special = not vocabulary.special.isdisjoint(self.tokens)
        self.longest = 1 if len(self.tokens) == 1 else len(self._data)
        self.most_closing = max(len(self.closing(at)) for at in range(len(self._data)))

    def follow(self, at: int, data: bytes) -> tuple[int, bytes | None]:
        """Continue the search in the bytes of one more token.

        Args:
            at: number of bytes of the mark that the text ends with.

        Returns:
            The new value of ``at``, and None; or, if the token completes the mark, 0 and the bytes after the mark.
        """
        for position, byte in enumerate(data, 1):
            at = self._step(at, byte)
            if at == len(self._data):
                return 0, data[position:]
        return at, None

    def begin(self, at: int, data: bytes) -> tuple[int, bytes | None] | None:
        """Like `follow`, for a text that must be the mark from its first byte on. Returns None if it is not."""
        rest = self._data[at:]
        if data.startswith(rest):
            return 0, data[len(rest) :]
        return (at + len(data), None) if rest.startswith(data) else None

    def closing(self, at: int) -> list[int]:
        """Return tokens that complete the mark after ``at`` bytes of it; all if ``at`` is within a special token."""
        if len(self.tokens) == 1:
            return self.tokens
        if (following := self._after(at)) is not None:
            return following
        return self.tokens if self._is_special else self._vocabulary.tokenize(self._data[at:])

    def next_tokens(self, at: int) -> list[int]:
        """Return the tokens that spell the mark, or a part of it, after ``at`` bytes of it."""
        if len(self.tokens) == 1 and not at:
            return self.tokens
        if (following := self._after(at)) and following[0] in self._vocabulary.special:
            return following[:1]
        rest = self._data[at:]
        found = (self._vocabulary.token_of(rest[:size]) for size in range(1, len(rest) + 1))
        return [token for token in found if token is not None]

    def _after(self, at: int) -> list[int] | None:
        """Return the mark's own tokens after ``at`` bytes of it; None if ``at`` is in the middle of one."""
        size = 0
        for number, token in enumerate(self.tokens):
            if size == at:
                return self.tokens[number:]
            size += len(self._vocabulary.tokens[token])
        return None

    def passing(self, at: int) -> list[int]:
        """Return the tokens that complete the mark after ``at`` bytes of it and contain further text."""
        return [token for token in self._candidates if self.follow(at, self._vocabulary.tokens[token])[1]]

    @cached_property
    def _candidates(self) -> list[int]:
        """All tokens that may contain the end of the mark and further text after it."""
        ends = tuple(self._data[start:] for start in range(1, len(self._data)))
        return [
            token for token, text in enumerate(self._vocabulary.tokens) if text.startswith(ends) or self._data in text
        ]

    def _step(self, at: int, byte: int) -> int:
        while at and self._data[at] != byte:
            at = self._fallback[at]
        return at + (self._data[at] == byte)


@lru_cache(maxsize=16)
def thought_mark(vocabulary: Vocabulary, text: str) -> ThoughtMark:
    """Return the mark for a text. The latest marks are cached, as all requests to a model have the same marks."""
    return ThoughtMark(vocabulary, text)


@lru_cache(maxsize=256)
def thought_row(vocabulary: Vocabulary, end: ThoughtMark, at: int, *, may_end: bool) -> Row:
    """Return the mask within a thought that is followed by an answer under a grammar. It is shared: do not write to it.

    All tokens are allowed except those with text after the end mark, as the grammar could not check that text.

    Args:
        at: number of bytes of the end mark that the thought ends with.
        may_end: whether the answer may end within the thought.
    """
    allowed = np.zeros(vocabulary.num_words * 32, dtype=bool)
    allowed[: len(vocabulary.tokens)] = True
    allowed[end.passing(at)] = False
    if not may_end:
        allowed[list(vocabulary.eos)] = False
    return np.packbits(allowed, bitorder="little").view(np.int32)


def _fallbacks(data: bytes) -> list[int]:
    """Return, for each prefix of ``data``, the length of its longest proper suffix that is a prefix too."""
    fallback = [0] * len(data)
    length = 0
    for position in range(1, len(data) - 1):
        while length and data[position] != data[length]:
            length = fallback[length]
        length += data[position] == data[length]
        fallback[position + 1] = length
    return fallback
