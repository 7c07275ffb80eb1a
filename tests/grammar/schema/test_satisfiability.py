"""Satisfiability: alternatives that no value has are left out before anything in them is refused."""

from __future__ import annotations

import itertools
import json

import jsonschema
import pytest
from support.grammar.grammar_fixtures import grammars, vocabulary

from rootgraft.grammar.errors import GrammarError

__all__ = ("grammars", "vocabulary")
NAMES = {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "minItems": 1}


@pytest.mark.parametrize("names", [NAMES, NAMES | {"uniqueItems": False}])
def test_a_branch_that_denies_what_holds_around_it_needs_no_grammar(grammars, names):
    """As in Dependabot's and Bitbucket's own schemas: the other branch's array cannot fail, so it must be absent."""
    schema = {
        "type": "object",
        "additionalProperties": False,
        "properties": {"many": names, "one": {"type": "string"}},
        "oneOf": [
            {"properties": {"many": names}, "required": ["many"]},
            {"properties": {"one": {"type": "string"}}, "required": ["one"]},
        ],
    }
    compiled = grammars.schema(schema)
    values = [{}, {"many": ["a"]}, {"many": []}, {"many": [1]}, {"one": "x"}, {"many": ["b"], "one": "x"}]
    assert_as_jsonschema(grammars, compiled, schema, values)


ITEMS = [{"type": "integer"}, {"type": "string"}, {"enum": [1, "a"]}]
VALUES = [list(value) for count in range(4) for value in itertools.product((1, 2, "a"), repeat=count)]


@pytest.mark.parametrize("rest", [False, *ITEMS])
@pytest.mark.parametrize("least", [0, 1, 2])
@pytest.mark.parametrize("contains", ITEMS)
def test_what_an_array_contains_needs_a_place(grammars, contains, least, rest):
    """In the prefix or behind it: schemas that no array satisfies are refused, others as the validator says."""
    first = {"type": "string"}
    schema = {"type": "array", "prefixItems": [first], "items": rest, "contains": contains, "minContains": least}
    valid = [value for value in VALUES if jsonschema.Draft202012Validator(schema).is_valid(value)]
    if not valid:
        with pytest.raises(GrammarError):
            grammars.schema(schema)
        return
    assert_as_jsonschema(grammars, grammars.schema(schema), schema, VALUES)


def assert_as_jsonschema(grammars, compiled, schema, values) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    for value in values:
        text = json.dumps(value, separators=(",", ":"))
        assert grammars.admits(compiled, text) == validator.is_valid(value), value


RECURSIVE = {
    "properties": {"properties": {"items": {"$ref": "#/$defs/part"}}},
    "required": {"properties": {"items": {"$ref": "#/$defs/part"}}, "required": ["items"], "type": ["object", "null"]},
    "items": {"type": ["array", "null"], "items": {"$ref": "#/$defs/part"}, "maxItems": 2},
    "closed": {
        "type": "object",
        "properties": {"items": {"$ref": "#/$defs/part"}, "n": {"type": "integer"}},
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("part", RECURSIVE)
def test_branches_that_share_a_recursive_part_are_told_apart(grammars, part):
    """As in OpenAPI 2.0's own schema: what fails in one branch is what holds in the other, part by part without end."""
    branches = [
        {"type": "object", "properties": {"items": {"$ref": "#/$defs/part"}, "a": {"type": "integer"}}},
        {"type": "object", "properties": {"items": {"$ref": "#/$defs/part"}, "b": {"const": 1}}, "required": ["b"]},
    ]
    schema = {"oneOf": branches, "$defs": {"part": RECURSIVE[part]}}
    values = [{}, {"a": 1}, {"b": 1}, {"a": "x"}, {"b": 1, "a": "x"}, {"a": 1, "b": 1}, {"a": 1, "b": 2}]
    assert_as_jsonschema(grammars, grammars.schema(schema), schema, values)


@pytest.mark.parametrize("part", ["properties", "required", "items"])
def test_nothing_holds_and_fails_a_recursive_schema(grammars, part):
    schema = {"$ref": "#/$defs/part", "not": {"$ref": "#/$defs/part"}, "$defs": {"part": RECURSIVE[part]}}
    with pytest.raises(GrammarError, match="no finite value"):
        grammars.schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"required": ["b"], "propertyNames": {"$ref": "#"}},
        {"required": ["b"], "propertyNames": {"anyOf": [{"$ref": "#"}, {"maxLength": 1}]}},
        {
            "$ref": "#/$defs/d",
            "$defs": {
                "d": {"required": ["b"], "allOf": [{"minProperties": 1, "propertyNames": {"$ref": "#/$defs/d"}}]}
            },
        },
    ],
)
def test_names_that_are_to_be_valid_under_the_schema_itself(grammars, schema):
    """Whether a required name is admitted was asked again inside of itself, without end."""
    compiled = grammars.schema(schema)
    assert all(grammars.admits(compiled, text) for text in ('{"b":1}', '{"b":{"b":[]}}', '"b"'))
    assert not any(grammars.admits(compiled, text) for text in ("{}", '{"a":1}'))


def test_a_long_chain_of_parts_that_two_keywords_describe_is_followed(grammars):
    """Whether the last one can exist was asked inside of the questions about all others, more than the stack holds."""
    parts = {
        f"d{index}": {
            "required": ["a"],
            "properties": {"a": {"$ref": f"#/$defs/d{index + 1}"}},
            "patternProperties": {"a": {}},
        }
        for index in range(300)
    }
    compiled = grammars.schema({"type": "object", "$ref": "#/$defs/d0", "$defs": parts | {"d300": {"const": 1}}})
    matcher = compiled.matcher()
    assert grammars.allowed(matcher)
