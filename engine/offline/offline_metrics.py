"""Metrics of an ``LLM`` as in vLLM: the gauges, counters and histograms that ``get_metrics`` returns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..bucket_counts import BucketCounts
from ..metric_tables import (
    COUNTERS,
    ENGINE_HISTOGRAMS,
    GAUGES,
    SECONDS_BETWEEN,
    SECONDS_TO_FIRST,
    SEQUENCE_HISTOGRAMS,
    VLLM_PREFIX,
    accepted_by_position,
    full_name,
    kv_usage,
    sequence_values,
    token_buckets,
)
from ..serving.output_processor import TextDelta
from ..serving.request import TextRequest
from ..types import FinishReason

_ENDS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR)


@dataclass
class Metric:
    """A metric with its labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that never decreases."""

    value: int


@dataclass
class Vector(Metric):
    """A vector of counters: accepted draft tokens by their position in a draft."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A number that may increase and decrease."""

    value: float


@dataclass
class Histogram(Metric):
    """Number and sum of observed values, and for each upper bound (and ``+Inf``) the number of values up to it."""

    count: int
    sum: float
    buckets: dict[str, int]


class OfflineMetrics:
    """Observes the requests of an ``LLM`` and returns metrics under vLLM's names. Belongs to the engine's thread.

    Args:
        model_name: value of the label ``model_name``.
        max_model_len: largest bound of the histograms of lengths, in tokens.
        max_drafts: largest number of draft tokens of a sequence in one step; 0 without speculative decoding.
    """

    def __init__(self, model_name: str, max_model_len: int, max_drafts: int) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self._max_drafts = max_drafts
        bounds: dict[str, Sequence[float]] = {name: bounds for name, _, bounds in ENGINE_HISTOGRAMS}
        bounds |= {
            name: token_buckets(max_model_len) if values is None else values for name, _, values in SEQUENCE_HISTOGRAMS
        }
        bounds |= {"time_to_first_token_seconds": SECONDS_TO_FIRST, "inter_token_latency_seconds": SECONDS_BETWEEN}
        self._histograms = {name: BucketCounts(each) for name, each in bounds.items()}

    def observe(self, values: Mapping[str, float]) -> None:
        """Add one value to each of the named histograms."""
        for name, value in values.items():
            self._histograms[name].observe(value)

    def watch(self, request: TextRequest) -> RequestWatch:
        """Return the observer of a request that begins now."""
        return RequestWatch(self, request)

    def take(self, observations: Mapping[str, Sequence[float]]) -> None:
        """Add the values that the engine observed in its steps to the histograms. Unknown names are ignored."""
        for name, values in observations.items():
            if (histogram := self._histograms.get(name)) is not None:
                for value in values:
                    histogram.observe(value)

    def snapshot(self, stats: Mapping[str, float]) -> list[Metric]:
        """Return those metrics that vLLM also has.

        Args:
            stats: gauges and counters of the engine.
        """
        return list(self._collect(stats))

    def _collect(self, stats: Mapping[str, float]) -> Iterator[Metric]:
        yield Gauge(VLLM_PREFIX + "kv_cache_usage_perc", dict(self._labels), kv_usage(stats))
        for key, name, _ in GAUGES:
            if (full := full_name(name, VLLM_PREFIX)).startswith(VLLM_PREFIX):
                yield Gauge(full, dict(self._labels), float(stats.get(key, 0)))
        for key, name, _ in COUNTERS:
            if (full := full_name(name, VLLM_PREFIX)).startswith(VLLM_PREFIX):
                yield Counter(full, dict(self._labels), int(stats.get(key, 0)))
        for reason in _ENDS:
            labels = {**self._labels, "finished_reason": reason.value}
            yield Counter(VLLM_PREFIX + "request_success", labels, int(stats.get(f"finished_{reason.value}", 0)))
        if self._max_drafts:
            name = VLLM_PREFIX + "spec_decode_num_accepted_tokens_per_pos"
            yield Vector(name, dict(self._labels), accepted_by_position(stats, self._max_drafts))
        for name, histogram in self._histograms.items():
            if (full := full_name(name, VLLM_PREFIX)).startswith(VLLM_PREFIX):
                count, total = histogram.total
                yield Histogram(full, dict(self._labels), count, total, dict(histogram.up_to))


class RequestWatch:
    """Observes one request. ``add`` must be called with each of its deltas when it arrives."""

    def __init__(self, metrics: OfflineMetrics, request: TextRequest) -> None:
        self._metrics = metrics
        self._n = request.n
        self._start = time.monotonic()
        self._last: dict[int, float] = {}  # Monotonic time in seconds of each answer's last token.
        self._lengths: list[int] = []  # Numbers of tokens of the answers that have ended.
        metrics.observe(
            {
                "request_prompt_tokens": len(request.tokens),
                "request_params_n": request.n,
                "request_params_max_tokens": request.params.max_tokens,
            }
        )

    def add(self, delta: TextDelta) -> None:
        """Record the time of a delta, and the end of its answer."""
        now = time.monotonic()
        if delta.tokens:
            last = self._last.get(delta.index)
            name = "time_to_first_token_seconds" if last is None else "inter_token_latency_seconds"
            self._metrics.observe({name: now - (self._start if last is None else last)})
            self._last[delta.index] = now
        if delta.finish is not None:
            usage = delta.finish.usage
            self._metrics.observe(sequence_values(now - self._start, usage, delta.finish.stats))
            self._lengths.append(usage.completion)
            if len(self._lengths) == self._n:
                self._metrics.observe({"request_max_num_generation_tokens": max(self._lengths)})
