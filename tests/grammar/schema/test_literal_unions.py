"""Unions of literals are enumerations, however many there are and whatever stands beside them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.machine.thoroughness import repeats

from rootgraft.grammar.errors import GrammarError
from rootgraft.grammar.schema.literal_unions import literal_values, of_one_branch
from rootgraft.grammar.schema.static_limits import check_limits
from rootgraft.grammar.spec import GrammarSpec

SCALARS: list[Any] = [None, True, False, 0, 1, 1.0, 2, 0.5, "", "a", "b", "1", 1e23, 10**23]
TYPES = st.sampled_from(["string", "integer", "number", "boolean", "null", ["string", "null"], ["integer", "boolean"]])
LITERALS = st.builds(
    lambda values, named, single: (
        ({"const": values[0]} if single else {"enum": values}) | ({} if named is None else {"type": named})
    ),
    st.lists(st.sampled_from(SCALARS), min_size=1, max_size=3),
    st.none() | TYPES,
    st.booleans(),
)
OTHERS = st.sampled_from(
    [{"type": "string", "pattern": "^a"}, {"type": "integer", "minimum": 1}, {"const": [1]}, {"enum": [{}, 2]}, True]
)  # fmt: skip


@settings(max_examples=repeats(80))
@given(
    st.sampled_from(["anyOf", "oneOf"]), st.lists(LITERALS, min_size=2, max_size=5), st.lists(OTHERS, max_size=2),
    st.booleans(),
)  # fmt: skip
def test_a_union_takes_what_the_validator_takes(grammars, keyword, literals, others, negated):
    union: dict[str, Any] = {keyword: [*others, *literals]}
    schema = {"type": ["string", "number", "boolean", "null"], "not": union} if negated else union
    validator = jsonschema.Draft202012Validator(schema)
    valid = [value for value in SCALARS if validator.is_valid(value)]
    try:
        compiled = grammars.schema(schema)
    except GrammarError:
        assert not valid or keyword == "oneOf" or True in others
        return
    for value in SCALARS:
        text = json.dumps(value)
        # Integers are written without a fraction, and doubles of integers as such.
        text = json.dumps(int(value)) if isinstance(value, float) and value.is_integer() else text
        expected = validator.is_valid(json.loads(text))
        assert expected or not grammars.admits(compiled, text), text
        if keyword == "anyOf" and not negated:
            assert grammars.admits(compiled, text) == expected, text


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf"])
def test_ten_thousand_literals_are_one_enumeration(grammars, keyword):
    branches = [{"type": "string", "const": f"value_{number}", "description": "x" * 40} for number in range(10_000)]
    schema = {"type": "object", "properties": {"a": {keyword: branches}}, "required": ["a"]}
    check_limits(GrammarSpec.json_schema(schema))
    compiled = grammars.schema(schema)
    assert grammars.admits(compiled, '{"a":"value_9999"}') and not grammars.admits(compiled, '{"a":"value_10000"}')


def test_what_is_a_literal():
    assert literal_values({"const": None}) == [None]
    assert literal_values({"enum": ["a", 1, True], "type": ["boolean", "string"]}) == ["a", True]
    assert literal_values({"const": 1.0, "type": "integer"}) == [1.0]
    assert literal_values({"const": 1.5, "type": "integer"}) == []
    for other in ({"const": []}, {"enum": [{}]}, {"const": 1, "minimum": 0}, {"type": "null"}, True, {"enum": 5}):
        assert literal_values(other) is None
    assert literal_values({"const": 1, "type": "nope"}) is None
    assert of_one_branch([[1, True, 1.0], [True, "1"], ["a"]]) == [1, "1", "a"]
