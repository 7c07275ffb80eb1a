"""Branches of ``oneOf`` are told apart wherever both languages can be written: closed objects, formats, multiples."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.machine.thoroughness import repeats

from rootgraft.api.structured.jsonschema_validators import FORMAT_CHECKER
from rootgraft.grammar.errors import GrammarError
from rootgraft.grammar.regex.divisibility import divisible_terms
from rootgraft.grammar.regex.ecma_regex import pattern_matches
from rootgraft.grammar.regex.string_formats import FORMATS, LOOKALIKES

NAMES = ["a", "b", "c", "xd"]
VALUES = st.sampled_from([{}, {"type": "integer"}, {"type": "string"}, {"const": 1}, {"enum": [1, "s"]}])
CLOSED = st.builds(
    lambda properties, required, patterns, rest: {
        "type": "object",
        "properties": properties,
        "required": [name for name in required if name in properties],
        **({"patternProperties": {"^x": patterns}} if patterns is not None else {}),
        "additionalProperties": rest,
    },
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3),
    st.lists(st.sampled_from(NAMES), max_size=1),
    st.none() | VALUES,
    st.just(False) | st.just(False) | st.just({"type": "null"}),
)
OBJECTS = st.dictionaries(st.sampled_from([*NAMES, "xe", "z"]), st.sampled_from([1, 2, "s", None]), max_size=3)


def ordered(value: dict[str, Any], schema: Any) -> list[str]:
    """Return the spellings of an object in the orders of the branches."""
    found = []
    for branch in schema["oneOf"]:
        listed = [name for name in branch.get("properties", ()) if name in value]
        rest = [name for name in value if name not in listed]
        found.append(json.dumps({name: value[name] for name in (*listed, *rest)}))
    return found


@settings(max_examples=repeats(120))
@given(
    st.lists(CLOSED, min_size=2, max_size=3),
    st.lists(OBJECTS, min_size=4, max_size=8),
    st.booleans(),
    st.integers(0, 99),
)
def test_closed_objects_with_optional_keys_are_told_apart(grammars, branches, values, refers, seed):
    schema: dict[str, Any] = {"oneOf": branches}
    if refers:
        named = {f"d{number}": branch for number, branch in enumerate(branches)}
        schema = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in named], "$defs": named}
    validator = jsonschema.Draft202012Validator(schema)
    are_closed = all(not branch["additionalProperties"] and "patternProperties" not in branch for branch in branches)
    valid = [value for value in values if validator.is_valid(value)]
    try:
        compiled = grammars.schema(schema)
    except GrammarError:
        assert not (are_closed and valid)
        return
    for value in values:
        texts = ordered(value, {"oneOf": branches})
        admitted = [grammars.admits(compiled, text) for text in texts]
        assert value in valid or not any(admitted), (schema, value)
        assert any(admitted) or value not in valid or not are_closed, (schema, value)
    text = grammars.draw(compiled.matcher(), random.Random(seed), 80)
    assert text is None or validator.is_valid(json.loads(text)), (schema, text)


FORMAT_PAIRS = [("date", "date-time"), ("ipv4", "ipv6"), ("uri", "email"), ("uuid", "date"), ("time", "duration")]


@pytest.mark.parametrize("pair", FORMAT_PAIRS)
def test_formats_that_do_not_look_alike_are_told_apart(grammars, pair):
    for names in (pair, pair[::-1]):
        schema = {"oneOf": [{"type": "string", "format": name} for name in names]}
        compiled = grammars.schema(schema)
        for name in names:
            assert any(grammars.admits(compiled, json.dumps(text)) for text in FORMATS[name].shortest), name
        validator = jsonschema.Draft202012Validator(schema, format_checker=FORMAT_CHECKER)
        for seed in range(12):
            text = grammars.draw(compiled.matcher(), random.Random(seed), 80)
            assert text is None or validator.is_valid(json.loads(text)), text


ALPHABET = st.text(st.sampled_from("0123456789abcdefTtZWPp-:.@/+%{} _\n"), max_size=12)


def conforms(checker: jsonschema.FormatChecker, text: str, name: str) -> bool:
    """Return whether a checker takes a text; some raise errors of their own over absurd numbers."""
    try:
        return name in checker.checkers and checker.conforms(text, name)
    except ArithmeticError:
        return False


@pytest.mark.parametrize("name", LOOKALIKES)
@settings(max_examples=repeats(10))
@given(seed=st.integers(0, 10**6), inserted=ALPHABET, at=st.integers(0, 40))
def test_what_does_not_look_like_a_format_is_not_in_it(grammars, name, seed, inserted, at):
    compiled = grammars.schema({"type": "string", "format": name})
    drawn = grammars.draw(compiled.matcher(), random.Random(seed), 60)
    texts = [inserted, *FORMATS[name].shortest] if drawn is None else [inserted, json.loads(drawn)]
    for text in (*texts, *(text[:at] + inserted + text[at:] for text in texts), *(text.lower() for text in texts)):
        checkers = (FORMAT_CHECKER, jsonschema.Draft202012Validator.FORMAT_CHECKER)
        if any(conforms(checker, text, name) for checker in checkers) or FORMATS[name].matches(text):
            assert pattern_matches(LOOKALIKES[name], text, wide=True), text


STEPS = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 10, 15, 25])


@settings(max_examples=repeats(60))
@given(
    kind=st.sampled_from(["integer", "number"]), steps=st.lists(STEPS, min_size=2, max_size=3, unique=True),
    low=st.none() | st.integers(-40, 10), high=st.none() | st.integers(-10, 40), form=st.sampled_from(["oneOf", "not"]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_multiples_are_told_apart(grammars, kind, steps, low, high, form, seed):
    first, *others = [{"multipleOf": step} for step in steps]
    schema: dict[str, Any] = {"type": kind}
    schema |= {"oneOf": [first, *others]} if form == "oneOf" else first | {"not": {"anyOf": others}}
    schema |= ({} if low is None else {"minimum": low}) | ({} if high is None else {"maximum": high})
    validator = jsonschema.Draft202012Validator(schema)
    values = [*range(-45, 46), 10**15 + 1, 3 * 10**15, 0.5, -1.5, 2.25]
    valid = [value for value in values if validator.is_valid(value)]
    try:
        compiled = grammars.schema(schema)
    except GrammarError:
        assert not valid
        return
    for value in values:
        assert grammars.admits(compiled, json.dumps(value)) == (value in valid), (schema, value)
        if isinstance(value, int) and value not in valid:
            assert not grammars.admits(compiled, f"{value}.0") and not grammars.admits(compiled, f"{value}e0")
    text = grammars.draw(compiled.matcher(), random.Random(seed), 80)
    assert text is None or validator.is_valid(json.loads(text)), (schema, text)


def test_divisibility_of_digits():
    for number in (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 25, 75, 375, 1000):
        terms = divisible_terms(number)
        assert terms is not None
        for value in (*range(1_200), *range(10**12, 10**12 + 60)):
            assert all(re.fullmatch(term, str(value)) for term in terms) == (value % number == 0), (number, value)
    assert divisible_terms(7) is divisible_terms(9) is divisible_terms(2**11) is None


def key(name: str, value: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: value}, "required": [name]}


LEFT_OUT: list[tuple[list[Any], int]] = [
    # What a negation cannot say.
    ([{"const": 5}, {"not": {"multipleOf": 7}}], 0),
    ([{"enum": [5, 14, "x"]}, {"not": {"multipleOf": 7}}], 2),
    ([{"type": "array"}, {"not": {"uniqueItems": True}}], 3),
    ([{"type": "object"}, {"not": {"additionalProperties": {"type": "integer"}}}], 3),
    ([{"const": {"a": "x"}}, {"not": {"patternProperties": {"^a": {"type": "integer"}}}}], 0),
    ([{"enum": ["a", "2023-02-30"]}, {"not": {"format": "date"}}], 1),
    ([{"enum": ["ab", "x"]}, {"not": {"propertyNames": {"maxLength": 1}}}], 0),
    ([{"type": "object"}, {"not": {"unevaluatedProperties": False}}], 0),
    ([{"type": "array"}, {"not": {"prefixItems": [{}], "items": {"const": 1}}}], 2),
    # What some validators match and others do not.
    ([{"const": "\u0663"}, {"type": "string", "pattern": r"^\d$"}], 1),
    ([{"enum": ["a\n", "x"]}, {"type": "string", "pattern": "^a$"}], 2),
    ([{"enum": ['"q"@b.c', "x"]}, {"type": "string", "format": "email"}], 1),
    ([key("a", {"const": "a\n"}), key("a", {"pattern": "^a$"})], 0),
    ([key("a\n", {"const": 1}), {"type": "object", "patternProperties": {"^a$": {"type": "string"}}}], 0),
    ([{"const": 4503599627370497.5}, {"type": "number", "multipleOf": 0.3}], 0),
    # What is unevaluated is told apart where the evaluated parts are known.
    ([key("a", {}) | {"unevaluatedProperties": False}, key("ab", {}) | {"unevaluatedProperties": False}], 3),
]


@pytest.mark.parametrize(("branches", "least"), LEFT_OUT, ids=[str(branches) for branches, _ in LEFT_OUT])
def test_a_branch_excludes_others_from_values_that_it_does_not_write_itself(grammars, branches, least):
    """Each branch takes for its own also what its alternatives leave out, and what only some validators match."""
    schema = {"oneOf": branches}
    validator = jsonschema.Draft202012Validator(schema, format_checker=FORMAT_CHECKER)
    try:
        compiled = grammars.schema(schema)
    except GrammarError as error:
        assert not least and error.reason
        return
    values: list[Any] = [5, 7, 14, 0.3, 4503599627370497.5, "x", "a", "ab", "a\n", "\u0663", "3", "2023-02-30", None]
    values += [
        "2023-02-03",
        '"q"@b.c',
        "q@b.c",
        [],
        [1],
        [1, 1],
        [1, 2],
        [1, 1, 1],
        {},
        {"a": 1},
        {"a": "x"},
        {"a": "a"},
    ]
    values += [{"a": "a\n"}, {"a\n": 1}, {"ab": 1}, {"ab": "x"}, {"a": 1, "ab": 1}, {"b": "x"}]
    admitted = [value for value in values if grammars.admits(compiled, json.dumps(value, ensure_ascii=False))]
    for value in admitted:
        assert validator.is_valid(value), value
    assert len(admitted) >= least
