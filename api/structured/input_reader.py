"""Input reader: extracts a custom tool's input, the only string in the call's arguments, from partial JSON."""

from __future__ import annotations

import json
import re

from ..protocol.tools import CUSTOM_INPUT

_BEGIN = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_LONGEST_BEGIN = 64
# Matches complete JSON characters: both halves of a surrogate pair (``\\ud83d\\ude00``), or a first half that is
# followed by something else.
_CHARACTERS = re.compile(
    r"""(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}
    |\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2}
        |(?=[^\\]|\\[^u]|\\u(?![dD][c-fC-F])[0-9a-fA-F]{4})))*""",
    re.VERBOSE,
)


class InputReader:
    """Reads the input of a custom tool from the arguments of one call."""

    def __init__(self) -> None:
        self._held = ""
        self._is_inside = False
        self._is_over = False

    def read(self, text: str) -> str:
        """Return the part of the input's text that is certain after the new JSON text."""
        self._held += text
        if not self._is_inside:
            begin = _BEGIN.match(self._held)
            if begin is None:
                self._is_over = self._is_over or len(self._held) > _LONGEST_BEGIN
                return ""
            self._held, self._is_inside = self._held[begin.end() :], True
        if self._is_over:
            return ""
        whole = _CHARACTERS.match(self._held)
        # The expression always matches, at least an empty text.
        assert whole is not None
        end = whole.end()
        self._is_over = self._held[end : end + 1] == '"'
        spelled, self._held = self._held[:end], self._held[end:]
        plain: str = json.loads(f'"{spelled}"', strict=False)
        return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
