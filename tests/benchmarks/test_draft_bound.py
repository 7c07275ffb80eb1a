"""The bounds of ``benchmarks.draft_bound``: against all choices of drafts, and on a text whose copies are known."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.draft_bound import MOST, Place, by_length_seconds, foreknown_seconds, look_up, rates_by_length

SECONDS = [1.0 + 0.1 * count for count in range(MOST + 1)]


def least(places: Seq[Place], seconds: Seq[float], at: int = 0) -> float:
    """The least seconds of all choices of drafts that will be accepted."""
    if at == len(places):
        return 0.0
    most = min(places[at].hits, len(places) - at - 1)
    return min(seconds[count] + least(places, seconds, at + 1 + count) for count in range(most + 1))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.lists(st.floats(0, 1), min_size=MOST, max_size=MOST))
def test_what_is_foreknown_is_the_least_of_all_choices(hits, more):
    places = [Place(1, each) for each in hits]
    seconds = [1.0, *(1.0 + sum(more[: count + 1]) for count in range(MOST))]
    found = foreknown_seconds(places, seconds)
    assert found == pytest.approx(least(places, seconds))
    rates = dict.fromkeys(range(1, 17), 0.5)
    assert found <= by_length_seconds(places, seconds, rates) + 1e-9


def test_a_copy_is_seen_from_its_second_token_on():
    document = list(range(100, 120))
    places = look_up(array("i", [*document, 1]), document)
    assert places[0] == Place(0, 0)
    assert [place.length for place in places[1:]] == [min(16, length) for length in range(1, 20)]
    assert [place.hits for place in places[1:]] == [min(MOST, 20 - at) for at in range(1, 20)]
    assert rates_by_length([places])[1] == (1, 1.0)
    assert foreknown_seconds(places, SECONDS) == pytest.approx(1.0 + SECONDS[16] + SECONDS[1])
    assert by_length_seconds(places, SECONDS, {}) < 20.0


def test_drafts_that_are_never_accepted_are_not_computed():
    places = [Place(3, 0)] * 10
    assert by_length_seconds(places, SECONDS, dict.fromkeys(range(1, 17), 0.0)) == 10.0
    assert by_length_seconds(places, SECONDS, dict.fromkeys(range(1, 17), 0.9)) > 10.0
