"""Memory of keys and items: no repetition is written, every answer without one can be, and no answer gets stuck."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from itertools import combinations, permutations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from numpy.typing import NDArray
from support.machine.thoroughness import repeats

from benchmarks.grammar.limited_walk import draw_within
from rootgraft.api.protocol.tools import Function, Tool
from rootgraft.api.structured.tool_formats import FORMATS
from rootgraft.api.structured.tool_grammar import tool_output_format
from rootgraft.grammar.compile.compiled_grammar import CompiledGrammar
from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.emit import listed_values
from rootgraft.grammar.emit.grammar_artifact import GrammarArtifact
from rootgraft.grammar.errors import GrammarError
from rootgraft.grammar.match.matcher import Matcher
from rootgraft.grammar.schema.constraints import Strings
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.vocabulary import Vocabulary

# Tokens that begin, complete and repeat entries, in one and across several.
LONGER = (
    b'"a"', b'","', b'",', b'"a",', b',"b"', b'a"]', b'":', b'{"a":', b'["a","a"', b"1,1", b"0,", b",0", b'""', b"ab",
    b"ba", b"12", b'"}', b',"a":0', b'":0,"', b"[[", b"],[", b"true,", b"e,t", b'\xc3\xa9"', b"}]", b"1]", b":1}",
    b", ", b",\n  ", b'["',
)  # fmt: skip
TOKENS = (*(bytes([byte]) for byte in range(256)), *LONGER, b"<end>")
END = len(TOKENS) - 1
VOCABULARY = Vocabulary(TOKENS, frozenset((END,)), (END,))
BLANKS = {token for token, text in enumerate(TOKENS) if set(text) & set(b" \t\r\n")}
# What makes repetitions likely in a random answer.
LIKELY = [token for token, text in enumerate(TOKENS) if set(text) <= set(b'"ab01,:[]{}-.')]
SLOW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def compiled(schema: Any) -> CompiledGrammar:
    return _compiled(json.dumps(schema))


@functools.cache
def _compiled(schema: str) -> CompiledGrammar:
    return compile(GrammarSpec.json_schema(json.loads(schema)), VOCABULARY)


def allowed(matcher: Matcher) -> list[int]:
    row = np.zeros(VOCABULARY.num_words, dtype=np.int32)
    matcher.fill_mask(row)
    return [int(token) for token in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))]


def language(grammar: CompiledGrammar) -> set[bytes]:
    """All texts without white space, over every way to spell them in tokens, each of which must come to an end."""
    texts: set[bytes] = set()
    done: set[bytes] = set()

    def walk(matcher: Matcher, text: bytes) -> None:
        if text in done:
            return
        done.add(text)
        tokens = [token for token in allowed(matcher) if token not in BLANKS]
        assert tokens, text
        for token in tokens:
            if token == END:
                texts.add(text)
                continue
            after = matcher.copy()
            assert after.accept(token), (text, TOKENS[token])
            walk(after, text + TOKENS[token])

    walk(grammar.matcher(), b"")
    return texts


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), pairs
    return dict(pairs)


def loaded(text: bytes) -> Any:
    return json.loads(text, object_pairs_hook=without_repeats)


def canonical(value: Any) -> str:
    """A text that is equal for equal values; 1.0 is 1."""
    return json.dumps(json.loads(json.dumps(value), parse_float=shortened), sort_keys=True)


def shortened(text: str) -> int | float:
    return int(float(text)) if float(text).is_integer() else float(text)


def assert_is_exact(schema: Any, instances: Iterator[Any]) -> None:
    """The grammar's texts are the valid instances, neither more nor fewer."""
    validator = Draft202012Validator(schema)
    found = [loaded(text) for text in language(compiled(schema))]
    for value in found:
        validator.validate(value)
    assert set(map(canonical, found)) == {canonical(each) for each in instances if validator.is_valid(each)}


