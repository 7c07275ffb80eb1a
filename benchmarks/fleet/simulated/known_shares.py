"""Routers that are told each adapter's share of the calls ahead, as no real one is: what any placement can reach."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.fleet.simulated.replica_model import SLOTS
from benchmarks.fleet.simulated.traffic import Call


class OnePlaceEach:
    """Each adapter has one replica for good, by its share: each loads once, and no replica holds too many.

    Args:
        shares: of the calls, those of ``adapter-0`` first, which is the largest; they fall.
    """

    def __init__(self, num_replicas: int, shares: Sequence[float]) -> None:
        self._places = _spread(shares, [0.0] * num_replicas, [0] * num_replicas)

    def choose(self, number: int, call: Call) -> int:
        return self._places[str(call.adapter)]

    def begun(self, number: int) -> None:
        """Do nothing."""

    def ended(self, number: int) -> None:
        """Do nothing."""

    def beat(self, replica: int, stats: dict[str, float]) -> None:
        """Do nothing."""


class TwoPlacesForTheLargest(OnePlaceEach):
    """The same, but the adapter with most calls has a slot on two replicas, and the one with fewest none of its own.

    So the load is even, and only calls to the least used adapter make others leave.
    """

    def __init__(self, num_replicas: int, shares: Sequence[float]) -> None:
        half = shares[0] / 2
        loads, counts = [half, half] + [0.0] * (num_replicas - 2), [1, 1] + [0] * (num_replicas - 2)
        self._places = _spread(shares[1:-1], loads, counts, first=1)
        self._places[f"adapter-{len(shares) - 1}"] = loads.index(min(loads))
        self._rows = [0] * num_replicas
        self._placed: dict[int, int] = {}

    def choose(self, number: int, call: Call) -> int:
        largest = call.adapter == "adapter-0"
        place = min((0, 1), key=self._rows.__getitem__) if largest else super().choose(number, call)
        self._rows[place] += 1
        self._placed[number] = place
        return place

    def ended(self, number: int) -> None:
        """Note the end of a call."""
        self._rows[self._placed.pop(number)] -= 1


def _spread(shares: Sequence[float], loads: list[float], counts: list[int], first: int = 0) -> dict[str, int]:
    """Place adapters from ``first`` on, each where the load is least and a slot is free; fill ``loads``, ``counts``."""
    places = {}
    for adapter, share in enumerate(shares, first):
        place = min((each for each, count in enumerate(counts) if count < SLOTS), key=loads.__getitem__)
        loads[place] += share
        counts[place] += 1
        places[f"adapter-{adapter}"] = place
    return places
