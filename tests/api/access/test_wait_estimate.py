"""Correction of estimated waits by what came of them: it follows late ones, and is forgotten with time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootgraft.api.access.wait_estimate import WaitCorrection


def test_sequences_in_time_change_nothing() -> None:
    correction = WaitCorrection()
    for now in range(100):
        correction.add(now, 10.0, is_late=False)
    assert correction.factor(100.0, 10.0) == 1


def test_late_ones_raise_it_and_many_in_time_lower_it() -> None:
    correction = WaitCorrection()
    for _ in range(3):
        correction.add(0.0, 10.0, is_late=True)
    raised = correction.factor(0.0, 10.0)
    assert raised == pytest.approx(1.5**3)
    for _ in range(20):
        correction.add(0.0, 10.0, is_late=False)
    assert 1 < correction.factor(0.0, 10.0) < raised
    for _ in range(200):
        correction.add(0.0, 10.0, is_late=False)
    assert correction.factor(0.0, 10.0) == 1


@given(st.lists(st.booleans(), max_size=200), st.floats(0.1, 1000))
def test_it_is_bounded_and_forgotten(late: list[bool], half_life: float) -> None:
    correction = WaitCorrection()
    for now, each in enumerate(late):
        correction.add(float(now), half_life, is_late=each)
    end = float(len(late))
    assert 1 <= correction.factor(end, half_life) <= 16
    assert correction.factor(end + 30 * half_life, half_life) == pytest.approx(1, abs=1e-6)
