"""Exact JSON: integers of any length, and an error of one kind for what cannot be read."""

from __future__ import annotations

import orjson
import pytest

from rootgraft.api.protocol.exact_json import loads_exact

LONG = b"12345678901234567890123"


def test_long_integers_are_exact() -> None:
    assert loads_exact(b'{"a": [%s]}' % LONG) == {"a": [int(LONG)]}


@pytest.mark.parametrize("inner", [b"1", LONG], ids=["short", "long"])
@pytest.mark.parametrize("depth", [900, 1010, 1023, 1025, 100_000])
def test_nesting_ends_in_a_value_or_in_the_error_of_bad_json(inner: bytes, depth: int) -> None:
    try:
        value = loads_exact(b"[" * depth + inner + b"]" * depth)
    except orjson.JSONDecodeError:
        assert depth > 900
    else:
        assert isinstance(value, list) and depth < 1025
