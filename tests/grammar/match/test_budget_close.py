"""Budgets: every answer, and every structured part of a free text, is complete whenever its shortest form fits."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from support.grammar.patch_grammar import PATCH
from support.grammar.schema_cases import CASES
from support.machine.thoroughness import taking_turns

from benchmarks.grammar.limited_walk import draw_within
from rootgraft.grammar.compile.compiled_grammar import CompiledGrammar
from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.errors import GrammarError
from rootgraft.grammar.match.budget_close import BudgetClose
from rootgraft.grammar.match.closing_texts import ranks
from rootgraft.grammar.match.matcher import Matcher
from rootgraft.grammar.match.token_classes import text_bytes
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.vocabulary import Vocabulary

OPENINGS = {
    "hermes": ("<tool_call>", "<tool_call>\n", "\n</tool_call>"),
    "mistral": ("[TOOL_CALLS]", "[TOOL_CALLS] [", "]"),
    "special": ("<tool>", "<tool>", "<tool>"),
}


def _suite() -> list[Any]:
    """More than a hundred schemas, of the official test suite and of the test of keywords."""
    lines = (Path(__file__).parents[1] / "data" / "test_suite.jsonl").read_text("utf-8").rstrip("\n").split("\n")
    schemas = [*(json.loads(line)["schema"] for line in lines), *(schema for schema, _, _ in CASES)]
    return [schema for schema in schemas if isinstance(schema, dict)]


SUITE = _suite()


def call(names: list[str], schemas: list[Any], opening: str) -> dict[str, Any]:
    """A tag for calls of some functions."""
    tags = [
        {
            "type": "tag",
            "begin": f'{{"name": "{name}", "arguments": ',
            "content": {"type": "json_schema", "json_schema": schema},
            "end": "}",
        }
        for name, schema in zip(names, schemas, strict=True)
    ]
    _, begin, end = OPENINGS[opening]
    return {"type": "tag", "begin": begin, "content": {"type": "or", "elements": tags}, "end": end}


def triggered(schemas: list[Any], opening: str, **options: Any) -> dict[str, Any]:
    """Free text in which functions may be called."""
    names = [f"f{'_long_name' * index}" for index in range(len(schemas))]
    return {
        "type": "triggered_tags",
        "triggers": [OPENINGS[opening][0]],
        "tags": [call(names, schemas, opening)],
        **options,
    }


def compiled_tag(form: dict[str, Any], vocabulary: Vocabulary) -> CompiledGrammar | None:
    try:
        return compile(GrammarSpec.structural_tag({"format": form}), vocabulary)
    except GrammarError:
        return None


def drawn(grammars, matcher: Matcher, rng: random.Random, budget: int) -> tuple[bytes, int | None]:
    """Tokens drawn at random within a budget, each tested once drawn as the sampler does, and after how many of them
    the text was first complete."""
    text, whole = b"", 0 if matcher.can_end else None
    row = np.zeros(grammars.vocabulary.num_words, dtype=np.int32)
    for step in range(budget):
        token = draw_within(matcher, row, budget - step, lambda left: int(left[rng.randrange(len(left))]))
        assert matcher.accept(token)
        if matcher.is_done:
            break
        text += grammars.vocabulary.tokens[token]
        whole = step + 1 if whole is None and matcher.can_end else whole
    return text, whole


def test_arrays_with_items_to_count_at_small_budgets(grammars):
    """Their shortest form has as many items that hold as are needed, and no more than there may be."""
    three, most_two = {"contains": {"const": 3}}, {"maxContains": 2}
    counted = [
        {**three, "minContains": 2},
        {**three, "minContains": 2, **most_two},
        {**three, **most_two},
        {**three, **most_two, "minItems": 4},
        {**three, "minContains": 0, **most_two, "minItems": 3},
        {"contains": {"type": "integer"}, "minContains": 2, "minItems": 3},
        {"contains": {"type": "integer"}, "maxContains": 1, "minItems": 3},
        {"contains": {"type": "string"}, "minContains": 2, "items": {"type": ["string", "null"]}, "minItems": 3},
    ]
    assert_complete_at_small_budgets(grammars, [{"type": "array", **each} for each in counted])


@pytest.mark.sample
@pytest.mark.parametrize("part", range(2))
def test_some_schemas_of_the_suite_at_small_budgets(grammars, part):
    assert_complete_at_small_budgets(grammars, SUITE[part::40])


@pytest.mark.heavy
@pytest.mark.parametrize("part", taking_turns(range(2), 2))
def test_many_schemas_of_the_suite_at_small_budgets(grammars, part):
    assert_complete_at_small_budgets(grammars, SUITE[4 * part + 3 :: 8])


def assert_complete_at_small_budgets(grammars, schemas: list[Any]) -> None:
    """From one token up: complete and valid whenever the shortest form fits, and that form is as long as is said."""
    for number, schema in enumerate(schemas):
        try:
            compiled = grammars.schema(schema)
        except GrammarError:
            continue
        shortest = compiled.matcher().num_shortest
        assert shortest, schema
        validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
        for budget in sorted({1, shortest - 1, shortest, shortest + 1, shortest + 9} - {0}):
            text, whole = drawn(grammars, compiled.matcher(), random.Random(number), budget)
            if budget >= shortest:
                assert whole is not None, (schema, budget, text)
            if whole is not None:
                assert validator.is_valid(json.loads(text)), (schema, text)


@pytest.mark.sample
@pytest.mark.parametrize("opening", OPENINGS)
def test_a_tag_of_some_schemas_is_closed_at_every_budget_that_it_fits(grammars, vocabulary, opening):
    assert_an_opened_tag_is_closed(grammars, vocabulary, opening, every=15, least=4)


@pytest.mark.heavy
@pytest.mark.parametrize("opening", OPENINGS)
def test_a_tag_that_is_opened_is_closed_at_every_budget_that_it_fits(grammars, vocabulary, opening):
    assert_an_opened_tag_is_closed(grammars, vocabulary, opening, every=6, least=10)


def assert_an_opened_tag_is_closed(grammars, vocabulary, opening: str, *, every: int, least: int) -> None:
    """Over pairs of the suite's schemas; the text before the tag holds a quote that is never closed."""
    trigger = OPENINGS[opening][0]
    count = 0
    for number in range(0, len(SUITE) - 1, every):
        compiled = compiled_tag(triggered(SUITE[number : number + 2], opening), vocabulary)
        if compiled is None:
            continue
        count += 1
        assert compiled.matcher().num_shortest is None
        matcher = compiled.matcher()
        for token in vocabulary.tokenize_named('I say "call it: ' + trigger):
            assert matcher.accept(token)
        needed = _needed(matcher)
        for budget in (needed, needed + 9):
            text, whole = drawn(grammars, matcher.copy(), random.Random(budget), budget)
            assert whole is not None, (SUITE[number], text)
    assert count >= least