@pytest.fixture(params=["listed", "remembered"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small sets are listed in the grammar, or left to the memory as large ones are."""
    if request.param == "remembered":
        monkeypatch.setattr(listed_values, "MAX_LISTED_VALUES", 0)
    return str(request.param)


def record(**properties: Any) -> dict[str, Any]:
    """An object with all of some properties and no other."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


WORDS = ["", "a", "b", "aa", "ab", "ba", "bb", "é", "\t"]
SCALARS = [*WORDS, -1, 0, 0.5, 1, 9, 10, 11, 12, True, False, None]


def lists(most: int, values: list[Any] = SCALARS) -> Iterator[list[Any]]:
    for count in range(most + 1):
        yield from map(list, permutations(values, count))


def objects(most: int, values: list[Any]) -> Iterator[dict[str, Any]]:
    for count in range(most + 1):
        for names in combinations(WORDS, count):
            for chosen in product(values, repeat=count):
                yield dict(zip(names, chosen, strict=True))


ITEMS: list[Any] = [
    {"type": "string", "pattern": "^[ab]{0,2}$"},
    {"type": "string", "pattern": "^(a|b|ab|ba|é)$"},
    {"type": "string", "pattern": "^[éa\\t]$"},
    {"type": "integer", "minimum": 9, "maximum": 12},
    {"type": "integer", "minimum": -1, "maximum": 1},
    {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.5},
    {"type": ["boolean", "null"]},
    {"anyOf": [{"type": "boolean"}, {"enum": ["a", 1]}]},
    {"anyOf": [{"type": "string", "pattern": "^[ab]$"}, {"type": "string", "pattern": "^[bé]$"}]},
    {"oneOf": [{"const": "a"}, {"const": 1}, {"const": None}]},
]


@pytest.mark.parametrize("item", ITEMS, ids=str)
def test_sets_of_scalars_are_exact(way: str, item: Any) -> None:
    assert_is_exact({"type": "array", "items": item, "uniqueItems": True, "minItems": 1, "maxItems": 2}, lists(2))


BIT = {"enum": [0, 1]}
# Arrays and objects of limited size, and all of their values.
LIMITED: list[tuple[Any, list[Any]]] = [
    (record(a=BIT), [{"a": 0}, {"a": 1}]),
    (record(a=BIT, b={"type": "boolean"}), [{"a": a, "b": b} for a in (0, 1) for b in (False, True)]),
    (record(a={"const": "aa"}, b={"type": "null"}) | {"required": []},
     [{}, {"a": "aa"}, {"b": None}, {"a": "aa", "b": None}]),
    ({"type": "array", "items": {"enum": ["a", "ab"]}, "minItems": 1, "maxItems": 2},
     [["a"], ["ab"], *map(list, product(["a", "ab"], repeat=2))]),
    ({"type": "array", "items": BIT, "maxItems": 2, "uniqueItems": True}, [[], [0], [1], [0, 1], [1, 0]]),
    ({"anyOf": [record(k={"const": "a"}), record(k={"const": "ab"}), {"const": 1}]}, [{"k": "a"}, {"k": "ab"}, 1]),
    ({"anyOf": [{"enum": ["a", None]}, {"type": "array", "items": {"const": 0}, "minItems": 1, "maxItems": 2}]},
     ["a", None, [0], [0, 0]]),
    (record(a={"anyOf": [record(b=BIT), {"type": "array", "items": BIT, "minItems": 1, "maxItems": 1}]}),
     [{"a": a} for a in ({"b": 0}, {"b": 1}, [0], [1])]),
]  # fmt: skip


@pytest.mark.parametrize(("item", "values"), LIMITED, ids=[json.dumps(item)[:60] for item, _ in LIMITED])
def test_sets_of_arrays_and_objects_of_limited_size_are_exact(
    monkeypatch: pytest.MonkeyPatch, item: Any, values: list[Any]
) -> None:
    """Each item that is begun has an end that no other item has, however few of them are left."""
    monkeypatch.setattr(listed_values, "MAX_LISTED_VALUES", 0)
    least = min(len(values), 2)
    schema = {"type": "array", "items": item, "uniqueItems": True, "minItems": least, "maxItems": 3}
    assert_is_exact(schema, lists(3, values))


# Two arrays in one place, one of them a set of arrays or objects.
IN_ONE_PLACE: list[Any] = [
    {"anyOf": [{"type": "array", "items": record(a=BIT), "uniqueItems": True, "minItems": 2, "maxItems": 3},
               {"type": "array", "items": record(a={"enum": [1, 2]}), "uniqueItems": True, "minItems": 1,
                "maxItems": 3}]},
    {"anyOf": [{"type": "array", "items": record(a=BIT), "uniqueItems": True, "maxItems": 2},
               {"type": "array", "items": record(b={"const": 1}), "maxItems": 2}]},
]  # fmt: skip


@pytest.mark.parametrize("schema", IN_ONE_PLACE, ids=["two sets", "a set and no set"])
def test_a_set_of_objects_and_another_array_in_one_place_are_sets(monkeypatch: pytest.MonkeyPatch, schema: Any) -> None:
    """All sets that the schema permits, also of the array that would take repetitions."""
    monkeypatch.setattr(listed_values, "MAX_LISTED_VALUES", 0)
    values = [{"a": 0}, {"a": 1}, {"a": 2}, {"b": 1}]
    assert_is_exact({"uniqueItems": True, **schema}, lists(3, values))


def test_a_set_is_used_up(way: str) -> None:
    schema = {"type": "array", "items": {"enum": ["a", "ab", 1, True]}, "uniqueItems": True, "minItems": 3}
    assert_is_exact(schema, lists(4, ["a", "ab", 1, True]))


@settings(max_examples=repeats(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(items=st.lists(st.sampled_from(ITEMS), min_size=1, max_size=2), least=st.integers(0, 2), more=st.integers(0, 1))
def test_unions_of_sets_are_exact(monkeypatch: pytest.MonkeyPatch, items: list[Any], least: int, more: int) -> None:
    monkeypatch.setattr(listed_values, "MAX_LISTED_VALUES", 0)
    schema = {"type": "array", "items": {"anyOf": items}, "uniqueItems": True, "minItems": least}
    assert_is_exact(schema | {"maxItems": min(2, least + more)}, lists(2))


@pytest.mark.parametrize(
    "schema",
    [
        {"patternProperties": {"^[ab]$": {"enum": [0, 1]}}, "additionalProperties": False},
        {"patternProperties": {"^[ab]$": {"const": 0}, "^.b$": {"const": 1}}, "additionalProperties": False},
        {"propertyNames": {"pattern": "^[ab]{1,2}$"}, "additionalProperties": {"const": 0}},
        {
            "properties": {"a": {"const": 1}},
            "propertyNames": {"pattern": "^[ab]{1,2}$"},
            "additionalProperties": {"const": 0},
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("least", [0, 2])
def test_objects_with_few_keys_are_exact(way: str, schema: Any, least: int) -> None:
    # `.b` has a million keys, of which only those of WORDS are looked at.
    if "^.b$" in schema.get("patternProperties", {}):
        schema = schema | {"propertyNames": {"pattern": "^[ab]{1,2}$"}}
    whole = {"type": "object", "minProperties": least, "maxProperties": 2, **schema}
    assert_is_exact(whole, objects(2, [0, 1]))


OPEN = [
    {"type": "array", "uniqueItems": True},
    {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "minItems": 3},
    {"type": "array", "items": {"type": "string", "minLength": 2, "maxLength": 3}, "uniqueItems": True, "minItems": 2},
    {"type": "array", "items": {"type": "string", "format": "date"}, "uniqueItems": True, "minItems": 2},
    {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "minItems": 4, "maxItems": 6},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 120}, "uniqueItems": True, "minItems": 3},
    {"type": "array", "items": {"type": "number"}, "uniqueItems": True, "minItems": 3},
    {"type": "array", "items": {"type": ["string", "integer", "null"]}, "uniqueItems": True, "minItems": 4},
    {"type": "array", "items": {"type": "object", "minProperties": 1}, "uniqueItems": True, "minItems": 2},
    {"type": "array", "items": {"type": "array", "items": {"enum": [0, 1]}}, "uniqueItems": True, "minItems": 3},
    {"type": "array", "items": {"enum": [*range(100), "a", "b"]}, "uniqueItems": True, "minItems": 2},
    {"type": "array", "items": {"type": "string", "pattern": "^[ab]{7}$"}, "uniqueItems": True, "minItems": 2},
    {"type": "array", "items": {"enum": [{"a": 1}, {"a": 2}, [1], []]}, "uniqueItems": True, "minItems": 3},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "minProperties": 3, "maxProperties": 4},
    {"type": "object", "properties": {"b": {}}, "required": ["a"], "minProperties": 4},
    {"type": "object", "propertyNames": {"pattern": "^[ab]{1,7}$"}, "minProperties": 3},
    {"type": "object", "patternProperties": {"^[ab]{6}$": {"type": "object"}}, "additionalProperties": False},
    {
        "type": "object",
        "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "minItems": 2}},
        "required": ["tags"],
    },
    {
        "anyOf": [
            {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "minItems": 2},
            {"type": "array", "items": {"type": "integer"}, "minItems": 3},
        ]
    },
    {
        "type": "array",
        "items": {"type": "string", "pattern": "^(?:[ab]+ ){0,49}[ab]+$", "maxLength": 500},
        "uniqueItems": True,
        "minItems": 2,
    },
]


@pytest.fixture(scope="module")
def grammars_of_open() -> list[CompiledGrammar]:
    return [compiled(schema) for schema in OPEN]


def walked(matcher: Matcher, rng: random.Random, budget: int) -> bytes | None:
    """A random answer within a budget, inclined to repeat itself; None if it was cut off."""

    def choose(tokens: NDArray[np.int64]) -> int:
        likely = [token for token in tokens.tolist() if token in LIKELY or token == END]
        return rng.choice(likely if likely and rng.random() < 0.95 else tokens.tolist())

    text, row = b"", np.zeros(VOCABULARY.num_words, dtype=np.int32)
    for step in range(budget):
        token = draw_within(matcher, row, budget - step, choose)
        assert matcher.accept(token), (text, TOKENS[token])
        if matcher.is_done:
            return text
        text += TOKENS[token]
    return text if matcher.can_end else None


def assert_random_answers_are_whole(grammar: CompiledGrammar, index: int, budgets: list[int]) -> None:
    """Budgets count from the least one."""
    rng, checker = random.Random(index), Draft202012Validator.FORMAT_CHECKER
    validator = Draft202012Validator(OPEN[index], format_checker=checker)
    least = grammar.matcher().num_shortest
    assert least is not None
    for more in budgets:
        text = walked(grammar.matcher(), rng, least + more)
        assert text is not None, more
        validator.validate(loaded(text))


NAMES_OF_OPEN = [json.dumps(schema)[:60] for schema in OPEN]


@pytest.mark.sample
@pytest.mark.parametrize("index", range(len(OPEN)), ids=NAMES_OF_OPEN)
def test_some_answers_hold_the_schema_and_repeat_nothing(grammars_of_open: list[CompiledGrammar], index: int) -> None:
    assert_random_answers_are_whole(grammars_of_open[index], index, [0, 1, 3, 6, 40])


@pytest.mark.heavy
@pytest.mark.parametrize("index", range(len(OPEN)), ids=NAMES_OF_OPEN)
def test_random_answers_hold_the_schema_and_repeat_nothing(grammars_of_open: list[CompiledGrammar], index: int) -> None:
    assert_random_answers_are_whole(grammars_of_open[index], index, [*range(12), *[50] * 3])


def sets_and_objects() -> st.SearchStrategy[Any]:
    """Schemas of sets and of objects with open keys, alone, in an object and in an array."""
    string = {"type": "string"}
    items = st.sampled_from([*ITEMS[:9], string, {"type": "integer"}, string | {"pattern": "^[ab]{3,7}$"}])
    sets = st.builds(
        lambda item, least: {"type": "array", "items": item, "uniqueItems": True, "minItems": least},
        items,
        st.integers(0, 2),
    )
    keys = st.sampled_from([{}, {"propertyNames": {"pattern": "^[ab]{1,7}$"}}, {"required": ["a"]}])
    values = st.sampled_from([True, {"type": "integer"}, string])
    objects = st.builds(
        lambda key, value, least: {"type": "object", **key, "additionalProperties": value, "minProperties": least},
        keys,
        values,
        st.integers(0, 3),
    )
    alone = sets | objects
    field = st.builds(lambda each: {"type": "object", "properties": {"b": each}, "required": ["b"]}, alone)
    return alone | field | st.builds(lambda each: {"type": "array", "items": each, "minItems": 1}, alone)


def assert_ends_whole_at_every_small_budget(schema: Any, seed: int, more: int) -> None:
    try:
        grammar = compiled(schema)
    except GrammarError:
        assume(False)
    validator, rng = Draft202012Validator(schema), random.Random(seed)
    least = grammar.matcher().num_shortest
    assert least is not None
    for budget in range(least, least + more):
        text = walked(grammar.matcher(), rng, budget)
        assert text is not None, budget
        validator.validate(loaded(text))


@pytest.mark.sample
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sets_and_objects(), st.integers(0, 1000))
def test_generated_schemas_end_whole_at_small_budgets(schema: Any, seed: int) -> None:
    assert_ends_whole_at_every_small_budget(schema, seed, 3)


@pytest.mark.heavy
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sets_and_objects(), st.integers(0, 1000))
def test_generated_schemas_end_whole_at_all_small_budgets(schema: Any, seed: int) -> None:
    assert_ends_whole_at_every_small_budget(schema, seed, 10)


@pytest.mark.parametrize(("index", "least", "seed"), [(0, 11, 9), (11, 13, 92)])
def test_an_end_of_an_earlier_position_is_followed_again(index: int, least: int, seed: int) -> None:
    grammar = compiled(OPEN[index])
    for turn in range(4):
        assert walked(grammar.matcher(), random.Random(seed + turn), least) is not None


@pytest.mark.parametrize("index", range(len(OPEN)))
def test_a_rollback_and_a_copy_leave_no_trace(grammars_of_open: list[CompiledGrammar], index: int) -> None:
    grammar, rng = grammars_of_open[index], random.Random(index)
    matcher, tokens = grammar.matcher(), list[int]()
    for _ in range(12):
        for _ in range(rng.randint(0, 6)):
            choice = [token for token in allowed(matcher) if token in LIKELY] or allowed(matcher)
            if not matcher.is_done:
                tokens.append(rng.choice(choice))
                assert matcher.accept(tokens[-1])
        count = rng.randint(0, min(4, len(tokens)))
        matcher.rollback(count)
        del tokens[len(tokens) - count :]
        fresh = grammar.matcher()
        assert all(map(fresh.accept, tokens))
        assert allowed(fresh) == allowed(matcher) == allowed(matcher.copy())


@pytest.mark.parametrize("index", range(len(OPEN)))
def test_a_mask_is_what_is_accepted(grammars_of_open: list[CompiledGrammar], index: int) -> None:
    matcher, rng = grammars_of_open[index].matcher(), random.Random(index)
    for _ in range(25):
        tokens = allowed(matcher)
        assert tokens == [token for token in range(len(TOKENS)) if is_accepted(matcher, token)]
        likely = [token for token in tokens if token in LIKELY] or tokens
        if not matcher.accept(rng.choice(likely)) or matcher.is_done:
            break


def is_accepted(matcher: Matcher, token: int) -> bool:
    found = matcher.accept(token)
    matcher.rollback(int(found))
    return found


def is_admitted(grammar: CompiledGrammar, text: str) -> bool:
    matcher = grammar.matcher()
    return all(map(matcher.accept, VOCABULARY.tokenize(text.encode()))) and matcher.can_end


@SLOW
@given(st.lists(st.text(max_size=6), max_size=6), st.booleans())
def test_any_strings_can_be_a_set_and_keys(texts: list[str], with_repeat: bool) -> None:
    assume(all(not 0xD800 <= ord(char) <= 0xDFFF for text in texts for char in text))
    texts = list(dict.fromkeys(texts))
    if with_repeat:
        assume(texts)
        texts.append(texts[0])
    spelled = [json.dumps(text, ensure_ascii=False) for text in texts]
    items = compiled(OPEN[1] | {"minItems": 0})
    assert is_admitted(items, f"[{', '.join(spelled)}]") != with_repeat
    keys = compiled({"type": "object"})
    assert is_admitted(keys, f"{{{', '.join(f'{text}: {{}}' for text in spelled)}}}") != with_repeat


NUMBERS = st.integers(-20, 20) | st.integers() | st.floats(allow_nan=False, allow_infinity=False, width=32).map(abs)


@SLOW
@given(st.lists(NUMBERS, max_size=6))
def test_numbers_are_told_apart_by_value(numbers: list[float]) -> None:
    grammar = compiled({"type": "array", "items": {"type": "number"}, "uniqueItems": True})
    spelled = [format(number, ".10f") if isinstance(number, float) else str(number) for number in numbers]
    text = f"[{', '.join(spelled)}]"
    assume(all(len(each) < 30 for each in spelled))
    assert is_admitted(grammar, text) == (len(set(map(json.loads, spelled))) == len(spelled))


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ('[{"a": 1, "b": 2}, {"b": 2, "a": 1}]', False),
        ('[{"a": 1, "b": 2}, {"b": 2, "a": 1, "c": 0}]', True),
        ('[{"a": [1, true]}, {"a": [true, 1]}, {"a": [1, 1]}]', True),
        ("[[1, 1], [1, 1.0]]", False),
        ('[1, true, [1], [true], "1", {}, [], 0, false]', True),
        ('[{"a": 1}, [{"a": 1}], {"a": 1}]', False),
        ('["\\n", "\\\\n", "n"]', True),
        ("[1, 1.0]", False),
        ("[10, 1e1]", False),
        ("[0, -0.0]", False),
        ("[9007199254740992, 9007199254740993]", True),
        ('[{"k": 1, "k": 2}]', False),
        ("[[1, 1], [1]]", True),
    ],
)
def test_values_of_any_kind_are_told_apart(text: str, is_valid: bool) -> None:
    assert is_admitted(compiled({"type": "array", "uniqueItems": True}), text) == is_valid


