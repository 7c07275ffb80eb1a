"""ECMA-262 patterns against Python's `re`, both as searches and as spelled inside of JSON."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootgraft.grammar.regex.ecma_regex import examples, parse, repeat_product, shortest
from rootgraft.grammar.regex.regex_parser import RegexError

ATOMS = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\d", r"\w", r"\S", r"[\w-]", "x"])


def combine(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    groups = st.sampled_from(["(", "(?:"])
    suffix = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,}", "*?"])
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.builds(lambda g, a, b: f"{g}{a}|{b})", groups, inner, inner),
        st.builds(lambda g, a, s: f"{g}{a}){s}", groups, inner, suffix),
    )


BODIES = st.recursive(ATOMS, combine, max_leaves=6)
PATTERNS = st.builds(
    lambda a, b, c, tail: a + b + c + tail,
    st.sampled_from(["", "^"]),
    BODIES,
    st.sampled_from(["", "$"]),
    st.sampled_from(["", "|b$", "|^x"]),
)
TEXTS = st.text(alphabet='abx1-_ \n"é', max_size=5)


@given(PATTERNS, st.lists(TEXTS, min_size=1, max_size=8))
def test_a_pattern_matches_what_python_matches(pattern, texts):
    narrow, wide = parse(pattern), parse(pattern, wide=True)
    for text in texts:
        expected = re.search(pattern, text) is not None
        assert expected or not narrow.matches(text)
        assert not expected or wide.matches(text)
        if "\n" not in text and text.isascii():
            assert narrow.matches(text) == expected


@given(PATTERNS)
def test_examples_match(pattern):
    read = parse(pattern)
    for node in read.must:
        assert read.matches(shortest(node))
        assert all(map(read.matches, examples(node)))


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        (r"^(?!foo|bar)[a-z]+$", ["baz"], ["foo", "bars", ""]),
        (r"^(?=.*\d)[a-z\d]{3}$", ["ab1"], ["abc"]),
        (r"^\u00e9\x41\cJ\t$", ["éA\n\t"], ["eA\n\t"]),
        (r"^\p{Lu}\p{L}+$", ["Éa"], ["éa", "1a"]),
        (r"^\ud83d\ude00$", ["\U0001f600"], ["x"]),
        (r"(?i)^ab$", ["AB", "aB"], ["abc"]),
        (r"(?i)^(?!ab|\u0063[d])[a-z]+$", ["ba", "BA"], ["ab", "AB", "aBc", "CD", "Cdx"]),
        (r"(?i)^(?=.*x)(?=y)[a-z]+$", ["yax", "YX", "yX"], ["YA", "ax", "X"]),
        (r"^[\]\\^-]+$", ["]\\^-"], ["["]),
        (r"(^a|b)c$", ["ac", "xbc"], ["xac"]),
        (r"^$", [""], ["a"]),
        (r"^ab{0}(?:cd){0,0}e$", ["ae"], ["abe", "abbe", "acde"]),
        (r"^a{,}{x$", ["a{,}{x"], ["aa"]),
    ],
)
def test_special_constructs(pattern, matching, other):
    read = parse(pattern)
    assert all(map(read.matches, matching))
    assert not any(map(read.matches, other))


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        ")",
        "a**",
        "*a",
        "[b-a]",
        "[a",
        "a{2,1}",
        r"(a)\1",
        r"\bfoo",
        "(?<=a)b",
        "a(?=b)c",
        r"\y",
        "a{99999}",
        "(?<n",
        "\\",
        "a^b",
        "a{,2}",
        "[]a]",
        r"[^]\d]",
    ],
)
def test_what_cannot_be_used_is_refused_with_a_reason(pattern):
    with pytest.raises(RegexError, match=r"\w"):
        parse(pattern)


def test_the_size_of_nested_repeats_is_seen():
    [node] = parse("^((a{100}){100}){5}$").must
    assert 50_000 <= repeat_product(node) <= 50_010


def test_matching_takes_polynomial_time():
    assert not parse("^((a+)+)+$").matches("a" * 200 + "b")


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("(?i)^k$", "kK", "\u212a"),
        ("(?i)^[^k]$", "jsS\u017f", "kK\u212a"),
        ("(?i)^[^a-r]$", "sS", "kK\u212aiI\u0130\u0131"),
        ("(?i)^(?!s)[^.]$", "ktT", "sS\u017f"),
        ("(?i)^(?=[^s]).$", "kt", "sS\u017f"),
        ("(?i)^(?![^s]).$", "sS", "kt\u017f"),
        (r"(?i)^[\W\u006B]$", "kK-", "\u212aa"),
        ("(?i)^\u0131$", "\u0131", "iI\u0130"),
    ],
)
def test_letters_without_case_are_few_where_they_must_match_and_many_where_they_must_not(pattern, matching, other):
    read = parse(pattern)
    assert all(map(read.matches, matching)) and not any(map(read.matches, other))


@pytest.mark.parametrize("pattern", [r"(?i)^\p{Lu}$", r"(?i)^[^\p{L}]$", r"(?i)^\P{M}$"])
def test_letters_by_property_without_case_are_refused(pattern):
    with pytest.raises(RegexError, match="different regex dialects"):
        parse(pattern)
