"""Multiples of decimals against python-jsonschema, which divides doubles, and against exact arithmetic."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.errors import GrammarError
from rootgraft.grammar.regex.multiple_of import divides, is_safe, multiple_terms, nearest_multiples
from rootgraft.grammar.spec import GrammarSpec

STEPS = ["0.1", "0.01", "0.001", "0.05", "0.02", "0.2", "0.04", "0.000001"]


def _validates(step: str, text: str) -> bool:
    value = float(text) if "." in text else int(text)
    return jsonschema.Draft202012Validator({"multipleOf": float(step)}).is_valid(value)


@given(st.sampled_from(STEPS), st.integers(0, 10**6), st.sampled_from(["", "0", "00"]), st.booleans())
def test_what_the_terms_admit_is_a_multiple_to_the_validator(step, count, zeros, negative):
    must, must_not = multiple_terms(Fraction(step).denominator, frozenset((Fraction(step),))) or ("", "")
    text = "-" * negative + format(count * Decimal(step), "f") + zeros
    admitted = re.fullmatch(must, text) and not (must_not and re.fullmatch(must_not, text))
    assert not admitted or _validates(step, text), text


@pytest.mark.parametrize("step", ["0.1", "0.01", "0.05", "0.2"])
def test_small_multiples_are_admitted_if_and_only_if_the_validator_takes_them(step):
    must, must_not = multiple_terms(Fraction(step).denominator, frozenset((Fraction(step),))) or ("", "")
    for count in range(2_000):
        text = format(count * Decimal(step), "f")
        admitted = re.fullmatch(must, text) is not None and re.fullmatch(must_not, text) is None
        assert admitted == _validates(step, text), text


@given(st.sampled_from([*STEPS, "0.3", "0.7", "1.1", "0.00001"]), st.integers(-(10**6), 10**6))
def test_division_is_exact_and_by_doubles(step, count):
    value = count * Decimal(step)
    assert divides(Fraction(step), value) == _validates(step, format(value, "f"))
    assert not divides(Fraction(step), value + Decimal(step) / 2)


def test_of_unsafe_steps_some_multiples_are_listed():
    assert is_safe(Fraction("0.01")) and not is_safe(Fraction("0.00001"))
    found = list(nearest_multiples(Fraction("0.7"), None, None, 4))
    assert found == [0, Decimal("0.7"), Decimal("-0.7"), Decimal("1.4")]
    assert all(value > 6 for value in nearest_multiples(Fraction("0.7"), Decimal(7), None, 3))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 9973},
        {"type": "integer", "allOf": [{"multipleOf": 4999}, {"multipleOf": 3}]},
    ],
)
def test_a_step_of_too_many_remainders_is_refused_by_name(vocabulary, schema):
    """Some masks of such a grammar fail in the library, so that a dry run may or may not find out."""
    with pytest.raises(GrammarError, match="the combined step is") as caught:
        compile(GrammarSpec.json_schema(schema), vocabulary)
    assert caught.value.keyword == "multipleOf" and caught.value.pointer.endswith("/multipleOf")


def test_a_step_of_few_remainders_is_followed_however_large(vocabulary, grammars):
    compiled = compile(GrammarSpec.json_schema({"type": "integer", "multipleOf": 10_000}), vocabulary)
    assert grammars.admits(compiled, "1230000") and not grammars.admits(compiled, "1235000")
