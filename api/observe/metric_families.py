"""Metric families: create a server's counters and histograms with its prefix and labels, in its registry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import HistogramMetricFamily, Metric

from ...engine.bucket_counts import BucketCounts
from ...engine.metric_tables import full_name
from .engine_collector import LABELS


class ObservedHistogram(BucketCounts):
    """Histogram of the registry that is fast enough for values of every token. Belongs to one event loop."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str]) -> None:
        super().__init__(bounds)
        self._name = name
        self._text = text
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """Yield the metric family. The registry calls this method."""
        histogram = HistogramMetricFamily(self._name, self._text, labels=LABELS)
        histogram.add_metric(self._labels, self.up_to, self._sum)
        yield histogram


@dataclass(frozen=True, slots=True)
class MetricFamilies:
    """Creates the metric families of one server.

    Attributes:
        prefix: prefix of the metrics' names.
        labels: values of ``LABELS`` in each series.
    """

    registry: CollectorRegistry
    prefix: str
    labels: tuple[str, str]

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """Create a counter with further labels of these names."""
        return Counter(full_name(name, self.prefix), text, (*LABELS, *labels), registry=self.registry)

    def histogram(self, name: str, text: str, bounds: Sequence[float]) -> ObservedHistogram:
        """Create a histogram with these upper bounds of its buckets."""
        histogram = ObservedHistogram(full_name(name, self.prefix), text, bounds, self.labels)
        self.registry.register(histogram)
        return histogram
