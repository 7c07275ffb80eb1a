"""Languages of distinct entries: numbers of any length, the shortest spellings first."""

from __future__ import annotations

import itertools
import json

import pytest

from rootgraft.grammar.emit.entry_languages import number_spellings
from rootgraft.grammar.regex.ecma_regex import read_pattern
from rootgraft.grammar.regex.string_automaton import START, StringAutomaton, string_automaton


def automaton(pattern: str) -> StringAutomaton:
    return string_automaton(list(read_pattern(f"^(?:{pattern})$").must), [])


@pytest.mark.parametrize(
    "pattern", ["-?(0|[1-9][0-9]?)", "[5-9][0-9]{2}|1[0-9]{3}", "[12](\\.[05]{1,2})?", "7[0-9]{0,2}|-3e[1-4]"]
)
def test_all_spellings_come_once_and_the_shortest_first(pattern):
    each = automaton(pattern)
    found = list(number_spellings([(each, START, "")]))
    assert list(map(len, found)) == sorted(map(len, found))
    assert sorted(found) == sorted(each.strings())


def test_spellings_of_many_digits_are_found_though_there_are_many_beginnings_of_them():
    each = automaton("[1-9][0-9]{22,}")
    found = list(itertools.islice(number_spellings([(each, START, "")]), 500))
    assert len(set(map(json.loads, found))) == 500 and {len(text) for text in found} == {23}


@pytest.mark.parametrize("bounds", [{"minimum": 1e23}, {"minimum": 10**40}, {"exclusiveMaximum": -1e23}])
def test_arrays_of_distinct_numbers_beyond_bounds_of_many_digits(grammars, bounds):
    for kind, count in (("integer", 2), ("number", 40)):
        items = {"type": kind, **bounds}
        compiled = grammars.schema({"type": "array", "uniqueItems": True, "items": items, "minItems": count})
        first = (-1 if "exclusiveMaximum" in bounds else 1) * 10**40
        text = json.dumps([first * 10 + at for at in range(count)])
        assert grammars.admits(compiled, text)
        assert not grammars.admits(compiled, json.dumps([first * 10] * count))
