"""Collector of the engine's gauges and counters, read from its last heartbeat at a scrape."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ...engine.types import Priority
from .engine_facts import EngineFacts
from .metric_tables import COUNTERS, GAUGES, SLEEP_STATES, TIERS, VLLM_PREFIX, ZERO_COUNTERS, full_name

LABELS = ("model_name", "engine")


def kv_usage(stats: Mapping[str, float]) -> float:
    """Return the share of the KV pool that running sequences hold, 0 to 1, from a heartbeat's statistics."""
    return 1 - stats.get("pages_available", 0.0) / max(1.0, stats["pages"]) if "pages" in stats else 0.0


class EngineCollector:
    """Yields the families of one engine.

    Args:
        stats: returns the engine's last gauges and counters.
        adapters: returns the names of adapters that have running and that have waiting sequences.
        labels: values of ``LABELS``.
    """

    def __init__(
        self,
        stats: Callable[[], Mapping[str, float]],
        adapters: Callable[[], tuple[Sequence[str], Sequence[str]]],
        labels: Sequence[str],
        prefix: str,
        facts: EngineFacts,
    ) -> None:
        self._stats = stats
        self._adapters = adapters
        self._labels = labels
        self._prefix = prefix
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        stats = self._stats()
        usage = kv_usage(stats)
        yield self._gauge("kv_cache_usage_perc", "Share of the KV pool that running sequences hold, 0 to 1.", usage)
        for key, name, text in GAUGES:
            yield self._gauge(name, text, stats.get(key, 0.0))
        for key, name, text in COUNTERS:
            yield self._counter(name, text, stats.get(key, 0.0))
        yield from self._queue(stats)
        if self._facts.max_drafts:
            yield self._accepted_by_position(stats)
        yield from self._infos()
        if self._prefix == VLLM_PREFIX:
            yield from self._vllm_alone(stats)

    def _queue(self, stats: Mapping[str, float]) -> Iterator[Metric]:
        deferred = stats.get("waiting_deferred", 0.0)
        reasons = {"capacity": stats.get("waiting", 0.0) - deferred, "deferred": deferred}
        text = "Those of them that wait for room, and for an adapter's load or a grammar's compile."
        yield self._gauge("num_requests_waiting_by_reason", text, reasons, "reason")
        waits = {each.name.lower(): stats.get(f"queue_seconds_{each.name.lower()}", 0.0) for each in Priority}
        text = "Seconds until all that waits now, in this band and those before it, has its first token."
        yield self._gauge("expected_queue_seconds", text, waits, "priority")

    def _accepted_by_position(self, stats: Mapping[str, float]) -> Metric:
        runs = [stats.get(f"accepted_runs_{length}", 0.0) for length in range(self._facts.max_drafts + 1)]
        values = {str(position): sum(runs[position + 1 :]) for position in range(self._facts.max_drafts)}
        text = "Drafts accepted, by their position in a draft."
        return self._counter("spec_decode_num_accepted_tokens_per_pos", text, values, "position")

    def _infos(self) -> Iterator[Metric]:
        """Yield vLLM's metrics whose labels are their content; they have no ``model_name``."""
        if self._facts.max_loras:
            running, waiting = map(",".join, self._adapters())
            names = {"max_lora": str(self._facts.max_loras), "waiting_lora_adapters": waiting}
            names["running_lora_adapters"] = running
            text = "Adapters that have running and waiting sequences; the time of the scrape."
            yield self._info("lora_requests_info", text, names, time.time())
        if self._facts.cache:
            text = "The KV pool and its options, in vLLM's words; always 1."
            yield self._info("cache_config_info", text, {**self._facts.cache, "engine": self._labels[1]}, 1.0)

    def _vllm_alone(self, stats: Mapping[str, float]) -> Iterator[Metric]:
        cached = stats.get("prompt_tokens_cached", 0.0)
        computed = stats.get("prompt_tokens", 0.0) - cached
        sources = {"local_compute": computed, "local_cache_hit": cached, "external_kv_transfer": 0.0}
        yield self._counter("prompt_tokens_by_source", "Tokens of admitted prompts.", sources, "source")
        tiers = dict.fromkeys(TIERS, 0.0) | {"device": cached}
        yield self._counter("prompt_tokens_cached_by_source", "Those of them that were cached.", tiers, "source")
        yield self._gauge("engine_sleep_state", "The engine never sleeps.", SLEEP_STATES, "sleep_state")
        for name, text in ZERO_COUNTERS:
            yield self._counter(name, text, 0.0)

    def _gauge(self, name: str, text: str, value: float | Mapping[str, float], label: str = "") -> Metric:
        labels = (*LABELS, label) if label else LABELS
        return self._filled(GaugeMetricFamily(full_name(name, self._prefix), text, labels=labels), value)

    def _counter(self, name: str, text: str, value: float | Mapping[str, float], label: str = "") -> Metric:
        labels = (*LABELS, label) if label else LABELS
        return self._filled(CounterMetricFamily(full_name(name, self._prefix), text, labels=labels), value)

    def _filled(
        self, family: GaugeMetricFamily | CounterMetricFamily, value: float | Mapping[str, float]
    ) -> GaugeMetricFamily | CounterMetricFamily:
        """Add a family's value, or one for each value of its last label."""
        if isinstance(value, Mapping):
            for name, each in value.items():
                family.add_metric((*self._labels, name), each)
        else:
            family.add_metric(self._labels, value)
        return family

    def _info(self, name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
        info = GaugeMetricFamily(full_name(name, self._prefix), text, labels=tuple(labels))
        info.add_metric(tuple(labels.values()), value)
        return info
