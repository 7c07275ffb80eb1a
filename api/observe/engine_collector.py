"""Engine collector: yields the engine's gauges and counters, which are read from its last heartbeat at each scrape."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ...engine.metric_tables import (
    COUNTERS,
    GAUGES,
    KV_TIER_COUNTERS,
    KV_TIER_GAUGES,
    KV_TIERS,
    SLEEP_STATES,
    TIERS,
    VLLM_PREFIX,
    ZERO_COUNTERS,
    accepted_by_position,
    full_name,
    kv_usage,
)
from ...engine.types import Priority
from .engine_facts import EngineFacts

LABELS = ("model_name", "engine")


ByEngine = Mapping[str, float | Mapping[str, float]]
"""Values of a metric family by the label ``engine``: one value, or one for each value of a further label."""


class EngineCollector:
    """Yields the metric families of an engine. An engine with several replicas has a series for each of them.

    Args:
        stats: returns the last gauges and counters of the whole engine and of the server.
        engines: returns the gauges and counters by replica; empty for an engine that is a single process.
        adapters: returns the names of the adapters with running and with waiting sequences.
        labels: values of ``LABELS``.
    """

    def __init__(
        self,
        stats: Callable[[], Mapping[str, float]],
        engines: Callable[[], Mapping[int, Mapping[str, float]]],
        adapters: Callable[[], tuple[Sequence[str], Sequence[str]]],
        labels: Sequence[str],
        prefix: str,
        facts: EngineFacts,
    ) -> None:
        self._stats = stats
        self._engines = engines
        self._adapters = adapters
        self._model_name, self._engine = labels
        self._prefix = prefix
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families."""
        whole = self._stats()
        engines = {str(index): stats for index, stats in self._engines().items()} or {self._engine: whole}
        usage = {name: kv_usage(stats) for name, stats in engines.items()}
        yield self._gauge(
            "kv_cache_usage_perc", "Fraction of the KV pool that running sequences hold, from 0 to 1.", usage
        )
        for key, name, text in GAUGES:
            yield self._gauge(name, text, self._values(key, engines, whole))
        for key, name, text in COUNTERS:
            yield self._counter(name, text, self._values(key, engines, whole))
        yield from self._tiers(engines)
        yield from self._queue(engines, whole)
        if self._facts.max_drafts:
            yield self._accepted_by_position(engines)
        yield from self._infos()
        if self._prefix == VLLM_PREFIX:
            yield from self._vllm_alone(engines)

    def _values(
        self, key: str, engines: Mapping[str, Mapping[str, float]], whole: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the values of the replicas that report one, or else the value of the whole engine."""
        return {name: stats[key] for name, stats in engines.items() if key in stats} or {
            self._engine: whole.get(key, 0.0)
        }

    def _tiers(self, engines: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
        """Yield the metrics of each KV tier other than the pool; nothing without such tiers."""
        for rows, make in ((KV_TIER_GAUGES, self._gauge), (KV_TIER_COUNTERS, self._counter)):
            for key, name, text in rows:
                values = {
                    engine: {tier: stats[f"{key}_{tier}"] for tier in KV_TIERS if f"{key}_{tier}" in stats}
                    for engine, stats in engines.items()
                }
                if any(values.values()):
                    yield make(name, text, values, "tier")

    def _queue(self, engines: Mapping[str, Mapping[str, float]], whole: Mapping[str, float]) -> Iterator[Metric]:
        text = "Waiting sequences by reason: room in the engine, or an adapter's load or a grammar's compile."
        reasons = {name: _waiting_by_reason(stats) for name, stats in engines.items()}
        yield self._gauge("num_requests_waiting_by_reason", text, reasons, "reason")
        waits = {each.name.lower(): whole.get(f"queue_seconds_{each.name.lower()}", 0.0) for each in Priority}
        text = (
            "Seconds until all waiting requests of this priority class and the classes before it have their first "
            "token."
        )
        yield self._gauge("expected_queue_seconds", text, {self._engine: waits}, "priority")

    def _accepted_by_position(self, engines: Mapping[str, Mapping[str, float]]) -> Metric:
        most = self._facts.max_drafts
        values = {
            name: {str(position): float(count) for position, count in enumerate(accepted_by_position(stats, most))}
            for name, stats in engines.items()
        }
        text = "Draft tokens accepted, by their position in the draft."
        return self._counter("spec_decode_num_accepted_tokens_per_pos", text, values, "position")

    def _infos(self) -> Iterator[Metric]:
        """Yield the metrics whose content is in their labels (``MODEL_INFOS``), as in vLLM.

        They have no ``model_name``.
        """
        if self._facts.max_loras:
            running, waiting = map(",".join, self._adapters())
            names = {"max_lora": str(self._facts.max_loras), "waiting_lora_adapters": waiting}
            names["running_lora_adapters"] = running
            text = "Adapters with running and waiting sequences; the value is the time of the scrape."
            yield self._info("lora_requests_info", text, names, time.time())
        if self._facts.cache:
            text = "The KV pool and its options, with vLLM's labels; always 1."
            yield self._info("cache_config_info", text, {**self._facts.cache, "engine": self._engine}, 1.0)

    def _vllm_alone(self, engines: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
        sources: dict[str, Mapping[str, float]] = {}
        tiers: dict[str, Mapping[str, float]] = {}
        for name, stats in engines.items():
            cached = stats.get("prompt_tokens_cached", 0.0)
            computed = stats.get("prompt_tokens", 0.0) - cached
            sources[name] = {"local_compute": computed, "local_cache_hit": cached, "external_kv_transfer": 0.0}
            tiers[name] = dict.fromkeys(TIERS, 0.0) | {"device": cached}
        yield self._counter("prompt_tokens_by_source", "Tokens of admitted prompts.", sources, "source")
        yield self._counter(
            "prompt_tokens_cached_by_source", "Tokens of admitted prompts that were cached.", tiers, "source"
        )
        sleep = {self._engine: SLEEP_STATES}
        yield self._gauge("engine_sleep_state", "The engine never sleeps.", sleep, "sleep_state")
        for name, text in ZERO_COUNTERS:
            yield self._counter(name, text, {self._engine: 0.0})

    def _gauge(self, name: str, text: str, values: ByEngine, label: str = "") -> Metric:
        labels = (*LABELS, label) if label else LABELS
        return self._filled(GaugeMetricFamily(full_name(name, self._prefix), text, labels=labels), values)

    def _counter(self, name: str, text: str, values: ByEngine, label: str = "") -> Metric:
        labels = (*LABELS, label) if label else LABELS
        return self._filled(CounterMetricFamily(full_name(name, self._prefix), text, labels=labels), values)

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, values: ByEngine) -> Metric:
        """Add values to a family, one for each engine and each value of the family's last label."""
        for engine, value in values.items():
            if isinstance(value, Mapping):
                for name, each in value.items():
                    family.add_metric((self._model_name, engine, name), each)
            else:
                family.add_metric((self._model_name, engine), value)
        return family

    def _info(self, name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
        info = GaugeMetricFamily(full_name(name, self._prefix), text, labels=tuple(labels))
        info.add_metric(tuple(labels.values()), value)
        return info


def _waiting_by_reason(stats: Mapping[str, float]) -> dict[str, float]:
    deferred = stats.get("waiting_deferred", 0.0)
    return {"capacity": stats.get("waiting", 0.0) - deferred, "deferred": deferred}
