"""Regular expressions, choices, Lark, EBNF and structural tags."""

from __future__ import annotations

import random
import re
import sys

import pytest

from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.errors import GrammarError
from rootgraft.grammar.spec import GrammarSpec


@pytest.mark.parametrize(
    ("spec", "admitted", "other"),
    [
        (GrammarSpec.regex(r"(v\d+)?"), ["", "v12"], ["v", "12"]),
        (GrammarSpec.regex(r"^(?!no)[a-z]{2,3}$"), ["yes", "on"], ["no", "not", "a"]),
        (GrammarSpec.regex('"quoted"\\s/é'), ['"quoted" /é'], ["quoted"]),
        (GrammarSpec.choice(["yes", "no", "yesterday", 'a "b" / c\n']), ["yes", "yesterday", 'a "b" / c\n'], ["y", ""]),
        (GrammarSpec.lark('start: "a" B*\nB: /[0-9]+/'), ["a", "a12"], ["b"]),
        (GrammarSpec.json_object(), ["{}", '{"a": [1, null]}'], ["[]", "1"]),
    ],
)
def test_grammars_of_llguidance(grammars, vocabulary, spec, admitted, other):
    compiled = compile(spec, vocabulary)
    for text in admitted:
        assert grammars.admits(compiled, text), text
    for text in other:
        assert not grammars.admits(compiled, text), text


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (GrammarSpec.regex("(a"), "cannot be used"),
        (GrammarSpec.regex("((a{1000}){1000}){1000}"), "repeats multiply"),
        (GrammarSpec.regex("(" * 5000), "groups inside each other"),
        (GrammarSpec.regex("^(?=b)a+$"), "matches no text"),
        (GrammarSpec.regex("x[]"), "matches no text"),
        (GrammarSpec.lark("start: /[a/"), "unclosed character class"),
        (GrammarSpec.lark("start: ("), r"1\(9\)"),
        (GrammarSpec.lark('start: "a"\nx[max_tokens=3]: "b"'), "max_tokens"),
        (GrammarSpec.lark("start: %json {}"), "use a JSON schema"),
        (GrammarSpec.lark("start: <[5]>"), "tokens by number"),
        (GrammarSpec.lark("start: start"), "'start' derives no finite text"),
    ],
)
def test_wrong_grammars_are_refused(vocabulary, spec, reason):
    with pytest.raises(GrammarError, match=reason) as caught:
        compile(spec, vocabulary)
    assert caught.value.keyword == spec.kind.value
    assert "/" not in caught.value.reason.replace("/(", "")


def test_a_regex_is_closed_within_a_budget(grammars, vocabulary):
    compiled = compile(GrammarSpec.regex(r"[a-z ]+(foo|barbar)[0-9]{4}\."), vocabulary)
    for seed in range(10):
        text = grammars.draw(compiled.matcher(), random.Random(seed), 40)
        assert text is not None
        assert re.fullmatch(rb"[a-z ]+(foo|barbar)[0-9]{4}\.", text)


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
CALL = {"begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
TEXT = {"begin": "<g>", "content": {"type": "any_text"}, "end": "</g>"}


def tags(**options: object) -> dict[str, object]:
    return {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": ["<"], "tags": [CALL, TEXT], **options},
    }


@pytest.mark.parametrize(
    ("tag", "admitted", "other"),
    [
        (tags(), ["", "hi", 'hi <f>{"x": 1}</f> bye <g>any</g>'], ["a < b", '<f>{"y": 1}</f>', '<f>{"x":1}', "<h>"]),
        (tags(at_least_one=True, stop_after_first=True), ['so <f>{"x":1}</f>'], ["so", '<f>{"x":1}</f>.']),
        (tags(stop_after_first=True), ["so", '<f>{"x":1}</f>'], ['<f>{"x":1}</f>.']),
        (
            {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]},
            ["a < b", '<f>{"x":1}</f>'],
            ["<f", '<f>{"x":"1"}</f>'],
        ),
        (
            {
                "format": {
                    "type": "sequence",
                    "elements": [
                        {"type": "const_string", "value": "A:"},
                        {"type": "regex", "pattern": "[0-9]+"},
                        {"type": "or", "elements": [{"type": "const_string", "value": "!"}, CALL | {"type": "tag"}]},
                    ],
                }
            },
            ["A:12!", 'A:1<f>{"x": 1}</f>'],
            ["A:!", "A:1"],
        ),
        (
            {"format": {"type": "tags_with_separator", "tags": [CALL], "separator": ", "}},
            ["", '<f>{"x":1}</f>', '<f>{"x":1}</f>, <f>{"x":2}</f>'],
            ['<f>{"x":1}</f>,', ", "],
        ),
    ],
)
def test_structural_tags(grammars, vocabulary, tag, admitted, other):
    compiled = compile(GrammarSpec.structural_tag(tag), vocabulary)
    for text in admitted:
        assert grammars.admits(compiled, text), text
    for text in other:
        assert not grammars.admits(compiled, text), text


