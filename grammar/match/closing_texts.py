"""The short texts of a grammar as tokens, of which a way to an end is put together, and where they may stand."""

from __future__ import annotations

from functools import cached_property, lru_cache

import numpy as np

from ..emit.grammar_artifact import GrammarArtifact
from ..vocabulary import Vocabulary
from .backends import Row

MAX_TAILS = 600
DEFAULT_JUMP = 10
MAX_RESTS = 4_000
# Where a text stands: outside or inside of a JSON string, behind a backslash in one, or in free text.
OUTSIDE, INSIDE, ESCAPED, FREE = range(4)
NEVER = 100  # the kind of tokens that are never tried
_PLAIN = (b"0", b'""', b"null", b"[]", b"{}", b"true", b"false", b"[", b"{")


class ClosingTexts:
    """The short texts of one grammar as tokens, shared by all its matchers; worked out when first needed."""

    def __init__(self, vocabulary: Vocabulary, artifact: GrammarArtifact) -> None:
        self.vocabulary = vocabulary
        self.is_json = artifact.is_json
        # A separator before any piece: after a number, a piece would only be more digits.
        self.closers = [vocabulary.tokenize(text) for text in (b"}", b"]", b",", b":")]
        self.quote = vocabulary.tokenize(b'"')
        self._artifact = artifact
        self._moves: dict[tuple[int, int], int] = {}

    @property
    def whole(self) -> tuple[int, ...]:
        """The shortest answer; none if it is not known."""
        return self._artifact.whole

    @property
    def is_hopeless(self) -> bool:
        """Whether no short answer was found when one was looked for."""
        return self._artifact.is_hopeless

    @property
    def num_shortest(self) -> int | None:
        """Tokens of the shortest answer, if it is known."""
        return len(self._artifact.whole) or None

    @cached_property
    def listed(self) -> list[list[int]]:
        """Shortest properties and values, in the order in which to try them; empty if the text is no JSON."""
        texts = (*(text.encode() for text in self._texts), *_PLAIN) if self.is_json else ()
        return [self.vocabulary.tokenize(text) for text in texts]

    @cached_property
    def tails(self) -> list[list[int]]:
        """Ends of short strings, shortest first: what may lead out of the middle of a string, or of a plain text."""
        texts = [text.encode() for text in self._texts]
        if self.is_json:
            texts = [b'""', *(text for text in texts if text[:1] == text[-1:] == b'"')]
        ends = {text[at:] for text in texts for at in range(self.is_json, len(text)) if text[at] & 0xC0 != 0x80}
        return [self.vocabulary.tokenize(end) for end in sorted(ends, key=lambda end: (len(end), end))[:MAX_TAILS]]

    @cached_property
    def ends(self) -> list[list[int]]:
        """What ends a tag and all tags around it."""
        return [self.vocabulary.tokenize_named(text) for text in self._artifact.ends]

    @cached_property
    def rests(self) -> list[list[int]]:
        """The texts beside JSON, and then their rests from any place on, of one text after the other."""
        texts = self._artifact.texts
        rests = dict.fromkeys((*texts, *(text[at:] for text in texts for at in range(1, len(text)))))
        return [self.vocabulary.tokenize_named(rest) for rest in list(rests)[:MAX_RESTS] if rest]

    @cached_property
    def jump(self) -> int:
        """About the most tokens by which one token can lengthen the completion."""
        detour = self.vocabulary.tokenize_named(self._artifact.detour)
        pieces = self.listed if self.is_json else self.tails
        # A completion is put together from parts, which takes more tokens than a piece as a whole.
        return 4 + 3 * max(map(len, (detour, *pieces))) // 2 if pieces else DEFAULT_JUMP

    @property
    def _texts(self) -> tuple[str, ...]:
        return (*self._artifact.properties, *self._artifact.values)

    @property
    def rank(self) -> Row:
        """How good each token is for a search."""
        return ranks(self.vocabulary)

    def lexical(self, state: int, token: int) -> int:
        """Inside or outside of a JSON string after a token; a structured part begins outside."""
        if not self.is_json:
            return state
        state = OUTSIDE if state == FREE else state
        move = self._moves.get((state, token))
        if move is None:
            move = self._moves[state, token] = _lexical(state, self.vocabulary.tokens[token])
        return move


def _lexical(state: int, text: bytes) -> int:
    for byte in text:
        if state == ESCAPED:
            state = INSIDE
        elif byte == 0x22:
            state = INSIDE if state == OUTSIDE else OUTSIDE
        elif byte == 0x5C and state == INSIDE:
            state = ESCAPED
    return state


@lru_cache(maxsize=4)
def ranks(vocabulary: Vocabulary) -> Row:
    """For each token kind * 256 + preference within the kind; a kind of 100 is never tried."""
    rank: Row = np.full(vocabulary.size, NEVER << 8, dtype=np.int32)
    for token, text in enumerate(vocabulary.tokens):
        if text and token not in vocabulary.special and token not in vocabulary.eos:
            kind, size = _kind(text), min(len(text), 255)
            rank[token] = (kind << 8) + (255 - size if kind < 10 else size)
    return rank


def _kind(text: bytes) -> int:
    """Long runs of letters, digits or blanks (kinds below 10), and single characters by what they are."""
    if len(text) == 1:
        return 11 if text.isdigit() else 12 if text.islower() else 13 if text.isupper() else 14 + text[0] % 32
    if text.isalpha():
        return 1
    if text.isdigit():
        return 2
    return 3 if not set(text) & set(b'"\\{}[],:') else 50
