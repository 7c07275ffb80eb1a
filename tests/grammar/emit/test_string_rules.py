"""String rules: automata that follow strings with large repeats and lengths, exactly, beside the grammar library."""

from __future__ import annotations

import json
import random

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.grammar.counted_cases import case
from benchmarks.grammar.counted_strings import run
from rootgraft.grammar.compile.compiled_grammar import CompiledGrammar
from rootgraft.grammar.emit import string_rules
from rootgraft.grammar.emit.grammar_artifact import Backend, GrammarArtifact
from rootgraft.grammar.emit.lark_writer import to_lark
from rootgraft.grammar.emit.string_rules import automaton, weight
from rootgraft.grammar.errors import GrammarError
from rootgraft.grammar.match.budget_close import BudgetClose
from rootgraft.grammar.match.string_masks import StringRule
from rootgraft.grammar.match.string_state import StringState
from rootgraft.grammar.regex.charset import json_string
from rootgraft.grammar.regex.ecma_regex import parse
from rootgraft.grammar.regex.string_automaton import START, AutomatonTooLarge, string_automaton
from rootgraft.grammar.schema.analysis import Analysis
from rootgraft.grammar.schema.constraints import Strings
from rootgraft.grammar.schema.document import Document

FEW_WORDS = r"^(?:\S+\s+){0,49}\S+$"
WORDS = {"type": "string", "pattern": FEW_WORDS, "maxLength": 500}
CLOSED = {"additionalProperties": False}
PATTERNS = (
    FEW_WORDS, r"^(a|b{2,3})*$", "b", r"^(?:[a-z]{1,3}\s?){2,4}$", "^(?!ab)[a-c]+$", "^a|b$", r"^\d+[^\d]$", r"^\W*\w$",
    "^(?:é|ß|\U0001f600){0,3}$", r"^[\n\"\\x]+$", "^(a?b?){3}$", "^(?:ab){2,}c$", r"^\p{Lu}\p{Ll}*$",
)  # fmt: skip
TEXTS = st.text(st.sampled_from('aabbcé ß\U0001f600\n"\\xZ1'), max_size=9)


@given(st.sampled_from(PATTERNS), TEXTS, st.integers(0, 4), st.one_of(st.none(), st.integers(0, 9)))
def test_an_automaton_admits_what_the_pattern_and_the_length_do(pattern, text, least, most):
    strings = Strings(least, most, frozenset((pattern,)))
    found = automaton(strings)
    if found is None:
        assert not strings.admits(text)
        return
    state, count = START, 0
    for char in text:
        state = found.transitions[state][found.classes.of(ord(char))]
        count = min(count + 1, found.last_count)
    assert found.may_end(state, count) == strings.admits(text)
    assert found.can_finish[state, count] or not strings.admits(text)
    rest = found.rest(state, count)
    assert (rest is not None) == found.can_finish[state, count]
    for number in rest or ():
        state, count = found.transitions[state][number], min(count + 1, found.last_count)
    assert rest is None or found.may_end(state, count)


def test_negated_patterns_formats_values_and_exclusions_are_part_of_an_automaton():
    for strings, good, bad in (
        (Strings(not_patterns=frozenset(("a.*b", "c"))), ["ba", ""], ["ab", "xaxb", "c"]),
        (Strings(most=12, formats=frozenset(("email",))), ["a@b.c"], ["a@", "a@b.cdefghijk"]),
        (Strings(values=("one", "two")), ["one", "two"], ["on", "three", ""]),
        (Strings(2, 3, excluded=frozenset(("ab", "abc"))), ["abd", "ba"], ["ab", "abc", "abcd"]),
    ):
        found = automaton(strings)
        assert found is not None
        for text in (*good, *bad):
            state, count = START, 0
            for char in text:
                state = found.transitions[state][found.classes.of(ord(char))]
                count = min(count + 1, found.last_count)
            assert found.may_end(state, count) == (text in good), (strings, text)


def test_an_automaton_with_too_many_states_is_not_built():
    with pytest.raises(AutomatonTooLarge):
        string_automaton(parse("^(a|b)*a(a|b){18}$").must, [])
    with pytest.raises(AutomatonTooLarge):
        string_automaton(parse("^(?:a{90}b{90}){40}$").must, [])


