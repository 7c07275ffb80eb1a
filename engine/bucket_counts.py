"""Bucket counts: the numbers of a histogram, of values that are observed one by one."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.utils import floatToGoString


class BucketCounts:
    """Counts values by bucket, several times as fast as Prometheus' library. Belongs to one thread.

    Args:
        bounds: upper bounds of all buckets but the last, in order; the last bucket has no bound.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = (*bounds, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def total(self) -> tuple[int, float]:
        """Number and sum of the values."""
        return sum(self._counts), self._sum

    @property
    def up_to(self) -> list[tuple[str, int]]:
        """How many values are at most as large as each bound, written as Prometheus does, ``+Inf`` the last."""
        return list(zip(map(floatToGoString, self._bounds), accumulate(self._counts), strict=True))
