"""Replica roster: the running replicas of a fleet, each with its client, its index and its last reports."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .adapter_versions import BusyAdapters
from .fleet_stats import FleetStats
from .placement.replica_table import BOTH
from .replica_client import ReplicaClient


@dataclass(slots=True, eq=False)
class Member:
    """A running replica.

    Attributes:
        name: unique name, never used for another replica.
        role: work that the replica does, as in ``ReplicaInfo``.
        index: the lowest index that no other replica has; it is the label ``engine`` of its metrics.
        joined: time at which it began to serve, in seconds of the monotonic clock.
        num_frames: number of frames that it has sent.
        busy: adapters in use, by its last heartbeat.
        drains_until: time at which its remaining sequences are moved elsewhere; None while it takes new sequences.
    """

    name: str
    index: int
    client: ReplicaClient
    joined: float
    role: str = BOTH
    num_frames: int = 0
    busy: BusyAdapters = ((), ())
    drains_until: float | None = None


class ReplicaRoster:
    """Running replicas by name, in the order in which they joined.

    Args:
        roles: roles to assign to replicas; when all are assigned, further replicas do all work.

    Attributes:
        num_joined: number of replicas that have joined.
        num_drained: number of replicas that were drained to the end.
    """

    def __init__(self, roles: Sequence[str] = ()) -> None:
        self._roles = tuple(roles)
        self._members: dict[str, Member] = {}
        self._totals = FleetStats()
        self._numbers = itertools.count(1)
        self._num_failed_starts = 0
        self.num_joined = 0
        self.num_drained = 0

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def __iter__(self) -> Iterator[Member]:
        return iter(tuple(self._members.values()))

    def __getitem__(self, name: str) -> Member:
        return self._members[name]

    @property
    def clients(self) -> Mapping[str, ReplicaClient]:
        """Clients by the replicas' names."""
        return {name: member.client for name, member in self._members.items()}

    @property
    def serving(self) -> list[str]:
        """Names of the replicas that take new sequences."""
        return [name for name, member in self._members.items() if member.drains_until is None]

    def add(self, client: ReplicaClient, now: float) -> Member:
        """Add a replica that has started. Returns it with a name that is unique for all time."""
        used = {member.index for member in self._members.values()}
        index = next(index for index in itertools.count() if index not in used)
        member = Member(f"replica-{next(self._numbers)}", index, client, now, self._free_role())
        self._members[member.name] = member
        self.num_joined += 1
        self._num_failed_starts = 0
        return member

    def count_failed_start(self) -> int:
        """Count a failed start, and return the number of failed starts since a replica has joined."""
        self._num_failed_starts += 1
        return self._num_failed_starts

    def _free_role(self) -> str:
        """Return the first role that is not taken by a serving replica, or ``both`` if all are taken."""
        lacking = Counter(self._roles) - Counter(self._members[name].role for name in self.serving)
        return next((role for role in self._roles if lacking[role]), BOTH)

    def remove(self, name: str, *, is_drained: bool = False) -> ReplicaClient:
        """Remove a replica but keep its counters; its messages are no longer received. Returns its client."""
        member = self._members.pop(name)
        self.num_drained += is_drained
        self._totals.retire(member.index, member.client.stats)
        mute(member.client)
        return member.client

    def next_frame(self, name: str) -> int:
        """Return the number of the frame that has just arrived from a replica."""
        member = self._members[name]
        member.num_frames += 1
        return member.num_frames - 1

    @property
    def stats(self) -> dict[str, float]:
        """Sums of gauges and counters, also of replicas that have ended."""
        return self._totals.total(self._stats())

    def stats_by_index(self) -> dict[int, dict[str, float]]:
        """Sums as in ``stats``, by replica index; for running replicas also the seconds since their last message."""
        sums = self._totals.by_index(self._stats())
        for member in self:
            sums[member.index]["engine_silent_seconds"] = member.client.silent_seconds
        return sums

    def _stats(self) -> dict[int, Mapping[str, float]]:
        return {member.index: member.client.stats for member in self._members.values()}


def mute(client: ReplicaClient) -> None:
    """Stop receiving messages of a replica."""
    client.on_frame, client.on_heartbeat = (lambda messages: None), (lambda heartbeat: None)
    client.on_death = lambda error: None