def test_a_special_token_can_be_a_trigger(grammars, vocabulary):
    call = {**CALL, "begin": "<tool>f ", "end": "<end>"}
    form = {"type": "triggered_tags", "triggers": ["<tool>"], "tags": [call]}
    compiled = compile(GrammarSpec.structural_tag({"format": form}), vocabulary)
    tool, end = vocabulary.tokens.index(b"<tool>"), vocabulary.tokens.index(b"<end>")
    matcher = compiled.matcher()
    for token in (*vocabulary.tokenize(b"hi "), tool, *vocabulary.tokenize(b'f {"x": 1}')):
        assert token in grammars.allowed(matcher)
        assert matcher.accept(token)
    assert end in grammars.allowed(matcher)


@pytest.mark.parametrize(
    ("tag", "pointer"),
    [
        ({"format": {"type": "nope"}}, "/format/type"),
        ({"format": {"type": "triggered_tags", "triggers": [], "tags": [CALL]}}, "/format/triggers"),
        ({"format": {"type": "triggered_tags", "triggers": ["x"], "tags": [CALL]}}, "/format/tags/0/begin"),
        (
            {
                "format": {
                    "type": "tag",
                    "begin": "a",
                    "end": "b",
                    "content": {"type": "json_schema", "json_schema": {"type": 5}},
                }
            },
            "/format/content/json_schema/type",
        ),
        ({}, "/format"),
    ],
)
def test_wrong_tags_are_refused_with_a_pointer(vocabulary, tag, pointer):
    with pytest.raises(GrammarError) as caught:
        compile(GrammarSpec.structural_tag(tag), vocabulary)
    assert caught.value.pointer == pointer


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")
def test_ebnf_goes_to_xgrammar(grammars, vocabulary):
    compiled = compile(GrammarSpec.ebnf('root ::= "ab" [0-9]* | "x" root'), vocabulary)
    assert all(grammars.admits(compiled, text) for text in ("ab", "ab12", "xxab"))
    assert not any(grammars.admits(compiled, text) for text in ("", "a", "x"))
    matcher = compiled.matcher()
    assert matcher.accept(ord("x"))
    other = matcher.copy()
    matcher.rollback(1)
    assert grammars.allowed(matcher) != set()
    assert other.num_tokens == 1
    assert not matcher.accept(vocabulary.eos[0])
    for seed in range(5):
        assert grammars.draw(compiled.matcher(), random.Random(seed), 20) is not None
    for text, reason in (
        ('root ::= "a" b', "not defined"),
        ("root ::= root", "'root' derives no finite text"),
        ('root ::= "a" root', "'root' derives no finite text"),
        ("root ::= " + "(" * 30_000, "EBNF"),
    ):
        with pytest.raises(GrammarError, match=reason) as caught:
            compile(GrammarSpec.ebnf(text), vocabulary)
        assert "/project" not in str(caught.value)


