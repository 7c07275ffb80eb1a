"""Keywords of other drafts: enforced where that leaves answers out, and only where the draft's own validators agree."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from support.grammar.schema_cases import DRAFT4, DRAFT7, DRAFT2019

from rootgraft.grammar.errors import GrammarError

DRAFT2020 = "https://json-schema.org/draft/2020-12/schema"
DRAFTS = {
    DRAFT4: jsonschema.Draft4Validator,
    DRAFT7: jsonschema.Draft7Validator,
    DRAFT2019: jsonschema.Draft201909Validator,
    DRAFT2020: jsonschema.Draft202012Validator,
}
LITERALS: list[Any] = [
    [],
    [1],
    [2],
    [1, 2],
    [[1]],
    {},
    {"a": 1},
    {"a": 2},
    {"a": [1]},
    {"b": 1},
    {"a": 1, "b": 1},
    "a",
    1,
]


def check(grammars: Any, schema: dict[str, Any], values: list[Any]) -> int:
    """Compare with the validator of the schema's draft; return how many values both admit."""
    validator = DRAFTS[schema["$schema"]](schema)
    compiled = grammars.schema(schema)
    admitted = [value for value in values if grammars.admits(compiled, json.dumps(value))]
    for value in admitted:
        assert validator.is_valid(value), (schema, value)
    return len(admitted)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("within", ["oneOf", "not", "if"])
def test_listed_arrays_and_objects_are_what_they_are_in_every_draft(grammars, draft, within):
    """They are written as schemas of their own, whose keywords the draft may not have."""
    listed = {"enum": [[1], {"a": [1]}, {"a": 1}, "a"]}
    around = {
        "oneOf": {"oneOf": [listed, {"type": "integer"}]},
        "not": {"not": {"not": listed}},
        "if": {"if": {"type": "integer"}, "else": listed},
    }
    assert check(grammars, {"$schema": draft, **around[within]}, LITERALS) >= 4


@pytest.mark.parametrize(
    "schema",
    [
        {"$schema": DRAFT2019, "type": "array", "prefixItems": [{"type": "integer"}], "unevaluatedItems": False},
        {
            "$schema": DRAFT2019,
            "type": "array",
            "contains": {"prefixItems": [{"const": 1}], "type": "array"},
            "maxContains": 1,
        },
    ],
)
def test_what_a_keyword_of_another_draft_says_of_other_keywords_does_not_count(grammars, schema):
    assert check(grammars, schema, [[], [1], [2], [[1]], [[2]], [[2], [2]], [[1], [2]]])


@pytest.mark.parametrize(
    "schema",
    [
        {"contains": {"dependencies": {"a": ["b"]}}, "maxContains": 1},
        {"dependencies": {"a": {"properties": {"b": {}}}}, "properties": {"a": {}}, "unevaluatedProperties": False},
    ],
)
def test_dependencies_of_a_later_draft_are_refused_where_validators_disagree(vocabulary, grammars, schema):
    with pytest.raises(GrammarError) as found:
        grammars.schema({"$schema": DRAFT2020, **schema})
    assert found.value.keyword == "dependencies"