def test_a_schema_without_open_objects_and_sets_has_no_memory() -> None:
    closed = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}
    assert not compiled(closed).artifact.has_memory
    assert not compiled({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}).artifact.has_memory
    assert compiled({"type": "object"}).artifact.has_memory


def test_an_artifact_is_the_same_after_a_pipe(grammars_of_open: list[CompiledGrammar]) -> None:
    for grammar in grammars_of_open:
        assert GrammarArtifact.decode(grammar.artifact.encode()) == grammar.artifact


def test_where_another_array_may_stand_it_is_told() -> None:
    grammar = compiled(OPEN[19])
    assert [each.pointer for each in grammar.artifact.narrowings] == ["/anyOf/0/uniqueItems"]
    assert is_admitted(grammar, '["a", "b"]') and is_admitted(grammar, "[1, 1, 1]")
    assert not is_admitted(grammar, '["a", "a"]')


DISCRIMINATED = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"k": {"const": "x"}, "tags": {"type": "array", "uniqueItems": True}},
            "required": ["k"],
        },
        {"type": "object", "properties": {"k": {"const": "y"}}, "required": ["k"]},
    ]
}


@pytest.mark.parametrize("items", [{}, {"type": "string"}])
def test_an_open_alternative_is_told_apart_by_what_was_written(items: Any) -> None:
    schema = json.loads(
        json.dumps(DISCRIMINATED).replace('"uniqueItems"', f'"items": {json.dumps(items)}, "uniqueItems"')
    )
    grammar = compiled(schema)
    assert is_admitted(grammar, '{"k": "y", "tags": ["a", "a"]}')
    assert is_admitted(grammar, '{"k": "y", "tags": [{"a": 1}, {"a": 1}]}')
    assert not is_admitted(grammar, '{"k": "x", "tags": [{"a": 1}, {"a": 1}]}')
    assert not is_admitted(grammar, '{"k": "x", "tags": ["a", "a"]}')
    assert is_admitted(grammar, '{"k": "x", "tags": ["a", "b"]}')


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"items": {"type": "array", "maxItems": 3}, "minItems": 61}, "uniqueItems"),
        ({"prefixItems": [{}]}, "uniqueItems"),
        ({"contains": {"const": 1}}, "uniqueItems"),
        ({"items": {"type": "integer", "minimum": 1, "maximum": 99}, "minItems": 100}, "uniqueItems"),
    ],
)
def test_what_is_not_remembered_is_refused_by_name(schema: Any, keyword: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compiled({"properties": {"s": {"type": "array", "uniqueItems": True, **schema}}})
    assert (caught.value.keyword, caught.value.pointer) == (keyword, f"/properties/s/{keyword}")


def test_as_many_items_as_there_are_values() -> None:
    schema = {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 99}, "uniqueItems": True}
    grammar = compiled(schema | {"minItems": 99})
    assert is_admitted(grammar, json.dumps(list(range(99, 0, -1))))
    assert not is_admitted(grammar, json.dumps(list(range(99, 1, -1))))


