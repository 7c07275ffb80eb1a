"""A growth curve: measured times by size, beside the exponent that the algorithm allows and the machine's limit."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NOISE = 1.25
"""A point bends worse than its algorithm if it is so many times above where every earlier point allows it to be."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Times at rising sizes.

    Attributes:
        name: a word, unique among all curves.
        title: what was measured, with its unit.
        x_label: what the sizes are.
        exponent: y may grow as x to the power of it.
        reason: why, in a few words.
        limit: the least that the machine allows at each size, None where it is not what limits.
        most: allowed ratio to the limit at the last size.
    """

    name: str
    title: str
    x_label: str
    x: Sequence[int]
    y: Sequence[float]
    exponent: float
    reason: str
    limit: Sequence[float] | None = None
    most: float | None = None

    def fitted_exponent(self) -> float:
        """Return the slope of the least-squares line through the logarithms."""
        xs, ys = [math.log(x) for x in self.x], [math.log(y) for y in self.y]
        return statistics.linear_regression(xs, ys).slope

    def bends(self) -> list[int]:
        """Return the sizes at which the curve is above what the points before them allow."""
        found = []
        for at in range(1, len(self.x)):
            allowed = min(self.y[before] * (self.x[at] / self.x[before]) ** self.exponent for before in range(at))
            if self.y[at] > NOISE * allowed:
                found.append(self.x[at])
        return found

    def ratio(self) -> float | None:
        """Return the last time over its limit."""
        return None if self.limit is None else self.y[-1] / self.limit[-1]

    def worst(self) -> tuple[float, int] | None:
        """Return the largest time over its limit, and its size."""
        if self.limit is None:
            return None
        return max((y / limit, x) for x, y, limit in zip(self.x, self.y, self.limit, strict=True))

    @property
    def is_within(self) -> bool:
        """Whether it bends nowhere, and is as near to its limit as it has to be."""
        ratio = self.ratio()
        return not self.bends() and (self.most is None or ratio is None or ratio <= self.most)
