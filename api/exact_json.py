"""Exact JSON: parses and serializes JSON with exact integers of any length. orjson alone is exact up to 64 bits.

Clients send longer integers as bounds in schemas and as values in calls, template variables and states. These functions
read and write all JSON of clients from which a number can get into a prompt, a schema or an answer.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

# Maps each digit to a zero and each other byte to a space. Every body is searched, and this mapping with a search for
# zeros takes a tenth of the time of a regular expression.
_DIGITS_AS_ZEROS = bytes(ord("0") if chr(byte).isdecimal() and byte < 128 else ord(" ") for byte in range(256))
_LONG_INTEGER = b"0" * 19


def _may_be_inexact(data: bytes) -> bool:
    """Return whether JSON may contain an integer that orjson would parse as a float."""
    return _LONG_INTEGER in data.translate(_DIGITS_AS_ZEROS)


def loads_exact(data: bytes) -> Any:
    """Parse JSON as strictly as orjson. orjson checks the syntax and that every number is in the range of a double.

    Raises:
        orjson.JSONDecodeError: the data is not JSON, or is nested too deeply.
    """
    value = orjson.loads(data)
    if not _may_be_inexact(data):
        return value
    try:
        return json.loads(data)
    except RecursionError:
        # The largest depth that Python's parser reaches is smaller than orjson's, and depends on the depth of the call
        # stack.
        raise orjson.JSONDecodeError("nested too deeply", "", 0) from None


def dumps_spaced(value: Any) -> bytes:
    """Serialize a value as JSON with a space after each comma and colon, as language models write it.

    Raises like ``dumps_exact``. A value that is nested too deeply for Python's writer is written without spaces.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        return _dumps_deep(value)


def dumps_exact(value: Any) -> bytes:
    """Serialize a value as JSON without white space.

    Raises:
        TypeError: the value is not JSON.
        UnicodeEncodeError: a string contains half of a surrogate pair.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        pass
    try:
        return _dumps(value)
    except RecursionError:
        return _dumps_deep(value)


def _dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _dumps_deep(value: Any) -> bytes:
    """Serialize JSON without recursion: the other writers stop at a depth that ``loads_exact`` still accepts."""
    written: list[bytes] = []
    # Values that are left to write; the next one is the last in the list. Bytes are written unchanged.
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, bytes):
            written.append(item)
        elif isinstance(item, dict):
            members = [part for name, each in item.items() for part in (b",", _dumps(name), b":", each)]
            left += [b"}", *reversed(members[1:]), b"{"]
        elif isinstance(item, list | tuple):
            items = [part for each in item for part in (b",", each)]
            left += [b"]", *reversed(items[1:]), b"["]
        else:
            written.append(_dumps(item))
    return b"".join(written)
