"""Objects that were cut off anywhere, against pydantic's reader of partial JSON, and what that reader changes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json
from support.machine.thoroughness import repeats

from rootgraft.api.structured.cut_json import completed_object

TEXTS = st.text(st.sampled_from('ab"\\{}[]:, é😀\n\x00'), max_size=6)
VALUES = st.recursive(
    st.sampled_from([None, True, False, 0, -1, 12.5, 1e-300]) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=repeats(200), deadline=None)
@given(value=st.dictionaries(TEXTS, VALUES, max_size=4), is_ascii=st.booleans(), indent=st.sampled_from([None, 1]))
def test_every_beginning_has_the_members_that_it_tells(value: object, is_ascii: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    assert completed_object(text) == text
    for end in range(1, len(text)):
        assert json.loads(completed_object(text[:end])) == from_json(text[:end], allow_partial=True)


@pytest.mark.parametrize(
    ("text", "completed"),
    [
        ('{"n": 123456789012345678901, "b": "x', '{"n": 123456789012345678901}'),
        ('{"n": [1e400, 12345678901234567.125', '{"n": [1e400, 12345678901234567.125]}'),
        ('{"n": 1e400, "b": 1e', '{"n": 1e400}'),
        ('{"a": "\\ud800 ", "b": "x', '{"a": "\\ud800 "}'),
        ('{"a": "x\\ud83d', "{}"),
        ('{"a": ["x", "\\\\', '{"a": ["x"]}'),
        ('{"command": "rm -rf /tmp', "{}"),
        ('{"a": 1, "a": 2, "a', '{"a": 1, "a": 2}'),
        ("", "{}"),
        ("[1, 2", "{}"),
        ("so", "{}"),
    ],
)
def test_numbers_and_strings_stay_as_they_are_written(text: str, completed: str) -> None:
    assert completed_object(text) == completed


def test_deep_and_long_beginnings_take_one_pass() -> None:
    assert completed_object('{"a":' * 50_000) == '{"a":' * 49_999 + "{" + "}" * 50_000
    assert completed_object('{"a": [' + "[1], " * 50_000) == '{"a": [' + "[1], " * 49_999 + "[1]]}"
    assert completed_object('{"a": "' + "\\\\" * 100_000 + "\\") == "{}"
