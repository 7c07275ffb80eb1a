"""Lookahead is part of the algebra of patterns: it may be intersected and complemented, in keys and in values."""

from __future__ import annotations

import json

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.machine.thoroughness import repeats

from rootgraft.grammar.regex.ecma_regex import pattern_matches

LOOKAHEADS = (
    "^(?!x$)[a-z]+$", "^(?!x)", "^(?!.*b)[ab]*$", "^(?=a)(?!.*b$)", "^(?!a)(?!b)[a-c]{1,3}$", "^(?!(a|b)c)",
    "^(?!)a", "^(?!$)",
)  # fmt: skip
TEXTS = st.text(st.sampled_from('abcxX\n"é'), max_size=4)


@pytest.mark.parametrize("pattern", LOOKAHEADS)
@settings(max_examples=repeats(25))
@given(texts=st.lists(TEXTS, min_size=3, max_size=8))
def test_what_a_pattern_with_lookahead_leaves_is_known(grammars, pattern, texts):
    length = {"type": "string", "minLength": 0, "maxLength": 60}
    keys = {"type": "object", "patternProperties": {pattern: {"type": "integer"}}}
    schemas = [
        {"type": "string", "not": {"pattern": pattern}},
        # The large repeat is followed by an automaton of its own.
        {**length, "pattern": r"^(?:[\s\S]){0,60}$", "not": {"pattern": pattern}},
        keys | {"additionalProperties": False},
        keys | {"additionalProperties": {"type": "null"}},
        {"type": "object", "patternProperties": {pattern: True, "^a": {"type": "null"}}, "additionalProperties": False},
    ]  # fmt: skip
    for schema in schemas:
        compiled = grammars.schema(schema)
        validator = jsonschema.Draft202012Validator(schema)
        for text in texts:
            values = [text] if schema["type"] == "string" else [{text: 1}, {text: None}]
            for value in values:
                admitted = grammars.admits(compiled, json.dumps(value, ensure_ascii=False))
                # Python's "$" and "." have other ideas of the last line break, so both readings are asked for.
                if not text.endswith("\n"):
                    assert admitted == validator.is_valid(value), (schema, value)
                elif schema["type"] == "string":
                    assert not admitted or not pattern_matches(pattern, text)


def test_a_key_pattern_with_lookahead_in_a_closed_object_beside_a_declared_key(grammars):
    schema = {
        "type": "object",
        "properties": {"x": {"type": "string"}},
        "patternProperties": {"^(?!x$)[a-z]+$": {"type": "integer"}},
        "additionalProperties": False,
    }
    compiled = grammars.schema(schema)
    for text in ('{"x":"a","xy":1}', '{"a":1}', "{}"):
        assert grammars.admits(compiled, text)
    for text in ('{"x":1}', '{"xy":"a"}', '{"X":1}', '{"":1}'):
        assert not grammars.admits(compiled, text)
