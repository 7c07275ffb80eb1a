"""Where routers send traffic: a short form of ``benchmarks/fleet/simulated/hit_rates.py`` on a fake clock."""

from __future__ import annotations

from array import array

import pytest

from benchmarks.fleet.simulated.hit_rates import OurRouter, RoundRobin, compare_adapters, compare_hits, faults
from benchmarks.fleet.simulated.replica_model import LOAD_SECONDS, PAGE, play
from benchmarks.fleet.simulated.traffic import NAMES, Call, Traffic, traffic


def call(first: int, pages: int, **fields: object) -> Call:
    tokens = array("i", range(first, first + pages * PAGE + 1))
    return Call(tokens, array("i", [1, 2, 3]), **fields)  # type: ignore[arg-type]


def test_a_replica_computes_a_common_beginning_once() -> None:
    same = [call(0, 4), call(0, 4), call(0, 4, after=(1,))]
    assert play(Traffic(same, 3), RoundRobin(1), 1).hit_rate == pytest.approx(2 * 4 * PAGE / (3 * (4 * PAGE + 1)))
    assert play(Traffic(same[:2], 2), RoundRobin(2), 2).hit_rate == 0


def test_adapters_share_no_beginning_and_are_loaded_once() -> None:
    calls = [call(0, 4, adapter=f"a{each % 2}") for each in range(6)]
    outcome = play(Traffic(calls, 6), OurRouter(1), 1)
    assert outcome.loads == 2 and outcome.hit_rate == pytest.approx(4 * 4 * PAGE / (6 * (4 * PAGE + 1)))
    assert all(min(waits) > LOAD_SECONDS for waits in outcome.waits.values())


@pytest.mark.parametrize("name", NAMES)
def test_calls_come_after_those_whose_answers_they_hold(name: str) -> None:
    load = traffic(name)
    assert all(at < number for number, each in enumerate(load.calls) for at in each.after)
    assert any(each.after for each in load.calls) == (name in ("W4", "thoughts", "map-reduce", "agents"))


def test_our_router_reaches_what_it_is_to_reach() -> None:
    hits = compare_hits(("W4", "agents"), 1, for_each=1)
    adapters = compare_adapters(600, 1)
    assert [fault for fault in faults(hits, adapters) if "loads an adapter" not in fault] == []
    ours, in_turn, _, one_place, two_places = adapters
    assert ours["loads_an_adapter"] < 0.25 * in_turn["loads_an_adapter"]
    assert one_place["loads_an_adapter"] == 1 and one_place["load"] > 1.3 > two_places["load"]
    assert two_places["loads_an_adapter"] > 1.25, "who knows the shares cannot have both"
    by_router = {row["router"]: row for row in hits if row["traffic"] == "W4" and row["replicas"] == 4}
    assert by_router["round robin"]["hits_of_one"] < by_router["rootgraft"]["hits_of_one"]
