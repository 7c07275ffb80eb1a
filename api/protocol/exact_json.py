"""JSON with integers that are exact at any length, as bounds in schemas may be; orjson stops at 64 bits."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

_LONG_INTEGER = re.compile(rb"[0-9]{19}")


def may_be_inexact(data: bytes) -> bool:
    """Return whether JSON may hold an integer that orjson reads as a float."""
    return _LONG_INTEGER.search(data) is not None


def loads_exact(data: bytes) -> Any:
    """Parse JSON as strictly as orjson, which checks the syntax and that every number is within a double's range.

    Raises:
        orjson.JSONDecodeError: it is not JSON, or nested too deeply.
    """
    value = orjson.loads(data)
    if not may_be_inexact(data):
        return value
    try:
        return json.loads(data)
    except RecursionError:
        # Python's parser goes less deep than orjson, by what is on the stack already.
        raise orjson.JSONDecodeError("nested too deeply", "", 0) from None


def dumps_exact(value: Any) -> bytes:
    """Return JSON without white space.

    Raises:
        TypeError: the value is not JSON.
        UnicodeEncodeError: a string contains half of a surrogate pair.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
