"""Autoscaler: applies the policy again and again, and counts what it has changed."""

from __future__ import annotations

from .autoscaling import AutoscalePolicy, FleetLoad, ScaleState


class Autoscaler:
    """How many replicas there should be, from one moment to the next.

    Args:
        policy: decides.

    Attributes:
        num_up, num_down: changes.
    """

    def __init__(self, policy: AutoscalePolicy) -> None:
        self._policy = policy
        self._state = ScaleState()
        self.num_up = 0
        self.num_down = 0

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and most replicas."""
        return self._policy.least, self._policy.most

    def decide(self, load: FleetLoad, now: float) -> int:
        """Return how many replicas there should be. ``now`` is in seconds, monotonic."""
        wanted, self._state = self._policy.decide(load, self._state, now)
        self.num_up += wanted > load.replicas
        self.num_down += wanted < load.replicas
        return wanted