PARAMETERS = {
    "type": "object",
    "properties": {
        "note": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "ids": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    },
    "required": ["tags"],
    "additionalProperties": False,
}
TOOLS = [
    Tool(type="function", function=Function(name="f", parameters=PARAMETERS)),
    Tool(type="function", function=Function(name="g", parameters={"type": "object"})),
]
BYTES = Vocabulary((*(bytes([byte]) for byte in range(256)), b"</s>"), frozenset({256}), (256,), 257)


@pytest.mark.parametrize("form", [name for name in FORMATS if name != "gemma4"])
def test_sets_are_parameters_of_tools_in_all_forms_of_calls(form: str) -> None:
    found = tool_output_format(TOOLS, "auto", FORMATS[form], None, parallel=False)
    assert found is not None
    grammar = compile(found.spec, BYTES)

    def is_written(arguments: dict[str, Any]) -> bool:
        matcher = grammar.matcher()
        text = FORMATS[form].calls([("f", json.dumps(arguments))])
        return all(map(matcher.accept, text.encode())) and matcher.can_end

    text = 'x ["a","a"] [1,1] {"k":1,"k":2}'
    assert is_written({"tags": ["a", "b"]}) and is_written({"tags": []})
    assert is_written({"note": text, "tags": ["a", "b"], "ids": [1, 12, 2], "map": {"a": 1, "b": 1}})
    assert not is_written({"tags": ["a", "a"]})
    assert not is_written({"note": text, "tags": ["a"], "ids": [1, 2, 1]})


