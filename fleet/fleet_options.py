"""Options of a fleet, which its owner fills from its own options."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Number and place of the replicas, and the limits after which a replica counts as hung.

    Attributes:
        replicas: number of engine processes; without effect if ``autoscale_bounds`` are given.
        autoscale_bounds: smallest and largest number of replicas of a fleet that follows the load; None for a fixed
            number.
        idle_seconds: seconds without a request after which the last replica ends, if the smallest number is 0; None for
            the policy's own value.
        ray_address: address of the Ray cluster that places the replicas: ``local``, ``auto`` or HOST:PORT; None without
            Ray.
        silence_seconds: seconds without a sign of life after which a replica counts as hung.
        watchdog_timeout: largest number of seconds of one step.
        roles: role of each replica: prefill, decode or both; empty if all replicas do both.
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
        """Largest number of replicas that share the machine."""
        return self.replicas if self.autoscale_bounds is None else self.autoscale_bounds[1]
