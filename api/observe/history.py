"""The last minutes of the server, point by point, for who opens the live page later than the load began."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

SECONDS = 2.0
"""Time between two points, at least."""
POINTS = 150
"""Points kept: five minutes."""
_MOST_LATENCIES = 4096  # of a kind, for one point; what goes beyond is not looked at


@dataclass(frozen=True, slots=True)
class Point:
    """What happened since the point before.

    Attributes:
        at: seconds since the history began, the end of the time that the point is about.
        generated: tokens drawn in a second; ``prompt`` and ``cached``: tokens of admitted prompts, and those of them
            that were found in the prefix cache.
        running, waiting: sequences, at the end.
        first: median and 95th percentile of the seconds to a first token; None if there was none.
        between: the same of the seconds between two arrivals of tokens.
    """

    at: float
    generated: float
    prompt: float
    cached: float
    running: float
    waiting: float
    first: tuple[float, float] | None
    between: tuple[float, float] | None


class History:
    """Gathers points from the engine's heartbeats and from latencies as clients see them.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._points: deque[Point] = deque(maxlen=POINTS)
        self._last: tuple[float, Mapping[str, float]] | None = None
        self._first: list[float] = []
        self._between: list[float] = []

    def note_first(self, seconds: float) -> None:
        """A first token came so long after its request."""
        if len(self._first) < _MOST_LATENCIES:
            self._first.append(seconds)

    def note_between(self, seconds: float) -> None:
        """A token came so long after the one before it."""
        if len(self._between) < _MOST_LATENCIES:
            self._between.append(seconds)

    def take(self, stats: Mapping[str, float]) -> None:
        """Take the engine's gauges and counters; makes a point when it is time."""
        now = self._clock()
        if self._last is None:
            self._last = now, stats
            return
        before, old = self._last
        if now - before < SECONDS:
            return

        def rate(name: str) -> float:
            return (stats.get(name, 0.0) - old.get(name, 0.0)) / (now - before)

        self._last = now, stats
        self._points.append(
            Point(
                at=now - self._began,
                generated=rate("generation_tokens"),
                prompt=rate("prompt_tokens"),
                cached=rate("prompt_tokens_cached"),
                running=stats.get("running", 0.0),
                waiting=stats.get("waiting", 0.0),
                first=_percentiles(self._first),
                between=_percentiles(self._between),
            )
        )
        self._first, self._between = [], []

    def since(self, at: float) -> Iterable[Point]:
        """The points after a point in time."""
        return (point for point in self._points if point.at > at)


def _percentiles(values: list[float]) -> tuple[float, float] | None:
    """Median and 95th percentile: of the values in order, those before which lie half and 95 of 100."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[len(ordered) * 95 // 100]
