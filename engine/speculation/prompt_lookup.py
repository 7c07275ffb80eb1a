"""Prompt lookup (n-gram drafts): an index of a sequence's own tokens by n-grams of one to three, and what followed."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from operator import eq

import numpy as np

WINDOW = 1 << 16  # last tokens of the prompt that are indexed
_CHOICES = 4  # earlier positions that are compared
_LONGEST = 16  # tokens of context that are compared
_AGREED = 4  # tokens that agree before a match, which make it longer by one
_LONGEST_KEY = 3  # tokens of the longest n-grams that are indexed
TOKEN_BITS = 20  # bits of a token in a key; keys of larger ids may collide, which the comparison detects
TOKEN = (1 << TOKEN_BITS) - 1
KEY = (1 << 3 * TOKEN_BITS) - 1


class NgramIndex:
    """Finds earlier occurrences of a sequence's last tokens, and returns the tokens that followed.

    The prompt is sorted by numpy, once for each order; each later token costs a fixed number of steps.

    Args:
        tokens: int32 tokens of the sequence, which grows at its end and is only read.
    """

    def __init__(self, tokens: array[int]) -> None:
        self._tokens = tokens
        self._orders = [_Order(tokens, order) for order in range(_LONGEST_KEY, 0, -1)]
        self._key = key_of(tokens[-_LONGEST_KEY:])  # key of the last indexed trigram
        self._num_indexed = len(tokens)
        self._source = -1  # the position after the last match, which goes on where a token differs

    def lookup(self, limit: int) -> tuple[int, array[int]]:
        """Return the tokens that followed the best earlier match of the last tokens.

        If the match overlaps the end of the sequence, the sequence ends with a repeated pattern, and the draft repeats
        it.

        Returns:
            The length of the match (1 to 16, or 0) and up to ``limit`` tokens. Tokens before the match, within the last
            16, that agree too count for a fourth each. So a copy with a few differences also has a long match.
        """
        self._extend()
        tokens, end = self._tokens, len(self._tokens)
        best, source = 0, -1
        last = tokens[-_LONGEST:]
        last.reverse()
        for position in self._candidates():
            length = match_length(tokens, position, tokens, end, min(_LONGEST, position))
            if 0 < length < _LONGEST:
                before = tokens[max(0, position - _LONGEST) : position]
                before.reverse()
                length += (sum(map(eq, before, last)) - length) // _AGREED
            if length > best:
                best, source = length, position
                if best == _LONGEST:
                    break
        if not best:
            return 0, array("i")
        self._source = source
        found = self._tokens[source : source + limit]
        while len(found) < limit:
            found += found[: limit - len(found)]
        return best, found

    def _extend(self) -> None:
        """Index the tokens appended since the last call."""
        added = self._tokens[self._num_indexed :]
        if self._source >= 0:
            self._source += len(added)
        for token in added:
            self._key = (self._key << TOKEN_BITS | token & TOKEN) & KEY
            self._num_indexed += 1
            for order in self._orders:
                order.add(self._key, self._num_indexed)

    def _candidates(self) -> Iterator[int]:
        """Yield earlier ends of the last tokens: the one after the last match, then those of the longest key."""
        end = len(self._tokens)
        if self._source >= 0:
            yield self._source
        for order in self._orders:
            found = order.earlier(self._key, end)
            if found:
                yield from found
                return


class _Order:
    """Earlier ends of a sequence's n-grams of one length."""

    def __init__(self, tokens: array[int], order: int) -> None:
        self._order = order
        self._mask = (1 << order * TOKEN_BITS) - 1
        self._keys, self._ends = _sorted_keys(tokens, order)
        self._first_end = len(tokens)
        self._last: dict[int, int] = {}  # key -> its last end, since the index was made
        self._earlier = array("i")  # by position: the earlier end of the n-gram that ends there, or -1

    def add(self, key: int, end: int) -> None:
        """Add the n-gram of the next position."""
        key &= self._mask
        self._earlier.append(self._last.get(key, -1))
        self._last[key] = end

    def earlier(self, key: int, end: int) -> list[int]:
        """Return earlier ends of the n-gram at ``end``: the latest since the index was made, then the latest before."""
        if end < self._order:
            return []
        key &= self._mask
        found: list[int] = []
        position = self._earlier[-1] if end > self._first_end else -1
        while position >= 0 and len(found) < _CHOICES:
            found.append(position)
            position = self._earlier[position - self._first_end - 1]
        after = bisect_right(self._keys, key)
        most = len(found) + _CHOICES
        while len(found) < most and after and self._keys[after - 1] == key:
            after -= 1
            if self._ends[after] < end:
                found.append(self._ends[after])
        return found


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


def _sorted_keys(tokens: array[int], order: int) -> tuple[array[int], array[int]]:
    """Return the sorted keys of all n-grams in the window, and the end of each; equal keys in order."""
    known = np.frombuffer(tokens, np.int32).astype(np.int64)
    start = max(0, len(known) - WINDOW)
    known = known[start:] & TOKEN
    count = max(0, len(known) - order + 1)
    keys = np.zeros(count, np.int64)
    for place in range(order):
        keys = keys << TOKEN_BITS | known[place : place + count]
    ends = np.argsort(keys, kind="stable")
    return array("q", keys[ends].tobytes()), array("q", (ends + start + order).tobytes())
