"""Metric families of one server: counters and histograms under its prefix, with its labels, in its registry."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from .engine_collector import LABELS
from .metric_tables import full_name


class Histogram:
    """Histogram for values of every token, several times as fast as the library's. Belongs to one event loop."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str]) -> None:
        self._name = name
        self._text = text
        self._bounds = (*bounds, math.inf)
        self._labels = labels
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def total(self) -> tuple[int, float]:
        """Number and sum of the values."""
        return sum(self._counts), self._sum

    def collect(self) -> Iterator[Metric]:
        """Return the family, as a collector of the registry."""
        histogram = HistogramMetricFamily(self._name, self._text, labels=LABELS)
        buckets = zip(map(floatToGoString, self._bounds), accumulate(self._counts), strict=True)
        histogram.add_metric(self._labels, list(buckets), self._sum)
        yield histogram


@dataclass(frozen=True, slots=True)
class MetricFamilies:
    """Makes the families of one server.

    Attributes:
        prefix: beginning of their names.
        labels: values of ``LABELS``, which each series has.
    """

    registry: CollectorRegistry
    prefix: str
    labels: tuple[str, str]

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """Return a counter with further labels of these names."""
        return Counter(full_name(name, self.prefix), text, (*LABELS, *labels), registry=self.registry)

    def histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        """Return a histogram with these upper bounds of its buckets."""
        histogram = Histogram(full_name(name, self.prefix), text, bounds, self.labels)
        self.registry.register(histogram)
        return histogram
