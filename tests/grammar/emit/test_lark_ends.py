"""Short ends of Lark grammars."""

from __future__ import annotations

import json

import pytest
from support.grammar.patch_grammar import PATCH

from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.emit.lark_ends import MAX_ENDS, LarkEnds, lark_ends
from rootgraft.grammar.emit.lark_text import check_lark
from rootgraft.grammar.errors import GrammarError
from rootgraft.grammar.spec import GrammarSpec


def test_the_ends_of_a_patch_lead_from_each_of_its_parts():
    found = lark_ends(PATCH, len)
    assert found.shortest.startswith("*** Begin Patch\n*** Add File: ") and found.shortest in found.ends
    assert {"\n", "*** End Patch", "+\n*** End Patch", "*** End of File\n*** End Patch"} <= set(found.ends)


@pytest.mark.timeout(30)
def test_repeats_of_repeats_are_not_written_out():
    """Each one more would take twenty times as long; what ends is told all the same."""
    nested = "start: " + "(" * 90 + '"a"' + "{20})" * 90
    assert len(lark_ends(nested, len).ends) <= MAX_ENDS
    with pytest.raises(GrammarError, match="no finite text"):
        check_lark("start: " + "(" * 20 + "x" + "{20})" * 20 + '\nx: "a" x')


@pytest.mark.parametrize(
    ("grammar", "shortest"),
    [
        ('start: "a" x{2,4} | y ~ 3\nx: "b" ".."?\ny: "long"', "abb"),
        ('start: x "c"\nx: "(" x ")" | D+\nD: "0".."9"', "0c"),
        ("start: A\nA: B B\nB: /[x-z]{2}/", "xxxx"),
        ("start: ESC\n%import common.ESCAPED_STRING -> ESC\n", ""),
        ("start: INT\n%import common.INT\n", "0"),
        ('start: "a" UNKNOWN', ""),
        ('start: x\nx: "a" x', ""),
        ("start: ???", ""),
    ],
)
def test_a_shortest_text(grammar, shortest):
    assert lark_ends(grammar, len).shortest == shortest


def test_texts_are_spelled_as_in_answers_and_the_cheapest_one_is_taken():
    grammar = 'start: (SHORT | "long one") LF\nSHORT: "q"\nLF: "\\n"\n'
    found = lark_ends(grammar, lambda text: text.count("q"), lambda text: json.dumps(text)[1:-1])
    assert found.shortest == "long one\\n"


def test_a_rule_that_is_used_in_two_places_ends_in_each_of_them():
    """The inner end of a rule within itself is cheaper than any outer one, and ends no answer."""
    found = lark_ends('start: r "+" r\nr: "aa" | "(" r ")"\n', len)
    assert {")", ")+aa", "aa)+aa"} <= set(found.ends)


def test_of_the_texts_of_an_expression_the_one_of_the_fewest_tokens_is_taken(vocabulary):
    """The vocabulary has a token ``aaa``, and none of several ``z``."""
    spec = GrammarSpec.lark("start: A A\nA: /z{2}|a{3}/\n")
    assert compile(spec, vocabulary).matcher().num_shortest == 2


@pytest.mark.parametrize(
    "grammar",
    [
        "start: " + " ".join(f'("{number}" r)?' for number in range(8000)) + '\nr: "a"+ | start',
        "start: " + "(x " * 90 + '"a"' + ' | "b" x)?' * 90 + "\nx: start",
    ],
    ids=["wide", "deep"],
)
@pytest.mark.timeout(30)
def test_a_search_that_takes_long_finds_no_ends(grammar):
    assert lark_ends(grammar, len) == LarkEnds()


def test_ends_are_bounded():
    rules = "\n".join(f'r{number}: "{number}" r{number + 1}' for number in range(400))
    found = lark_ends(f'start: r0\n{rules}\nr400: "z"', len)
    assert len(found.ends) <= MAX_ENDS
