"""Prometheus metrics with vLLM's names, and with this server's prefix or vLLM's, for which vLLM's dashboards work.

At a scrape, gauges and counters of the engine are read from its last heartbeat. Histograms of the engine arrive with
each heartbeat, and the engine's measurements of a sequence arrive when the sequence ends. Other latencies are measured
in the API process. Clients cannot create new label values. ``docs/reference/metrics.md`` lists all metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import choose_encoder

from ...engine.metric_tables import (
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
    sequence_values,
    token_buckets,
)
from ...grammar.spec import GrammarKind
from ..errors import Rejection
from .bounded_labels import BoundedLabels
from .engine_collector import EngineCollector
from .engine_facts import EngineFacts
from .history import History
from .metric_families import MetricFamilies
from .replica_collector import GatewayCollector, ReplicaCollector
from .token_usage import TokenCounts

if TYPE_CHECKING:
    from ...engine.messages import Heartbeat
    from ...engine.serving.replica_status import FleetStatus
    from ...engine.types import SequenceStats, Usage
    from .gpu_usage import GpuCollector
    from .replica_view import GatewaysStatus

MOST_ADAPTERS = 200
"""Largest number of adapters with counters of their own. Requests of further adapters are counted together."""
MOST_ERRORS = 64

# Without this call, each counter and histogram would also expose its time of creation.
disable_created_metrics()  # type: ignore[no-untyped-call]

_REASONS = ("stop", "length", "abort", "error", "timeout")
_ERRORS = ("internal_error", "engine_dead", "server_overloaded", "timeout", "structured_answer_broken")
_METHODS = frozenset(("GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"))
_TOTALS = (
    ("structured_answers_broken", "Finished answers that the final validation found invalid."),
    ("reasoning_tokens", "Tokens of reasoning before answers."),
)
_OF_KEYS = (
    ("key_requests", "Ended requests, by the name of their key."),
    ("key_prompt_tokens", "Prompt tokens of these requests."),
    ("key_prompt_tokens_cached", "Prompt tokens of these requests whose KV was cached."),
    ("key_generation_tokens", "Generated tokens of these requests."),
)
_OF_ADAPTERS = (
    ("adapter_requests", "Ended requests, by their adapter."),
    ("adapter_prompt_tokens", "Prompt tokens of these requests."),
    ("adapter_prompt_tokens_cached", "Prompt tokens of these requests whose KV was cached."),
    ("adapter_generation_tokens", "Generated tokens of these requests."),
)


class SequenceHistograms:
    """Histograms of measurements of sequences and of the engine's steps.

    Args:
        families: makes the metric families.
        max_model_len: largest number of tokens of a sequence, which is the largest bound of the histograms of lengths.
    """

    def __init__(self, families: MetricFamilies, max_model_len: int) -> None:
        fast = families.prefix == OWN_PREFIX
        between = FAST_SECONDS_BETWEEN if fast else SECONDS_BETWEEN
        finer = {SECONDS_IN_ALL: FAST_SECONDS_IN_ALL if fast else SECONDS_IN_ALL, SECONDS_BETWEEN: between}
        tokens = token_buckets(max_model_len)
        self._of_steps = {name: families.histogram(name, text, bounds) for name, text, bounds in ENGINE_HISTOGRAMS}
        self._of_sequences = {
            name: families.histogram(name, text, tokens if bounds is None else finer.get(bounds, bounds))
            for name, text, bounds in SEQUENCE_HISTOGRAMS
        }
        self.first_token = families.histogram(
            "time_to_first_token_seconds", "Seconds from the request to its first token.", SECONDS_TO_FIRST
        )
        self.inter_token = families.histogram(
            "inter_token_latency_seconds", "Seconds between tokens of a sequence.", between
        )

    def observe_steps(self, histograms: Mapping[str, Sequence[float]]) -> None:
        """Add the engine's observations by the name of the histogram. Observations with unknown names are ignored."""
        for name, values in histograms.items():
            if (histogram := self._of_steps.get(name)) is not None:
                for value in values:
                    histogram.observe(value)

    def observe(self, **values: float) -> None:
        for name, value in values.items():
            self._of_sequences[name].observe(value)

    def observe_end(self, seconds: float, usage: Usage, stats: SequenceStats | None) -> None:
        """Add a sequence that has ended by itself, like ``Metrics.observe_end``."""
        self.observe(**sequence_values(seconds, usage, stats))

    @property
    def ended(self) -> tuple[int, float]:
        """Number of sequences that have ended by themselves, and the sum of their seconds."""
        return self._of_sequences["e2e_request_latency_seconds"].total


