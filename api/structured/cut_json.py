"""Cut JSON: completes the text of a JSON object that was cut off. Numbers and strings keep their spelling."""

from __future__ import annotations

import re

_TOKEN = re.compile(r'[{}\[\],:]|"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[^\s{}\[\],:"]+', re.DOTALL)
_CLOSING = {"{": "}", "[": "]"}
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def completed_object(text: str) -> str:
    """Complete the text of a JSON object that may end anywhere. Takes time linear in the text's length.

    A string that was cut off is dropped, as it is by Anthropic's client from a stream: a value that is half there, such
    as a command, must not look like a whole one. So is a member without a value. If the text does not begin an object,
    the result is ``{}``. If the text becomes invalid JSON later, the result is invalid JSON too.
    """
    if not text.lstrip().startswith("{"):
        return "{}"
    closings: list[str] = []
    # The end of the last value or bracket. No bracket follows it, so ``closings`` are the brackets that the text lacks.
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
    """Return a value that is not nested; "" for an incomplete value."""
    return token if _SCALAR.fullmatch(token) or _STRING.fullmatch(token) else ""
