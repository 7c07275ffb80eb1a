"""Autoscaling policy: how many replicas a model should have. A pure function of load and time, without I/O.

``Autoscaler`` applies the policy repeatedly, and counts its changes.

scale up     at once if there are more rows than replicas are meant to have, or if the queue has been slow for a while
scale down   one replica at a time, after a while in which one replica fewer would have been enough
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

SLOW_QUEUE_SECONDS = 2.0
UP_AFTER_SECONDS = 5.0
DOWN_AFTER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """Load of a model's replicas.

    Attributes:
        busy: number of sequences that run or wait.
        queue_seconds: seconds that a new sequence is expected to wait, on the replica with the shortest queue.
        replicas: number of replicas that serve or are starting, without draining ones.
    """

    busy: int
    queue_seconds: float
    replicas: int


@dataclass(frozen=True, slots=True)
class ScaleState:
    """State that the policy keeps from one decision to the next.

    Attributes:
        slow_since: time since when the queue has been slow; None if it is not slow.
        low_since: time since when fewer replicas have been enough; None if they are not enough.
    """

    slow_since: float | None = None
    low_since: float | None = None


@dataclass(frozen=True, slots=True)
class AutoscalePolicy:
    """Limits and target for the number of a model's replicas.

    Attributes:
        least, most: smallest and largest number of replicas; if ``least`` is 0, the first sequence starts a replica and
            waits for it.
        rows: number of sequences that a replica is meant to have.
        idle_seconds: seconds without a sequence after which the last replica ends too.
    """

    least: int
    most: int
    rows: int
    idle_seconds: float = DOWN_AFTER_SECONDS

    def decide(self, load: FleetLoad, state: ScaleState, now: float) -> tuple[int, ScaleState]:
        """Return how many replicas there should be, and the state for the next call.

        Args:
            now: time in seconds, monotonic.
        """
        needed = min(self.most, max(self.least, math.ceil(load.busy / self.rows)))
        is_slow = load.queue_seconds > SLOW_QUEUE_SECONDS and load.replicas > 0
        state = ScaleState(
            slow_since=_since(state.slow_since, is_slow, now),
            low_since=_since(state.low_since, needed < load.replicas and not is_slow, now),
        )
        if needed > load.replicas:
            return needed, replace(state, slow_since=None)
        if _lasts(state.slow_since, UP_AFTER_SECONDS, now) and load.replicas < self.most:
            return load.replicas + 1, replace(state, slow_since=None)
        if _lasts(state.low_since, self.idle_seconds if load.replicas == 1 else DOWN_AFTER_SECONDS, now):
            return load.replicas - 1, replace(state, low_since=now)
        return min(self.most, max(self.least, load.replicas)), state


def _since(before: float | None, holds: bool, now: float) -> float | None:
    return (now if before is None else before) if holds else None


def _lasts(since: float | None, seconds: float, now: float) -> bool:
    return since is not None and now - since >= seconds


class Autoscaler:
    """Decides repeatedly how many replicas there should be.

    Args:
        policy: policy that makes each decision.

    Attributes:
        num_up, num_down: number of changes upward and downward.
    """

    def __init__(self, policy: AutoscalePolicy) -> None:
        self._policy = policy
        self._state = ScaleState()
        self.num_up = 0
        self.num_down = 0

    @property
    def bounds(self) -> tuple[int, int]:
        """Smallest and largest number of replicas."""
        return self._policy.least, self._policy.most

    def decide(self, load: FleetLoad, now: float) -> int:
        """Return how many replicas there should be. ``now`` is in seconds, monotonic."""
        wanted, self._state = self._policy.decide(load, self._state, now)
        self.num_up += wanted > load.replicas
        self.num_down += wanted < load.replicas
        return wanted
