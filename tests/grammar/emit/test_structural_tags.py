"""String rules in structural tags: heavy strings in the arguments of tool calls, amid free text."""

from __future__ import annotations

import json
import random

import jsonschema_rs
import pytest

from benchmarks.grammar.counted_cases import tool_case
from benchmarks.grammar.counted_strings import run
from rootgraft.api.protocol.tools import Function, Tool
from rootgraft.api.structured.output_format import OutputFormat
from rootgraft.api.structured.tool_formats import FORMATS
from rootgraft.api.structured.tool_grammar import tool_output_format
from rootgraft.grammar.compile import dry_run
from rootgraft.grammar.compile.compiled_grammar import CompiledGrammar
from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.emit.tag_choices import is_unambiguous
from rootgraft.grammar.errors import GrammarError
from rootgraft.grammar.match.string_state import StringState, may_precede
from rootgraft.grammar.spec import GrammarSpec

WORDS = {"type": "string", "pattern": r"^(?:\S+\s+){0,49}\S+$", "maxLength": 500}
NUMBERS = {"type": "string", "pattern": r"^(?:\d+ ){0,60}\d+$", "maxLength": 300}


def _object(**properties):
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


PARAMETERS = {
    "say": _object(text=WORDS),
    "list": _object(items={"type": "array", "items": {"anyOf": [WORDS, {"const": "no "}]}}, plain={"type": "string"}),
    "count": _object(n=NUMBERS),
}
TOOLS = [Tool(type="function", function=Function(name=n, parameters=p)) for n, p in PARAMETERS.items()]
# Formats in which a call is JSON up to a text of its own.
NAMES = ("mistral", "hermes", "llama3_json", "generic", "deepseek_v31")
DOCUMENT = GrammarSpec.json_schema(_object(text=NUMBERS))
GOOD = [
    ("say", {"text": "a b"}),
    ("list", {"items": ["w " * 49 + "w", "no ", 'q"\\é'], "plain": ' " '}),
    ("count", {"n": "1 2"}),
]
BAD = [
    ("say", {"text": "a "}),
    ("say", {"text": "x" * 501}),
    ("list", {"items": ["w " * 50 + "w"], "plain": ""}),
    ("list", {"items": ["yes "], "plain": ""}),
    ("count", {"n": "a b"}),
]


def _compiled(name, grammars, *, parallel=True, asked=None):
    requested = None if asked is None else OutputFormat(asked, "response_format", "json_schema", asked)
    found = tool_output_format(TOOLS, "auto", FORMATS[name], requested, parallel=parallel)
    assert found is not None
    compiled = compile(found.spec, grammars.vocabulary)
    assert compiled.artifact.strings
    return compiled


def _written(name, *calls):
    return FORMATS[name].calls([(tool, json.dumps(arguments, ensure_ascii=False)) for tool, arguments in calls])


@pytest.mark.parametrize("name", NAMES)
def test_calls_with_heavy_strings_amid_free_text(grammars, real_grammars, name):
    """Every tool, several calls in one answer, quotes in the text before and after, tokens across all borders."""
    form = FORMATS[name]
    around = [("", "")] if form.only_at_start else [("", ""), ('He said "a b ", then: "', "")]
    for over in (grammars, real_grammars):
        compiled = _compiled(name, over)
        for before, after in around:
            for call in GOOD:
                assert over.admits(compiled, before + _written(name, call) + after), call
            for call in BAD:
                assert not over.admits(compiled, before + _written(name, call) + after), call
        for text in ("", 'x "y z', '"', 'a": "b '):
            assert over.admits(compiled, text), text
        if not form.only_at_start:
            assert over.admits(compiled, _written(name, *GOOD))
            assert not over.admits(compiled, _written(name, *GOOD[:2], BAD[0]))
        if form.separator is None and not form.only_at_start:
            assert over.admits(compiled, _written(name, GOOD[0]) + ' and "so \n' + _written(name, GOOD[1]) + ' "end ')


