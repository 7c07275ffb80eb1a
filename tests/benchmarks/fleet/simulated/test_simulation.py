"""Some seeds of ``benchmarks/fleet/simulated/simulate.py``, and faults made on purpose that it must find."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from benchmarks.fleet.simulated import simulation
from benchmarks.fleet.simulated.routing_cost import decide, place_adapters
from benchmarks.fleet.simulated.simulate import MOST_UNLUCKY
from benchmarks.fleet.simulated.simulation import simulate
from rootgraft.fleet.dispatcher import Dispatcher
from rootgraft.fleet.frame_order import FrameOrder
from rootgraft.fleet.journal import Journal, JournalEntry

SEEDS = range(60)


def test_every_sequence_ends_once_with_the_tokens_of_one_version() -> None:
    counts: Counter[str] = Counter()
    for seed in SEEDS:
        counts += simulate(seed)
    met = ("whole", "aborted", "poisoned", "replays", "kill", "cut", "freeze", "version", "base", "base gone")
    assert all(counts[name] > 0 for name in met), "what could go wrong was there"
    assert counts["unlucky"] <= max(1, MOST_UNLUCKY * counts["whole"])


def finds(seeds: range = SEEDS) -> bool:
    for seed in seeds:
        try:
            simulate(seed)
        except AssertionError:
            return True
    return False


def skip_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FrameOrder, "feed", lambda _self, _number, frame: [frame])


def forget_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence begins anew on another replica, though the client has tokens."""
    inner = Journal.place

    def place(self: Journal, entry: JournalEntry, *rest: Any) -> Any:
        del entry.generated[:]
        return inner(self, entry, *rest)

    monkeypatch.setattr(Journal, "place", place)


def mix_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Journal.place

    def place(self: Journal, entry: JournalEntry, *rest: Any) -> Any:
        entry.base_digest = ""
        return inner(self, entry, *rest)

    monkeypatch.setattr(Journal, "place", place)
    monkeypatch.setattr(Journal, "take_tokens", taking_no_base(Journal.take_tokens))


def taking_no_base(inner: Any) -> Any:
    def take(self: Journal, entry: JournalEntry, message: Any, base_digest: str) -> Any:
        said = inner(self, entry, message, base_digest)
        entry.base_digest = ""
        return said

    return take


def lose_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dispatcher, "_replay", lambda *_args: None)


def forgive_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kills its replica is tried for ever."""
    inner = Dispatcher._replay

    def replay(self: Dispatcher, entry: JournalEntry, now: float) -> None:
        entry.losses.in_a_row = entry.losses.in_all = 0
        inner(self, entry, now)

    monkeypatch.setattr(Dispatcher, "_replay", replay)


@pytest.mark.parametrize("fault", [skip_order, forget_tokens, mix_bases, lose_replays, forgive_all])
def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    monkeypatch.setattr(simulation, "SECONDS", 20.0)
    fault(monkeypatch)
    assert finds()


def test_adapters_are_loaded_seldom_and_spread_evenly() -> None:
    """With one slot to spare for the most used one, which has more than a replica's share."""
    loads, skew = place_adapters(16, 4, 5, 3000)
    assert loads <= 1.35 and skew <= 1.3


def test_a_thousand_replicas_are_chosen_among() -> None:
    assert len(decide(1000, 100)) == 100
