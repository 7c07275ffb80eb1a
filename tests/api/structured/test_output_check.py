"""Validation of answers: schemas that share parts cost what they have, and mean what jsonschema says."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.machine.thoroughness import repeats

from benchmarks.hostile_programs import doubling
from rootgraft.api.structured import output_check
from rootgraft.api.structured.output_check import AnswerValidator, OutputValidators, TooMuchWork
from rootgraft.engine.sandbox.program_pool import ProgramStopped
from rootgraft.grammar.spec import GrammarSpec

MOST = 4_000


@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "oneOf"])
def test_work_grows_with_the_levels_and_does_not_double(keyword: str) -> None:
    work = []
    for levels in (8, 16, 32):
        validator = AnswerValidator(GrammarSpec.json_schema(doubling(keyword, levels)))
        assert validator.is_valid('"abc"', MOST) == (keyword != "oneOf")
        valid = validator.work
        assert not validator.is_valid('"abcd"', MOST)
        work.append(valid + validator.work)
    assert work[2] - work[1] == pytest.approx(2 * (work[1] - work[0]))


LEAVES = st.sampled_from(
    [
        {"type": "string"}, {"type": "integer"}, {"const": 1}, {"enum": ["a", None, 1]}, {"minLength": 2}, True, False,
        {"minimum": 1}, {"type": ["object", "array"]}, {"required": ["a"]}, {"maxItems": 1}, {"uniqueItems": True},
    ]
)  # fmt: skip
REFS = st.integers(0, 3).map(lambda number: {"$ref": f"#/$defs/d{number}"})


def above(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=3)
    keywords = {
        "allOf": some, "anyOf": some, "oneOf": some, "not": inner, "items": inner, "contains": inner, "if": inner,
        "then": inner, "else": inner, "additionalProperties": inner, "propertyNames": inner,
        "properties": st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
        "dependentSchemas": st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
        "prefixItems": some, "unevaluatedProperties": inner, "unevaluatedItems": inner,
    }  # fmt: skip
    return st.fixed_dictionaries({}, optional=keywords)


def without_loops(number: int, schema: Any) -> Any:
    """Let references lead to definitions of higher numbers alone."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            target = int(schema["$ref"][-1])
            return {"$ref": f"#/$defs/d{target}"} if target > number else True
        return {key: without_loops(number, value) for key, value in schema.items()}
    return [without_loops(number, each) for each in schema] if isinstance(schema, list) else schema


SCHEMAS = st.recursive(LEAVES | REFS, above, max_leaves=6)
VALUES = st.recursive(
    st.sampled_from([None, True, 1, 2, 1.5, "a", "abc", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=repeats(400))
@given(st.lists(SCHEMAS, min_size=5, max_size=5), st.lists(VALUES, min_size=1, max_size=4))
def test_sharing_changes_no_verdict(schemas: list[Any], values: list[Any]) -> None:
    root, *definitions = (without_loops(number - 1, schema) for number, schema in enumerate(schemas))
    schema = {"allOf": [root], "$defs": {f"d{number}": each for number, each in enumerate(definitions)}}
    validator = AnswerValidator(GrammarSpec.json_schema(schema))
    plain = jsonschema.Draft202012Validator(schema)
    for value in values:
        assert validator.is_valid(json.dumps(value), None) == plain.is_valid(value), (schema, value)


def test_a_dynamic_reference_is_not_shared() -> None:
    tree = {
        "$id": "https://example.com/tree",
        "$dynamicAnchor": "node",
        "properties": {"children": {"type": "array", "items": {"$dynamicRef": "#node"}}},
    }
    validator = AnswerValidator(GrammarSpec.json_schema(tree))
    assert validator.is_valid('{"children": [{"children": []}]}', None)
    assert not validator.is_valid('{"children": [{"children": 1}]}', None)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"pattern": "^(a|b)*c$"}, '"ab"'),
        ({"pattern": "^a{9000}"}, json.dumps("a" * 100)),
        ({"unevaluatedProperties": False}, "{}"),
        ({"type": "array", "items": {"enum": list(range(400))}}, json.dumps([399] * 200)),
    ],
)
async def test_what_may_take_long_is_validated_in_another_process(schema: Any, text: str) -> None:
    spec = GrammarSpec.json_schema(schema)
    with pytest.raises(TooMuchWork):
        AnswerValidator(spec).is_valid(text, MOST)
    expected = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    assert await OutputValidators().is_valid(spec, text) == expected


async def test_an_answer_whose_validation_is_ended_stays_as_the_grammar_has_made_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stop(*_: object, **__: object) -> bytes:
        raise ProgramStopped("takes longer than 2 s")

    monkeypatch.setattr(output_check.POOL, "run", stop)
    spec = GrammarSpec.json_schema({"type": "integer"})
    assert await OutputValidators().is_valid(spec, "1" * 2_000)
    assert "could not be validated: the validation takes longer than 2 s" in caplog.text


async def test_a_long_answer_that_does_not_match_is_found() -> None:
    spec = GrammarSpec.json_schema({"type": "array", "items": {"type": "integer"}})
    validators = OutputValidators()
    assert await validators.is_valid(spec, json.dumps([1] * 1_000))
    assert not await validators.is_valid(spec, json.dumps([*[1] * 1_000, "a"]))


async def test_validations_that_meet_do_not_add_up_on_the_event_loop() -> None:
    """One costs a few milliseconds; 128 calls of an answer in one turn of the loop would stop it for half a second."""
    spec = GrammarSpec.json_schema({"anyOf": [*[{"minProperties": 2}] * 400, {"type": "object"}]})
    validators, done, turns = OutputValidators(), [], 0

    async def validate() -> None:
        assert await validators.is_valid(spec, "{}")
        done.append(turns)

    async def answer() -> None:
        for _ in range(10):
            await validate()

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count())
    await asyncio.gather(answer(), *(validate() for _ in range(60)))
    counting.cancel()
    in_a_turn = max(Counter(done).values())
    assert len(done) == 70 and in_a_turn <= 20
