"""Numbers of schemas by value: doubles beyond 2^53 and long integers, one at a time, against python-jsonschema."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.machine.thoroughness import repeats, taking_turns

from rootgraft.grammar.errors import GrammarError

LARGE = st.floats(2.0**53, 1e60) | st.floats(1e60, 1.7976931348623157e308)
SMALL = st.floats(1e-30, 1e-4) | st.floats(0.001, 1e6) | st.floats(1e13, 2.0**53)
LONG = st.integers(2**53 - 9, 2**53 + 9) | st.integers(10**15, 10**45)
NUMBERS = st.builds(lambda value, sign: sign * value, LARGE | SMALL | LONG, st.sampled_from((1, -1)))
KNOWN = (1e23, 1e30, 1.2345678901234567e19, 9.223372036854776e18, 3.4028234663852886e38, 2**53 + 1, 4503599627370496.5)
ONE_NUMBER: dict[str, Any] = {
    "const": lambda v: {"const": v},
    "const of draft 4": lambda v: {"$schema": "http://json-schema.org/draft-04/schema#", "enum": [v], "type": "number"},
    "enum": lambda v: {"enum": [v]},
    "item": lambda v: {"enum": [[v]]},
    "both bounds": lambda v: {"type": "number", "minimum": v, "maximum": v},
    "minimum": lambda v: {"type": "number", "minimum": v},
    "maximum": lambda v: {"type": "number", "maximum": v},
    "exclusiveMinimum": lambda v: {"type": "number", "exclusiveMinimum": v},
    "exclusiveMaximum": lambda v: {"type": "number", "exclusiveMaximum": v},
    "integers from": lambda v: {"type": "integer", "minimum": v},
    "integers below": lambda v: {"type": "integer", "exclusiveMaximum": v},
    "not const": lambda v: {"type": "number", "not": {"const": v}},
    "integers but one": lambda v: {"type": "integer", "not": {"enum": [v]}},
    "not above": lambda v: {"type": "number", "not": {"exclusiveMinimum": v}},
    "oneOf": lambda v: {"oneOf": [{"type": "integer", "minimum": v}, {"const": v}]},
    "multiples from": lambda v: {"type": "integer", "multipleOf": 3, "minimum": v},
    "multiples below": lambda v: {"type": "integer", "multipleOf": 7, "exclusiveMaximum": v},
    "multiples near": lambda v: {"type": "integer", "multipleOf": 7, "minimum": v - 20, "maximum": v + 30},
    "halves from": lambda v: {"type": "number", "multipleOf": 0.5, "minimum": v},
    "listed multiple": lambda v: {"enum": [v], "multipleOf": 3},
}


def spellings(value: float) -> set[str]:
    """Return texts of a number and of its neighbours, as an integer, as a decimal and with an exponent."""
    exact, shortest = Decimal(value), Decimal(repr(value))
    found = {repr(value), format(exact, "f"), format(shortest, "f")}
    for base in (int(exact), int(shortest), 3 * (int(exact) // 3), 7 * (int(exact) // 7), int(exact) // 2 * 2):
        found |= {str(base + step) for step in (-3, -2, -1, 0, 1, 2, 3, 7)}
        found |= {f"{base}.{digit}" for digit in range(10)} | {f"{base - 1}.9", f"{base}.25"}
    return found


def check(grammars: Any, schema: dict[str, Any], value: float, seed: int) -> None:
    """Check that what the grammar takes of a number's neighbourhood, and what it draws, is valid, unless refused."""
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    try:
        compiled = grammars.schema(schema)
    except GrammarError as error:
        assert error.reason
        return
    for text in spellings(value):
        text = f"[{text}]" if schema.get("enum") == [[value]] else text
        if grammars.admits(compiled, text):
            assert validator.is_valid(json.loads(text)), text
    drawn = grammars.draw(compiled.matcher(), random.Random(seed), 400)
    if drawn is not None:
        assert validator.is_valid(json.loads(drawn)), drawn


@pytest.mark.parametrize(
    ("form", "value"),
    [(form, value) for place, form in enumerate(ONE_NUMBER) for value in taking_turns(KNOWN, 2, place)],
)
def test_a_number_known_to_be_hard_is_compared_by_value(grammars, form, value):
    for signed in (value, -value):
        check(grammars, ONE_NUMBER[form](signed), signed, 1)


@settings(max_examples=repeats(8))
@pytest.mark.parametrize("form", ONE_NUMBER)
@given(value=NUMBERS, seed=st.integers(0, 100))
def test_one_number_is_compared_by_value(grammars, form, value, seed):
    check(grammars, ONE_NUMBER[form](value), value, seed)


@settings(max_examples=repeats(60))
@given(value=NUMBERS)
@example(1e23)
@example(1.7976931348623157e308)
@example(10**60)
def test_each_number_can_be_written(grammars, value):
    for schema in ({"const": value}, {"type": "number", "minimum": value, "maximum": value}):
        drawn = grammars.draw(grammars.schema(schema).matcher(), random.Random(1), 400)
        assert drawn is not None and json.loads(drawn) == value
