"""Prometheus metrics, with vLLM's names under our prefix or, on demand, its own, so that its dashboards work unchanged.

Gauges and counters of the engine are read from its last heartbeat at a scrape, and its histograms arrive with each
heartbeat. What the engine measures of a sequence comes with the sequence's end. Other latencies are measured in the API
process. No label's value is made up by a client. ``docs/reference/metrics.md`` lists all metrics.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, disable_created_metrics
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

from ...grammar.spec import GrammarKind
from ..errors import Rejection
from .bounded_labels import BoundedLabels
from .engine_collector import LABELS, EngineCollector
from .engine_facts import EngineFacts
from .history import History
from .metric_tables import (
    ENGINE_HISTOGRAMS,
    FAST_SECONDS_BETWEEN,
    FAST_SECONDS_IN_ALL,
    OWN_PREFIX,
    SECONDS_BETWEEN,
    SECONDS_IN_ALL,
    SECONDS_TO_FIRST,
    SEQUENCE_HISTOGRAMS,
    VLLM_PREFIX,
    VLLM_REJECTIONS,
    full_name,
    token_buckets,
)
from .replica_collector import GatewayCollector, ReplicaCollector
from .token_usage import TokenCounts

if TYPE_CHECKING:
    from ...engine.messages import Heartbeat
    from ...engine.serving.replica_status import FleetStatus
    from ...engine.types import SequenceStats, Usage
    from .gpu_usage import GpuCollector
    from .replica_view import GatewaysStatus

MOST_ADAPTERS = 200
"""Adapters with counters of their own; requests of further ones count together."""
MOST_ERRORS = 64

# No time of creation beside every counter and histogram.
disable_created_metrics()  # type: ignore[no-untyped-call]

_REASONS = ("stop", "length", "abort", "error", "timeout")
_ERRORS = ("internal_error", "engine_dead", "server_overloaded", "timeout", "structured_answer_broken")
_METHODS = frozenset(("GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"))
_TOTALS = (
    ("structured_answers_broken", "Finished answers that the safety net found invalid."),
    ("reasoning_tokens", "Tokens of thoughts before answers."),
)
_OF_KEYS = (
    ("key_requests", "Requests that ended, by the name of their key."),
    ("key_prompt_tokens", "Tokens of their prompts."),
    ("key_prompt_tokens_cached", "Those of them whose KV was cached."),
    ("key_generation_tokens", "Tokens of their answers."),
)
_OF_ADAPTERS = (
    ("adapter_requests", "Requests that ended, by their adapter."),
    ("adapter_prompt_tokens", "Tokens of their prompts."),
    ("adapter_prompt_tokens_cached", "Those of them whose KV was cached."),
    ("adapter_generation_tokens", "Tokens of their answers."),
)


class _Histogram:
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
        histogram = HistogramMetricFamily(self._name, self._text, labels=LABELS)
        buckets = zip(map(floatToGoString, self._bounds), accumulate(self._counts), strict=True)
        histogram.add_metric(self._labels, list(buckets), self._sum)
        yield histogram


class Metrics:
    """All metrics of one server.

    Args:
        stats: returns the engine's last gauges and counters.
        prefix: of the metrics that vLLM has too: ours or vLLM's. With vLLM's their buckets are its own, to the last.
        facts: of the engine, once it is ready.
        gpus: collector of GPU use; None where there is no GPU to tell of.
        engines: returns the engine's gauges and counters by replica; none for an engine of one process.
        fleet: returns the status of a fleet; None for an engine of one process.
        gateways: returns the status of the gateways; None where there are none.

    Attributes:
        model_name: value of the label.
        history: some of the metrics over the last minutes.
        registry: of all collectors.
    """

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], Mapping[str, float]],
        *,
        prefix: str = OWN_PREFIX,
        facts: EngineFacts | None = None,
        gpus: GpuCollector | None = None,
        engines: Callable[[], Mapping[int, Mapping[str, float]]] = dict,
        fleet: Callable[[], FleetStatus | None] = lambda: None,
        gateways: Callable[[], GatewaysStatus] | None = None,
    ) -> None:
        self.history = History()
        self.model_name = model_name
        self._labels = (model_name, "0")
        self._prefix = prefix
        self.registry = CollectorRegistry()
        self._adapters_in_use: tuple[Sequence[str], Sequence[str]] = ((), ())
        facts = facts or EngineFacts()
        collector = EngineCollector(stats, engines, lambda: self._adapters_in_use, self._labels, prefix, facts)
        self.registry.register(collector)
        self.registry.register(ReplicaCollector(fleet, model_name))
        if gateways is not None:
            self.registry.register(GatewayCollector(gateways))
        if gpus is not None:
            self.registry.register(gpus)
        ProcessCollector(registry=self.registry)
        self._make_histograms(facts)
        self._make_counters()

    def _make_histograms(self, facts: EngineFacts) -> None:
        fast = self._prefix == OWN_PREFIX
        between = FAST_SECONDS_BETWEEN if fast else SECONDS_BETWEEN
        finer = {SECONDS_IN_ALL: FAST_SECONDS_IN_ALL if fast else SECONDS_IN_ALL, SECONDS_BETWEEN: between}
        tokens = token_buckets(facts.max_model_len)
        self._engine = {name: self._histogram(name, text, bounds) for name, text, bounds in ENGINE_HISTOGRAMS}
        self._of_sequences = {
            name: self._histogram(name, text, tokens if bounds is None else finer.get(bounds, bounds))
            for name, text, bounds in SEQUENCE_HISTOGRAMS
        }
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Seconds from the request to its first token.", SECONDS_TO_FIRST
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Seconds between tokens of a sequence.", between
        )

    def _make_counters(self) -> None:
        """Make the counters, and the series whose labels are known, at 0."""
        self._success = self._counter("request_success", "Sequences that ended, by reason.", "finished_reason")
        self._structured = self._counter(
            "structured_requests", "Requests for an answer of a certain form, by its kind.", "kind"
        )
        self._totals = {name: self._counter(name, text).labels(*self._labels) for name, text in _TOTALS}
        self._rejections = self._counter("admission_rejections", "Requests that were not taken, by reason.", "reason")
        self._errors = self._counter("request_errors", "Requests that ended in an error, by its code.", "error")
        self._error_labels = BoundedLabels(MOST_ERRORS)
        # Its labels are the operator's: targets are names of a models file.
        text = "Requests that another model took, by why and which."
        self._fallbacks = self._counter("fallback_requests", text, "reason", "target")
        # vLLM's dashboards read it under this name.
        text = "Requests by route, method and class of status."
        self._http = Counter("http_requests", text, ("handler", "method", "status"), registry=self.registry)
        # A key's name is written by the operator; an adapter's by whoever loaded it, so that those are bounded.
        self._of_keys = [self._counter(name, text, "key") for name, text in _OF_KEYS]
        self._of_adapters = [self._counter(name, text, "adapter") for name, text in _OF_ADAPTERS]
        self._adapter_labels = BoundedLabels(MOST_ADAPTERS, self._drop_adapter)
        self.count_usage("", None, TokenCounts(0, 0, 0), (), requests=0)
        for reason in Rejection.REASONS:
            self._rejections.labels(*self._labels, reason)
        for reason in _REASONS:
            self._success.labels(*self._labels, reason)
        for code in _ERRORS:  # so that the first one is an increase
            self._errors.labels(*self._labels, self._error_labels.label(code))
        for kind in (*GrammarKind, "tools"):
            self._structured.labels(*self._labels, str(kind))
        if self._prefix == VLLM_PREFIX:
            name, text = VLLM_PREFIX + "admission_rejections", "Requests that a limit of the queue refused."
            self._vllm_rejections = Counter(name, text, ("model_name", "reason"), registry=self.registry)
            for reason in VLLM_REJECTIONS.values():
                self._vllm_rejections.labels(self._labels[0], reason)

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> _Histogram:
        histogram = _Histogram(full_name(name, self._prefix), text, bounds, self._labels)
        self.registry.register(histogram)
        return histogram

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(full_name(name, self._prefix), text, (*LABELS, *labels), registry=self.registry)

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Add the engine's observations since its last heartbeat."""
        self.history.take(heartbeat.stats)
        self._adapters_in_use = heartbeat.adapters
        for name, values in heartbeat.histograms.items():
            if (histogram := self._engine.get(name)) is not None:
                for value in values:
                    histogram.observe(value)

    def observe_prompt(self, num_tokens: int, num_answers: int, max_tokens: int) -> None:
        """Add what a request asks for, once for each of its prompts."""
        self._observe(
            request_prompt_tokens=num_tokens, request_params_n=num_answers, request_params_max_tokens=max_tokens
        )

    def observe_first(self, seconds: float) -> None:
        """Add the seconds from a request to a sequence's first token."""
        self._first_token.observe(seconds)
        self.history.add_first(seconds)

    def observe_between(self, seconds: float) -> None:
        """Add the seconds from a sequence's token to its next."""
        self._inter_token.observe(seconds)
        self.history.add_between(seconds)

    def observe_end(self, seconds: float, usage: Usage, stats: SequenceStats | None) -> None:
        """Add a sequence that has ended by itself: seconds from the request, tokens, and what the engine measured."""
        self._observe(e2e_request_latency_seconds=seconds, request_generation_tokens=usage.completion)
        if stats is None:
            return
        self.history.add_queued(stats.queued)
        later = usage.completion - 1
        self._observe(
            request_queue_time_seconds=stats.queued,
            request_prefill_time_seconds=stats.prefill,
            request_decode_time_seconds=stats.decode,
            request_inference_time_seconds=stats.prefill + stats.decode,
            request_time_per_output_token_seconds=stats.decode / later if later > 0 else 0.0,
            request_num_preemptions=stats.preemptions,
            request_prefill_kv_computed_tokens=usage.prompt - usage.cached,
            request_batch_size=stats.batch_size,
            request_kv_pages=stats.kv_pages,
        )
        if later > 0 and stats.decode > 0:
            self._observe(request_tokens_per_second=later / stats.decode)

    def served(self) -> tuple[int, float]:
        """Return the number of sequences that have ended by themselves, and the sum of their seconds."""
        return self._of_sequences["e2e_request_latency_seconds"].total

    def observe_longest(self, num_tokens: int) -> None:
        """Add the length of the longest answer to a prompt, once all of them have ended."""
        self._observe(request_max_num_generation_tokens=num_tokens)

    def _observe(self, **values: float) -> None:
        for name, value in values.items():
            self._of_sequences[name].observe(value)

    def count_end(self, reason: str) -> None:
        self._success.labels(*self._labels, reason).inc()

    def count_rejection(self, reason: str) -> None:
        """Count a request that was not taken; under vLLM's prefix those that vLLM counts too."""
        self._rejections.labels(*self._labels, reason).inc()
        if self._prefix == VLLM_PREFIX and reason in VLLM_REJECTIONS:
            self._vllm_rejections.labels(self._labels[0], VLLM_REJECTIONS[reason]).inc()

    def count_http(self, handler: str, method: str, status: int) -> None:
        """Count a response by its route's path, "none" for unknown ones, and its status by the first digit."""
        self._http.labels(handler, method if method in _METHODS else "other", f"{status // 100}xx").inc()

    def count_error(self, code: str) -> None:
        """Count a request that was answered with an error, or whose stream ended in one."""
        self._errors.labels(*self._labels, self._error_labels.label(code)).inc()

    def count_fallback(self, reason: str, target: str) -> None:
        """Count a request that ``target``, a model or a provider, took in the place of this one."""
        self._fallbacks.labels(*self._labels, reason, target).inc()

    def count_structured(self, kind: str) -> None:
        self._structured.labels(*self._labels, kind).inc()

    def count_broken(self, answers: int) -> None:
        self._totals["structured_answers_broken"].inc(answers)

    def count_reasoning(self, tokens: int) -> None:
        self._totals["reasoning_tokens"].inc(tokens)

    def count_usage(
        self, key: str, adapter: str | None, tokens: TokenCounts, loaded: Container[str], *, requests: int = 1
    ) -> None:
        """Add the tokens of requests with this key and adapter.

        Args:
            key: its name, "" where no keys are in use.
            adapter: None for the base model, whose label is "".
            loaded: names of adapters that are loaded; only they get series of their own.
        """
        amounts = (requests, tokens.prompt, tokens.cached, tokens.completion)
        label = "" if adapter is None else self._adapter_labels.label(adapter, loaded)
        for counters, value in ((self._of_keys, key), (self._of_adapters, label)):
            for counter, amount in zip(counters, amounts, strict=True):
                counter.labels(*self._labels, value).inc(amount)

    def _drop_adapter(self, name: str) -> None:
        for counter in self._of_adapters:
            counter.remove(*self._labels, name)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics in a format of the Accept header, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type
