"""Annotations constrain nothing: they count towards no limit, and make no other grammar."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grammar.random_schemas import SCHEMAS, VALUES
from support.machine.thoroughness import repeats

from rootgraft.grammar.annotations import EFFECTIVE, without_annotations, without_nulls
from rootgraft.grammar.errors import GrammarError
from rootgraft.grammar.schema.keywords import KEYWORDS, Treatment
from rootgraft.grammar.schema.static_limits import check_limits
from rootgraft.grammar.spec import GrammarSpec

LONG = "x" * 600_000
NOTES = {
    "title": LONG, "description": LONG, "default": {"type": LONG}, "examples": [{"$id": LONG}], "deprecated": True,
    "$comment": LONG, "readOnly": True, "x-order": [LONG], "markdownDescription": LONG, "example": LONG,
}  # fmt: skip
# What says where and of which draft a schema is, or holds schemas that references may lead to.
BOOKKEEPING = {
    "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$defs", "definitions", "contentSchema",
}  # fmt: skip


def test_every_keyword_with_an_effect_is_kept():
    annotations = {name for name, row in KEYWORDS.items() if row.treatment is Treatment.ANNOTATION}
    assert KEYWORDS.keys() - annotations == EFFECTIVE - BOOKKEEPING
    assert EFFECTIVE & annotations >= BOOKKEEPING


@pytest.mark.parametrize("name", NOTES)
def test_an_annotation_counts_towards_no_limit_and_a_property_of_its_name_is_kept(grammars, name):
    note = {name: NOTES[name]}
    plain = {
        "type": "object",
        "properties": {name: {"type": "integer"}, "b": {"anyOf": [{"const": 1}, {"items": {"not": {"const": 2}}}]}},
        "required": [name], "patternProperties": {"^d": {}}, "$defs": {name: {"enum": [{name: 1}]}},
        "additionalProperties": {"$ref": f"#/$defs/{name}"} if name.isalpha() else False,
    }  # fmt: skip
    properties = {key: note | value for key, value in plain["properties"].items()}
    noted = note | plain | {"properties": properties, "$defs": {name: note | plain["$defs"][name]}}
    spec = GrammarSpec.json_schema(noted)
    # A reference to a definition of the name keeps it wherever it stands, as it may lead there.
    if "$ref" not in json.dumps(plain):
        assert spec == GrammarSpec.json_schema(plain)
        check_limits(spec)
    compiled = grammars.schema(plain)
    assert grammars.admits(compiled, json.dumps({name: 1})) and not grammars.admits(compiled, "{}")


def test_schemas_in_structural_tags_have_their_annotations_cut_too():
    def tag(schema):
        content = {"type": "json_schema", "json_schema": schema}
        return {"format": {"type": "tag", "begin": "<", "content": content, "end": ">"}}

    def older(schema):
        return {"structures": [{"begin": "<", "schema": schema, "end": ">"}], "triggers": ["<"]}

    for form in (tag, older):
        spec = GrammarSpec.structural_tag(form({"type": "string"} | NOTES))
        assert spec == GrammarSpec.structural_tag(form({"type": "string"}))


def test_what_a_reference_leads_to_is_kept(grammars):
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/x-types/a~1b"}, "b": {"$ref": "#/properties/a"}, "c": {"$ref": "#/examples/0"}},
        "x-types": {"a/b": {"type": "integer", "x-note": "y"}},
        "examples": [{"const": 5}],
        "x-other": "z",
    }
    kept = without_annotations(schema)
    assert kept == {key: value for key, value in schema.items() if key != "x-other"}
    compiled = grammars.schema(schema)
    assert grammars.admits(compiled, '{"a":1,"b":2,"c":5}') and not grammars.admits(compiled, '{"a":1,"b":2,"c":6}')


def test_a_null_is_an_absent_keyword_where_it_is_no_value(grammars):
    nulls = dict.fromkeys(EFFECTIVE - {"const", "type"} | {"title"})
    plain = {"type": "object", "properties": {"a": {"const": None}, "b": {"enum": [None]}}, "required": ["a"]}
    noted = nulls | plain | {"properties": {"a": nulls | {"const": None}, "b": nulls | {"enum": [None]}}}
    assert GrammarSpec.json_schema(noted).value() == plain
    assert without_nulls(noted | {"default": None}) == plain | {"default": None}
    for kept in ({"type": None}, {"properties": {"a": None}}, {"anyOf": [None]}):
        assert GrammarSpec.json_schema(kept).value() == kept == without_nulls(kept)
        with pytest.raises(GrammarError):
            grammars.schema(kept)


NAMES = st.sampled_from(["title", "default", "x-a", "examples", "deprecated", "unheard"])


def noted(schema, seed):
    """Return a schema with annotations in random places."""
    rng = random.Random(seed)

    def walk(at):
        if not isinstance(at, dict):
            return at
        found = {}
        for keyword, value in at.items():
            if keyword in ("properties", "patternProperties", "dependentSchemas"):
                value = {name: walk(item) for name, item in value.items()}
            elif keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
                value = [walk(item) for item in value]
            elif keyword not in ("enum", "const", "dependentRequired"):
                value = walk(value)
            found[keyword] = value
        if rng.random() < 0.7:
            found[rng.choice(["title", "default", "x-a", "examples", "unheard"])] = {"type": "string", "not": {}}
        return found

    return walk(schema)


@settings(max_examples=repeats(80))
@given(SCHEMAS, st.lists(VALUES, min_size=3, max_size=6), st.integers(0, 99))
def test_a_schema_with_its_annotations_cut_is_the_same_schema(schema, values, seed):
    annotated = noted(schema, seed)
    assert GrammarSpec.json_schema(annotated) == GrammarSpec.json_schema(schema)
    cut = without_annotations(annotated)
    for value in values:
        validators = (jsonschema.Draft202012Validator(each) for each in (annotated, cut))
        assert len({validator.is_valid(value) for validator in validators}) == 1


def test_what_is_too_deep_for_the_parser_is_refused_as_such():
    deep: dict[str, object] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(GrammarError, match="nested too deeply"):
        GrammarSpec.json_schema(deep)
