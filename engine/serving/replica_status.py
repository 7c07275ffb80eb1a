"""Replica status: what an engine tells of the replicas that it consists of. One process is a fleet of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from .engine_like import EngineLike


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica that runs.

    Attributes:
        name: unique, also among those that are gone.
        engine: its index, which a later replica may have: the label ``engine`` of its metrics.
        state: serving or draining; lost where one process is all and has ended.
        place: where it runs.
        up_seconds: since it serves.
        silent_seconds: since its last sign of life.
        adapters: names of those that are likely in its slots, the last used ones last.
        stats: gauges and counters of its last heartbeat.
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
    """All replicas, and what has happened to them since the start.

    Attributes:
        wanted: how many there should be.
        num_starting: replicas that load the model.
        num_held: sequences that wait for a replica, as there is none.
        bounds: least and most replicas where their number follows the load; None where it is fixed.
        num_started: replicas that have served.
        num_lost: those of them that ended or hung.
        num_replays: sequences that went on on another replica.
        num_drained: replicas that were not wanted any more.
        num_scaled_up, num_scaled_down: changes of ``wanted`` by the load.
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
    """An engine that consists of replicas."""

    def status(self) -> FleetStatus:
        """Return the replicas and what has happened to them."""
        ...

    def engine_stats(self) -> Mapping[int, Mapping[str, float]]:
        """Return gauges and counters by the replica's index; counters of an index never go back."""
        ...


def fleet_status(client: EngineLike, up_seconds: float) -> FleetStatus:
    """Return the status of an engine, whether it consists of replicas or is one process.

    Args:
        up_seconds: seconds that the server has been up; an engine of one process has been up for as long.
    """
    if isinstance(client, ReplicaOwner):
        return client.status()
    state = "serving" if client.is_alive else "lost"
    loaded = tuple(client.adapters)
    replica = ReplicaStatus("engine", 0, state, "this machine", up_seconds, client.silent_seconds, loaded, client.stats)
    return FleetStatus((replica,), num_lost=int(not client.is_alive))