@given(st.sampled_from(PATTERNS), TEXTS, st.sampled_from([None, 4, 9]), st.binary(max_size=2))
def test_a_mask_is_what_each_token_does_byte_by_byte(vocabulary, pattern, text, most, more):
    strings = Strings(0, most, frozenset((pattern,)))
    found = automaton(strings)
    rule = None if found is None else StringRule(found, vocabulary)
    position = rule.start if rule else None
    for byte in json_string(text)[1:-1].encode() + more:
        position = rule.after(position, byte) if position and byte != 0x22 else None
    if not rule or not position or not rule.can_finish(position):
        return
    allowed = rule.allowed(position)
    for token, data in enumerate(vocabulary.tokens):
        if token in vocabulary.special:
            assert not allowed[token]
            continue
        assert allowed[token] == _fits(rule, position, data), (position, data)
    end = rule.rest(position)
    assert end is not None and end[-1:] == b'"'
    for byte in end[:-1]:
        position = rule.after(position, byte)
    assert rule.may_close(position)


def _fits(rule: StringRule, position, data: bytes) -> bool:
    for byte in data:
        if byte == 0x22 and position[2] == 0:
            return rule.may_close(position)
        position = rule.after(position, byte)
        if position is None:
            return False
    return rule.can_finish(position)


def test_the_weight_is_that_of_places_times_lengths():
    assert weight(Strings(0, 500, frozenset((FEW_WORDS,)))) > 20_000
    few = r"(?:\S+\s+){0,5}\S+$"
    assert weight(Strings(0, 100, frozenset((f"^(?!.*secret){few}",)))) > 5 * weight(Strings(0, 100, frozenset((few,))))
    for strings in (
        Strings(0, 8_000), Strings(0, 63, frozenset(("^[a-z]{1,63}$",))), Strings(values=("a",)),
        Strings(most=500, excluded=frozenset(("a",))),
    ):  # fmt: skip
        assert weight(strings) == 0


def test_an_artifact_with_automata_survives_the_pipe(grammars, vocabulary):
    compiled = grammars.schema({"type": "object", "properties": {"a": WORDS}, "required": ["a"], **CLOSED})
    artifact = GrammarArtifact.decode(compiled.artifact.encode())
    assert artifact == compiled.artifact and len(artifact.strings) == 1
    assert grammars.admits(CompiledGrammar(artifact, vocabulary), '{"a": "one two"}')


def test_words_and_length_hold_both(grammars):
    compiled = grammars.schema({"type": "object", "properties": {"a": WORDS}, "required": ["a"], **CLOSED})
    for text, good in (
        ("w " * 49 + "w", True), ("w " * 50 + "w", False), ("x" * 500, True), ("x" * 501, False), ("", False),
        ("a ", False), ("é" * 499 + "\U0001f600", True), ("é" * 500 + "\U0001f600", False), ('"\\\n\t"', True),
    ):  # fmt: skip
        assert grammars.admits(compiled, json.dumps({"a": text}, ensure_ascii=False)) == good, text


EITHER = {"anyOf": [WORDS, {"type": "string", "pattern": r"^(?:\d+\s+){0,99}\d+$", "maxLength": 300}, {"const": "no"}]}
SHARED = {
    "anyOf": [
        {"type": "object", "properties": {"t": WORDS, "k": {"const": 1}}, "required": ["t", "k"], **CLOSED},
        {"type": "object", "properties": {"t": {"pattern": "^(?:[ab]+ ){0,90}$", "maxLength": 200, "type": "string"},
                                          "k": {"const": 2}}, "required": ["t", "k"], **CLOSED},
    ]
}  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "array", "items": EITHER}, [["no", "a b", "1"], []], [["no "], [""]]),
        (SHARED, [{"t": "a b", "k": 1}, {"t": "a b ", "k": 2}], [{"t": "a b", "k": 2}, {"t": "a b ", "k": 1}]),
        ({"anyOf": [WORDS, {"type": "string", "minLength": 600}]}, ["a b", "x " * 300], ["x " * 60]),
        (
            {"type": ["string", "null", "object"], "pattern": FEW_WORDS, "maxLength": 500},
            [None, "a", {"a": "b "}],
            [" "],
        ),
        ({"patternProperties": {"^w": WORDS}, "type": "object"}, [{"w": "a", "x": " "}, {}], [{"w": " "}, {"wx": ""}]),
    ],
)
def test_rules_in_alternatives(grammars, real_grammars, schema, good, bad):
    """Several rules at one place, with other strings beside: exact, also where tokens cross the quotes."""
    for over in (grammars, real_grammars):
        compiled = over.schema(schema)
        assert compiled.artifact.strings
        for value in good:
            assert over.admits(compiled, json.dumps(value, ensure_ascii=False)), value
        for value in bad:
            assert not over.admits(compiled, json.dumps(value, ensure_ascii=False)), value


