"""Rules of a Lark grammar's text, read far enough to tell which of them derive no finite text."""

from __future__ import annotations

import re

from ..rule_ends import TEXT, AllOf, OneOf, RulePart, RuleRef, check_ends, optional

_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r\n]+|(?://|\#)[^\n]*|%[^\n]*|^[!?]+(?=\w))
    |(?P<text>"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*|<[^>\n]*>)
    |(?P<name>_*[A-Za-z][A-Za-z0-9_-]*)
    |(?P<count>\{\s*(?P<low>\d*)\s*(?P<comma>,?)\s*(?P<high>\d*)\s*\})
    |(?P<tilde>~\s*(?P<least>\d+)(?:\s*\.\.\s*(?P<most>\d+))?)
    |(?P<alias>->\s*\w+)
    |(?P<sign>\.\.|[()\[\]|?*+:])""",
    re.VERBOSE | re.MULTILINE,
)
_MOST_NESTED = 100
# Kind and text. The flags are those of a repeat: whether it may be empty, and whether it must be.
_Token = tuple[str, str, bool, bool]


class _Unread(Exception):
    """The text has something that is not read here; the compiler tells what is wrong, if anything is."""


def check_lark(text: str) -> None:
    """Raise GrammarError for a rule that ``start`` reaches and that derives no finite text.

    A grammar with parts that are not read here is left to the compiler.
    """
    try:
        rules = _Reader(text).rules()
    except _Unread:
        return
    check_ends("lark", rules, "start", frozenset(rules))


class _Reader:
    """Recursive descent over the tokens of a text."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._at = 0

    def rules(self) -> dict[str, RulePart]:
        """Return all rules by name. Raises _Unread."""
        rules: dict[str, RulePart] = {}
        while self._at < len(self._tokens):
            name = self._tokens[self._at][1]
            if not self._begins_rule() or name in rules:
                raise _Unread
            self._at += 2
            rules[name] = self._choices(0)
        used = {each[1] for each in self._tokens if each[0] == "name"}
        if "start" not in rules or any(name not in rules for name in used if _is_rule(name)):
            raise _Unread
        return rules

    def _begins_rule(self) -> bool:
        after = self._tokens[self._at + 1 : self._at + 2]
        return self._tokens[self._at][0] == "name" and bool(after) and after[0][1] == ":"

    def _take(self, sign: str) -> bool:
        found = self._at < len(self._tokens) and self._tokens[self._at][:2] == ("sign", sign)
        self._at += found
        return found

    def _choices(self, depth: int) -> RulePart:
        if depth > _MOST_NESTED:
            raise _Unread
        parts = [self._sequence(depth)]
        while self._take("|"):
            parts.append(self._sequence(depth))
        return OneOf(tuple(parts))

    def _sequence(self, depth: int) -> RulePart:
        parts: list[RulePart] = []
        while self._at < len(self._tokens) and not self._begins_rule():
            kind, text, may_skip, must_skip = self._tokens[self._at]
            if kind == "sign" and text in "|)]":
                break
            self._at += 1
            if kind == "name":
                parts.append(RuleRef(text) if _is_rule(text) else TEXT)
            elif kind == "text":
                parts.append(TEXT)
            elif (kind, text) in (("sign", "("), ("sign", "[")):
                inner = self._choices(depth + 1)
                if not self._take(")" if text == "(" else "]"):
                    raise _Unread
                parts.append(inner if text == "(" else optional(inner))
            elif (kind, text) == ("sign", "..") and parts:
                # The sign stands between the two texts of a range, which are parts already.
                continue
            elif parts and (kind == "repeat" or (kind == "sign" and text in "?*+")):
                if must_skip:
                    parts[-1] = TEXT
                elif may_skip or text in ("?", "*"):
                    parts[-1] = optional(parts[-1])
            elif kind != "alias":
                raise _Unread
        return AllOf(tuple(parts))


def _tokens(text: str) -> list[_Token]:
    found: list[_Token] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _Unread
        at = match.end()
        kind = match.lastgroup if match.lastgroup in ("text", "name", "alias", "sign") else None
        if match["name"]:
            found.append(("name", match["name"], False, False))
        elif match["count"]:
            least = int(match["low"] or 0)
            most = match["high"] if match["comma"] else match["low"]
            found.append(("repeat", "", least == 0, most != "" and int(most) == 0))
        elif match["tilde"]:
            most = match["most"] or match["least"]
            found.append(("repeat", "", int(match["least"]) == 0, int(most) == 0))
        elif kind is not None:
            found.append((kind, match[0], False, False))
    return found


def _is_rule(name: str) -> bool:
    return name.lstrip("_")[:1].islower()
