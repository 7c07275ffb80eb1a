"""Prometheus metrics, with vLLM's names under our prefix so that dashboards and routers know them.

Gauges and counters of the engine are read from its last heartbeat at a scrape, and its histograms arrive with each
heartbeat. Latencies are measured in the API process. ``docs/metrics.md`` lists all metrics.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

from ...engine.types import Priority
from ...grammar.spec import GrammarKind
from ..errors import Rejection
from .history import History
from .token_usage import TokenCounts

if TYPE_CHECKING:
    from ...engine.messages import Heartbeat

PREFIX = "rootgraft:"

# No time of creation beside every counter and histogram.
disable_created_metrics()  # type: ignore[no-untyped-call]

_SECONDS_TO_FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_SECONDS_BETWEEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_SECONDS_IN_ALL = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_SECONDS_OF_MASKS = (
    *(0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 20.0),
)
_TOKENS = tuple(float(1 << power) for power in range(18))
_COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0)

# Name in the heartbeat, name outside, help.
_ENGINE_GAUGES = (
    ("engine_healthy", "engine_healthy", "1 while the engine's process runs and does not hang, else 0."),
    ("engine_silent_seconds", "engine_silent_seconds", "Seconds since the last sign of life of the engine's process."),
    ("running", "num_requests_running", "Sequences that take part in steps."),
    ("waiting", "num_requests_waiting", "Sequences that wait to be admitted."),
    ("pages", "kv_cache_pages", "Pages of the KV pool."),
    ("pages_cached", "prefix_cache_pages", "Those of them that the prefix cache holds."),
    ("pages_pinned", "prefix_cache_pinned_pages", "Those of them that `cache_control` pins."),
    ("pages_of_sessions", "prefix_cache_session_pages", "Those of them that living sessions hold."),
    ("pins", "prefix_cache_pins", "Prompts that are pinned."),
    ("sessions", "prefix_cache_sessions", "Sessions that live, by `prompt_cache_key`."),
    ("grammar_pending", "grammar_compiles_pending", "Grammars that wait to be compiled, or are being compiled."),
    ("grammar_cached_bytes", "grammar_cache_bytes", "What compiled grammars take in memory, about."),
    ("adapters", "adapters_loaded", "Adapters that requests can name."),
    ("adapters_resident", "adapters_resident", "Adapters in a slot on the device."),
    ("adapters_host_bytes", "adapters_host_bytes", "Memory of adapters on the host."),
    ("responses_stored", "responses_stored", "Responses that clients may go on from."),
    ("responses_stored_bytes", "responses_stored_bytes", "What those take in memory, about."),
    ("files_stored_bytes", "files_stored_bytes", "What files of clients take in the folder of batches."),
    ("batches_unfinished", "batches_unfinished", "Batches that have not ended."),
    ("ledger_waiting", "usage_ledger_waiting", "Requests that are to be written to the usage ledger."),
)
_ENGINE_COUNTERS = (
    ("prompt_tokens", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("prompt_tokens_cached", "prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    ("preemptions", "num_preemptions", "Sequences sent back to the queue for lack of pages."),
    ("prompt_tokens", "prompt_tokens", "Tokens of admitted prompts."),
    ("prompt_tokens_cached", "prompt_tokens_cached", "Those of them whose KV was cached."),
    ("prompt_tokens_forked", "prompt_tokens_forked", "Those of them that another running sequence used then."),
    ("computed_tokens", "computed_tokens", "Tokens put through the model."),
    ("generation_tokens", "generation_tokens", "Tokens drawn."),
    ("steps", "steps", "Forward passes."),
    ("drafts", "spec_decode_num_drafts", "Times that a sequence had drafts in a step."),
    ("draft_tokens", "spec_decode_num_draft_tokens", "Tokens drafted."),
    ("draft_tokens_accepted", "spec_decode_num_accepted_tokens", "Draft tokens accepted."),
    ("forced_tokens", "forced_tokens", "Tokens that a grammar left no choice about."),
    ("grammar_hits", "grammar_cache_hits", "Grammars found compiled, or being compiled."),
    ("grammar_compiled", "grammar_compiles", "Grammars compiled."),
    ("grammar_refused", "grammar_refusals", "Grammars refused by the compiler, those it was stopped on included."),
    ("grammar_stopped", "grammar_compiles_stopped", "Compiles ended by their limits of time or memory."),
    ("ledger_lost", "usage_ledger_lost", "Requests that could not be written to the usage ledger."),
    ("adapters_evicted", "adapters_evicted", "Adapters that left the host's memory for others."),
)
_ENGINE_HISTOGRAMS = (
    ("request_queue_time_seconds", "Seconds from arrival to the first step.", _SECONDS_IN_ALL),
    ("iteration_tokens_total", "Tokens computed in one step.", _TOKENS),
    ("grammar_mask_seconds", "Seconds that the masks of one step took to fill.", _SECONDS_OF_MASKS),
    ("grammar_compile_seconds", "Seconds of one compile of a grammar.", _SECONDS_OF_MASKS),
)
_LABELS = ("model_name", "engine")
_REASONS = ("stop", "length", "abort", "error", "timeout")
_OF_KEYS = (
    ("key_requests", "Requests that ended, by the name of their key."),
    ("key_prompt_tokens", "Tokens of their prompts."),
    ("key_prompt_tokens_cached", "Those of them whose KV was cached."),
    ("key_generation_tokens", "Tokens of their answers."),
)


class _EngineCollector:
    """Collector that reads the engine's last heartbeat at a scrape."""

    def __init__(self, stats: Callable[[], Mapping[str, float]], labels: Sequence[str]) -> None:
        self._stats = stats
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        usage = 1 - stats.get("pages_available", 0.0) / max(1.0, stats["pages"]) if "pages" in stats else 0.0
        yield self._gauge("kv_cache_usage_perc", "Share of the KV pool that running sequences hold, 0 to 1.", usage)
        for key, name, text in _ENGINE_GAUGES:
            yield self._gauge(name, text, stats.get(key, 0.0))
        waits = GaugeMetricFamily(
            PREFIX + "expected_queue_seconds",
            "Seconds until all that waits now, in this band and those before it, has its first token.",
            labels=(*_LABELS, "priority"),
        )
        for priority in Priority:
            name = priority.name.lower()
            waits.add_metric((*self._labels, name), stats.get(f"queue_seconds_{name}", 0.0))
        yield waits
        for key, name, text in _ENGINE_COUNTERS:
            counter = CounterMetricFamily(PREFIX + name, text, labels=_LABELS)
            counter.add_metric(self._labels, stats.get(key, 0.0))
            yield counter

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=_LABELS)
        gauge.add_metric(self._labels, value)
        return gauge


