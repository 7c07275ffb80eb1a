"""Options of a fleet, as its owner reads them from its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """How many replicas there are, where they run, and when one counts as hung.

    Attributes:
        replicas: number of engine processes; without meaning where ``autoscale_bounds`` are given.
        autoscale_bounds: least and most replicas of a fleet that follows the load; None for a fixed number.
        idle_seconds: without a request, after which no replica runs, where the least is 0; None for the policy's own.
        ray_address: of the Ray cluster that places the replicas: ``local``, ``auto`` or HOST:PORT; None without Ray.
        silence_seconds: without a sign of life, after which a replica counts as hung.
        watchdog_timeout: seconds that one step may take.
        roles: of the replicas, as many as there are: prefill, decode or both; none where all compute all.
    """

    replicas: int
    autoscale_bounds: tuple[int, int] | None
    ray_address: str | None
    silence_seconds: float
    watchdog_timeout: float
    roles: tuple[str, ...] = ()
    idle_seconds: float | None = None

    @property
    def most_replicas(self) -> int:
        """Replicas that share the machine."""
        return self.replicas if self.autoscale_bounds is None else self.autoscale_bounds[1]