def test_an_array_and_an_object_in_one_place_have_languages_of_their_own() -> None:
    keys = {"type": "object", "propertyNames": {"pattern": "^[ab]{7}$"}}
    grammar = compiled({"anyOf": [{"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, keys]})
    assert is_admitted(grammar, '{"aaaaaaa": 1, "aaaaaab": 2}') and is_admitted(grammar, "[1, 12]")
    assert not is_admitted(grammar, '{"aaaaaaa": 1, "aaaaaaa": 2}') and not is_admitted(grammar, "[1, 1]")


def test_only_one_form_of_calls_has_no_memory() -> None:
    with pytest.raises(GrammarError, match="which is the limit here"):
        found = tool_output_format(TOOLS, "auto", FORMATS["gemma4"], None, parallel=False)
        assert found is not None
        compile(found.spec, BYTES)


def test_keys_of_a_call_are_told_apart_and_those_of_the_text_are_not() -> None:
    found = tool_output_format(TOOLS, "auto", FORMATS["hermes"], None, parallel=False)
    assert found is not None
    grammar = compile(found.spec, BYTES)
    call = '{"a":1,"a":2} <tool_call>\n{"name": "g", "arguments": {"x": {"k": 1, "K": 2}}}\n</tool_call>'
    for text, is_valid in ((call, True), (call.replace("K", "k"), False)):
        matcher = grammar.matcher()
        assert (all(map(matcher.accept, text.encode())) and matcher.can_end) == is_valid


@given(st.integers(0, 3), st.none() | st.integers(0, 4), st.sampled_from(["", "^[ab]*$", "^a+$", "^(aa)*b?$", "b"]))
def test_ends_of_a_string_are_counted(least: int, most: int | None, pattern: str) -> None:
    from rootgraft.grammar.emit.string_rules import automaton

    found = automaton(Strings(least, most, frozenset({pattern, "^[ab]*$"})))
    texts = ["".join(chars) for count in range(9) for chars in product("ab", repeat=count)]
    if found is None:
        assert most is not None
        return
    if most is None:
        assert found.num_ends[1, 0] == np.inf
    else:
        strings = Strings(least, most, frozenset({pattern, "^[ab]*$"}))
        assert found.num_ends[1, 0] == sum(map(strings.admits, texts)) == len(set(found.strings()))


def test_a_token_that_ends_a_string_amid_a_character_is_not_accepted() -> None:
    item = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}, "additionalProperties": False}
    matcher = compiled({"type": "array", "items": item, "uniqueItems": True, "minItems": 2}).matcher()
    for text in (*(bytes([byte]) for byte in b'[{"a":"a"},{"a":"'), b"\xc3"):
        assert matcher.accept(TOKENS.index(text)), text
    assert not matcher.accept(TOKENS.index(b'"'))
