"""Where a sequence has said the same before: an index of its tokens by groups of three."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator

import numpy as np

WINDOW = 1 << 16  # tokens of the prompt that are indexed, its last ones
_CHOICES = 4  # earlier places that are looked at
_LONGEST = 16  # tokens by which they are compared
TOKEN_BITS = 20  # of a token in a key; larger ids may make keys collide, which the comparison finds out
TOKEN = (1 << TOKEN_BITS) - 1
KEY = (1 << 3 * TOKEN_BITS) - 1


class NgramIndex:
    """Finds earlier places at which the last tokens stood, and what came then.

    What is there when the index is made (the prompt) is sorted once by numpy; each token that follows costs a fixed
    number of steps and one entry.

    Args:
        tokens: int32 tokens of the sequence, which grows at its end and is only read here.
    """

    def __init__(self, tokens: array[int]) -> None:
        self._tokens = tokens
        self._keys, self._ends = _sorted_keys(tokens)
        self._key = key_of(tokens[-3:])  # of the last three tokens that are indexed
        self._num_indexed = len(tokens)
        self._first_end = len(tokens)
        self._last: dict[int, int] = {}  # key of three tokens -> where they ended last, since the index was made
        self._earlier = array("i")  # by position: where the three tokens that end there ended before, or -1
        self._source = -1  # where the tokens of the last match go on

    def guess(self, limit: int) -> tuple[int, array[int]]:
        """What came after the longest earlier match of the last tokens.

        A match that reaches into itself repeats: the guess goes on with the period.

        Returns:
            The length of the match (3 to 16, or 0) and up to ``limit`` tokens.
        """
        self._extend()
        end = len(self._tokens)
        best, source = 0, -1
        for place in self._places():
            length = num_alike(self._tokens, place, self._tokens, end, min(_LONGEST, place))
            if length > best:
                best, source = length, place
                if best == _LONGEST:
                    break
        self._source = source
        if best < 3:
            return 0, array("i")
        found = self._tokens[source : source + limit]
        while len(found) < limit:
            found += found[: limit - len(found)]
        return best, found

    def _extend(self) -> None:
        """Index the tokens that came since the last call."""
        tokens, key, source = self._tokens, self._key, self._source
        last, earlier = self._last, self._earlier
        place = self._num_indexed
        for token in tokens[place:]:
            place += 1
            if source >= 0:
                source = source + 1 if tokens[source] == token else -1
            key = (key << TOKEN_BITS | token & TOKEN) & KEY
            earlier.append(last.get(key, -1))
            last[key] = place
        self._num_indexed, self._key, self._source = place, key, source

    def _places(self) -> Iterator[int]:
        """Where the last three tokens ended before: where the last match goes on, then latest first."""
        end = len(self._tokens)
        if end < 3:
            return
        left = 2 * _CHOICES
        if self._source >= 0:
            yield self._source
            left -= 1
        place = self._earlier[-1] if end > self._first_end else -1
        while place >= 0 and left > _CHOICES:
            yield place
            left -= 1
            place = self._earlier[place - self._first_end - 1]
        after = bisect_right(self._keys, self._key)
        while left and after and self._keys[after - 1] == self._key:
            after -= 1
            left -= 1
            if self._ends[after] < end:
                yield self._ends[after]


def key_of(tokens: Iterable[int]) -> int:
    """The key of some tokens: of the last three of them."""
    key = 0
    for token in tokens:
        key = (key << TOKEN_BITS | token & TOKEN) & KEY
    return key


def num_alike(left: array[int], left_end: int, right: array[int], right_end: int, most: int) -> int:
    """How many tokens before two places are the same, at most so many, which both have."""
    length = 0
    while length < most and left[left_end - length - 1] == right[right_end - length - 1]:
        length += 1
    return length


def _sorted_keys(tokens: array[int]) -> tuple[array[int], array[int]]:
    """The keys of all groups of three in the window, sorted, and where each ends; equal ones in order."""
    known = np.frombuffer(tokens, np.int32).astype(np.int64)
    start = max(0, len(known) - WINDOW)
    known = known[start:] & TOKEN
    keys = known[:-2] << 2 * TOKEN_BITS | known[1:-1] << TOKEN_BITS | known[2:]
    order = np.argsort(keys, kind="stable")
    return array("q", keys[order].tobytes()), array("q", (order + start + 3).tobytes())