def test_calls_or_a_document(grammars, real_grammars):
    for over in (grammars, real_grammars):
        for parallel in (True, False):
            compiled = _compiled("hermes", over, asked=DOCUMENT, parallel=parallel)
            assert over.admits(compiled, '{"text": "1 2"}')
            assert not over.admits(compiled, '{"text": "1 b"}')
            assert over.admits(compiled, _written("hermes", GOOD[0]))
            assert not over.admits(compiled, _written("hermes", BAD[0]))


@pytest.mark.parametrize("name", NAMES)
def test_random_answers_with_calls_hold_their_schemas_and_roll_back(grammars, name):
    compiled = _compiled(name, grammars)
    form = FORMATS[name]
    calls = 0
    for seed in range(6):
        rng = random.Random(seed)
        matcher = compiled.matcher()
        tool = rng.choice([*PARAMETERS])
        start = form.opening + form.head(tool)
        assert all(map(matcher.accept, grammars.vocabulary.tokenize(start.encode())))
        text = grammars.draw(matcher, rng, 300)
        if text is None:  # the budget ended within a character of the free text after the call
            continue
        arguments, _ = json.JSONDecoder().raw_decode(text.decode())
        assert jsonschema_rs.is_valid(PARAMETERS[tool], arguments)
        calls += 1
    assert calls >= 4
    matcher, tokens = compiled.matcher(), []
    rest = grammars.vocabulary.tokenize((form.opening + form.head("say") + '{"text": "a ').encode())
    for token in rest:
        assert matcher.accept(token)
        tokens.append(token)
    grammars.walk_back_and_forth(compiled, matcher, tokens, 6)


@pytest.mark.parametrize(
    ("text", "lead_ins", "expected"),
    [
        ("(", "", True), ("(", ">", False), ("", ">", True), (" \n", ">", True), (">\n", ">", True), ("a> ", ">", True),
        ('{"a": ', ">", True), ("}, ", ">", True), ("[", ">", True), ("true", ">", True), ("=", "é", False),
        ("é", "é", True), ("\u00a0", "\u00a0", True), ("\u00a0", ">", False),
    ],
)  # fmt: skip
def test_what_may_stand_before_a_string(text, lead_ins, expected):
    assert may_precede(text.encode(), lead_ins) == expected


def test_in_free_text_few_quotes_are_probed(real_grammars, monkeypatch):
    """Hundreds of tokens have a quote in their middle; most cannot come before a JSON string."""
    compiled = _compiled("hermes", real_grammars)
    matcher = compiled.matcher()
    for token in real_grammars.vocabulary.tokenize(b"Hello"):
        assert matcher.accept(token)
    probed, followed = [], []
    probe, follow = StringState._probe, StringState._follow
    monkeypatch.setattr(StringState, "_probe", lambda *args: probed.append(args) or probe(*args))
    monkeypatch.setattr(StringState, "_follow", lambda *args: followed.append(args) or follow(*args))
    real_grammars.allowed(matcher)
    texts = real_grammars.vocabulary.tokens
    assert 0 < len(probed) < sum(b'"' in text[:-1] for text in texts) / 4 and not followed


def _call(begin, schema=WORDS, end="</f>"):
    return {"type": "tag", "begin": begin, "content": {"type": "json_schema", "json_schema": schema}, "end": end}


SCHEMA = {"type": "json_schema", "json_schema": WORDS}
ANY, DIGITS = {"type": "any_text"}, {"type": "regex", "pattern": "[0-9]+"}
TEXT = {"type": "const_string", "value": "A"}


