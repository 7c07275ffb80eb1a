"""Replica status: the state of an engine's replicas. An engine that is a single process counts as one replica."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from .engine_like import EngineLike


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """The state of one replica.

    Attributes:
        name: unique name, which no earlier replica had either.
        engine: index of the replica, which is the label ``engine`` of its metrics. After its end, a new replica may get
            the index.
        state: serving or draining; lost if the engine is a single process that has ended.
        place: text that tells where it runs: ``this machine``, a process id, or the host of an actor of Ray.
        up_seconds: seconds since the replica began to serve.
        silent_seconds: seconds since the replica's last sign of life.
        adapters: names of the adapters that are probably in the replica's slots, the most recently used one last.
        stats: gauges and counters of the replica's last heartbeat.
        role: work that the replica does: prefill, decode or both.
    """

    name: str
    engine: int
    state: str
    place: str
    up_seconds: float
    silent_seconds: float
    adapters: tuple[str, ...]
    stats: Mapping[str, float]
    role: str = "both"


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """The state of all replicas, and counts of events since the start.

    Attributes:
        wanted: target number of replicas.
        num_starting: number of replicas that load the model.
        num_held: number of sequences that wait because no replica serves.
        bounds: smallest and largest number of replicas if their number follows the load; None if it is fixed.
        num_started: number of replicas that have served.
        num_lost: number of replicas that ended unexpectedly or hung.
        num_replays: number of sequences that were continued on another replica.
        num_drained: number of replicas that were removed because they were not needed any more.
        num_scaled_up, num_scaled_down: number of changes of ``wanted`` by the load.
    """

    replicas: tuple[ReplicaStatus, ...]
    wanted: int = 1
    num_starting: int = 0
    num_held: int = 0
    bounds: tuple[int, int] | None = None
    num_started: int = 1
    num_lost: int = 0
    num_replays: int = 0
    num_drained: int = 0
    num_scaled_up: int = 0
    num_scaled_down: int = 0


@runtime_checkable
class ReplicaOwner(Protocol):
    """Interface of an engine that consists of replicas."""

    def status(self) -> FleetStatus:
        """Return the state of the replicas and the counts of events."""
        ...

    def engine_stats(self) -> Mapping[int, Mapping[str, float]]:
        """Return gauges and counters by the index of the replica. The counters of an index never decrease."""
        ...


def fleet_status(client: EngineLike, up_seconds: float) -> FleetStatus:
    """Return the status of an engine, which may be a fleet of replicas or a single process.

    Args:
        up_seconds: seconds since the start of the server, which is the ``up_seconds`` of an engine that is a single
            process.
    """
    if isinstance(client, ReplicaOwner):
        return client.status()
    state = "serving" if client.is_alive else "lost"
    loaded = tuple(client.adapters)
    replica = ReplicaStatus("engine", 0, state, "this machine", up_seconds, client.silent_seconds, loaded, client.stats)
    return FleetStatus((replica,), num_lost=int(not client.is_alive))
