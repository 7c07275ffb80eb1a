"""Lark grammars in JSON strings: what they derive is the JSON spelling of what the grammar derives, and all of it."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grammar.grammar_fixtures import StructuredOutputManager, grammars, vocabulary
from support.grammar.patch_grammar import PATCH
from support.machine.thoroughness import repeats

from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.emit.json_lark import in_json_string
from rootgraft.grammar.errors import GrammarError
from rootgraft.grammar.match.matcher import Matcher
from rootgraft.grammar.spec import GrammarSpec

__all__ = ("grammars", "vocabulary")

TEXTS = {
    PATCH: [
        "*** Begin Patch\n*** Delete File: a\n*** End Patch",
        '*** Begin Patch\n*** Add File: a "b"\\c\n+\tx = "\\n"\n+\n*** End Patch\n',
        "*** Begin Patch\n*** Update File: ä\n*** Move to: b\n@@ def f():\n-a\n+é\U0001f600\n*** End of File\n"
        "*** End Patch",
    ],
    'start: "a\\"b" | /\\/[^"]*/s | X~2..3\nX: "p".."r"\n// a comment with "quotes"\n': ['a"b', "/\\\n\t", "pq", "rrr"],
    'start: "SELECT"i WS (CNAME | ESCAPED_STRING) ("," INT)* \n%import common (CNAME, INT)\n'
    "%import common.ESCAPED_STRING\n%import common.WS_INLINE -> WS\n": ["select a_1", 'Select \t"x\\"y",12,3'],
    # A rule has the name that a terminal would get, and repeats follow terminals that become repeats.
    'start: json_x "," X "," json__x\njson_x: "a"\nX: /[^,]*/\njson__x: /[^,b]+/? "b"~2\n': ['a,"\\c"\n,"bb', "a,,bb"],
    'start: expr\nexpr: NUMBER | expr OP expr | "(" expr ")"\nOP: /[-+*\\/]/\nNUMBER: /[0-9]+(\\.[0-9]+)?/\n': [
        *("1", "(1+2.5)*3/4"),
    ],
}


def tag(grammar: str) -> GrammarSpec:
    elements = [
        {"type": "const_string", "value": '{"input": "'},
        {"type": "json_lark", "grammar": grammar},
        {"type": "const_string", "value": '"}'},
    ]
    return GrammarSpec.structural_tag({"format": {"type": "sequence", "elements": elements}})


@pytest.mark.parametrize("grammar", TEXTS, ids=range(len(TEXTS)))
def test_texts_of_the_grammar_are_admitted_in_their_spelling(grammars: StructuredOutputManager, grammar: str):
    compiled, plain = (compile(spec, grammars.vocabulary) for spec in (tag(grammar), GrammarSpec.lark(grammar)))
    for text in TEXTS[grammar]:
        written = json.dumps({"input": text}, ensure_ascii=False)
        assert grammars.admits(plain, text), text
        assert grammars.admits(compiled, written), text
        for broken in (written[:-1], written.replace('": "', '": "\n', 1), written + " "):
            assert not grammars.admits(compiled, broken)


@pytest.mark.parametrize("grammar", TEXTS, ids=range(len(TEXTS)))
def test_drawn_inputs_are_texts_of_the_grammar(grammars: StructuredOutputManager, grammar: str):
    """In random draws of each."""
    compiled, plain = (compile(spec, grammars.vocabulary) for spec in (tag(grammar), GrammarSpec.lark(grammar)))
    rng, num_whole = random.Random(2), 0
    for _ in range(12):
        text = json.loads(drawn(grammars, compiled.matcher(), rng))["input"]
        assert grammars.admits(plain, text), text
        num_whole += bool(text)
    assert num_whole == 12


def drawn(grammars: StructuredOutputManager, matcher: Matcher, rng: random.Random) -> str:
    """A random answer in which lines, texts and answers soon end."""
    data = b""
    for _ in range(3_000):
        allowed = sorted(grammars.allowed(matcher))
        ending = [
            token for token in allowed if grammars.vocabulary.tokens[token] in (b"\\", b"n", b'"', b"}", b"<end>")
        ]
        token = rng.choice(ending if ending and rng.random() < 0.6 else allowed)
        assert matcher.accept(token)
        if matcher.is_done:
            return data.decode("utf-8", "replace")
        data += grammars.vocabulary.tokens[token]
    raise AssertionError(data)


@settings(max_examples=repeats(60), deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12))
def test_any_literal(grammars: StructuredOutputManager, text: str):
    literal = json.dumps(text).replace("\\/", "/")
    compiled = compile(tag(f"start: {literal}\n" if "\\ud" not in literal else 'start: "x"\n'), grammars.vocabulary)
    wanted = text if "\\ud" not in literal else "x"
    assert grammars.admits(compiled, json.dumps({"input": wanted}, ensure_ascii=False).replace("\x7f", "\x7f"))


@pytest.mark.parametrize(
    ("grammar", "part"),
    [
        ("start: /a(?=b)b/", "a(?=b)b"),
        ("start: /a^b/", "anchor"),
        ("start: /(?!a)b/", "lookahead"),
        ("start: A & B\nA: /a/\nB: /b/", "&"),
        ("start: <|im_end|>", "<|im_end|>"),
        ("start: X\n%import common.NOTHING -> X", "common.NOTHING"),
        ("start: X\n%declare X", "%declare"),
        ("start: /a/x", "flags"),
        ("start: %json {}", "%json"),
    ],
)
def test_what_has_no_form_is_refused_by_name(grammar: str, part: str):
    with pytest.raises(GrammarError) as found:
        in_json_string(grammar)
    assert part in found.value.reason