@pytest.mark.parametrize("schema", [{"type": "array", "items": EITHER, "maxItems": 3}, SHARED, WORDS])
def test_random_answers_with_rules_validate_and_roll_back(grammars, schema):
    compiled = grammars.schema(schema)
    for seed in range(12):
        rng = random.Random(seed)
        text = grammars.draw(compiled.matcher(), rng, 60)
        assert text is not None
        jsonschema.validate(json.loads(text), schema)
    grammars.walk_back_and_forth(compiled, compiled.matcher(), [], 4)


def test_no_token_of_a_marker_is_ever_allowed(grammars, vocabulary):
    matcher = grammars.schema({"type": "array", "items": EITHER}).matcher()
    row = np.zeros(vocabulary.num_words, dtype=np.int32)
    for token in vocabulary.tokenize(b'["no"'):
        matcher.fill_mask(row)
        assert not row[0] & 0b110
        assert not matcher.accept(1) and not matcher.accept(2)
        assert matcher.accept(token)


def test_what_cannot_be_followed_is_refused_by_name_behind_many_fields_too(real_grammars):
    """No automaton of it is small enough, and a walk through the whole schema ends before it is reached."""
    hard = {"type": "string", "pattern": "^(?=.*a.{40})(?=.*b.{40}).*$", "maxLength": 500}
    fields = {f"f{number}": {"type": "string", "maxLength": 100} for number in range(9)}
    schema = {"type": "object", "properties": {**fields, "hard": hard}, "required": [*fields, "hard"]}
    with pytest.raises(GrammarError) as refused:
        real_grammars.schema(schema)
    assert (refused.value.keyword, refused.value.pointer) == ("pattern", "/properties/hard/pattern")
    assert "too complex to follow" in refused.value.reason or "one mask took" in refused.value.reason


def test_quotes_that_lead_nowhere_are_probed_once(grammars, monkeypatch):
    """A search for an end tries many texts at one place, which begin with a quote."""
    probes = []
    probe = StringState._probe
    monkeypatch.setattr(StringState, "_probe", lambda *args: probes.append(args) or probe(*args))
    state = grammars.schema({"type": "array", "items": EITHER}).matcher()._state
    assert state.accept(ord("["))
    probes.clear()
    for _ in range(5):
        other = state.copy()
        assert other.accept(ord('"')) and other.accept(ord("a"))
        other.rollback(2)
        assert other.accept(ord('"'))
    assert len(probes) == 1


def test_near_the_budget_the_end_of_a_string_is_known_without_a_search(grammars, monkeypatch):
    """What ends the string changes with each token, what comes after it does not."""
    pairs = {"type": "string", "pattern": "^(?:(?:ax|cd|éf) ?){1,60}$", "maxLength": 300}
    compiled = grammars.schema({"type": "array", "items": pairs, "minItems": 1})
    assert compiled.artifact.strings
    searches = []
    completion = BudgetClose.completion
    monkeypatch.setattr(BudgetClose, "completion", lambda *args: searches.append(args) or completion(*args))
    matcher = compiled.matcher()
    for step, token in enumerate(grammars.vocabulary.tokenize(b'["' + "cd éf ax".encode() * 6)):
        assert token in grammars.allowed(matcher, 130 - step)
        assert matcher.accept(token)
    assert len(searches) <= 2, len(searches)


