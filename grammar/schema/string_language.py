"""Strings that constraints admit: the expressions of their automaton, and whether there are any such strings at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..regex.charset import single
from ..regex.ecma_regex import read_pattern, repeat_product
from ..regex.regex_parser import Alt, Cat, Chars, RegexNode
from ..regex.string_automaton import (
    START,
    AutomatonTooLarge,
    Excluded,
    StringAutomaton,
    each_excluded,
    string_automaton,
)
from ..regex.string_formats import FORMATS
from ..sized_cache import sized_cache
from .constraints import Strings

# Limits on the characters of all expressions with repeats written out, and on the length of the shortest string. Beyond
# either limit no search is made: it is assumed that a string satisfies the constraints.
MAX_PLACES = 2_000
MAX_LEAST = 4_000
# Limits for listing short strings of a pattern: number of strings, characters of the expressions with repeats written
# out, length of a string, and number of characters that stand for a class of characters.
MAX_SHORT = 32
MAX_SHORT_PLACES = 200
MAX_SHORT_LENGTH = 24
CHARS_OF_A_CLASS = 4


def expressions(strings: Strings) -> tuple[list[RegexNode], list[Excluded]]:
    """Return the expressions that all match, and groups of strings that are left out; without the lengths."""
    must: list[RegexNode] = []
    must_not: list[Excluded] = []
    if strings.values is not None:
        must.append(_any_of(strings.values))
    for pattern in (*map(read_pattern, sorted(strings.patterns)), *(FORMATS[name] for name in sorted(strings.formats))):
        must += pattern.must
        must_not += each_excluded(pattern.must_not)
    for pattern in (read_pattern(source, True) for source in sorted(strings.not_patterns)):
        must_not.append(Excluded(pattern.must, pattern.must_not))
    if strings.excluded:
        must_not.append(Excluded((_any_of(sorted(strings.excluded)),)))
    return must, must_not


@sized_cache(4 << 20, lambda _, strings: strings.num_bytes)
def admits_any(strings: Strings) -> bool:
    """Return whether any string satisfies constraints; also True where that is too hard to find out."""
    if strings.values is not None or strings.is_empty():
        return not strings.is_empty()
    if not (strings.patterns or strings.not_patterns or strings.formats or strings.excluded):
        return True
    if strings.least > MAX_LEAST or any(map(strings.admits, _guesses(strings))):
        return True
    return has_string(*expressions(strings), strings.least, strings.most)


def has_string(
    must: Sequence[RegexNode], must_not: Sequence[Excluded], least: int = 0, most: int | None = None
) -> bool:
    """Return whether any string has `string_automaton`'s properties; also True where that is too hard to find out."""
    left_out = (node for group in must_not for node in group.nodes)
    if sum(map(repeat_product, (*must, *left_out))) > MAX_PLACES:
        return True
    try:
        found = string_automaton(must, must_not)
    except AutomatonTooLarge:
        return True
    return _ends_within(found, least, most)


@sized_cache(4 << 20, lambda found, strings: strings.num_bytes + 100 * len(found))
def short_strings(strings: Strings) -> tuple[str, ...]:
    """Return some of the shortest strings that patterns admit, of up to two lengths; none if they are hard to find.

    If the patterns treat some characters alike, strings are listed for only a few of these.
    """
    if not strings.patterns or strings.least > MAX_SHORT_LENGTH or (automaton := automaton_of(strings)) is None:
        return ()
    return tuple(text for text in automaton.shortest_strings(MAX_SHORT, MAX_SHORT_LENGTH, CHARS_OF_A_CLASS))


@sized_cache(16 << 20, lambda found, strings: strings.num_bytes + (found.bytes_alone if found else 0))
def automaton_of(strings: Strings) -> StringAutomaton | None:
    """Return the automaton of all strings that constraints admit; None if it would be large."""
    must, must_not = expressions(strings)
    if sum(map(repeat_product, (*must, *(node for group in must_not for node in group.nodes)))) > MAX_SHORT_PLACES:
        return None
    try:
        return string_automaton(must, must_not, strings.least, strings.most)
    except AutomatonTooLarge:
        return None


def _guesses(strings: Strings) -> list[str]:
    """Return strings that are likely to satisfy constraints."""
    guesses = ["a" * strings.least]
    for pattern in (*map(read_pattern, strings.patterns), *map(FORMATS.__getitem__, strings.formats)):
        for text in pattern.shortest:
            guesses.append(text + text[-1:] * (strings.least - len(text)))
    return guesses


def _ends_within(automaton: StringAutomaton, least: int, most: int | None) -> bool:
    """Return whether an automaton accepts a string whose length is from ``least`` to ``most``; None for no upper bound.

    After ``least`` characters, the shortest such string visits no state twice. So the search ends after as many further
    characters as there are states.
    """
    delta = np.array(automaton.transitions, dtype=np.int32)
    accepting = np.array(automaton.accepting, dtype=np.bool_)
    reached = np.zeros(len(accepting), dtype=np.bool_)
    reached[START] = True
    longest = least + len(accepting)
    for length in range((longest if most is None else min(most, longest)) + 1):
        if length >= least and accepting[reached].any():
            return True
        after = np.zeros_like(reached)
        after[delta[reached]] = True
        reached = after
    return False


def _any_of(texts: Iterable[str]) -> RegexNode:
    return Alt(tuple(Cat(tuple(Chars(single(char)) for char in text)) for text in texts))
