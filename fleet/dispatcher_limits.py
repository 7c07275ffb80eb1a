"""Dispatcher limits: bounds on replicas, memory, waiting and silence of a fleet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DispatcherLimits:
    """Bounds of a dispatcher.

    Attributes:
        most_replicas: at one time.
        most_bytes: of the journal.
        most_held: sequences that wait for a replica while there is none.
        hold_seconds: that they wait.
        heartbeat_seconds: without a sign of life after which a replica is lost.
        adapter_slots: adapters that a replica holds on its device.
        adapter_load_seconds: that a load takes.
    """

    most_replicas: int = 64
    most_bytes: int = 1 << 30
    most_held: int = 1024
    hold_seconds: float = 60.0
    heartbeat_seconds: float = 3.0
    adapter_slots: int = 4
    adapter_load_seconds: float = 0.5

    @property
    def silent_seconds(self) -> float:
        """Without a sign of life after which a replica gets new sequences only if there is no other."""
        return self.heartbeat_seconds / 2
