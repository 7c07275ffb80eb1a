"""The clock by which files and batches expire."""

from __future__ import annotations

import time

import pytest

from rootgraft.api.storage.steady_clock import SteadyClock


@pytest.mark.parametrize("jump", [10 * 365 * 86400.0, -10 * 365 * 86400.0, 3600.0])
def test_it_goes_on_when_the_systems_clock_is_set(jump: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, wall = SteadyClock(), time.time
    before = clock()
    assert abs(before - wall()) < 60
    monkeypatch.setattr(time, "time", lambda: wall() + jump)
    assert before <= clock() < before + 60