class UsageCounters:
    """Counts requests and tokens by the name of the API key and by the adapter.

    The operator defines the names of keys. Clients may load adapters, so the number of adapter labels is limited.
    """

    def __init__(self, families: MetricFamilies) -> None:
        self._labels = families.labels
        self._of_keys = [families.counter(name, text, "key") for name, text in _OF_KEYS]
        self._of_adapters = [families.counter(name, text, "adapter") for name, text in _OF_ADAPTERS]
        self._adapter_labels = BoundedLabels(MOST_ADAPTERS, self._drop_adapter)
        self.count("", None, TokenCounts(0, 0, 0), (), requests=0)

    def count(
        self, key: str, adapter: str | None, tokens: TokenCounts, loaded: Container[str], *, requests: int = 1
    ) -> None:
        """Add the tokens of requests, like ``Metrics.count_usage``."""
        amounts = (requests, tokens.prompt, tokens.cached, tokens.completion)
        label = "" if adapter is None else self._adapter_labels.label(adapter, loaded)
        for counters, value in ((self._of_keys, key), (self._of_adapters, label)):
            for counter, amount in zip(counters, amounts, strict=True):
                counter.labels(*self._labels, value).inc(amount)

    def _drop_adapter(self, name: str) -> None:
        for counter in self._of_adapters:
            counter.remove(*self._labels, name)


class FailureCounters:
    """Counts requests that were refused, that ended with an error, or that another model answered."""

    def __init__(self, families: MetricFamilies) -> None:
        self._labels = families.labels
        self._rejections = families.counter("admission_rejections", "Rejected requests, by reason.", "reason")
        self._vllm_rejections = _vllm_rejections(families) if families.prefix == VLLM_PREFIX else None
        self._errors = families.counter("request_errors", "Requests that ended with an error, by error code.", "error")
        self._error_labels = BoundedLabels(MOST_ERRORS)
        # The labels are defined by the operator, because targets are names in the models file.
        text = "Requests that another model or provider answered, by reason and target."
        self._fallbacks = families.counter("fallback_requests", text, "reason", "target")
        for reason in Rejection.REASONS:
            self._rejections.labels(*self._labels, reason)
        # A series starts at 0, so that its first error is visible as an increase.
        for code in _ERRORS:
            self._errors.labels(*self._labels, self._error_labels.label(code))

    def count_rejection(self, reason: str) -> None:
        """Count a refused request, like ``Metrics.count_rejection``."""
        self._rejections.labels(*self._labels, reason).inc()
        if self._vllm_rejections is not None and reason in VLLM_REJECTIONS:
            self._vllm_rejections.labels(self._labels[0], VLLM_REJECTIONS[reason]).inc()

    def count_error(self, code: str) -> None:
        self._errors.labels(*self._labels, self._error_labels.label(code)).inc()

    def count_fallback(self, reason: str, target: str) -> None:
        self._fallbacks.labels(*self._labels, reason, target).inc()


def _vllm_rejections(families: MetricFamilies) -> Counter:
    """Create vLLM's counter of refused requests. Its series have no engine label."""
    name, text = VLLM_PREFIX + "admission_rejections", "Requests rejected by a limit of the queue."
    counter = Counter(name, text, ("model_name", "reason"), registry=families.registry)
    for reason in VLLM_REJECTIONS.values():
        counter.labels(families.labels[0], reason)
    return counter