class _Histogram:
    """Histogram for values of every token, several times as fast as the library's. Belongs to one event loop."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str]) -> None:
        self._name = PREFIX + name
        self._text = text
        self._bounds = (*bounds, math.inf)
        self._labels = labels
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        histogram = HistogramMetricFamily(self._name, self._text, labels=_LABELS)
        buckets = zip(map(floatToGoString, self._bounds), accumulate(self._counts), strict=True)
        histogram.add_metric(self._labels, list(buckets), self._sum)
        yield histogram


class Metrics:
    """All metrics of one server.

    Args:
        stats: returns the engine's last gauges and counters.

    Attributes:
        history: some of the metrics over the last minutes.
    """

    def __init__(self, model_name: str, stats: Callable[[], Mapping[str, float]]) -> None:
        self.history = History()
        self._labels = (model_name, "0")
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats, self._labels))
        ProcessCollector(registry=self._registry)
        self._engine = {name: self._histogram(name, text, buckets) for name, text, buckets in _ENGINE_HISTOGRAMS}
        self._success = Counter(
            PREFIX + "request_success",
            "Sequences that ended, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._structured = Counter(
            PREFIX + "structured_requests",
            "Requests for an answer of a certain form, by its kind.",
            (*_LABELS, "kind"),
            registry=self._registry,
        )
        self._broken = Counter(
            PREFIX + "structured_answers_broken",
            "Finished answers that the safety net found invalid.",
            _LABELS,
            registry=self._registry,
        ).labels(*self._labels)
        self._reasoning = Counter(
            PREFIX + "reasoning_tokens", "Tokens of thoughts before answers.", _LABELS, registry=self._registry
        ).labels(*self._labels)
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Seconds from the request to its first token.", _SECONDS_TO_FIRST
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Seconds between tokens of a sequence.", _SECONDS_BETWEEN
        )
        self.end_to_end = self._histogram(
            "e2e_request_latency_seconds", "Seconds from the request to a sequence's end.", _SECONDS_IN_ALL
        )
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Tokens of a request's prompt.", _TOKENS)
        self.generated_tokens = self._histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self.params_n = self._histogram("request_params_n", "Answers asked for.", _COUNTS)
        self.params_max_tokens = self._histogram("request_params_max_tokens", "Limit of tokens asked for.", _TOKENS)
        self._rejections = Counter(
            PREFIX + "admission_rejections",
            "Requests that were not taken, by reason.",
            (*_LABELS, "reason"),
            registry=self._registry,
        )
        # A label's values are the names of keys, which only the operator writes.
        self._of_keys = [
            Counter(PREFIX + name, text, (*_LABELS, "key"), registry=self._registry) for name, text in _OF_KEYS
        ]
        self.count_usage("", TokenCounts(0, 0, 0), requests=0)
        for reason in Rejection.REASONS:
            self._rejections.labels(*self._labels, reason)
        for reason in _REASONS:
            self._success.labels(*self._labels, reason)
        for kind in (*GrammarKind, "tools"):
            self._structured.labels(*self._labels, str(kind))

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> _Histogram:
        histogram = _Histogram(name, text, bounds, self._labels)
        self._registry.register(histogram)
        return histogram

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Add the engine's observations since its last heartbeat."""
        self.history.take(heartbeat.stats)
        for name, values in heartbeat.histograms.items():
            if (histogram := self._engine.get(name)) is not None:
                for value in values:
                    histogram.observe(value)

    def observe_first(self, seconds: float) -> None:
        """Add the seconds from a request to a sequence's first token."""
        self._first_token.observe(seconds)
        self.history.add_first(seconds)

    def observe_between(self, seconds: float) -> None:
        """Add the seconds from a sequence's token to its next."""
        self._inter_token.observe(seconds)
        self.history.add_between(seconds)

    def count_end(self, reason: str) -> None:
        self._success.labels(*self._labels, reason).inc()

    def count_rejection(self, reason: str) -> None:
        self._rejections.labels(*self._labels, reason).inc()

    def count_structured(self, kind: str) -> None:
        self._structured.labels(*self._labels, kind).inc()

    def count_broken(self, answers: int) -> None:
        self._broken.inc(answers)

    def count_reasoning(self, tokens: int) -> None:
        self._reasoning.inc(tokens)

    def count_usage(self, key: str, tokens: TokenCounts, *, requests: int = 1) -> None:
        """Add the tokens of requests with this key; its name is "" where no keys are in use."""
        amounts = (requests, tokens.prompt, tokens.cached, tokens.completion)
        for counter, amount in zip(self._of_keys, amounts, strict=True):
            counter.labels(*self._labels, key).inc(amount)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics in a format of the Accept header, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type
