"""Rules of GBNF and Lark grammars without a finite text: named before a library follows them without an end."""

from __future__ import annotations

import json

import pytest

from rootgraft.grammar.emit.ebnf_rules import FORMATS, check_ebnf
from rootgraft.grammar.emit.lark_text import check_lark
from rootgraft.grammar.errors import GrammarError

xgrammar = pytest.importorskip("xgrammar")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('root ::= "a" root', "root"),
        ("root ::= root", "root"),
        ('root ::= root "a" | "b" root', "root"),
        ('root ::= "c" | "a" loop\nloop ::= "x" loop', "loop"),
        ('root ::= "a" loop\nloop ::= "x" loop', "loop"),
        ('root ::= loop*\nloop ::= "x" loop', "loop"),
        ('root ::= loop{0,3} "y"\nloop ::= "x" (loop | "z" loop)', "loop"),
        ('root ::= a | "x"\na ::= b "q"\nb ::= c\nc ::= a "z"', "c"),
        ('root ::= "x" []', "root"),
        ('root ::= TagDispatch(("<a>", loop))\nloop ::= "x" loop', "loop"),
    ],
)
def test_a_rule_that_never_ends_is_named(text, name):
    with pytest.raises(GrammarError, match=f"the rule '{name}' derives no finite text") as caught:
        check_ebnf(text)
    assert caught.value.keyword == "ebnf"


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "a" root | "b"',
        'root ::= root "a" | ""',
        'root ::= "a"\nloop ::= "x" loop',  # no answer comes to it
        'root ::= loop{0,0} "a"\nloop ::= "x" loop',
        'root ::= a b\na ::= "x" b | "y"\nb ::= "z" a | ""',
        'root ::= [a-z]+ [^"]* ("x" | y){2,3} z?\ny ::= "y" y | ""\nz ::= (z "z")* "!"',
        'root ::= "\\"a\\" ::= " root2\nroot2 ::= "b" # root2 ::= root2',
        "root ::= " + "(" * 300 + '"a"' + ")" * 300,
    ],
)
def test_rules_that_end_are_left_to_the_compiler(text):
    check_ebnf(text)


@pytest.mark.parametrize("text", ['root ::= "a', "root ::= b", 'other ::= "a"', "root ::= " + "(" * 30_000])
def test_what_is_no_grammar_is_left_to_the_compiler(text):
    check_ebnf(text)


def test_long_chains_take_linear_time():
    """Some 3,000 rules fit the limit on bytes; a quadratic search would take a minute."""
    chain = ["root ::= r0", *(f'r{number} ::= "a" r{number + 1}' for number in range(3000))]
    check_ebnf("\n".join([*chain, 'r3000 ::= "z"']))
    with pytest.raises(GrammarError, match="'r3000'"):
        check_ebnf("\n".join([*chain, "r3000 ::= r2999"]))


def test_the_librarys_format_is_the_one_that_is_read():
    assert json.loads(xgrammar.Grammar.from_ebnf('root ::= "a"').serialize_json())["__VERSION__"] in FORMATS


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('start: "a" start', "start"),
        ("start: start", "start"),
        ('?start: "c" | "a" loop // loop: "x"\n!loop: "x" loop', "loop"),
        ('start: "c"\n    | loop\n\nloop: ("x" | WORD) loop\nWORD: /[a-z]+/', "loop"),
        ('start: (loop ",")* "x"\nloop: loop "y" | "z" loop+', "loop"),
        ('start: loop ~ 2..3 | "x"\nloop: "x" loop{1,2}', "loop"),
        ('start: [loop] "x"\nloop: "x" _other -> called\n_other: loop', "_other"),
    ],
)
def test_a_lark_rule_that_never_ends_is_named(text, name):
    with pytest.raises(GrammarError, match=f"the rule '{name}' derives no finite text") as caught:
        check_lark(text)
    assert caught.value.keyword == "lark"


@pytest.mark.parametrize(
    "text",
    [
        'start: "a" start | "b"',
        'start: "a" start?',
        'start: "a" loop?start*"b"\nloop: "x" loop?',
        'start: "a" start{,2} | start ~ 0 "x" | start{0} | [start]',
        'start: "a"\nloop: "x" loop',
        'start: "start: start" /loop|:/ # start: start\n%ignore / /\n%import common.WS',
        'start: list\nlist: "(" list* ")"\n',
        'start: "a".."z" expr\nexpr: expr "+" expr | NUMBER -> number\nNUMBER: /[0-9]+/',
        'start: <|tool|> "x"',
        "start:",
        # These are not read, and left to the compiler.
        'start: "a" start @other',
        "start: none start",
        "start: ( start",
        "start: " + "(" * 500 + "start" + ")" * 500,
        "other: other",
        "start::_ : start",
        "",
    ],
)
def test_lark_rules_that_end_or_are_not_read_are_left_to_the_compiler(text):
    check_lark(text)
