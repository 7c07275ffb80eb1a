"""Polynomial-time matcher for the regular expressions of ``rank_pattern`` and ``alpha_pattern``.

Patterns are untrusted, and Python's backtracking matcher may take exponential time on one of 20 characters. Here a
pattern is a function from the set of start positions of a match to the set of its end positions, so no position is
tried twice. Look-around and back references, which have no such form, are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from .errors import AdapterError

_Matcher = Callable[[str, frozenset[int]], frozenset[int]]

_MOST_CHARACTERS = 512
_MOST_REPEATS = 64
_MOST_DEPTH = 16
_CLASSES = {"d": "0-9", "w": "a-zA-Z0-9_", "s": r" \t\n\r\f\v"}
_PLAIN = re.compile(r"[A-Za-z0-9_.]+")
_COUNT = re.compile(r"\{(\d{0,3})(,?)(\d{0,3})\}")


class NamePattern:
    """A pattern as PEFT applies it: it must match a module's whole name, or all that follows one of its dots.

    Args:
        pattern: a regular expression of literals, ``.``, classes, groups, ``|``, ``* + ? {m,n}``, ``^`` and ``$``.
        option: the config's key that holds it, for errors.

    Raises:
        AdapterError: the pattern is malformed, too long, or uses anything else.
    """

    def __init__(self, pattern: str, option: str) -> None:
        if len(pattern) > _MOST_CHARACTERS:
            raise AdapterError(
                f"{option} has a pattern of {len(pattern)} characters; at most {_MOST_CHARACTERS} are read.", option
            )
        self._match = _Parser(pattern, option).whole()
        self._size = len(pattern)
        self._plain = re.compile(pattern) if _PLAIN.fullmatch(pattern) else None

    @property
    def is_plain(self) -> bool:
        """Whether the pattern is a plain name, which is fast to match."""
        return self._plain is not None

    def matches(self, name: str) -> bool:
        """Return whether PEFT applies the pattern's value to the module of this name."""
        if self._plain is not None:
            start = len(name) - self._size
            return (start == 0 or name[start - 1 : start] == ".") and bool(self._plain.fullmatch(name, start))
        starts = frozenset({0, *(index + 1 for index, letter in enumerate(name) if letter == ".")})
        return len(name) in self._match(name, starts)


class _Parser:
    """Recursive descent: alternatives of sequences of repeated atoms."""

    def __init__(self, pattern: str, option: str) -> None:
        self._pattern = pattern
        self._option = option
        self._at = 0
        self._depth = 0

    def whole(self) -> _Matcher:
        matcher = self._alternatives()
        if self._at < len(self._pattern):
            raise self._error("has an unmatched ')'")
        return matcher

    def _error(self, what: str) -> AdapterError:
        return AdapterError(f"{self._option}: the pattern {self._pattern[:80]!r} {what}.", self._option)

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _next(self) -> str:
        letter = self._peek()
        if not letter:
            raise self._error("ends too early")
        self._at += 1
        return letter

    def _alternatives(self) -> _Matcher:
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise self._error(f"has groups nested more than {_MOST_DEPTH} deep")
        branches = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            branches.append(self._sequence())
        self._depth -= 1
        return branches[0] if len(branches) == 1 else _any_of(branches)

    def _sequence(self) -> _Matcher:
        parts: list[_Matcher] = []
        while self._peek() and self._peek() not in "|)":
            parts.append(self._repeated(self._atom()))
        return _in_order(parts)

    def _atom(self) -> _Matcher:
        letter = self._next()
        if letter == "(":
            return self._group()
        if letter == "[":
            return self._letters(self._class())
        if letter == "\\":
            return self._escape()
        if letter == ".":
            return self._letters(".")
        if letter == "^":
            return lambda _text, at: at & {0}
        if letter == "$":
            return lambda text, at: at & {len(text)}
        if letter in "*+?{":
            raise self._error(f"repeats nothing with {letter!r}")
        return self._letters(re.escape(letter))

    def _group(self) -> _Matcher:
        if self._peek() == "?":
            self._at += 1
            if self._next() != ":":
                raise self._error("uses look-around, flags or a named group, which are not supported")
        inner = self._alternatives()
        if self._peek() != ")":
            raise self._error("has an unmatched '('")
        self._at += 1
        return inner

    def _escape(self) -> _Matcher:
        letter = self._next()
        if letter.lower() in _CLASSES:
            return self._letters(f"[{'^' if letter.isupper() else ''}{_CLASSES[letter.lower()]}]")
        if letter.isalnum():
            raise self._error(f"uses \\{letter}, which is not supported")
        return self._letters(re.escape(letter))

    def _class(self) -> str:
        """Parse a character class up to its bracket; returns its source."""
        end = self._pattern.find("]", self._at + (2 if self._pattern[self._at : self._at + 1] == "^" else 1))
        if end < 0:
            raise self._error("has an unmatched '['")
        source = self._pattern[self._at - 1 : end + 1]
        if "\\" in source or "[" in source[1:]:
            raise self._error("uses a class with an escape or a bracket in it, which is not supported")
        self._at = end + 1
        return source

    def _letters(self, source: str) -> _Matcher:
        """Match one character by ``source``, an atom without repetition."""
        try:
            accepts = re.compile(source).fullmatch
        except re.error as error:
            raise self._error(f"is malformed: {error}") from None
        return lambda text, at: frozenset(i + 1 for i in at if i < len(text) and accepts(text[i]))

    def _repeated(self, inner: _Matcher) -> _Matcher:
        letter = self._peek()
        if letter == "{":
            least, most = self._count()
        elif letter and letter in "*+?":
            self._at += 1
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[letter]
        else:
            return inner
        if self._peek() == "?":  # lazy: the same names match
            self._at += 1
        if self._peek() and self._peek() in "*+?{":
            raise self._error("repeats a repetition")
        return _repeat(inner, least, most)

    def _count(self) -> tuple[int, int | None]:
        found = _COUNT.match(self._pattern, self._at)
        if found is None or not (found[1] or found[3]):
            raise self._error("has a '{' without a count")
        self._at = found.end()
        least = int(found[1] or 0)
        most = least if not found[2] else (int(found[3]) if found[3] else None)
        if max(least, most or 0) > _MOST_REPEATS or (most is not None and most < least):
            raise self._error(f"has a count that is not in 0 .. {_MOST_REPEATS}")
        return least, most


def _in_order(parts: list[_Matcher]) -> _Matcher:
    def match(text: str, at: frozenset[int]) -> frozenset[int]:
        for part in parts:
            at = part(text, at)
        return at

    return match


def _any_of(branches: list[_Matcher]) -> _Matcher:
    return lambda text, at: frozenset().union(*(branch(text, at) for branch in branches))


def _repeat(inner: _Matcher, least: int, most: int | None) -> _Matcher:
    def match(text: str, at: frozenset[int]) -> frozenset[int]:
        for _ in range(least):
            at = inner(text, at)
        ends, new, count = at, at, least
        while new and (most is None or count < most):
            new = inner(text, new) - ends
            ends, count = ends | new, count + 1
        return ends

    return match
