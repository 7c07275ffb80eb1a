"""Partial value: the beginning of a JSON value, and a test of which whole values it may still become."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..regex.charset import json_string

# The groups match a whole string; a string that is still open, to the end of the text; a number or word; a mark.
_LEXEMES = re.compile(rb'("(?:[^"\\]|\\.)*")|(".*)|([^\s"\][{},:]+)|([][{},:])', re.DOTALL)
_WORDS = (b"true", b"false", b"null")
_CUT_ESCAPE = re.compile(rb"(?<!\\)((?:\\\\)*)\\(?:u[0-9a-fA-F]{0,3})?$")


def container_value(text: bytes) -> Any:
    """Return the contents of an array or object as a hashable value. Equal JSON values give equal results."""
    return frozen(json.loads(text))


def frozen(value: Any) -> Any:
    """Return a JSON value as a hashable one: objects become sets of pairs, true and false become bytes."""
    if isinstance(value, dict):
        return frozenset((key, frozen(item)) for key, item in value.items())
    if isinstance(value, list):
        return tuple(map(frozen, value))
    # Python's True equals 1, so true and false become bytes.
    return b"true" if value is True else b"false" if value is False else value


@dataclass
class _Level:
    """An array or object that is open.

    Attributes:
        key: key of the present member.
        members: members that are complete.
        items: items that are complete, if it is an array.
    """

    is_object: bool
    key: str | None = None
    members: dict[str, Any] = field(default_factory=dict)
    items: list[Any] = field(default_factory=list)

    def add(self, value: Any) -> None:
        if not self.is_object:
            self.items.append(value)
        elif self.key is None:
            self.key = value
        else:
            self.members[self.key], self.key = value, None

    def value(self) -> Any:
        return frozenset(self.members.items()) if self.is_object else tuple(self.items)


class PartialValue:
    """The beginning of an array or object.

    Args:
        text: JSON text of the beginning.

    Raises:
        ValueError: the text is not the beginning of JSON.
    """

    def __init__(self, text: bytes) -> None:
        self._levels: list[_Level] = []
        self._tail = b""
        last = 0
        for found in _LEXEMES.finditer(text):
            string, begun, scalar, mark = found.groups()
            last = found.end()
            if mark:
                self._read_mark(mark)
            elif begun or (scalar and last == len(text)):
                self._tail = begun or scalar
            else:
                self._levels[-1].add(frozen(json.loads(string or scalar)))

    def _read_mark(self, mark: bytes) -> None:
        if mark in b"[{":
            self._levels.append(_Level(mark == b"{"))
        elif mark in b"]}" and len(self._levels) > 1:
            value = self._levels.pop().value()
            self._levels[-1].add(value)

    def rests(self, values: Iterable[Any]) -> set[bytes]:
        """Return, for each of the values, the rest of the string that is open, up to and with its closing quote."""
        if self._tail[:1] != b'"':
            return set()
        found = set[bytes]()
        for value in filter(self.may_become, values):
            for level in self._levels[:-1]:
                value = dict(value)[level.key] if level.is_object else value[len(level.items)]
            last = self._levels[-1]
            strings = list(dict(value)) if last.is_object and last.key is None else []
            if last.key is not None or not last.is_object:
                strings = [dict(value)[last.key] if last.is_object else value[len(last.items)]]
            spelled = (json_string(each).encode() for each in strings if isinstance(each, str))
            found |= {each[len(self._tail) :] for each in spelled if each.startswith(self._tail)}
        return found

    def may_become(self, value: Any) -> bool:
        """Return whether the beginning may become ``value`` (see `frozen`). True if only more text could decide it."""
        for level in self._levels:
            if level.is_object:
                if not isinstance(value, frozenset):
                    return False
                members = dict(value)
                if any(key not in members or members[key] != each for key, each in level.members.items()):
                    return False
                if level.key is None:
                    left = (key for key in members if key not in level.members)
                    return not self._tail or any(_may_become(self._tail, key) for key in left)
                if level.key not in members:
                    return False
                value = members[level.key]
            else:
                count = len(level.items)
                if not isinstance(value, tuple) or value[:count] != tuple(level.items):
                    return False
                if level is self._levels[-1] and not self._tail:
                    return True
                if len(value) <= count:
                    return False
                value = value[count]
        return not self._tail or _may_become(self._tail, value)


def _may_become(begun: bytes, value: Any) -> bool:
    """Return whether a scalar that has begun may become ``value``. A number is compared only once it is complete."""
    if begun[:1] == b'"':
        return isinstance(value, str) and value.startswith(_decoded(begun[1:]))
    if begun[:1] in b"-0123456789":
        return isinstance(value, int | float)
    word = b"null" if value is None else value
    return isinstance(word, bytes) and word in _WORDS and word.startswith(begun)


def _decoded(content: bytes) -> str:
    """Return the complete characters of the beginning of a string, decoded."""
    content = _CUT_ESCAPE.sub(rb"\1", content)
    text: str = json.loads(b'"' + content.decode("utf-8", "ignore").encode() + b'"', strict=False)
    return text[:-1] if text and "\ud800" <= text[-1] < "\udc00" else text
