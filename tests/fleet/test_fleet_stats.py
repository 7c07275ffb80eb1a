"""Statistics of a fleet: which of an engine's numbers are gauges, and so end with their replica."""

from __future__ import annotations

from typing import Any

from support.engine.adapter_engine import Engine
from support.engine.core_hooks import wait_for_vocabulary
from support.engine.structured_engine import Structured

from rootgraft.engine.engine_stats import EngineStats
from rootgraft.fleet.fleet_stats import _GAUGES, FleetStats
from rootgraft.grammar.spec import GrammarKind, GrammarSpec

COUNTERS = {"grammar_hits", "grammar_compiled", "grammar_refused", "grammar_stopped", "adapters_evicted"}
COUNTERS |= {
    f"kv_{name}_{tier}"
    for name in ("hits", "misses", "stored", "evicted", "rejected", "errors", "unwritten", "ghost_hits")
    for tier in ("host", "disk")
}


def test_gauges_are_all_numbers_of_an_engine_that_do_not_count(tmp_path: Any) -> None:
    structured = Structured()
    structured.submit(1, GrammarSpec(GrammarKind.REGEX, "a"), max_tokens=1)
    wait_for_vocabulary(structured.core)  # there are no numbers of grammars before
    adapters = Engine(tmp_path, kv_disk=str(tmp_path / "kv"), kv_host_gib=0.01)
    names = structured.core.stats().keys() | adapters.core.stats().keys()
    structured.core.close()
    adapters.core.close()
    assert names >= COUNTERS
    assert names - EngineStats().counters().keys() - COUNTERS == _GAUGES


def test_only_counters_of_a_lost_replica_stay() -> None:
    totals = FleetStats()
    totals.retire(0, {"waiting": 3, "waiting_deferred": 2, "accepted": 5})
    now = {0: {"waiting": 1, "accepted": 1}, 1: {"waiting": 2}}
    assert totals.by_index(now) == {0: {"waiting": 1, "accepted": 6}, 1: {"waiting": 2}}
    assert totals.total(now) == {"waiting": 3, "accepted": 6}
    assert totals.by_index({}) == {0: {"accepted": 5}}
