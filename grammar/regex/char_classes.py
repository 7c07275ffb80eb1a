"""Character classes of an automaton: code points grouped by which of its character sets they belong to."""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from ..sized_cache import sized_cache
from .charset import MAX_CODE_POINT, SET_BYTES, CharSet, Range


@dataclass(frozen=True, slots=True)
class CharClasses:
    """A partition of the code points. Each set that it was made for has all code points of a class or none of them.

    Attributes:
        starts: first code point of each interval, ascending, beginning at 0.
        classes: class of each interval.
        num: number of classes.
    """

    starts: tuple[int, ...]
    classes: tuple[int, ...]
    num: int

    def of(self, code: int) -> int:
        return self.classes[bisect_right(self.starts, code) - 1]

    def intervals(self, first: int = 0, last: int = MAX_CODE_POINT) -> Iterator[tuple[int, int, int]]:
        """Yield first and last code point and class of each interval within a range, without surrogates."""
        for at in range(bisect_right(self.starts, first) - 1, len(self.starts)):
            low = max(first, self.starts[at])
            high = min(last, self.starts[at + 1] - 1 if at + 1 < len(self.starts) else MAX_CODE_POINT)
            if low > last:
                return
            for start, end in ((low, min(high, 0xD7FF)), (max(low, 0xE000), high)):
                if start <= end:
                    yield start, end, self.classes[at]

    @property
    def sizes(self) -> NDArray[np.float64]:
        """Number of characters of each class, float64 [num]; 1 for a class that has none but surrogates."""
        found = np.zeros(self.num)
        for first, last, number in self.intervals():
            found[number] += last - first + 1
        return np.maximum(found, 1.0)

    def only(self, first: int, last: int) -> int | None:
        """Return the class that all code points of a range have, or None if they differ."""
        low, high = bisect_right(self.starts, first) - 1, bisect_right(self.starts, last)
        found = set(self.classes[low:high])
        return found.pop() if len(found) == 1 else None


def char_classes(sets: Sequence[CharSet]) -> tuple[CharClasses, list[int]]:
    """Return the coarsest partition for some sets, and for each set its classes as bits."""
    ranges = list(map(code_ranges, sets))
    starts = sorted({0, *(edge for listed in ranges for first, last in listed for edge in (first, last + 1))})
    if starts[-1] > MAX_CODE_POINT:
        starts.pop()
    index = {start: at for at, start in enumerate(starts)}
    members = [0] * len(starts)
    for bit, listed in enumerate(ranges):
        for first, last in listed:
            for at in range(index[first], index.get(last + 1, len(starts))):
                members[at] |= 1 << bit
    numbers: dict[int, int] = {}
    classes = tuple(numbers.setdefault(member, len(numbers)) for member in members)
    found = [sum(1 << number for member, number in numbers.items() if member >> bit & 1) for bit in range(len(sets))]
    return CharClasses(tuple(starts), classes, len(numbers)), found


@sized_cache(4 << 20, lambda found, chars: SET_BYTES * (len(found) + chars.num_parts))
def code_ranges(chars: CharSet) -> tuple[Range, ...]:
    """Return a set as ascending, disjoint, inclusive ranges of code points."""
    listed = [*chars.ranges]
    for name in chars.properties:
        listed += _category_ranges(name)
    for other in chars.nested:
        listed += code_ranges(other)
    merged = _merged(listed)
    return tuple(_gaps(merged)) if chars.negated else tuple(merged)


def _merged(ranges: Iterable[Range]) -> list[Range]:
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return merged


def _gaps(ranges: Sequence[Range]) -> Iterable[Range]:
    after = 0
    for first, last in ranges:
        if first > after:
            yield after, first - 1
        after = last + 1
    if after <= MAX_CODE_POINT:
        yield after, MAX_CODE_POINT


def _category_ranges(name: str) -> list[Range]:
    return [(first, last) for first, last, category in _categories() if category.startswith(name)]


@lru_cache(maxsize=1)
def _categories() -> tuple[tuple[int, int, str], ...]:
    """Return the runs of code points of one general category, which takes a tenth of a second."""
    runs = []
    for category, codes in groupby(range(MAX_CODE_POINT + 1), key=lambda code: unicodedata.category(chr(code))):
        listed = list(codes)
        runs.append((listed[0], listed[-1], category))
    return tuple(runs)
