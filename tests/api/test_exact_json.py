"""Exact JSON: integers of any length, and an error of one kind for what cannot be read."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootgraft.api.exact_json import dumps_exact, dumps_spaced, loads_exact

LONG = b"12345678901234567890123"


def test_long_integers_are_exact() -> None:
    assert loads_exact(b'{"a": [%s]}' % LONG) == {"a": [int(LONG)]}


def test_spaces_as_models_write_them() -> None:
    value: dict[str, Any] = {"a": [int(LONG), 1.5, 'é, "b":c', None], "d": {}}
    text = dumps_spaced(value)
    assert text == b'{"a": [' + LONG + ', 1.5, "é, \\"b\\":c", null], "d": {}}'.encode()
    assert loads_exact(text) == value == loads_exact(dumps_exact(value))
    for depth in range(900):
        value = {"a": value} if depth else {}
    assert dumps_exact(loads_exact(dumps_spaced(value))) == dumps_exact(value)


@pytest.mark.parametrize("inner", [b"1", LONG], ids=["short", "long"])
@pytest.mark.parametrize("depth", [900, 1010, 1023, 1025, 100_000])
def test_nesting_ends_in_a_value_or_in_the_error_of_bad_json(inner: bytes, depth: int) -> None:
    try:
        value = loads_exact(b"[" * depth + inner + b"]" * depth)
    except orjson.JSONDecodeError:
        assert depth > 900
    else:
        assert isinstance(value, list) and depth < 1025


INNER = st.one_of(st.just([]), st.just({}), st.integers(0, 2**70), st.text('aé"\\'), st.none(), st.booleans())


@settings(max_examples=20, deadline=None)
@given(st.lists(INNER, max_size=4), st.text('k"', max_size=3))
def test_what_is_read_at_any_depth_is_written(inner: list[Any], name: str) -> None:
    """The writers of JSON go less deep than its readers."""
    for depth in (1, 250, 400, 800):
        value: Any = inner
        for level in range(depth):
            value = {name: value, "b": level} if level % 2 else [level, value, []]
        written = dumps_exact(value)
        assert depth > 400 or loads_exact(written) == value
        assert dumps_exact(loads_exact(written)) == written
