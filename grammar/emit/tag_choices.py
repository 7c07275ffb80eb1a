"""Choices of a structural tag: checks that at most one of its parts is possible wherever a JSON string begins.

Where a string rule begins (``string_rules``), nothing but a string may follow. So the texts of several options must
differ before one of them reaches a string, and free text must not be possible at the same place as JSON.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

from ..regex.ecma_regex import parse
from ..regex.regex_parser import RegexError
from ..regex.string_automaton import DEAD, START, AutomatonTooLarge, StringAutomaton, each_excluded, string_automaton
from .entry_languages import ENTRIES
from .string_rules import MATCHED, PROBE

_JSON_FIRST = frozenset('"{[-0123456789tfn \t\r\n')
_JSON_SECOND = {"{": frozenset('"} \t\r\n'), "[": _JSON_FIRST | {"]"}}
# What an option begins with: a fixed text, text of an expression, JSON, any text, or text with parts in it.
JSON, TEXT, PARTS = object(), object(), object()
_OPEN = ("any_text", "regex")


class _Ambiguous(Exception):
    """Two parts may be under way at once."""


def is_unambiguous(form: Any, *, by_brackets: bool = False) -> bool:
    """Return whether string rules can be told apart from all else in a format of structural tags.

    Args:
        by_brackets: whether it suffices that the first bracket of JSON can be told apart from brackets in other text.
            Then arguments in another style than JSON count as one text, and the format may end with text that has no
            end mark.
    """
    try:
        _Begins(by_brackets=by_brackets).of(form, is_last=True)
    except _Ambiguous:
        return False
    return True


class _Begins:
    """Collects what formats can begin with."""

    def __init__(self, *, by_brackets: bool) -> None:
        self._by_brackets = by_brackets

    def of(self, form: Any, *, is_last: bool) -> list[Any]:
        """Return the texts with which a format can begin.

        Args:
            is_last: whether the format is the last part of the answer.
        """
        kind = form.get("type") if isinstance(form, dict) else None
        if kind == "json_schema":
            if form.get("style", "json") == "json":
                return [JSON]
            if not self._by_brackets:
                raise _Ambiguous
            return [TEXT]
        if kind == "any_text":
            return [TEXT]
        if kind == "regex":
            return [_automaton(form.get("pattern"))]
        if kind == "const_string":
            return [_text(form.get("value"))]
        if kind == "tag":
            return [self._tag(form, is_last=is_last)]
        if kind == "sequence":
            return self._sequence(_listed(form, "elements"), is_last=is_last)
        if kind == "or":
            return _either([self.of(item, is_last=is_last) for item in _listed(form, "elements")])
        if kind not in ("tags_with_separator", "triggered_tags"):
            raise _Ambiguous
        begins = _either([[self._tag(item, is_last=False)] for item in _listed(form, "tags")])
        _text(form.get("separator", ""))
        return begins if kind == "tags_with_separator" else [PARTS]

    def _tag(self, form: Any, *, is_last: bool) -> str:
        if not isinstance(form, dict):
            raise _Ambiguous
        begin, end = _text(form.get("begin")), _text(form.get("end"))
        content: Any = form.get("content")
        begins = self.of(content, is_last=is_last and not end)
        kind = content["type"]
        if kind in _OPEN and not end and not (is_last and self._by_brackets):
            raise _Ambiguous
        if kind == "tags_with_separator":
            for after in [content["separator"]] if content.get("separator") else begins:
                _check(after, end)
        return begin

    def _sequence(self, items: list[Any], *, is_last: bool) -> list[Any]:
        """Check that all elements but the last end in one way."""
        begins = [self.of(item, is_last=is_last and item is items[-1]) for item in items]
        for item, listed in zip(items[:-1], begins, strict=False):
            if item["type"] == "tags_with_separator" or not all(map(self._is_closed, listed)):
                raise _Ambiguous
        return begins[0] if begins else []

    def _is_closed(self, begin: Any) -> bool:
        if isinstance(begin, StringAutomaton):
            return self._by_brackets and not _has_brackets(begin)
        return begin is JSON or isinstance(begin, str)


def _has_brackets(automaton: StringAutomaton) -> bool:
    """Return whether a bracket that JSON may begin with is in any text of an automaton."""
    numbers = [automaton.classes.of(ord(char)) for char in "[{"]
    return any(row[number] != DEAD for row in automaton.transitions for number in numbers)


def _either(options: list[list[Any]]) -> list[Any]:
    for one, other in combinations(options, 2):
        for first in one:
            for second in other:
                _check(first, second)
    return [each for option in options for each in option]


def _check(one: Any, other: Any) -> None:
    """Raise _Ambiguous if both options may be in progress where a string begins."""
    if isinstance(other, str):
        one, other = other, one
    if not isinstance(one, str):
        # Without JSON in them, both options may be in progress at once.
        if PARTS in (one, other) or JSON in (one, other):
            raise _Ambiguous
        return
    if isinstance(other, str):
        differ = not one.startswith(other) and not other.startswith(one)
    elif isinstance(other, StringAutomaton):
        differ = _is_dead(other, one)
    else:
        differ = other is JSON and not _may_begin_json(one)
    if not differ:
        raise _Ambiguous


def _is_dead(automaton: StringAutomaton, text: str) -> bool:
    state = START
    for char in text:
        state = automaton.transitions[state][automaton.classes.of(ord(char))]
    return state == DEAD


def _may_begin_json(text: str) -> bool:
    return text[:1] in _JSON_FIRST and (len(text) < 2 or text[1] in _JSON_SECOND.get(text[0], (text[1],)))


def _automaton(pattern: Any) -> Any:
    try:
        parsed = parse(str(pattern), whole=True)
        return string_automaton(parsed.must, each_excluded(parsed.must_not))
    except (RegexError, AutomatonTooLarge):
        return TEXT


def _text(text: Any) -> str:
    if not isinstance(text, str) or not {PROBE.decode(), MATCHED.decode(), ENTRIES.decode()}.isdisjoint(text):
        raise _Ambiguous
    return text


def _listed(form: dict[str, Any], keyword: str) -> list[Any]:
    listed = form.get(keyword)
    if not isinstance(listed, list):
        raise _Ambiguous
    return listed