def _needed(matcher: Matcher) -> int:
    """The tokens of a short end, by the matcher's search."""
    found = matcher._budget_close.completion(matcher._state, 200)
    assert found is not None
    return len(found)


@pytest.mark.parametrize("options", [{}, {"at_least_one": True}, {"stop_after_first": True}])
def test_budgets_from_one_token_up_inside_of_a_tag(grammars, vocabulary, options):
    """At every eighth place of a call where the budget begins to count."""
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    }
    compiled = compiled_tag(triggered([schema, {"const": {}}], "hermes", **options), vocabulary)
    assert compiled is not None
    body = '<tool_call>\n{"name": "f", "arguments": {"city": "Par\\"is", "unit": "celsius"}}\n</tool_call>'
    matcher = compiled.matcher()
    for position, token in enumerate(vocabulary.tokenize(body.encode())):
        assert matcher.accept(token)
        if matcher.can_end or position % 8:
            continue
        needed = _needed(matcher)
        for budget in (needed, needed + 5):
            _, whole = drawn(grammars, matcher.copy(), random.Random(budget), budget)
            assert whole is not None


@pytest.mark.parametrize(
    "form",
    [
        {"type": "sequence", "elements": [
            {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
            {"type": "json_schema", "json_schema": {"type": "object", "required": ["answer"]}},
        ]},
        {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[a-z]{3,}-[0-9]{2}"}, "end": "</n>"},
        {"type": "tags_with_separator", "separator": ", ", "at_least_one": True,
         "tags": [call(["f", "g"], [{"const": {}}, {"type": "object", "required": ["x"]}], "mistral")]},
        {"type": "or", "elements": [
            call(["f"], [{"type": "object", "required": ["x"]}], "hermes"),
            {"type": "json_schema", "json_schema": {"type": "array", "minItems": 2}},
        ]},
    ],
)  # fmt: skip
def test_forms_that_are_no_free_text_have_a_shortest_answer(grammars, vocabulary, form):
    compiled = compiled_tag(form, vocabulary)
    assert compiled is not None and compiled.matcher().num_shortest
    for budget in range(compiled.matcher().num_shortest, compiled.matcher().num_shortest + 12, 3):
        text, whole = drawn(grammars, compiled.matcher(), random.Random(budget), budget)
        assert whole is not None, text


@pytest.mark.parametrize(
    ("spec", "shortest"),
    [
        (GrammarSpec.choice(["yesterday", "yes", "tomorrow"]), 3),
        (GrammarSpec.regex("[x-z]{2}(foo|barbar)?[0-9]{4}"), 4),
        (GrammarSpec.json_object(), 2),
        (GrammarSpec.json_schema({"const": "xyz"}), 5),
        (GrammarSpec.lark('start: "xy" W*\nW: /[0-9]+/'), 2),
    ],
)
def test_the_shortest_answer_of_each_kind(vocabulary, spec, shortest):
    assert compile(spec, vocabulary).matcher().num_shortest == shortest


EXPRESSION = 'start: term ("+" term)*\nterm: NUMBER | "(" start ")"\nNUMBER: /[0-9]{3,}/\n'


@pytest.mark.parametrize("lark", [PATCH, EXPRESSION], ids=["patch", "recursive"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_text_of_a_lark_grammar_ends_within_every_budget_that_it_fits(grammars, vocabulary, lark, inside):
    """The text itself, and as what a JSON string holds, beside a call whose arguments are of a schema."""
    spec = GrammarSpec.lark(lark)
    if inside:
        text = {"type": "json_lark", "grammar": lark}
        fixed = [{"type": "const_string", "value": mark} for mark in ('{"input": "', '"}')]
        form: Any = {"type": "sequence", "elements": [fixed[0], text, fixed[1]]}
        form = {"type": "or", "elements": [form, call(["f"], [{"type": "boolean"}], "hermes")]}
        spec = GrammarSpec.structural_tag({"format": form})
    compiled = compile(spec, vocabulary)
    shortest = compiled.matcher().num_shortest
    assert shortest
    for seed, more in enumerate((0, 1, 2, 5, 9, 20, 40, 60)):
        text, whole = drawn(grammars, compiled.matcher(), random.Random(seed), shortest + more)
        assert whole is not None, (more, text)


def test_a_way_to_the_end_that_is_known_is_not_searched_again(grammars, vocabulary, monkeypatch):
    """In a long value, and behind it, what was to come still is: that is tried before anything is searched."""
    searches = []
    search = BudgetClose.completion
    monkeypatch.setattr(BudgetClose, "completion", lambda *args: searches.append(args) or search(*args))
    fields = {name: {"type": "string", "maxLength": 40} for name in ("first", "second", "third")}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    matcher = grammars.schema(schema).matcher()
    searches.clear()
    answer = vocabulary.tokenize(json.dumps(dict.fromkeys(fields, "x" * 40)).encode())
    for budget, token in enumerate(answer):
        assert token in grammars.allowed(matcher, 200 - budget)
        assert matcher.accept(token)
    assert matcher.can_end
    assert len(searches) < len(answer) / 25  # one for each few tokens would be a fifth of them


def test_a_search_does_not_go_on_through_a_string_without_bound(vocabulary, monkeypatch):
    """Its only letter is tried again and again, and each text that ends is cut into tokens: not beyond the bound."""
    lengths, fewest = list[int](), Vocabulary.fewest
    monkeypatch.setattr(Vocabulary, "fewest", lambda self, text: lengths.append(len(text)) or fewest(self, text))
    compiled = compile(GrammarSpec.json_schema({"type": "string", "pattern": "^(xxx)*$"}), vocabulary)
    assert compiled.matcher().num_shortest and 0 < max(lengths) < 100


def test_what_is_made_of_a_vocabulary_lasts_as_long_as_it(vocabulary):
    """Adapters bring vocabularies of their own, all in use at once; a search asks again and again."""
    several = [dataclasses.replace(vocabulary) for _ in range(9)]
    for compute in (ranks, text_bytes):
        first = [compute(each) for each in several]
        assert all(compute(each) is made for each, made in zip(several, first, strict=True))


def closed(**properties: Any) -> dict[str, Any]:
    """An object with all of some properties and no other."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


PERSON = closed(name={"type": "string", "maxLength": 3}, kind={"enum": ["a", "b"]}, n={"enum": [1, 2]})
LONG = {"name": "abc", "kind": "a", "n": 1}
# Kinds of objects of which one needs nothing, and begins with the same letter as another's key.
KINDS = {"anyOf": [closed(ab={"enum": ["abcdef"]}, b={"const": "abcdef"}), closed(ax={"enum": [8]}) | {"required": []}]}
# A schema and an answer that is longer than the shortest one by one choice.
CHOICES = [
    (closed(x={"anyOf": [PERSON, {"type": "null"}]}), {"x": LONG}),
    (closed(x={"anyOf": [{"type": "null"}, PERSON]}) | {"required": []}, {"x": LONG}),
    ({"type": "array", "items": {"anyOf": [{"enum": [1]}, PERSON]}, "maxItems": 2}, [1, LONG]),
    (closed(x={"enum": ["a", "b" * 40]}), {"x": "b" * 40}),
    ({"enum": [7, "a" + "b" * 40]}, "a" + "b" * 40),
    (closed(x={"enum": [1, 10**40]}), {"x": 10**40}),
    (closed(x={"anyOf": [{"type": "null"}, {"type": "string", "minLength": 16, "maxLength": 20}]}), {"x": "a" * 16}),
    (closed(x={"anyOf": [{"type": "null"}, {"type": "array", "items": {"const": "abcd"}, "minItems": 5}]}),
     {"x": ["abcd"] * 5}),
    ({"$ref": "#/$defs/p",
      "$defs": {"p": closed(x={"type": "null"}, y={"anyOf": [{"$ref": "#/$defs/p"}, {"enum": [1]}]})}},
     {"x": None, "y": {"x": None, "y": {"x": None, "y": 1}}}),
    (closed(x=KINDS), {"x": {"ax": 8}}),
    ({"type": "array", "items": KINDS, "minItems": 1}, [{"ax": 8}]),
    ({"anyOf": [closed(a={"const": "abcdef"}), closed(ab=KINDS) | {"required": []}]}, {"ab": {"ax": 8}}),
    ({"anyOf": [{"enum": [1]}, closed(ab={"const": "abcdef"}) | {
        "required": [], "minProperties": 1, "patternProperties": {"^k[ab]$": {"const": "x"}}}]}, {"ka": "x"}),
]  # fmt: skip


@pytest.mark.parametrize("in_tag", [False, True])
@pytest.mark.parametrize(("schema", "answer"), CHOICES)
def test_a_longer_choice_is_begun_only_if_its_end_fits(grammars, vocabulary, schema, answer, in_tag):
    """Each token of a long answer is drawn as far as it fits, at each budget: an enum's label, a kind of value."""
    compiled, text = grammars.schema(schema), json.dumps(answer, separators=(",", ":"))
    if in_tag:
        form = {"type": "tag", "begin": "<n>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</n>"}
        compiled, text = compiled_tag(form, vocabulary), f"<n>{text}</n>"
    assert compiled is not None
    wanted, row = vocabulary.tokenize(text.encode()), np.zeros(vocabulary.num_words, dtype=np.int32)
    for budget in sorted({*range(compiled.matcher().num_shortest, len(wanted), 4), len(wanted)}):
        matcher, drawn_tokens = compiled.matcher(), list[int]()
        for remaining in range(budget, 0, -1):
            following = wanted[len(drawn_tokens)] if drawn_tokens == wanted[: len(drawn_tokens)] else -1
            token = draw_within(matcher, row, remaining, lambda left, t=following: t if t in left else int(left[-1]))
            assert matcher.accept(token)
            if matcher.is_done:
                break
            drawn_tokens.append(token)
        assert matcher.can_end, (budget, drawn_tokens)
    assert drawn_tokens == wanted


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 7},
        {"type": "integer", "multipleOf": 97, "minimum": 1000},
        {"oneOf": [{"type": "number", "multipleOf": 2}, {"type": "number", "multipleOf": 3}]},
        {"type": "array", "items": {"type": "integer", "multipleOf": 13}},
    ],
)
def test_a_multiple_is_whole_at_every_budget(grammars, schema):
    """Which digits end it depends on those before, and where it may end at once no search is needed."""
    compiled = grammars.schema(schema)
    shortest = compiled.matcher().num_shortest
    for seed in range(12):
        text, whole = drawn(grammars, compiled.matcher(), random.Random(seed), shortest + seed)
        assert whole is not None and jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)), text


@pytest.mark.heavy
@pytest.mark.parametrize("seed", taking_turns(range(2), 2))
def test_a_set_of_twenty_objects_is_complete_within_a_budget_above_the_shortest(real_grammars, seed):
    labels = (
        "query header head path cookie body form formData matrix label simple space pipe deep get put post patch "
        "delete options trace connect heading headline"
    )
    fields = {"in": {"enum": labels.split()}, "r": {"type": "boolean"}}
    item = {"type": "object", "properties": fields, "required": ["in"], "additionalProperties": False}
    schema = {"type": "array", "items": item, "uniqueItems": True, "minItems": 20}
    matcher = real_grammars.schema(schema).matcher()
    text, whole = drawn(real_grammars, matcher, random.Random(seed), matcher.num_shortest + 40)
    assert whole is not None, text
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))
