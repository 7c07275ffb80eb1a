"""A request is refused for its wait only where it would have waited: over arrivals, machines and tenants."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import pytest
from support.api.simulated_queue import Arrival, Machine, Simulation, true_wait
from support.machine.thoroughness import repeats

from rootgraft.api.access.overload import MARGIN
from rootgraft.engine.types import Priority

Make = Callable[[random.Random, float], Arrival]

LAPTOP = Machine(step=0.1, decode=0.02, prefill=0.005, pair=1e-7)
SERVER = Machine(step=0.02, decode=5e-5, prefill=5e-5, pair=0, pages=4096, max_queue_seconds=0.6)
MACHINES = {
    "middle": Machine(max_queue_seconds=5),
    "laptop": LAPTOP,
    "server": SERVER,
    "few pages": Machine(pages=2500, max_queue_seconds=5),
    "one row": Machine(rows=1, max_queue_seconds=3),
}


def prompt(draw: random.Random, num_tokens: int, shared: int = 0) -> array[int]:
    """Random tokens behind as many that all prompts share."""
    return array("i", [7] * shared + [draw.randrange(8, 10**6) for _ in range(num_tokens - shared)])


def arrivals(draw: random.Random, rate: float, seconds: float, make: Make) -> list[Arrival]:
    """Poisson arrivals."""
    at, found = 0.0, []
    while (at := at + draw.expovariate(rate)) < seconds:
        found.append(make(draw, at))
    return found


def check(machine: Machine, asked: list[Arrival], most: int = 4) -> list[int]:
    """Check that who was refused would have waited, for some of them; return the refused."""
    asked = sorted(asked, key=lambda each: each.at)
    slow = Simulation(machine, asked).go().slow()
    for index in sorted({slow[len(slow) * i // most] for i in range(most)} if slow else ()):
        wait = true_wait(machine, asked, index)
        assert wait > MARGIN * machine.max_queue_seconds, (index, asked[index].at, len(asked[index].prompt), wait)
    return slow


@pytest.mark.parametrize("machine", [Machine(), LAPTOP, Machine(rows=2)])
@pytest.mark.parametrize("num_tokens", [8_000, 30_000])
def test_nobody_is_refused_beside_a_long_prompt(machine: Machine, num_tokens: int) -> None:
    """Agents' first calls, each with a tool that is new, then a long prompt and short ones."""
    draw = random.Random(1)
    asked = [Arrival(i // 2, prompt(draw, 100), 1, compile=0.5) for i in range(8)]
    asked += [Arrival(4.0, prompt(draw, num_tokens), 1, compile=0.5)]
    asked += [Arrival(4.5 + 0.2 * i, prompt(draw, 30), 1) for i in range(40)]
    assert not Simulation(machine, asked).go().refused


@pytest.mark.parametrize("pause", [5, 20, 60, 300])
def test_silence_is_no_evidence(pause: float) -> None:
    """Chat turns, then two long prompts, a pause, and a short prompt."""
    draw = random.Random(2)
    asked = [Arrival(6.0 * (i // 2), prompt(draw, 50), 1) for i in range(16)]
    asked += [Arrival(60.0, prompt(draw, 4000), 1) for _ in range(2)]
    asked += [Arrival(60.0 + pause, prompt(draw, 50), 1)]
    refused = Simulation(Machine(prefill=0.05, max_queue_seconds=1), asked).go().refused
    assert refused.keys() <= {17}, "the second long prompt waits for the first, the short one for none"


def test_prompts_that_are_cached_do_not_count() -> None:
    """Follow-ups of agents at once, on a machine that would take minutes to compute one of their prompts."""
    draw = random.Random(3)
    conversations = [prompt(draw, 6000) for _ in range(6)]
    asked = [Arrival(60.0 * i, each, 2) for i, each in enumerate(conversations)]
    asked += [Arrival(500.0, each + prompt(draw, 20), 2) for each in conversations for _ in range(4)]
    assert not Simulation(Machine(step=0.1, prefill=0.01, max_queue_seconds=20), asked).go().refused


def test_who_waits_for_a_grammar_keeps_nobody_waiting() -> None:
    draw = random.Random(4)
    asked = arrivals(draw, 20, 10, lambda draw, at: Arrival(at, prompt(draw, 500), 8, compile=60))
    asked += [Arrival(11.0 + i / 4, prompt(draw, 30), 1) for i in range(20)]
    assert not check(Machine(max_queue_seconds=2), asked)


def test_answers_that_become_short_are_believed_at_once() -> None:
    draw = random.Random(5)
    asked = [Arrival(0.1 * i, prompt(draw, 50), 400) for i in range(48)]
    asked += [Arrival(40.0 + 0.01 * i, prompt(draw, 50), 2) for i in range(40)]
    check(Machine(max_queue_seconds=10), asked)


@pytest.mark.parametrize(
    ("machine", "rate", "make"),
    [
        ("server", 110, lambda draw, at: Arrival(at, prompt(draw, 128), 32)),
        ("server", 110, lambda draw, at: Arrival(at, prompt(draw, 128, shared=100), 32, most=4096)),
        ("server", 110, lambda draw, at: Arrival(at, prompt(draw, 128), 32, compile=0.1)),
        ("server", 110, lambda draw, at: Arrival(at, prompt(draw, 128), 32, tenant=str(draw.randrange(1000)))),
        (
            "server",
            110,
            lambda draw, at: Arrival(at, prompt(draw, 128), 32, tenant="few" if draw.random() < 0.1 else ""),
        ),
        ("middle", 4, lambda draw, at: Arrival(at, prompt(draw, 2000), 4)),
        ("middle", 40, lambda draw, at: Arrival(at, prompt(draw, 180), 1)),
        ("few pages", 2, lambda draw, at: Arrival(at, prompt(draw, 10_000), 100)),
        ("one row", 5, lambda draw, at: Arrival(at, prompt(draw, 30), 50)),
    ],
)
def test_overload_is_refused_early(machine: str, rate: float, make: Make) -> None:
    """Several times as much is asked as can be done: most is refused, long before the first has waited for as long."""
    found = MACHINES[machine]
    asked = arrivals(random.Random(6), rate, 6 if rate > 100 else 20, make)
    slow = check(found, asked, most=3)
    run = Simulation(found, asked).go()
    assert len(slow) > len(asked) / 4
    assert asked[slow[0]].at < 1 + 2 * found.max_queue_seconds
    late = sorted(wait for index, wait in run.waits.items() if index > slow[0])
    assert late[len(late) // 2] < 5 * found.max_queue_seconds, "half of those that are taken wait for about the limit"


def mixed(draw: random.Random) -> list[Arrival]:
    """Chats, documents, answers of all lengths, grammars, pauses, bursts and tenants."""
    tenants = draw.choice([1, 2, 30, 1000])
    documents = [prompt(draw, draw.choice([500, 2000, 8000])) for _ in range(3)]
    batch = draw.choice([0.0, 0.2])
    compiles = draw.choice([0.0, 0.3])

    def make(draw: random.Random, at: float) -> Arrival:
        kind = draw.random()
        text = prompt(draw, draw.choice([20, 100, 400]))
        if kind < 0.1:
            text = draw.choice(documents) + text
        elif kind < 0.15:
            text = prompt(draw, draw.choice([3000, 12_000]))
        answer = draw.choice([1, 8, 40, 200])
        return Arrival(
            at,
            text,
            answer,
            most=draw.choice([answer, 4096]),
            tenant=str(draw.randrange(tenants)) if tenants > 1 else "",
            priority=Priority.BATCH if draw.random() < batch else draw.choice(tuple(Priority)[:2]),
            compile=draw.choice([0.1, 2.0, 30.0]) if draw.random() < compiles else 0.0,
        )

    asked = []
    for begin in (0.0, 30.0, 100.0):
        rate = draw.choice([0.5, 2, 10])
        part = arrivals(draw, rate, draw.choice([1, 10, 20]), make)
        asked += [Arrival(**{**vars(each), "at": begin + each.at}) for each in part]
    return asked


@pytest.mark.sample
@pytest.mark.parametrize("seed", range(8))
def test_only_who_would_wait_is_refused(seed: int) -> None:
    draw = random.Random(seed)
    check(draw.choice(tuple(MACHINES.values())), mixed(draw), most=2)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(100, 100 + repeats(28)))
def test_only_who_would_wait_is_refused_in_any_mix(seed: int) -> None:
    draw = random.Random(seed)
    check(draw.choice(tuple(MACHINES.values())), mixed(draw), most=3)
