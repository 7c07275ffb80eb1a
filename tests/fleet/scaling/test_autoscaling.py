"""The autoscaling policy: up at once for rows and after a slow queue, down one by one after idle time."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootgraft.fleet.scaling.autoscaling import (
    DOWN_AFTER_SECONDS,
    SLOW_QUEUE_SECONDS,
    UP_AFTER_SECONDS,
    AutoscalePolicy,
    FleetLoad,
    ScaleState,
)

POLICY = AutoscalePolicy(least=1, most=8, rows=4)


def follow(policy: AutoscalePolicy, loads: list[tuple[float, int, float]], replicas: int) -> list[tuple[float, int]]:
    """Apply the policy to loads (second, rows, seconds of queue); returns the changes."""
    state, changes = ScaleState(), []
    for now, busy, queue in loads:
        wanted, state = policy.decide(FleetLoad(busy, queue, replicas), state, now)
        if wanted != replicas:
            changes.append((now, wanted))
        replicas = wanted
    return changes


def test_rows_are_served_at_once() -> None:
    assert follow(POLICY, [(0.0, 4, 0.0), (1.0, 5, 0.0), (2.0, 100, 0.0)], 1) == [(1.0, 2), (2.0, 8)]


@pytest.mark.parametrize(("queue", "grows"), [(SLOW_QUEUE_SECONDS, False), (SLOW_QUEUE_SECONDS + 0.1, True)])
def test_a_slow_queue_adds_one_after_a_while(queue: float, grows: bool) -> None:
    loads = [(second / 2, 3, queue) for second in range(int(2 * UP_AFTER_SECONDS) + 2)]
    assert follow(POLICY, loads, 1) == ([(UP_AFTER_SECONDS, 2)] if grows else [])


def test_a_queue_that_is_slow_now_and_then_adds_none() -> None:
    assert follow(POLICY, [(float(second), 3, 9.0 * (second % 4 > 0)) for second in range(60)], 1) == []


def test_idle_replicas_go_one_by_one() -> None:
    loads = [(float(second), 0, 0.0) for second in range(200)]
    assert follow(POLICY, loads, 3) == [(DOWN_AFTER_SECONDS, 2), (2 * DOWN_AFTER_SECONDS, 1)]


def test_from_none_to_one_and_back() -> None:
    policy = AutoscalePolicy(least=0, most=2, rows=4)
    loads = [(float(second), 1 if 5 <= second < 8 else 0, 0.0) for second in range(90)]
    assert follow(policy, loads, 0) == [(5.0, 1), (8.0 + DOWN_AFTER_SECONDS, 0)]


@pytest.mark.parametrize("idle", [7.0, 300.0])
def test_the_last_one_ends_after_the_idle_time_of_its_own(idle: float) -> None:
    policy = AutoscalePolicy(least=0, most=2, rows=4, idle_seconds=idle)
    loads = [(float(second), 5 if second < 3 else 0, 0.0) for second in range(400)]
    assert follow(policy, loads, 0) == [
        (0.0, 2),
        (3.0 + DOWN_AFTER_SECONDS, 1),
        (3.0 + DOWN_AFTER_SECONDS + idle, 0),
    ]


def test_a_sine_of_ten_minutes_takes_four_steps() -> None:
    """From one replica's load to three and back, with noise."""
    policy, draw = AutoscalePolicy(least=1, most=3, rows=8), random.Random(1)
    loads = [
        (float(second), round(12 - 9.5 * math.cos(2 * math.pi * second / 600) + draw.uniform(-1.5, 1.5)), 0.0)
        for second in range(690)
    ]
    assert [count for _, count in follow(policy, loads, 1)] == [2, 3, 2, 1]


@given(
    st.integers(0, 3), st.integers(0, 5), st.integers(1, 16),
    st.lists(st.tuples(st.floats(0, 20), st.integers(0, 200), st.floats(0, 10)), max_size=60),
)  # fmt: skip
def test_it_stays_within_its_bounds(least: int, more: int, rows: int, steps: list[tuple[float, int, float]]) -> None:
    policy = AutoscalePolicy(least, max(1, least + more), rows)
    now, loads = 0.0, []
    for seconds, busy, queue in steps:
        now += seconds
        loads.append((now, busy, queue))
    changes = follow(policy, loads, policy.least)
    assert all(policy.least <= count <= policy.most for _, count in changes)
