"""Spellings of characters in JSON strings: what JSON may hold raw is raw, and every key and string alike."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootgraft.grammar.regex.charset import json_string

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
