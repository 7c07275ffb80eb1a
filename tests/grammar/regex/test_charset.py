"""Spellings of characters in JSON strings: what JSON may hold raw is raw, and every key and string alike."""

from __future__ import annotations

import json
import re

import pytest
import re2
from hypothesis import given
from hypothesis import strategies as st

from rootgraft.grammar.regex.char_classes import code_ranges
from rootgraft.grammar.regex.charset import LAST_CASED, fold_case, json_string, single

# Around the ends of what JSON escapes, and around those of UTF-8's lengths.
EDGES = '\x00\x01\x08\x09\x0a\x1f !"\\/az~\x7f\x80\x9f\xa0\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff'


@given(st.text(st.sampled_from(EDGES) | st.characters(exclude_categories=["Cs"])))
def test_a_string_is_spelled_as_by_json(text):
    assert json_string(text) == json.dumps(text, ensure_ascii=False)


@pytest.mark.parametrize("char", EDGES)
def test_each_character_has_one_spelling_wherever_it_stands(grammars, char):
    written = json.dumps(char, ensure_ascii=False)
    # The bounded repeat has an automaton of its own.
    patterns = (
        {"pattern": rf"^[{char}]$" if char != "\\" else r"^\\$"},
        {"pattern": r"^(?:[^]){1,60}$", "maxLength": 60},
    )
    schemas = [{"const": char}, {"type": "string"}, *({"type": "string"} | each for each in patterns)]
    for schema in schemas:
        compiled = grammars.schema(schema)
        assert grammars.admits(compiled, written), schema
        other = f'"\\u{ord(char):04x}"' if ord(char) < 0x10000 else None
        assert other in (None, written) or not grammars.admits(compiled, other), schema
    compiled = grammars.schema({"type": "object", "properties": {char: {}}, "additionalProperties": False})
    assert grammars.admits(compiled, f"{{{written}:1}}")


CASED = "".join(
    char for char in map(chr, range(LAST_CASED + 1)) if {char.lower(), char.upper(), char.title()} != {char}
)


def test_no_letter_has_another_case_beyond_the_last_that_is_looked_at():
    rest = "".join(map(chr, range(LAST_CASED + 1, 0x110000)))
    assert rest.swapcase() == rest.casefold() == rest.title() == rest


def test_letters_without_case_are_few_enough_for_every_reader_and_enough_for_any():
    """Python's ``re`` folds by tables of its own, RE2 as Rust's engine does by Unicode's."""
    for char in CASED:
        python = set(re.findall(re.escape(char), CASED, re.IGNORECASE))
        unicode = set(re2.findall("(?i)" + re2.escape(char), CASED))
        narrow, wide = (
            {
                chr(code)
                for first, last in code_ranges(fold_case(single(char), wide=wide))
                for code in range(first, last + 1)
            }
            for wide in (False, True)
        )
        assert char in narrow <= python & unicode, char
        assert python | unicode <= wide, char
        assert {each for each in (char.lower(), char.upper()) if each in python & unicode} <= narrow


@pytest.mark.parametrize(("small", "capital"), [(0x19B, 0xA7DC), (0x1C8A, 0x1C89), (0x10D70, 0x10D50)])
def test_cases_of_new_versions_of_unicode_are_those_of_some_readers_only(small, capital):
    """Whatever this Python knows of them."""
    for one, other in ((small, capital), (capital, small)):
        folded = [fold_case(single(chr(one)), wide=wide) for wide in (False, True)]
        assert [any(first <= other <= last for first, last in code_ranges(each)) for each in folded] == [False, True]


def test_the_case_of_a_complement_is_that_of_what_it_excludes():
    assert fold_case(single("k").complement(), wide=True) == single("k").complement()