def test_an_answer_cut_off_in_the_middle_of_a_character_is_completed(grammars):
    """The character under way is ended, then the string, though no text of the schema has such bytes."""
    schema = {"type": "array", "items": {"type": "string", "pattern": r"^(?:\p{Lu}+ ){0,50}\p{Lu}+$", "maxLength": 300}}
    compiled = grammars.schema(schema)
    assert compiled.artifact.strings
    for begun in ("Ä".encode()[:1], "A Ā".encode()[:3], "Ⱥ".encode()[:2], "𐐀".encode()[:2]):
        matcher = compiled.matcher()
        assert all(map(matcher.accept, grammars.vocabulary.tokenize(b'["' + begun))), begun
        text = grammars.draw(matcher, random.Random(1), 8)
        assert text is not None
        [found] = json.loads(b'["' + begun + text)
        jsonschema.validate([found], {"items": {"maxLength": 300}})
        assert all(char == " " or char.isupper() for char in found), found


BLOWUP = "^[ab]*a[ab]{20}$"


@pytest.mark.parametrize(
    ("schema", "keyword", "pointer"),
    [
        ({"properties": {"a": {"pattern": BLOWUP}}}, "pattern", "/properties/a/pattern"),
        ({"patternProperties": {BLOWUP: {}}}, "patternProperties", "/patternProperties"),
        ({"items": {"pattern": "^(?:[ab]{1,40}x){0,120}$", "maxLength": 300}}, "pattern", "/items/pattern"),
        ({"items": {"pattern": "^(?:[ab]{1,30}x){0,60}$", "maxLength": 8_000}}, "pattern", "/items/pattern"),
        ({"anyOf": [WORDS, {"enum": [f"{number:09}" for number in range(300)]}]}, "pattern", "/anyOf/0/pattern"),
    ],
)
def test_a_string_that_neither_automaton_nor_library_is_sure_to_follow_is_refused_by_name(
    grammars, schema, keyword, pointer
):
    with pytest.raises(GrammarError) as refused:
        grammars.schema(schema)
    assert (refused.value.keyword, refused.value.pointer) == (keyword, pointer)
    assert "too complex to follow" in refused.value.reason and "8000 states" in refused.value.reason


def test_patterns_with_few_states_are_not_refused(grammars):
    """Large repeats without a loop before them, loops with small ones, and none of both."""
    for pattern in (
        "^[a-z]{1,3000}$",
        "^[ab]*a[ab]{8}$",
        "[0-9]{4}-[0-9]{2}-[0-9]{2}",
        r"^\S{0,200}$",
        "^(?:[a-z]+-){12}$",
    ):
        assert not string_rules.is_too_large(pattern)
    assert string_rules.is_too_large(BLOWUP)
    assert not string_rules.is_too_large("(")


def test_a_lexer_that_meets_a_limit_between_two_masks_is_built_again_and_goes_on(real_vocabulary, monkeypatch):
    """Strings that are left to the library: it refuses a right token there, and says nothing."""
    for name in ("MAX_WEIGHT", "MAX_TOTAL"):
        monkeypatch.setattr(string_rules, name, 1 << 60)
    rng = random.Random("0:0")
    drawn = case(rng)
    text = json.dumps(drawn.instance(rng), ensure_ascii=False)
    source = to_lark(Analysis(Document(drawn.schema))).text
    compiled = CompiledGrammar(GrammarArtifact(Backend.LLGUIDANCE, source, is_json=True), real_vocabulary)
    matcher = compiled.matcher()
    row = np.zeros(real_vocabulary.num_words, dtype=np.int32)
    for at, token in enumerate(real_vocabulary.tokenize_bpe(text.encode())):
        if at < 250:
            matcher.fill_mask(row)
        assert matcher.accept(token), at
    assert matcher.can_end and compiled.has_failed


@pytest.mark.sample
def test_generated_schemas_are_accepted_and_never_fail(real_vocabulary):
    outcome = run(real_vocabulary, 3, 6, seed=7)
    assert outcome.faults == [] and outcome.counts["accepted"] == 3


@pytest.mark.heavy
def test_generated_schemas_never_fail(real_vocabulary):
    """Some of what ``python -m benchmarks.grammar.counted_strings`` does."""
    outcome = run(real_vocabulary, 4, 6, start=100)
    assert outcome.faults == [] and outcome.counts["accepted"] == 4
