"""Prompt lookup (n-gram drafts): an index of a sequence's own tokens by trigram, and the tokens that followed."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator

import numpy as np

WINDOW = 1 << 16  # last tokens of the prompt that are indexed
_CHOICES = 4  # earlier positions that are compared
_LONGEST = 16  # tokens of context that are compared
TOKEN_BITS = 20  # of a token in a key; keys of larger ids may collide, which the comparison detects
TOKEN = (1 << TOKEN_BITS) - 1
KEY = (1 << 3 * TOKEN_BITS) - 1


class NgramIndex:
    """Finds earlier occurrences of a sequence's last tokens, and returns the tokens that followed.

    The prompt is sorted once by numpy; each later token costs a fixed number of steps and one entry.

    Args:
        tokens: int32 tokens of the sequence, which grows at its end and is only read.
    """

    def __init__(self, tokens: array[int]) -> None:
        self._tokens = tokens
        self._keys, self._ends = _sorted_keys(tokens)
        self._key = key_of(tokens[-3:])  # of the last indexed trigram
        self._num_indexed = len(tokens)
        self._first_end = len(tokens)
        self._last: dict[int, int] = {}  # trigram key -> its last end, since the index was made
        self._earlier = array("i")  # by position: the earlier end of the trigram that ends there, or -1
        self._source = -1  # the position after the last match

    def lookup(self, limit: int) -> tuple[int, array[int]]:
        """Return the tokens that followed the longest earlier match of the last tokens.

        A match that overlaps the end of the sequence is a period, which the draft repeats.

        Returns:
            The length of the match (3 to 16, or 0) and up to ``limit`` tokens.
        """
        self._extend()
        end = len(self._tokens)
        best, source = 0, -1
        for position in self._candidates():
            length = match_length(self._tokens, position, self._tokens, end, min(_LONGEST, position))
            if length > best:
                best, source = length, position
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
        """Index the tokens appended since the last call."""
        tokens, key, source = self._tokens, self._key, self._source
        last, earlier = self._last, self._earlier
        position = self._num_indexed
        for token in tokens[position:]:
            position += 1
            if source >= 0:
                source = source + 1 if tokens[source] == token else -1
            key = (key << TOKEN_BITS | token & TOKEN) & KEY
            earlier.append(last.get(key, -1))
            last[key] = position
        self._num_indexed, self._key, self._source = position, key, source

    def _candidates(self) -> Iterator[int]:
        """Yield earlier ends of the last trigram: the continuation of the last match, then the latest first."""
        end = len(self._tokens)
        if end < 3:
            return
        left = 2 * _CHOICES
        if self._source >= 0:
            yield self._source
            left -= 1
        position = self._earlier[-1] if end > self._first_end else -1
        while position >= 0 and left > _CHOICES:
            yield position
            left -= 1
            position = self._earlier[position - self._first_end - 1]
        after = bisect_right(self._keys, self._key)
        while left and after and self._keys[after - 1] == self._key:
            after -= 1
            left -= 1
            if self._ends[after] < end:
                yield self._ends[after]


def key_of(tokens: Iterable[int]) -> int:
    """Return the trigram key of the last three tokens."""
    key = 0
    for token in tokens:
        key = (key << TOKEN_BITS | token & TOKEN) & KEY
    return key


def match_length(left: array[int], left_end: int, right: array[int], right_end: int, most: int) -> int:
    """Return how many tokens before two positions are equal, at most ``most``, which both have."""
    length = 0
    while length < most and left[left_end - length - 1] == right[right_end - length - 1]:
        length += 1
    return length


def _sorted_keys(tokens: array[int]) -> tuple[array[int], array[int]]:
    """Return the sorted keys of all trigrams in the window, and the end of each; equal keys in order."""
    known = np.frombuffer(tokens, np.int32).astype(np.int64)
    start = max(0, len(known) - WINDOW)
    known = known[start:] & TOKEN
    keys = known[:-2] << 2 * TOKEN_BITS | known[1:-1] << TOKEN_BITS | known[2:]
    order = np.argsort(keys, kind="stable")
    return array("q", keys[order].tobytes()), array("q", (order + start + 3).tobytes())
