"""Every refusal names a keyword that the schema has, at the pointer where it stands."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.grammar.hostile_inputs import inputs
from rootgraft.api.protocol.completions import CompletionRequest
from rootgraft.api.structured.output_format import requested_format
from rootgraft.engine.errors import GrammarRefused
from rootgraft.grammar.compile.compiler import lower
from rootgraft.grammar.errors import GrammarError
from rootgraft.grammar.schema.error_location import relocated
from rootgraft.grammar.schema.static_limits import Limits, check_limits
from rootgraft.grammar.spec import GrammarSpec

SCHEMA = {"items": {"a/b": {"enum": [1, {"x": 2}]}}, "not": {"type": "string"}}


@pytest.mark.parametrize(
    ("keyword", "pointer", "found"),
    [
        ("type", "/not/type", ("type", "/not/type")),
        ("type", "/not", ("type", "/not")),
        ("enum", "/items/a~1b/enum/1", ("enum", "/items/a~1b/enum")),
        ("properties", "/items/a~1b/enum/1/properties", ("enum", "/items/a~1b/enum")),
        ("prefixItems", "/items/a~1b/prefixItems", ("a/b", "/items/a~1b")),
        ("contains", "/not/type/contains", ("type", "/not/type")),
        ("schema", "", ("items", "/items")),
        ("not", "", ("not", "")),
    ],
)
def test_a_place_that_the_schema_lacks_becomes_the_one_around_it(keyword, pointer, found):
    error = relocated(GrammarError(keyword, pointer, "why"), SCHEMA)
    assert (error.keyword, error.pointer, error.reason) == (*found, "why")


def test_a_schema_without_keywords_is_left_as_it_is():
    error = GrammarError("false", "", "why")
    assert relocated(error, False) is error and relocated(error, {}) is error


def _at(schema: Any, pointer: str) -> Any:
    for token in pointer.split("/")[1:]:
        step = token.replace("~1", "/").replace("~0", "~")
        schema = schema[int(step) if isinstance(schema, list) else step]
    return schema


def test_hostile_schemas_are_refused_by_keywords_that_they_have(vocabulary):
    """All shapes that the analysis or a limit refuses, without those that only a clock could stop."""
    refused = 0
    for name, fields in inputs():
        if name.partition(" ")[0] not in ("shape", "size") or not isinstance(fields["guided_json"], dict):
            continue
        schema = fields["guided_json"]
        spec = GrammarSpec.json_schema(schema)
        try:
            check_limits(spec)
            if len(spec.content) < 400:
                lower(spec, vocabulary)
        except GrammarError as error:
            refused += 1
            place = _at(schema, error.pointer)
            assert error.keyword == error.pointer.rpartition("/")[2] or error.keyword in place, (name, error)
    assert refused > 20


def test_the_answer_of_the_api_names_the_part_that_is_too_large():
    schema = {"type": "object", "properties": {"a": {"const": "x" * 600_000}}}
    body = {"model": "m", "prompt": "x", "guided_json": schema}
    with pytest.raises(GrammarRefused, match="too large: 6000") as caught:
        requested_format(CompletionRequest.model_validate(body))
    assert (caught.value.keyword, caught.value.pointer) == ("const", "/properties/a/const")


def test_tags_and_choices_have_their_part_named_too():
    tag = {"format": {"type": "sequence", "elements": [{"type": "any_text"}] * 30}}
    with pytest.raises(GrammarError) as caught:
        check_limits(GrammarSpec.structural_tag(tag), Limits(schema_bytes=200))
    assert caught.value.pointer == "/format/elements"
    with pytest.raises(GrammarError) as caught:
        check_limits(GrammarSpec.choice(["x" * 90]), Limits(schema_bytes=50))
    assert (caught.value.keyword, caught.value.pointer) == ("choice", "")
    assert json.loads(GrammarSpec.choice(["a"]).content) == ["a"]
