"""Loads and the picture of ``benchmarks``: what is drawn is what was measured, and no load depends on a server."""

from __future__ import annotations

import pytest

from benchmarks.serve.workloads import NAMES, workload


@pytest.mark.parametrize("name", NAMES)
def test_a_load_is_the_same_each_time_and_another_for_each_repeat(name: str) -> None:
    assert workload(name, 0, 0, adapters=3) == workload(name, 0, 0, adapters=3)
    ours, other = workload(name, 0, 0, adapters=3), workload(name, 1, 0, adapters=3)
    assert {talk.turns[0] for talk in ours.conversations}.isdisjoint(talk.turns[0] for talk in other.conversations)


def test_adapters_are_spread_evenly() -> None:
    asked = [talk.adapter for talk in workload("W6", 0, 0, adapters=3).conversations]
    assert {number: asked.count(number) for number in (None, 0, 1, 2)} == {None: 8, 0: 8, 1: 8, 2: 8}
