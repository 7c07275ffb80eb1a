"""Each keyword: what its grammar lets through and what it does not, judged by python-jsonschema as well."""

from __future__ import annotations

import json

import jsonschema
import pytest
from support.grammar.schema_cases import CASES, REFUSALS

from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.errors import GrammarError
from rootgraft.grammar.schema.keywords import KEYWORDS
from rootgraft.grammar.spec import GrammarSpec

IDS = [f"{index}-{'-'.join(schema)[:40]}" for index, (schema, _, _) in enumerate(CASES)]


@pytest.mark.parametrize(("schema", "valid", "invalid"), CASES, ids=IDS)
def test_a_schema_admits_what_is_valid_and_nothing_else(grammars, schema, valid, invalid):
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    compiled = grammars.schema(schema)
    for instance in valid:
        assert validator.is_valid(instance)
        assert grammars.admits_value(schema, compiled, instance), instance
    for instance in invalid:
        assert not validator.is_valid(instance)
        assert not grammars.admits_value(schema, compiled, instance), instance


@pytest.mark.parametrize(
    ("schema", "keyword", "pointer"), REFUSALS, ids=[row[1] + str(i) for i, row in enumerate(REFUSALS)]
)
def test_a_refusal_names_the_keyword_and_where_it_stands(vocabulary, schema, keyword, pointer):
    with pytest.raises(GrammarError) as caught:
        compile(GrammarSpec.json_schema(schema), vocabulary)
    assert (caught.value.keyword, caught.value.pointer) == (keyword, pointer)
    assert caught.value.reason


def test_no_option_of_the_library_can_be_set_from_a_schema(grammars):
    compiled = grammars.schema(
        {"x-guidance": {"lenient": True, "item_separator": ";"}, "type": "array", "not": {"const": []}}
    )
    assert not grammars.admits(compiled, "[1;1]")
    assert not grammars.admits(compiled, "[]")
    assert grammars.admits(compiled, "[1,1]")


def test_a_key_cannot_hide_behind_another_spelling(grammars):
    compiled = grammars.schema({"type": "object", "properties": {"a": {"type": "integer"}}})
    assert not grammars.admits(compiled, r'{"\u0061": true}')
    assert grammars.admits(compiled, r'{"b\n": true}')


def test_a_repeated_key_does_not_count_twice(grammars):
    compiled = grammars.schema({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2})
    assert not grammars.admits(compiled, '{"z": 1, "z": 2}')
    assert not grammars.admits(compiled, '{"a": 1, "a": 2}')
    assert grammars.admits(compiled, '{"a": 1, "z": 2}')


def test_white_space_is_free_between_the_parts_and_bounded(grammars):
    compiled = grammars.schema({"type": "array", "items": {"type": "integer"}})
    assert grammars.admits(compiled, "[\n\t1 ,\r\n 2 ]")
    assert not grammars.admits(compiled, "[" + " " * 100 + "1]")


def test_a_narrowing_is_reported(grammars):
    open_overlap = {
        "oneOf": [
            {"type": "object", "required": ["a"], "additionalProperties": {"type": "integer"}},
            {"type": "object", "required": ["b"]},
        ]
    }
    compiled = grammars.schema(open_overlap)
    assert {(n.keyword, n.pointer) for n in compiled.artifact.narrowings} >= {
        ("additionalProperties", "/oneOf/0/additionalProperties")
    }


def test_every_keyword_of_the_specification_is_in_the_table():
    vocabularies = jsonschema.validators.Draft202012Validator.META_SCHEMA["allOf"]
    assert vocabularies
    for validator in (jsonschema.Draft4Validator, jsonschema.Draft6Validator, jsonschema.Draft7Validator):
        assert set(validator.META_SCHEMA["properties"]) <= set(KEYWORDS)
    for validator in (jsonschema.Draft201909Validator, jsonschema.Draft202012Validator):
        assert set(validator.VALIDATORS) <= set(KEYWORDS)


def test_numbers_are_compared_as_they_will_be_read(grammars):
    """A number just below an open bound must not be rounded onto it by whoever parses the answer."""
    compiled = grammars.schema({"type": "number", "exclusiveMaximum": 9.1, "minimum": 0})
    assert grammars.admits(compiled, "9.09999999999999")
    assert not grammars.admits(compiled, "9.099999999999999")
    assert float("9.09999999999999") < 9.1 == float("9.099999999999999")


def test_what_is_no_integer_stays_none_when_it_is_read(grammars):
    compiled = grammars.schema({"type": "number", "not": {"type": "integer"}})
    assert grammars.admits(compiled, "12345678901234.5")
    assert not grammars.admits(compiled, "12345678901234567890.5")
    assert not grammars.admits(compiled, "0." + "9" * 20)


def test_numbers_left_out_have_no_other_spelling(grammars):
    compiled = grammars.schema({"type": "number", "not": {"enum": [0.3, 7]}})
    assert grammars.admits(compiled, "0.30000000000001")
    for text in ("0.3", "0.300", "0.30000000000000000001", "7", "7.0", "6.99999999999999999999"):
        assert not grammars.admits(compiled, text)


def test_answers_of_a_large_schema_validate(grammars):
    properties = {f"p{index}": {"type": "string", "maxLength": index} for index in range(300)}
    compiled = grammars.schema({"type": "object", "properties": properties, "required": ["p299"]})
    assert grammars.admits(compiled, json.dumps({"p3": "abc", "p299": ""}))
    assert not grammars.admits(compiled, json.dumps({"p3": "abcd", "p299": ""}))


INTEGER_N = {"$anchor": "n", "type": "integer"}


def test_a_resource_inside_of_a_schema_is_of_the_draft_that_it_names(grammars):
    draft4 = {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 0, "exclusiveMinimum": True}
    compiled = grammars.schema({"type": "array", "items": {"type": "integer", "id": "http://inner/", **draft4}})
    assert grammars.admits(compiled, "[1]") and not grammars.admits(compiled, "[0]")
    old = {"$id": "http://inner/", "$schema": "http://json-schema.org/draft-03/schema#"}
    no_id = {"$id": "http://inner/", **draft4}  # draft 4 has another keyword for it
    for items, keyword in ((draft4, "exclusiveMinimum"), (no_id, "exclusiveMinimum"), (old, "$schema")):
        with pytest.raises(GrammarError) as refused:
            grammars.schema({"type": "array", "items": items})
        assert (refused.value.keyword, refused.value.pointer) == (keyword, f"/items/{keyword}")


@pytest.mark.parametrize(
    "schema",
    [
        {"$id": "folder/whole.json", "$ref": "whole.json#/$defs/n", "$defs": {"n": {"type": "integer"}}},
        {
            "$id": "https://a.example/folder/whole.json",
            "$ref": "#/$defs/part",
            "$defs": {
                "part": {
                    "$id": "sub/part.json",
                    "$ref": "part.json#n",
                    "$defs": {"n": {"$anchor": "n", "type": "integer"}},
                }
            },
        },
    ],
)
def test_references_to_relative_ids(grammars, schema):
    compiled = grammars.schema(schema)
    assert grammars.admits(compiled, "1") and not grammars.admits(compiled, '"1"')
