"""Intervals as regular expressions, against plain comparison."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootgraft.grammar.regex.number_ranges import any_spelling, decimal_terms, integer_terms, spelling

DECIMALS = st.builds(lambda n, places: Decimal(n).scaleb(-places), st.integers(-3000, 3000), st.integers(0, 3))
BOUNDS = st.none() | DECIMALS


def matches(terms: list[str], text: str) -> bool:
    return all(re.fullmatch(term.replace("[ab&&c]", "(?!)"), text) for term in terms)


@given(
    st.none() | st.integers(-300, 300),
    st.none() | st.integers(-300, 300),
    st.lists(st.integers(-4000, 4000), min_size=1),
)
def test_integers_in_an_interval(low, high, values):
    terms = integer_terms(None if low is None else Fraction(low), None if high is None else Fraction(high))
    for value in (*values, low or 0, high or 0):
        inside = (low is None or value >= low) and (high is None or value <= high)
        assert matches(terms, str(value)) == inside


@given(BOUNDS, BOUNDS, st.booleans(), st.booleans(), st.lists(DECIMALS, min_size=1))
def test_decimals_in_an_interval(low, high, low_open, high_open, values):
    terms = decimal_terms(low, high, low_open=low_open, high_open=high_open)
    for value in (*values, low or Decimal(0), high or Decimal(0)):
        above = low is None or value > low or (value == low and not low_open)
        below = high is None or value < high or (value == high and not high_open)
        plain = format(value, "f")
        for text in {spelling(value), plain, plain + ("0" if "." in plain else ".0")}:
            if not (value == 0 and text.startswith("-")):
                assert matches(terms, text) == (above and below), text


@given(DECIMALS)
def test_every_spelling_is_left_out(value):
    pattern = any_spelling(value)
    assert re.fullmatch(pattern, format(value, "f"))
    assert re.fullmatch(pattern, spelling(value))
    assert not re.fullmatch(pattern, spelling(value + 1))


@pytest.mark.parametrize("bound", ["1e308", "-1e308", "1e-300", "123456789012345678901234567890123456789012345"])
def test_extreme_bounds_stay_small_and_safe(bound):
    value = Decimal(bound)
    for low, high in ((value, None), (None, value)):
        terms = decimal_terms(low, high, low_open=False, high_open=True)
        assert sum(map(len, terms)) < 20_000
        for text in ("0", "1", "-1", "9" * 39, "0.00000000000000000001"):
            number = Decimal(text)
            inside = (low is None or number >= low) and (high is None or number < high)
            assert inside or not matches(terms, text)
