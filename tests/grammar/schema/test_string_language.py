"""Parts of a schema that no value satisfies: left out or refused, and never begun by an answer that cannot go on."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from rootgraft.grammar.errors import GrammarError
from rootgraft.grammar.regex.string_automaton import AutomatonTooLarge
from rootgraft.grammar.schema import string_language
from rootgraft.grammar.schema.constraints import Strings
from rootgraft.grammar.schema.string_language import admits_any

EMPTY: list[Any] = [
    {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
    {"type": "integer", "minimum": 3, "maximum": 8, "multipleOf": 10},
    {"type": "integer", "minimum": 1, "maximum": 2, "not": {"enum": [1, 2]}},
    {"type": "number", "multipleOf": 0.5, "exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
    {"type": "string", "format": "date", "minLength": 60},
    {"type": "string", "pattern": "^[0-9]{10}$", "maxLength": 8},
    {"type": "string", "pattern": "^[0-9]$", "format": "date"},
    {"type": "string", "pattern": "^[]a$"},
    {"type": "string", "not": {"pattern": ""}},
    {"allOf": [{"type": "string", "pattern": "^a+$"}, {"pattern": "^b+$"}]},
    {"type": "array", "items": {"type": "string", "pattern": "^a$", "minLength": 2}, "minItems": 1},
    {"type": "object", "propertyNames": {"pattern": "^a$", "minLength": 2}, "minProperties": 1},
]
# Values there are, but none, or hardly any, that answers spell.
UNWRITTEN: list[Any] = [
    {"type": "integer", "minimum": 10**250},
    {"type": "integer", "minimum": 2 * 10**50, "maximum": 5 * 10**50},
    {"type": "number", "minimum": 1e308},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-30},
    {"type": "number", "minimum": 1 / 3, "maximum": 1 / 3},
]
AROUND: list[Callable[[Any], Any]] = [
    lambda part: part,
    lambda part: {"type": "object", "properties": {"z": {"type": "null"}, "a": part}, "additionalProperties": False},
    lambda part: {"type": "object", "properties": {"a": part}, "required": ["a"]},
    lambda part: {"type": "array", "items": part},
    lambda part: {"type": "array", "prefixItems": [{"type": "null"}, part], "minItems": 2},
    lambda part: {"type": "object", "additionalProperties": part},
    lambda part: {"anyOf": [part, {"type": "null"}]},
]


@pytest.mark.parametrize("around", range(len(AROUND)))
@pytest.mark.parametrize("part", [*EMPTY, *UNWRITTEN], ids=str)
def test_an_answer_never_comes_to_a_part_without_values(grammars, part: Any, around: int) -> None:
    schema = AROUND[around](part)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    try:
        compiled = grammars.schema(schema)
    except GrammarError as error:
        assert "no " in error.reason and "complex" not in error.reason
        return
    assert around or part not in EMPTY
    for seed in range(6):
        text = grammars.draw(compiled.matcher(), random.Random(seed), 40)
        assert text is None or validator.is_valid(json.loads(text))


def test_one_number_is_written_however_many_digits_it_has(grammars) -> None:
    for value in (1 / 3, 5e-324, 1.7976931348623157e308, 1e250, 10**250, 10**60 + 1, -0.5):
        for schema in ({"type": "number", "minimum": value, "maximum": value}, {"const": value}, {"enum": ["", value]}):
            text = grammars.draw(grammars.schema(schema).matcher(), random.Random(1), 400)
            assert text is not None and json.loads(text) in ("", value)


def test_strings_are_told_from_none_by_length_and_expressions(monkeypatch: pytest.MonkeyPatch) -> None:
    def strings(*patterns: str, **fields: Any) -> Strings:
        return Strings(patterns=frozenset(patterns), **fields)

    even = "^(aa)*$"
    assert admits_any(strings(even, least=2, most=3)) and not admits_any(strings(even, least=3, most=3))
    assert admits_any(strings(even, least=999)) and not admits_any(strings(even, least=999, most=999))
    assert not admits_any(strings(even, "^(aaa)*$", least=1, most=5)) and admits_any(strings(even, "^(aaa)*$", least=1))
    assert not admits_any(Strings(most=0, excluded=frozenset(("",)))) and admits_any(Strings())
    assert not admits_any(strings(even, not_patterns=frozenset(("^(aa)*$",))))

    def too_large(*_args: Any) -> None:
        raise AutomatonTooLarge

    monkeypatch.setattr(string_language, "string_automaton", too_large)
    assert admits_any(strings(even, least=5, most=5)), "what cannot be found out counts as there"
