"""References to the meta-schemas of the standard, as tools have them that write schemas."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from jsonschema_specifications import REGISTRY

from rootgraft.grammar.errors import GrammarError
from rootgraft.grammar.schema.document import standard_schema

NEW = "https://json-schema.org/draft/2020-12/"
OLD = "https://json-schema.org/draft/2019-09/"
WHOLE = [
    *(f"http://json-schema.org/draft-0{draft}/schema#" for draft in (4, 6, 7)),
    OLD + "schema", NEW + "schema", NEW + "meta/validation", OLD + "meta/validation",
]  # fmt: skip
PARTS = [
    *(NEW + f"meta/{name}" for name in ("core", "applicator", "unevaluated", "meta-data", "content")),
    NEW + "meta/format-annotation",
    *(OLD + f"meta/{name}" for name in ("core", "applicator", "meta-data", "content", "format")),
    NEW + "meta/core#/$defs/anchorString", "http://json-schema.org/draft-07/schema#/definitions/nonNegativeInteger",
    "http://json-schema.org/draft-04/schema#/definitions/positiveIntegerDefault0",
    "http://json-schema.org/draft-06/schema#/properties/format",
]  # fmt: skip
SCHEMAS: list[Any] = [
    True, {}, 5, -1, "a", {"$anchor": "a"}, {"$anchor": "1 a"}, {"properties": {"a": {"$anchor": "b"}}},
    {"properties": {"a": 1}}, {"properties": {"a": {"$id": 5}}}, {"allOf": []}, {"title": 5}, {"title": "t"},
    {"items": {"items": {"not": 7}}},
]  # fmt: skip


def check(grammars: Any, reference: str) -> None:
    """Check instances of a referenced schema, beside it in an object and within it, and random answers."""
    schema = {"type": "object", "properties": {"schema": {"$ref": reference}}, "additionalProperties": False}
    compiled = grammars.schema(schema)
    validator = jsonschema.Draft202012Validator(schema, registry=REGISTRY)
    for instance in SCHEMAS:
        admitted = grammars.admits(compiled, json.dumps({"schema": instance}))
        assert admitted == validator.is_valid({"schema": instance}), instance
    for seed in range(8):
        text = grammars.draw(compiled.matcher(), random.Random(seed), 80)
        assert text is None or validator.is_valid(json.loads(text)), text


@pytest.mark.parametrize("reference", PARTS)
def test_a_part_of_the_standard_is_what_it_is_to_the_validator(grammars, reference):
    check(grammars, reference)


@pytest.mark.parametrize("reference", WHOLE)
def test_a_meta_schema_is_found_and_only_what_it_holds_may_be_refused(grammars, reference):
    try:
        check(grammars, reference)
    except GrammarError as error:
        # These list strings that are unique.
        assert "enumeration of at most" in error.reason
        assert (error.keyword, error.pointer) == ("$ref", "/properties/schema/$ref")


@pytest.mark.parametrize(
    "reference",
    ["http://json-schema.org/draft-03/schema#", NEW + "meta/none", "https://json-schema.org.example/draft-07/schema"],
)
def test_what_is_not_known_or_not_read_is_refused_at_the_reference(grammars, reference):
    with pytest.raises(GrammarError) as caught:
        grammars.schema({"properties": {"a": {"$ref": reference}}})
    assert (caught.value.keyword, caught.value.pointer) == ("$ref", "/properties/a/$ref")


def test_a_schema_s_own_resource_of_the_same_name_comes_first(grammars):
    uri = "http://json-schema.org/draft-07/schema"
    compiled = grammars.schema({"$ref": uri, "$defs": {"own": {"$id": uri, "const": 1}}})
    assert grammars.admits(compiled, "1") and not grammars.admits(compiled, "true")


def test_dynamic_references_that_could_lead_to_several_places_are_refused(grammars):
    core, applicator = {"$ref": NEW + "meta/core"}, {"$ref": NEW + "meta/applicator"}
    for schema in (
        {"properties": {"a": core, "b": applicator}},
        {"properties": {"a": applicator}, "$defs": {"m": {"$dynamicAnchor": "meta"}}},
    ):
        with pytest.raises(GrammarError, match="more than one dynamic anchor 'meta'"):
            grammars.schema(schema)


def test_every_schema_of_the_installed_standard_is_known():
    for uri in REGISTRY:
        found = standard_schema(uri.rstrip("#"))
        assert found is not None and found == REGISTRY.contents(uri)
    assert standard_schema("https://json-schema.org/draft/2020-12/") is None
