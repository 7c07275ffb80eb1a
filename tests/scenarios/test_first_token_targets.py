"""Targets for the first token: by deadline more are met than by arrival, none starves, strict ones are told."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest
from support.api.simulated_queue import Arrival, Machine, Run, Simulation

from rootgraft.engine.types import Priority

MACHINE = Machine(step=0.05, decode=1e-3, prefill=2e-3, pair=0, rows=8, budget=128)
TARGET = 2.0
WITH_TARGET = replace(MACHINE, target_ttft=TARGET)
RATE, SECONDS = 10.0, 12.0


def overload(seed: int, *, num_tenants: int = 1) -> list[Arrival]:
    """Poisson arrivals, more than the machine can answer; one prompt in ten is long."""
    draw, at, asked = random.Random(seed), 0.0, []
    while (at := at + draw.expovariate(RATE)) < SECONDS:
        num_tokens = 300 if draw.random() < 0.1 else draw.randrange(10, 40)
        prompt = array("i", [draw.randrange(8, 10**6) for _ in range(num_tokens)])
        tenant = str(draw.randrange(num_tenants))
        asked.append(Arrival(at, prompt, 8, tenant=tenant))
    return asked


def num_met(run: Run) -> int:
    return sum(wait <= TARGET for wait in run.waits.values())


@pytest.mark.parametrize("num_tenants", [1, 3])
def test_more_first_tokens_are_in_time_by_deadline_than_by_arrival(num_tenants: int) -> None:
    asked = overload(1, num_tenants=num_tenants)
    by_arrival, by_deadline = (Simulation(machine, asked).go() for machine in (MACHINE, WITH_TARGET))
    assert by_arrival.waits.keys() == by_deadline.waits.keys() == set(range(len(asked)))
    assert num_met(by_deadline) > 1.5 * num_met(by_arrival)
    assert max(by_deadline.waits.values()) < 2 * max(by_arrival.waits.values()), "late ones have a share"


def test_strict_requests_are_told_early_that_they_would_be_late() -> None:
    asked = overload(2)
    strict = Simulation(WITH_TARGET, [replace(each, is_strict=True) for each in asked]).go()
    others = Simulation(WITH_TARGET, asked).go()
    assert {reason for reason, _ in strict.refused.values()} == {"target_ttft"} and not others.refused
    assert num_met(strict) >= num_met(others) and len(strict.waits) < len(asked)
    assert len(strict.waits) - num_met(strict) < len(others.waits) - num_met(others)


def test_nobody_is_refused_for_a_target_that_can_be_met() -> None:
    asked = [replace(each, at=3 * each.at, is_strict=True) for each in overload(3)]
    run = Simulation(WITH_TARGET, asked).go()
    assert not run.refused and num_met(run) == len(asked)


def with_realtime(rate: float, seconds: float, seed: int, *, is_strict: bool = True) -> list[Arrival]:
    """Poisson arrivals of which one in five is of the class that goes first, and one in ten of the others is long."""
    draw, at, asked = random.Random(seed), 0.0, []
    while (at := at + draw.expovariate(rate)) < seconds:
        is_first = draw.random() < 0.2
        num_tokens = 700 if not is_first and draw.random() < 0.1 else draw.randrange(28, 84)
        priority = Priority.REALTIME if is_first else Priority.INTERACTIVE
        prompt = array("i", [draw.randrange(8, 10**6) for _ in range(num_tokens)])
        asked.append(Arrival(at, prompt, 24, priority=priority, is_strict=is_strict and not is_first))
    return asked


BUSY = Machine(step=0.03, decode=2e-3, prefill=6e-4, pair=0, rows=8, budget=256, target_ttft=TARGET)


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_strict_ones_that_are_taken_are_in_time_beside_a_class_that_goes_first(seed: int) -> None:
    asked = with_realtime(12, 40, seed)
    run = Simulation(BUSY, asked).go()
    # Of the first seconds nothing was measured, so nothing is refused for them.
    taken = [wait for index, wait in run.waits.items() if asked[index].is_strict and asked[index].at > 5]
    assert sum(wait <= TARGET for wait in taken) >= 0.9 * len(taken) and len(taken) > 50
    plain = Simulation(BUSY, with_realtime(12, 40, seed, is_strict=False)).go()
    in_time = sum(w <= TARGET for index, w in plain.waits.items() if asked[index].is_strict and asked[index].at > 5)
    assert len(taken) > in_time, "as many are answered in time as without the header"


def test_a_busy_time_refuses_nobody_after_it() -> None:
    busy = with_realtime(30, 20, 6)
    end = max(each.at for each in busy)
    quiet = [replace(each, at=end + 30 + 4 * each.at) for each in with_realtime(3, 10, 7)]
    run = Simulation(BUSY, busy + quiet).go()
    assert any(index < len(busy) for index in run.refused), "it was busy"
    assert all(index < len(busy) for index in run.refused)
    assert max(wait for index, wait in run.waits.items() if index >= len(busy)) <= TARGET