def _form(kind, listed, **options):
    return {"type": kind, "tags" if "tags" in kind else "elements": listed, **options}


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (SCHEMA, True),
        (_form("or", [_call("<a>"), _call("<b>")]), True),
        (_form("or", [_call("<a>"), SCHEMA]), True),
        (_form("or", [_call("<a>"), _call("<a>", NUMBERS)]), False),
        (_form("or", [_call("<a>"), _call("<a>b")]), False),
        (_form("or", [_call("{"), SCHEMA]), False),
        (_form("or", [_call('{"name'), SCHEMA]), False),
        (_form("or", [_call("{name"), SCHEMA]), True),
        (_form("or", [SCHEMA, SCHEMA]), False),
        (_form("or", [SCHEMA, ANY]), False),
        (_form("or", [SCHEMA, DIGITS]), False),
        (_form("or", [_call("<a>"), DIGITS]), True),
        (_form("or", [_call("12"), DIGITS]), False),
        (_form("or", [DIGITS, ANY]), True),
        (_form("or", [_form("triggered_tags", [_call("<a>")], triggers=["<"]), ANY]), False),
        (_form("sequence", [TEXT, SCHEMA, TEXT, _call("<a>")]), True),
        (_form("sequence", [DIGITS, SCHEMA]), False),
        (_form("sequence", [ANY, SCHEMA]), False),
        (_form("sequence", [TEXT, ANY]), True),
        (_form("sequence", [_form("tags_with_separator", [_call("<a>")], separator=","), SCHEMA]), False),
        (_form("triggered_tags", [_call("<a>"), _call("<b>")], triggers=["<"]), True),
        (_form("triggered_tags", [_call("<a>"), _call("<a>>")], triggers=["<"]), False),
        ({**_call("<a>"), "content": _form("tags_with_separator", [_call("<b>")], separator=",")}, True),
        ({**_call("<a>"), "content": _form("tags_with_separator", [_call("<b>")], separator="<")}, False),
        ({**_call("<a>"), "content": _form("tags_with_separator", [_call("<b>")]), "end": ""}, False),
        ({**_call("<a>"), "content": ANY, "end": ""}, False),
        (_call("<\x01>"), False),
        ({"type": "nope"}, False),
        (None, False),
    ],
)
def test_string_rules_stay_out_of_tags_where_other_parts_may_be_under_way(form, expected):
    assert is_unambiguous(form) == expected


def test_strings_in_a_sequence_of_parts(grammars):
    form = _form("sequence", [TEXT, SCHEMA, TEXT, _call("<a>")])
    compiled = compile(GrammarSpec.structural_tag({"format": form}), grammars.vocabulary)
    assert compiled.artifact.strings
    assert grammars.admits(compiled, 'A"a b"A<a>"c"</f>')
    assert not grammars.admits(compiled, 'A"a b"A<a>"c "</f>')
    assert not grammars.admits(compiled, 'A"a "A<a>"c"</f>')


def test_heavy_strings_in_ambiguous_tags_are_refused_by_name(grammars):
    form = _form("or", [SCHEMA, ANY])
    with pytest.raises(GrammarError) as refused:
        compile(GrammarSpec.structural_tag({"format": form}), grammars.vocabulary)
    assert (refused.value.keyword, refused.value.pointer) == ("pattern", "/format/elements/0/json_schema/pattern")
    assert "other text" in refused.value.reason
    light = {"type": "json_schema", "json_schema": {"type": "string", "pattern": "^a+$", "maxLength": 9}}
    compiled = compile(GrammarSpec.structural_tag({"format": _form("or", [light, ANY])}), grammars.vocabulary)
    assert not compiled.artifact.strings and grammars.admits(compiled, '"a b ')


def test_large_terminals_in_tags_get_dry_runs_of_their_own(grammars):
    """As in schemas: a walk through a large grammar may end before it reaches them."""
    schema = _object(a={"type": "string"}, b={"type": "string", "pattern": "^x+$", "maxLength": 300})
    tag = GrammarSpec.structural_tag({"format": _form("or", [_call("<a>"), _call("<b>", schema)])})
    for spec in (GrammarSpec.json_schema(schema), tag):
        [alone] = dry_run._terminals_alone(compile(spec, grammars.vocabulary).artifact)
        compiled = CompiledGrammar(alone, grammars.vocabulary)
        assert grammars.admits(compiled, '"xx"') and not grammars.admits(compiled, '"xy"')


@pytest.mark.sample
def test_generated_tools_are_accepted_and_never_fail(real_vocabulary):
    outcome = run(real_vocabulary, 2, 6, seed=7, draw_case=tool_case)
    assert outcome.faults == [] and outcome.counts["accepted"] == 2


@pytest.mark.heavy
def test_generated_tools_never_fail(real_vocabulary):
    """Some of what ``python -m benchmarks.grammar.counted_strings --tools`` does."""
    outcome = run(real_vocabulary, 3, 6, draw_case=tool_case)
    assert outcome.faults == [] and outcome.counts["accepted"] == 3
