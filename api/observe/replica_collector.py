"""Replica collector: yields metrics on replicas and gateways by state, and on their starts and losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ...engine.metric_tables import OWN_PREFIX
from ...engine.serving.replica_status import FleetStatus
from .replica_view import GatewaysStatus

_STATES = ("serving", "starting", "draining")


class ReplicaCollector:
    """Yields the metric families of a fleet; none for an engine that is a single process.

    Args:
        status: returns the fleet's status; None without a fleet.
    """

    def __init__(self, status: Callable[[], FleetStatus | None], model_name: str) -> None:
        self._status = status
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families."""
        status = self._status()
        if status is None:
            return
        states = Counter(replica.state for replica in status.replicas)
        states["starting"] = status.num_starting
        replicas = GaugeMetricFamily(
            OWN_PREFIX + "replicas", "Replicas of the fleet, by state.", labels=("model_name", "state")
        )
        for state in _STATES:
            replicas.add_metric((self._model_name, state), states[state])
        yield replicas
        for name, text, value in (
            ("replicas_wanted", "Wanted number of replicas.", status.wanted),
            ("requests_held", "Sequences that wait because no replica is ready.", status.num_held),
        ):
            gauge = GaugeMetricFamily(OWN_PREFIX + name, text, labels=("model_name",))
            gauge.add_metric((self._model_name,), value)
            yield gauge
        for name, text, value in (
            ("replica_starts", "Replicas that started to serve.", status.num_started),
            ("replica_losses", "Replicas that ended or hung.", status.num_lost),
            ("replica_drains", "Replicas that ended because they were not needed any more.", status.num_drained),
            ("replays", "Sequences that continued on another replica.", status.num_replays),
        ):
            counter = CounterMetricFamily(OWN_PREFIX + name, text, labels=("model_name",))
            counter.add_metric((self._model_name,), value)
            yield counter
        scalings = CounterMetricFamily(
            OWN_PREFIX + "replica_scalings",
            "Changes of the wanted number of replicas because of the load.",
            labels=("model_name", "direction"),
        )
        scalings.add_metric((self._model_name, "up"), status.num_scaled_up)
        scalings.add_metric((self._model_name, "down"), status.num_scaled_down)
        yield scalings


class GatewayCollector:
    """Yields the metric families of the gateways, which belong to the whole server.

    Args:
        status: returns the status of the gateways.
    """

    def __init__(self, status: Callable[[], GatewaysStatus]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families."""
        status = self._status()
        states = Counter(gateway.state for gateway in status.gateways)
        gateways = GaugeMetricFamily(OWN_PREFIX + "gateways", "Gateway processes, by state.", labels=("state",))
        for state in _STATES:
            gateways.add_metric((state,), states[state])
        yield gateways
        active = GaugeMetricFamily(
            OWN_PREFIX + "gateway_requests", "Running requests of a gateway.", labels=("gateway",)
        )
        for gateway in status.gateways:
            active.add_metric((gateway.name,), gateway.active)
        yield active
        for name, text, value in (
            ("gateway_starts", "Gateways that were started.", status.num_started),
            ("gateway_losses", "Gateways that ended or hung.", status.num_lost),
        ):
            yield CounterMetricFamily(OWN_PREFIX + name, text, value)
