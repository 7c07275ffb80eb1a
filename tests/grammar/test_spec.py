"""What a request's grammar must be before anything is compiled."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rootgraft.grammar import spec
from rootgraft.grammar.errors import GrammarError
from rootgraft.grammar.schema.static_limits import Limits, check_limits
from rootgraft.grammar.spec import GrammarKind, GrammarSpec, parse_json


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1, "a": 2}', "repeats the key 'a'"),
        ('{"x": {"b": 1, "b": 1}}', "repeats the key 'b'"),
        ("{", "is not JSON"),
        ("{} x", "is not JSON"),
        ('{"minimum": NaN}', "NaN is not JSON"),
        ('{"minimum": 1e999}', "out of range"),
        ('{"enum": ["\\ud800"]}', "half of a surrogate pair"),
        ("[]", "must be an object or a boolean, not list"),
        (b"\xff", "is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"minimum": ' + "1" * 5000 + "}", "has an integer of 5000 digits, which is too many"),
    ],
)
def test_a_schema_must_be_strict_json(text, reason):
    with pytest.raises(GrammarError, match=reason):
        GrammarSpec.json_schema(text)


def test_specs_are_compared_by_content():
    loose = GrammarSpec.json_schema('{ "type" : "object",\n "minProperties": 1 }')
    assert loose == GrammarSpec.json_schema({"type": "object", "minProperties": 1})
    assert loose.key == GrammarSpec.json_schema('{"type":"object","minProperties":1}').key
    assert loose.key != GrammarSpec.json_schema({"minProperties": 1, "type": "object"}).key, "answers follow the order"
    assert GrammarSpec.regex("{}").key != GrammarSpec.json_object().key
    assert hash(loose) == hash(GrammarSpec(GrammarKind.JSON_SCHEMA, loose.content))


@pytest.mark.parametrize("make", [GrammarSpec.regex, GrammarSpec.ebnf, GrammarSpec.lark])
@pytest.mark.parametrize("text", ["", "a\0b", "\ud800", 5])
def test_text_grammars_must_be_text(make, text):
    with pytest.raises(GrammarError):
        make(text)


@pytest.mark.parametrize("options", [[], [""], ["a", 1]])
def test_choices_must_be_strings(options):
    with pytest.raises(GrammarError, match="choice"):
        GrammarSpec.choice(options)


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


def nested_list(depth: int) -> list[object]:
    found: list[object] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        (nested(100), "/items" * 64),
        ({"const": {"items": nested_list(100)}}, "/const"),
        ({"a,": 1, "anyOf": [True, {"properties": {"items": {"not": json.loads(nested(90))}}}]}, "/anyOf/1/properties"
         "/items/not" + "/items" * 59),
        ({"const": "x" * 600_000}, "/const"),
        ({"type": "object", "properties": {"a": {"const": "x" * 600_000}, "b": {}}}, "/properties/a/const"),
        ({"properties": {"a": {"anyOf": [{"pattern": "x" * 900}] * 2_000}}}, "/properties/a/anyOf"),
        ({"$defs": {f"d{i}": {"pattern": "x" * 900} for i in range(2_000)}}, "/$defs"),
        ({"items": {"properties": {str(i): {} for i in range(1001)}}}, "/items/properties"),
        ({"enum": list(range(10_001))}, "/enum"),
        ({"items": {"anyOf": [{"const": value} for value in range(10_001)]}}, "/items/anyOf"),
        ({"oneOf": [{"enum": [value], "type": "integer"} for value in range(10_001)]}, "/oneOf"),
        ({"allOf": [{"enum": ["x" * 140_000]}, {"enum": ["y" * 140_000]}]}, "/allOf/0/enum"),
        ({"pattern": "a" * 3000}, "/pattern"),
        ({"anyOf": [{}] * 257}, "/anyOf"),
        ({"allOf": [{"const": 1}] * 257}, "/allOf"),
        ({"anyOf": [{"const": 1}, {"const": 2}, *[{}] * 257]}, "/anyOf"),
        ({"prefixItems": [{}] * 10_001}, "/prefixItems"),
        ({"not": {}, "items": {"prefixItems": [{}] * 10_001}}, "/items/prefixItems"),
    ],
)  # fmt: skip
def test_a_schema_beyond_a_limit_is_refused_with_the_limit_and_the_keyword_that_passes_it(schema, pointer):
    with pytest.raises(GrammarError, match=r"limit is|more than") as caught:
        check_limits(GrammarSpec.json_schema(schema))
    assert (caught.value.keyword, caught.value.pointer) == (pointer.rpartition("/")[2], pointer)


def test_limits_can_be_set_and_brackets_in_strings_are_no_depth():
    check_limits(GrammarSpec.json_schema({"const": "[" * 1000 + '\\"' + "{" * 1000}))
    with pytest.raises(GrammarError, match="nested 3 deep; the limit is 2"):
        check_limits(GrammarSpec.json_schema({"items": {"items": {}}}), Limits(depth=2))
    with pytest.raises(GrammarError, match="choice"):
        check_limits(GrammarSpec.choice(map(str, range(10_001))))


def test_the_api_can_check_a_schema_without_the_libraries():
    program = (
        "import sys, rootgraft.grammar.spec\n"
        "from rootgraft.grammar.schema import analysis, keywords, static_limits\n"
        "print([m for m in ('torch', 'llguidance', 'xgrammar', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == []


def test_numbers_keep_their_value():
    assert parse_json('{"minimum": 0.1, "maximum": 10000000000000000000000}') == {"minimum": 0.1, "maximum": 10**22}


class CountedKey(str):
    """Counts how often keys are compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        CountedKey.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_a_repeated_key_is_found_in_one_pass() -> None:
    """Schemas come as texts of up to the size of a body: with its last key twice, others must not be compared."""
    keys = [CountedKey(f"k{number}") for number in range(20_000)]
    pairs = [(key, 0) for key in (*keys, CountedKey("k19999"))]
    CountedKey.compared = 0
    with pytest.raises(GrammarError, match="repeats the key 'k19999'"):
        spec._unique(pairs)
    assert CountedKey.compared < len(pairs)
    assert spec._unique(pairs[:-1]) == dict(pairs[:-1])
