"""The points of the curves: rates between heartbeats, percentiles, and no more of them than five minutes' worth."""

from __future__ import annotations

import pytest

from rootgraft.api.observe.history import POINTS, SECONDS, History


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_point_is_about_the_time_since_the_one_before() -> None:
    clock = Clock()
    history = History(clock)
    history.take({"generation_tokens": 50, "prompt_tokens": 10})
    for seconds in (0.5, 1.0):
        clock.now = 100 + seconds
        history.take({"generation_tokens": 1000})
    assert not list(history.since(-1))
    history.add_first(0.3)
    for latency in range(100):
        history.add_between(latency / 1000)
    for latency in range(10):
        history.add_queued(latency / 10)
    clock.now = 104.0
    stats = {"generation_tokens": 90, "prompt_tokens": 50, "prompt_tokens_cached": 20, "running": 3, "waiting": 1}
    history.take({**stats, "steps": 4, "rows": 10, "draft_tokens": 8, "draft_tokens_accepted": 2})
    [point] = history.since(-1)
    assert (point.at, point.generated, point.prompt, point.cached) == (4, 10, 10, 5)
    assert (point.running, point.waiting) == (3, 1)
    assert point.first == (0.3, 0.3) and point.between == (0.05, 0.095) and point.queued == (0.5, 0.9)
    assert (point.batch, point.drafted) == (2.5, 0.25)
    clock.now = 106.0
    history.take({"generation_tokens": 90})
    [point] = history.since(4)
    assert point.generated == 0 and point.first is None and point.between is None
    assert point.queued is None and point.batch is None and point.drafted is None


def test_it_forgets() -> None:
    clock = Clock()
    history = History(clock)
    for step in range(2 * POINTS):
        clock.now = 100 + step * SECONDS
        history.take({"generation_tokens": step})
    points = list(history.since(-1))
    assert len(points) == POINTS and points[-1].at == pytest.approx((2 * POINTS - 1) * SECONDS)
    assert len(list(history.since(points[-3].at))) == 2