class Metrics:
    """All metrics of one server.

    Args:
        stats: returns the engine's last gauges and counters.
        prefix: prefix of the metrics that vLLM also has: this server's or vLLM's. With vLLM's prefix, their buckets are
            exactly vLLM's.
        facts: facts about the engine, once it is ready.
        gpus: collector of GPU use; None without a GPU.
        engines: returns the engine's gauges and counters by replica; empty for an engine that is a single process.
        fleet: returns the status of a fleet; None for an engine that is a single process.
        gateways: returns the status of the gateways; None without gateways.

    Attributes:
        model_name: value of the label ``model_name``.
        history: some of the metrics over the last minutes, for the live page.
        registry: registry of all collectors.
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
        families = MetricFamilies(self.registry, prefix, self._labels)
        self._sequences = SequenceHistograms(families, facts.max_model_len)
        self._usage = UsageCounters(families)
        self._failures = FailureCounters(families)
        self._success = families.counter("request_success", "Ended sequences, by reason.", "finished_reason")
        text = "Requests with an output format, by its kind."
        self._structured = families.counter("structured_requests", text, "kind")
        self._totals = {name: families.counter(name, text).labels(*self._labels) for name, text in _TOTALS}
        # vLLM's dashboards read the metric under this name.
        text = "Requests by route, method and status class."
        self._http = Counter("http_requests", text, ("handler", "method", "status"), registry=self.registry)
        # Series whose labels are known start at 0.
        for reason in _REASONS:
            self._success.labels(*self._labels, reason)
        for kind in (*GrammarKind, "tools"):
            self._structured.labels(*self._labels, str(kind))

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Add the observations in a heartbeat of the engine."""
        self.history.take(heartbeat.stats)
        self._adapters_in_use = heartbeat.adapters
        self._sequences.observe_steps(heartbeat.histograms)

    def observe_prompt(self, num_tokens: int, num_answers: int, max_tokens: int) -> None:
        """Add the values of a request. Must be called once for each of its prompts."""
        self._sequences.observe(
            request_prompt_tokens=num_tokens, request_params_n=num_answers, request_params_max_tokens=max_tokens
        )

    def observe_first(self, seconds: float) -> None:
        """Add the seconds from a request to a sequence's first token."""
        self._sequences.first_token.observe(seconds)
        self.history.add_first(seconds)

    def observe_between(self, seconds: float) -> None:
        """Add the seconds between two consecutive tokens of a sequence."""
        self._sequences.inter_token.observe(seconds)
        self.history.add_between(seconds)

    def observe_end(self, seconds: float, usage: Usage, stats: SequenceStats | None) -> None:
        """Add a sequence that ended by itself: seconds since the request, token counts, the engine's measurements."""
        self._sequences.observe_end(seconds, usage, stats)
        if stats is not None:
            self.history.add_queued(stats.queued)

    def served(self) -> tuple[int, float]:
        """Return the number of sequences that have ended by themselves, and the sum of their seconds."""
        return self._sequences.ended

    def observe_longest(self, num_tokens: int) -> None:
        """Add the length of the longest answer to a prompt, after all answers have ended."""
        self._sequences.observe(request_max_num_generation_tokens=num_tokens)

    def count_end(self, reason: str) -> None:
        self._success.labels(*self._labels, reason).inc()

    def count_rejection(self, reason: str) -> None:
        """Count a refused request. Under vLLM's prefix, only requests that vLLM also counts are counted."""
        self._failures.count_rejection(reason)

    def count_http(self, handler: str, method: str, status: int) -> None:
        """Count a response by its route's path ("none" for an unknown path), its method and the class of its status."""
        self._http.labels(handler, method if method in _METHODS else "other", f"{status // 100}xx").inc()

    def count_error(self, code: str) -> None:
        """Count a request that was answered with an error, or whose stream ended with an error."""
        self._failures.count_error(code)

    def count_fallback(self, reason: str, target: str) -> None:
        """Count a request that ``target``, a model or a provider, has answered instead of this model."""
        self._failures.count_fallback(reason, target)

    def count_structured(self, kind: str) -> None:
        self._structured.labels(*self._labels, kind).inc()

    def count_broken(self, answers: int) -> None:
        self._totals["structured_answers_broken"].inc(answers)

    def count_reasoning(self, tokens: int) -> None:
        self._totals["reasoning_tokens"].inc(tokens)

    def count_usage(
        self, key: str, adapter: str | None, tokens: TokenCounts, loaded: Container[str], *, requests: int = 1
    ) -> None:
        """Add the tokens of requests with an API key and an adapter.

        Args:
            key: name of the key, "" without keys.
            adapter: None for the base model, whose label is "".
            loaded: names of the loaded adapters. Only these get series of their own.
        """
        self._usage.count(key, adapter, tokens, loaded, requests=requests)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics in a format that the Accept header allows, and the content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type
