"""Completion of JSON that was cut off: the text with what it lacks, numbers and strings as they are written."""

from __future__ import annotations

import re

_TOKEN = re.compile(r'[{}\[\],:]|"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[^\s{}\[\],:"]+', re.DOTALL)
_CLOSING = {"{": "}", "[": "]"}
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
# The end of a string whose last escape is incomplete, or is the first half of a surrogate pair. An escape follows an
# even number of backslashes.
_CUT_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*((?:\\u[dD][89abAB][0-9a-fA-F]{2})?(?:\\(?:u[0-9a-fA-F]{0,3})?)?)\Z")


def completed_object(text: str) -> str:
    """Return the members of a JSON object whose text may end anywhere, as an object, in time linear in its length.

    A string that was cut off is closed; a member without a value is dropped. If the text begins no object, the result
    is ``{}``; if it is not JSON further on, neither is the result.
    """
    if not text.lstrip().startswith("{"):
        return "{}"
    closings: list[str] = []
    # The text up to the last value or bracket. No bracket follows it, so ``closings`` are those that it lacks.
    end, last_value = 0, ""
    awaits_key = False
    for match in _TOKEN.finditer(text):
        token, value = match[0], ""
        if token in _CLOSING:
            closings.append(_CLOSING[token])
            awaits_key = token == "{"
        elif token in ("}", "]") and closings:
            closings.pop()
            awaits_key = False
        elif token in (",", ":"):
            awaits_key = token == "," and closings[-1:] == ["}"]
            continue
        elif awaits_key or not (value := _whole(token)):
            continue
        end, last_value = (match.start(), value) if value else (match.end(), "")
    return text[:end] + last_value + "".join(reversed(closings))


def _whole(token: str) -> str:
    """Return a value that is not nested, a string closed if it was cut off; empty for what is no value yet."""
    if not token.startswith('"'):
        return token if _SCALAR.fullmatch(token) else ""
    if _STRING.fullmatch(token):
        return token
    cut = _CUT_ESCAPE.search(token)
    return (token if cut is None else token[: cut.start(1)]) + '"'
