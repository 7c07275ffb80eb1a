"""History: throughput and latencies of the last five minutes, for the curves of the live page."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

SECONDS = 2.0
"""Shortest time in seconds between two points."""
POINTS = 150
"""Number of points that are kept, for five minutes."""
# Largest number of latencies of one kind in a point. Further ones are ignored.
_MOST_LATENCIES = 4096


@dataclass(frozen=True, slots=True)
class Point:
    """Averages over the interval since the previous point.

    Attributes:
        at: end of the interval, in seconds since the history began.
        generated: sampled tokens per second.
        prompt: tokens of admitted prompts per second. ``cached`` of them were in the prefix cache.
        running, waiting: numbers of sequences at the end of the interval.
        first: median and 95th percentile of the time to first token in seconds; None without a first token.
        between: median and 95th percentile of the seconds between tokens; None without such tokens.
        queued: median and 95th percentile of the seconds from a sequence's arrival at the engine to its first step, for
            the sequences that ended in the interval; None without such sequences.
        batch: mean number of sequences in a step; None without a step.
        drafted: fraction of the draft tokens that were accepted; None without draft tokens.
    """

    at: float
    generated: float
    prompt: float
    cached: float
    running: float
    waiting: float
    first: tuple[float, float] | None
    between: tuple[float, float] | None
    queued: tuple[float, float] | None = None
    batch: float | None = None
    drafted: float | None = None


class History:
    """Computes the points from the engine's heartbeats and the latencies in the API process.

    Args:
        clock: returns monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._points: deque[Point] = deque(maxlen=POINTS)
        self._last: tuple[float, Mapping[str, float]] | None = None
        self._first: list[float] = []
        self._between: list[float] = []
        self._queued: list[float] = []

    def add_first(self, seconds: float) -> None:
        """Add the seconds from a request to its first token."""
        if len(self._first) < _MOST_LATENCIES:
            self._first.append(seconds)

    def add_between(self, seconds: float) -> None:
        """Add the seconds between two consecutive tokens of a sequence."""
        if len(self._between) < _MOST_LATENCIES:
            self._between.append(seconds)

    def add_queued(self, seconds: float) -> None:
        """Add the seconds that a sequence waited for its first step."""
        if len(self._queued) < _MOST_LATENCIES:
            self._queued.append(seconds)

    def take(self, stats: Mapping[str, float]) -> None:
        """Process the engine's gauges and counters. Adds a point every ``SECONDS``."""
        now = self._clock()
        if self._last is None:
            self._last = now, stats
            return
        before, old = self._last
        if now - before < SECONDS:
            return

        def rate(name: str) -> float:
            return (stats.get(name, 0.0) - old.get(name, 0.0)) / (now - before)

        def share(part: str, whole: str) -> float | None:
            return rate(part) / rate(whole) if rate(whole) > 0 else None

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
                queued=_percentiles(self._queued),
                batch=share("rows", "steps"),
                drafted=share("draft_tokens_accepted", "draft_tokens"),
            )
        )
        self._first, self._between, self._queued = [], [], []

    def since(self, at: float) -> Iterable[Point]:
        return (point for point in self._points if point.at > at)


def _percentiles(values: list[float]) -> tuple[float, float] | None:
    """Return the median and the 95th percentile; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[len(ordered) * 95 // 100]
