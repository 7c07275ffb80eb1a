"""Lark's syntax as the library reads it, against Python's expressions and Lark's own library."""

from __future__ import annotations

import itertools
import random
import re

import lark
import pytest
from support.grammar.lark_grammars import LarkDraw
from support.machine.thoroughness import repeats

from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.emit.lark_dialect import in_dialect
from rootgraft.grammar.errors import GrammarError
from rootgraft.grammar.spec import GrammarSpec

CHARACTERS = ("", "a", "b", "<", ">", "[", "]", "{", "}", "x", "&", "-", "~", " ", "#", "é", "\b")
TEXTS = ["".join(pair) for pair in itertools.product(CHARACTERS, repeat=2)] + ["aab", "[a]", "{x}", "<a>"]


@pytest.mark.parametrize(
    "expression",
    [
        "[[]", "[^[]", "[^[\\]]+", "[]a]", "[^]a[]", "[a\\[]", "\\<a\\>", "[\\<a]", "{x}", "a{,2}b", "a{1,2}", "{}",
        "x{", "\\é", "[\\b]", "[\\é-]", "a|", "(|a)b", "[a-]", "[-a]", "&&", "[&]", "a--b", "[~-]",
        "\\{x\\}", "[\\]]{2}",
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::FutureWarning")  # Python says of "[[" that it may become a set within it
def test_an_expression_means_what_it_means_in_python(grammars, vocabulary, expression):
    compiled = compile(GrammarSpec.lark(f"start: /{expression}/"), vocabulary)
    for text in TEXTS:
        assert grammars.admits(compiled, text) == bool(re.fullmatch(expression, text)), text


def test_a_blank_in_a_class_of_a_verbose_expression_is_a_character(grammars, vocabulary):
    compiled = compile(GrammarSpec.lark("start: /a [ #b] # [\n/x"), vocabulary)
    assert all(grammars.admits(compiled, text) for text in ("a ", "a#", "ab"))
    assert not any(grammars.admits(compiled, text) for text in ("a", "a b", "a\n"))


@pytest.mark.parametrize("expression", ["[a&&b]", "[a~~b]", "[+--]", "[--a]", "[[a]b]", "[[:alpha:]]", "[[a]][[]"])
def test_a_class_that_rust_reads_as_an_operation_is_refused(vocabulary, expression):
    with pytest.raises(GrammarError, match=r"in a class is .* to some readers and .* to others; the text itself is \\"):
        compile(GrammarSpec.lark(f"start: /{expression}/"), vocabulary)


@pytest.mark.parametrize("expression", ["^a$", "(a|^b)", "^(?:a|b)$", "^[ab]"])
def test_an_anchor_at_the_edge_of_a_terminal_is_no_crash(grammars, vocabulary, expression):
    """The search of short ends took it for a repeat."""
    compiled = compile(GrammarSpec.lark(f'start: /{expression}/ "c"'), vocabulary)
    assert grammars.admits(compiled, "ac") and not grammars.admits(compiled, "c")
    assert compiled.matcher().num_shortest == 2 and compiled.artifact.ends


@pytest.mark.parametrize("expression", ["a^b", "(^a|b)+", "a$b", "(?=a)a", "a(?!b)", "^(?!a)b", "a\\b"])
def test_a_condition_within_a_terminal_is_refused(vocabulary, expression):
    with pytest.raises(GrammarError, match=r"look-?around"):
        compile(GrammarSpec.lark(f"start: /{expression}/"), vocabulary)


@pytest.mark.parametrize(
    ("grammar", "admitted", "other"),
    [
        ('start: "a"i~1..2 "b"', ["ab", "Aab"], ["b", "aaab"]),
        ('start: ("a"i | "c")~0..1 "b"', ["b", "Ab", "cb"], ["aab"]),
        ('start: "a" ~ 2 .. 3', ["aa", "aaa"], ["a", "aaaa"]),
        ('start: "~1..2" /~0..1/', ["~1..2~0..1"], ["~1..2"]),
        ('start: "a" // one\n  // | "x"\n\n  # another\n  | "b"', ["a", "b"], ["x", ""]),
        ('start: "a"\n   \n  | "b" /#\\// "//"', ["a", "b#///"], ["", "b"]),
        ('start: "a"\n\n| x\n// c\nx: "b"\n', ["a", "b"], ["ab"]),
    ],
)
def test_counts_and_alternatives_on_lines_of_their_own(grammars, vocabulary, grammar, admitted, other):
    lark.Lark(grammar)
    compiled = compile(GrammarSpec.lark(grammar), vocabulary)
    assert all(grammars.admits(compiled, text) for text in admitted)
    assert not any(grammars.admits(compiled, text) for text in other)


def test_an_error_after_lines_that_were_left_out_names_its_line(vocabulary):
    with pytest.raises(GrammarError, match=r"6\(4\)"):
        compile(GrammarSpec.lark('start: "a"\n\n// c\n  | x\n\nx: )'), vocabulary)


def test_an_alternative_of_what_is_ignored_belongs_to_no_rule(vocabulary):
    """It was read as one of the rule before, which then seemed to come to an end."""
    with pytest.raises(GrammarError, match="'x' derives no finite text"):
        compile(GrammarSpec.lark('start: x\nx: "a" x\n%ignore " "\n  // or\n  | "\\t"\n'), vocabulary)


def test_what_needs_no_change_stays_as_it_is():
    text = '// [[\nstart: "a[[b]]" /a[^b-d]{2}\\/\\d+/i /\\p{Lu}[\\u{61}\\P{L}]\\\\/ # ~1..2\n%ignore " "\n'
    assert in_dialect(text) == text


def check(grammars, vocabulary, seed: int) -> bool:
    """Compare the texts of a seed's grammar with those of Lark's library; return whether both read the grammar."""
    draw = LarkDraw(random.Random(seed))
    grammar = draw.grammar()
    try:
        parser = lark.Lark(grammar, parser="earley", lexer="dynamic_complete")
    except lark.exceptions.LarkError:
        return False
    try:
        compiled = compile(GrammarSpec.lark(grammar), vocabulary)
    except GrammarError as error:
        assert re.search(r"no finite text|one mask took|too complex", error.reason), (seed, grammar, error.reason)
        return False
    for length in range(4):
        for text in map("".join, itertools.product(draw.alphabet, repeat=length)):
            try:
                parser.parse(text)
                expected = True
            except lark.exceptions.LarkError:
                expected = False
            # What is ignored stands between terminals, not around them.
            if draw.ignores and text != text.strip():
                continue
            assert grammars.admits(compiled, text) == expected, (seed, grammar, text)
    return True


def test_generated_grammars_admit_what_larks_library_does(grammars, vocabulary):
    seeds = range(repeats(30))
    assert sum(check(grammars, vocabulary, seed) for seed in seeds) > len(seeds) // 3


@pytest.mark.heavy
def test_many_more_generated_grammars_admit_what_larks_library_does(grammars, vocabulary):
    seeds = range(1_000, 1_000 + repeats(300))
    assert sum(check(grammars, vocabulary, seed) for seed in seeds) > len(seeds) // 3
