"""Mark search: finds the first of many marks in text, and the end of the text that may be the beginning of a mark.

The work for a piece of text is about the same for two marks as for the hundreds that a request with many tools has.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable


class MarkSearch:
    """Searches for marks. Empty marks are left out. Immutable."""

    def __init__(self, marks: Iterable[str]) -> None:
        self._sorted = sorted({mark for mark in marks if mark})
        self._marks = frozenset(self._sorted)
        self._sizes = sorted(set(map(len, self._sorted)))
        by_first: defaultdict[str, list[str]] = defaultdict(list)
        for mark in self._sorted:
            by_first[mark[0]].append(mark)
        # In a sorted list, what the first and the last text have in common all of them have in common.
        self._beginnings = {first: _shared(group[0], group[-1]) for first, group in by_first.items()}

    def find(self, text: str) -> int:
        """Return the least index at which a mark begins in ``text``; -1 if there is none."""
        found = [at for each in self._beginnings.values() if (at := self._find(text, each)) >= 0]
        return min(found, default=-1)

    def _find(self, text: str, beginning: str) -> int:
        """Return the least index of a mark among those with this common beginning."""
        at = text.find(beginning)
        while at >= 0 and not any(text[at : at + size] in self._marks for size in self._sizes):
            at = text.find(beginning, at + 1)
        return at

    def num_held(self, text: str) -> int:
        """Return the length of the longest end of ``text`` that is the beginning of a mark, but not a whole mark."""
        longest = self._sizes[-1] if self._sizes else 0
        for size in range(min(longest - 1, len(text)), 0, -1):
            if text[-size] in self._beginnings:
                end = text[-size:]
                # Of the marks, the first one behind ``end`` in the order is the first one that ``end`` begins.
                at = bisect_right(self._sorted, end)
                if at < len(self._sorted) and self._sorted[at].startswith(end):
                    return size
        return 0


def _shared(left: str, right: str) -> str:
    """Return the longest common beginning of two texts."""
    size = next((at for at, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), None)
    return min(left, right, key=len) if size is None else left[:size]
