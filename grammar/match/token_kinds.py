"""Token kinds: groups of tokens after which the answer mostly ends alike, so that one token is tested for a group."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..vocabulary import Vocabulary

# Group numbers from this one on belong to groups of one token.
SINGLE = 1_000
_BROKEN = 500
_CLASSES = bytes.maketrans(
    bytes(range(256)),
    bytes(
        ord("0") if chr(byte).isdigit() and byte < 128
        else ord("a") if 97 <= byte <= 122
        else ord("A") if 65 <= byte <= 90
        else 128 if byte >= 128
        else byte
        for byte in range(256)
    ),
)  # fmt: skip


class TokenGroups:
    """The tokens sorted by the number of their group."""

    def __init__(self, numbers: NDArray[np.int32]) -> None:
        self.numbers = numbers
        self._order = np.argsort(numbers, kind="stable")
        self._sorted = numbers[self._order]

    def members(self, number: int) -> NDArray[np.int64]:
        """Return the tokens of a group."""
        first, last = np.searchsorted(self._sorted, [number, number + 1])
        return self._order[first:last]


class TokenKinds(NamedTuple):
    """The groups to which each token belongs, by two properties.

    Attributes:
        lengths: groups by number of characters. Tokens that may end a JSON string, escape in it or break a character
            are groups of one token.
        shapes: groups by the sequence of classes of all characters: letters, digits, others.
    """

    lengths: TokenGroups
    shapes: TokenGroups


def token_kinds(vocabulary: Vocabulary) -> TokenKinds:
    """Return the groups, computed once for each vocabulary."""
    return vocabulary.derived(_token_kinds)


def _token_kinds(vocabulary: Vocabulary) -> TokenKinds:
    lengths = np.arange(SINGLE, SINGLE + vocabulary.size, dtype=np.int32)
    shapes = np.arange(vocabulary.size, dtype=np.int32)
    numbers: dict[bytes, int] = {}
    for token, text in enumerate(vocabulary.tokens):
        if not text or token in vocabulary.special:
            continue
        shapes[token] = numbers.setdefault(text.translate(_CLASSES), token)
        if not any(byte < 0x20 or byte in b'"\\\x7f' for byte in text) and len(text) < _BROKEN:
            try:
                lengths[token] = len(text.decode())
            except UnicodeDecodeError:
                lengths[token] = _BROKEN + min(len(text), _BROKEN - 1) if text[0] & 0xC0 != 0x80 else lengths[token]
    return TokenKinds(TokenGroups(lengths), TokenGroups(shapes))
