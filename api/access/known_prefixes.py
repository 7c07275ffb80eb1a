"""Known prefixes: finds the part of a prompt that the engine must compute, because it has certainly not seen it before.

A prompt is marked at lengths that grow by a quarter. A mark is a chained hash of all tokens before it::

    32      40    50   62  ...                     tokens
    |--------|-----|----|------ ... ---------------|
     known    known  new                            all tokens after the first new mark must be computed

Adapters, salts and tenants are not distinguished: a prompt with one of them counts as known for all of them. So the
estimated work may be too small, but not too large.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

FIRST, GROWTH = 32, 1.25  # Length of the first mark in tokens, and ratio of the lengths of consecutive marks.
MOST = 1 << 16  # Largest number of stored marks.
# Size of a mark's hash in bytes.
_BYTES = 6


def mark_lengths(num_tokens: int) -> list[int]:
    """Return the lengths at which a prompt of ``num_tokens`` tokens is marked."""
    lengths, length = [], float(FIRST)
    while length <= num_tokens:
        lengths.append(int(length))
        length *= GROWTH
    return lengths


def marks_of(tokens: array[int]) -> tuple[int, ...]:
    """Return the marks of a prompt. They are equal in all processes. The time is linear in the number of tokens."""
    hasher, start, marks = hashlib.blake2b(digest_size=_BYTES), 0, []
    view = memoryview(tokens)
    for end in mark_lengths(len(tokens)):
        hasher.update(view[start:end])
        marks.append(int.from_bytes(hasher.digest(), "little"))
        start = end
    return tuple(marks)


class KnownPrefixes:
    """Marks of the prompts that were sent to the engine. The least recently used marks are dropped first."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._marks: OrderedDict[int, None] = OrderedDict()

    def num_new(self, num_tokens: int, marks: Sequence[int]) -> int:
        """Return the number of tokens of a prompt that are certainly new: those after its last known mark."""
        for mark, length in zip(marks, mark_lengths(num_tokens), strict=True):
            if mark not in self._marks:
                return num_tokens - length
        return 0

    def __contains__(self, mark: int) -> bool:
        return mark in self._marks

    def add(self, marks: Sequence[int]) -> None:
        """Record the marks of a prompt that is sent to the engine."""
        for mark in marks:
            self._marks[mark] = None
            self._marks.move_to_end(mark)
        while len(self._marks) > self._most:
            self._marks.popitem(last=False)
