"""History of throughput and latencies over the last five minutes, for the live page's curves."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

SECONDS = 2.0
"""Least time between two points."""
POINTS = 150
"""Points kept: five minutes."""
# A point keeps so many latencies of one kind; further ones are ignored.
_MOST_LATENCIES = 4096


@dataclass(frozen=True, slots=True)
class Point:
    """Averages over the interval since the previous point.

    Attributes:
        at: end of the interval, in seconds since the history began.
        generated: sampled tokens per second.
        prompt: tokens of admitted prompts per second; ``cached`` of them were found in the prefix cache.
        running, waiting: numbers of sequences at the end of the interval.
        first: median and 95th percentile of the seconds to the first token; None if there was no first token.
        between: median and 95th percentile of the seconds between tokens; None if there were none.
        queued: median and 95th percentile of the seconds from a sequence's arrival at the engine to its first step,
            over sequences that ended in the interval; None if there were none.
        batch: mean number of sequences in a step; None without a step.
        drafted: share of the drafts that were accepted; None without drafts.
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
    """Makes points from the engine's heartbeats and the latencies at the API.

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
        self._queued: list[float] = []

    def add_first(self, seconds: float) -> None:
        """Add the seconds from a request to its first token."""
        if len(self._first) < _MOST_LATENCIES:
            self._first.append(seconds)

    def add_between(self, seconds: float) -> None:
        """Add the seconds from a sequence's token to its next."""
        if len(self._between) < _MOST_LATENCIES:
            self._between.append(seconds)

    def add_queued(self, seconds: float) -> None:
        """Add the seconds that a sequence waited for its first step."""
        if len(self._queued) < _MOST_LATENCIES:
            self._queued.append(seconds)

    def take(self, stats: Mapping[str, float]) -> None:
        """Take the engine's gauges and counters; adds a point every ``SECONDS``."""
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
    """Return median and 95th percentile, None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[len(ordered) * 95 // 100]