def test_ebnf_without_its_package_is_refused_with_what_to_do(vocabulary, monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(GrammarError, match=r"lacks the package xgrammar. Try: pip install 'rootgraft\[ebnf\]', or"):
        compile(GrammarSpec.ebnf('root ::= "a"'), vocabulary)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('root ::= "x" ("é" | "yes")', "xé"),
        ('root ::= "日本語" [0-9]', "日本語7"),
        ('root ::= "à" | "é"', "é"),  # a first byte in common, and no character
        ('root ::= ("😀" | "😁") "!"', "😁!"),
    ],
)
def test_ebnf_has_text_beyond_ascii(grammars, vocabulary, grammar, text):
    """Tokens may end inside of a character: text that is forced from there on is no text."""
    compiled = compile(GrammarSpec.ebnf(grammar), vocabulary)
    assert grammars.admits(compiled, text)
    matcher, data = compiled.matcher(), text.encode()
    for at, byte in enumerate(data):
        forced = b"".join(vocabulary.tokens[token] for token in matcher.draft(len(data)))
        assert data[at:].startswith(forced) or forced.startswith(data[at:])
        assert matcher.accept(vocabulary.token_of(bytes([byte])))


@pytest.mark.parametrize("make", [GrammarSpec.regex, lambda pattern: GrammarSpec.json_schema({"pattern": pattern})])
def test_the_number_of_repeats_has_a_limit(vocabulary, make):
    """Of hundreds of optional letters in a row the library allows tokens that it then refuses."""
    compile(make("a?" * 20 + "b"), vocabulary)
    with pytest.raises(GrammarError, match="more than 200 repeats"):
        compile(make("a?" * 201 + "b"), vocabulary)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ("start: /<[^>]+>/", "<a>"),
        ("start: /<[0-9]>/", "<7>"),
        ('start: "temperature=" /[0-9]+/', "temperature=20"),
        ('start: "x" // stop = "a" ends it\n', "x"),
        ('start: "x" # max_tokens=3 and %json {} and <[1]>\n', "x"),
        (r'start: "\"stop=" "%json" /\/max_tokens=/', '"stop=%json/max_tokens='),
    ],
)
def test_what_stands_in_a_literal_or_a_comment_is_no_option(grammars, vocabulary, grammar, text):
    assert grammars.admits(compile(GrammarSpec.lark(grammar), vocabulary), text)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: x\nx[stop="a"]: /a/ // "',
        'start: x /"/\nx[max_tokens=3]: /[a"]/',
        'start: <a"> x\nx[max_tokens=3]: "b"',
        'start: "a\\"" x\nx[temperature=1]: "b"',
        "start: /a\\/b/ <[5]> /c/",
        'start: "#" %json {} //"',
        "start: /\\\n/ x\nx[max_tokens=3]: /b/",
    ],
)
def test_an_option_cannot_hide_behind_a_literal(vocabulary, grammar):
    with pytest.raises(GrammarError, match=r"not supported|lexer error"):
        compile(GrammarSpec.lark(grammar), vocabulary)


@pytest.mark.parametrize(
    "imported",
    [
        "%import common.ESCAPED_STRING",
        "%import common (INT, ESCAPED_STRING)",
        "%import common(ESCAPED_STRING)",
        "// %import common.INT\n%import common.ESCAPED_STRING // as Lark's",
        "ESCAPED_STRING: TEXT\n%import common.ESCAPED_STRING -> TEXT",
    ],
)
def test_an_imported_string_is_the_one_of_larks_library(grammars, vocabulary, imported):
    compiled = compile(GrammarSpec.lark(f"start: ESCAPED_STRING\n{imported}\n"), vocabulary)
    for text in ('""', '"a b"', r'"\""', r'"\\"', r'"\n"', '"\t"'):
        assert grammars.admits(compiled, text), text
    for text in ('"\n"', '"a\n"', '"a', r'"\"', '"a"b"', '"\\\n"'):
        assert not grammars.admits(compiled, text), text


@pytest.mark.filterwarnings("ignore")
def test_a_mask_of_ebnf_has_no_bit_beyond_the_vocabulary(grammars, vocabulary):
    """XGrammar sets the last bits of a row where most tokens are allowed: a dry run drew one of them."""
    assert vocabulary.size % 32
    compiled = compile(GrammarSpec.ebnf('root ::= [^"]* | [^a] "b"'), vocabulary)
    matcher = compiled.matcher()
    assert max(grammars.allowed(matcher)) < len(vocabulary.tokens)
    assert all(matcher.copy().accept(token) for token in grammars.allowed(matcher))
    assert grammars.admits(compiled, "aé b") and grammars.admits(compiled, '"b') and not grammars.admits(compiled, '"c')
