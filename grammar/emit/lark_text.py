"""Rules of a Lark grammar, parsed far enough to find rules without a finite text, and short texts of rules."""

from __future__ import annotations

import re

from ..regex.ecma_regex import parse
from ..regex.regex_parser import Cat, RegexError, RegexNode
from ..rule_ends import TEXT, AllOf, OneOf, RulePart, RuleRef, Terminal, check_ends, optional

_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r\n]+|(?://|\#)[^\n]*|^[!?]+(?=\w)
        |%[^\n]*(?:\n(?:[ \t\r\n]|(?://|\#)[^\n]*)*\|[^\n]*)*)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*|<[^>\n]*>)
    |(?P<name>_*[A-Za-z][A-Za-z0-9_-]*)
    |(?P<count>\{\s*(?P<low>\d*)\s*(?P<comma>,?)\s*(?P<high>\d*)\s*\})
    |(?P<tilde>~\s*(?P<least>\d+)(?:\s*\.\.\s*(?P<most>\d+))?)
    |(?P<alias>->\s*\w+)
    |(?P<sign>\.\.|[()\[\]|?*+:])""",
    re.VERBOSE | re.MULTILINE,
)
_MOST_NESTED = 100
# A repeat is written out as separate copies if its count is at most the first limit and the grammar has fewer copies
# than the second limit. Without the second limit, nested repeats would double the copies with every few characters.
_MOST_REPEATS = 20
_MOST_COPIES = 1_000
# Kind and text of a token, and the smallest and largest count of a repeat; -1 for no limit.
_Token = tuple[str, str, int, int]
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "b": "\b", "v": "\v", "0": "\0"}
_DOT = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\.")
# The terminals of Lark's library that grammars of texts use.
COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "NUMBER": r"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?)",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
    "WS_INLINE": "[ \\t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}


class LarkUnread(Exception):
    """The text has a construct that is not read here; the compiler reports any fault in it."""


def check_lark(text: str) -> None:
    """Raise GrammarError for a rule that ``start`` reaches and that derives no finite text.

    A grammar with parts that this module cannot read is not checked here: the library's own compiler checks it.
    """
    try:
        rules = lark_rules(text)
    except LarkUnread:
        return
    check_ends("lark", rules, "start", frozenset(rules))


def lark_rules(text: str) -> dict[str, RulePart]:
    """Return all rules and terminals by name. Raises LarkUnread."""
    return _Reader(text).rules()


def lark_expression(pattern: str, flags: str) -> RegexNode:
    """Read a regular expression of a grammar, whose slashes are plain.

    Anchors at its edges are those of the terminal, as the library has it.

    Raises:
        RegexError: also for other anchors and for lookaheads.
    """
    # In Lark a dot is any character but a line feed.
    dot = r"[\s\S]" if "s" in flags else r"[^\n]"
    pattern = _DOT.sub(lambda part: dot if part[0] == "." else part[0], pattern)
    read = parse(("(?i)" if "i" in flags else "") + pattern, whole=True)
    if len(read.must) > 1 or read.must_not:
        raise RegexError("anchors and lookaheads are not supported")
    node = read.must[0]
    # Nothing is added before and behind an expression that matches as a whole.
    return node.items[1] if isinstance(node, Cat) else node


def lark_literal(literal: str) -> str:
    """Return the text of a string literal with its quotes."""

    def plain(match: re.Match[str]) -> str:
        code = match["code"] or match["short"]
        return chr(int(code, 16)) if code else _ESCAPES.get(match["char"], match["char"])

    pattern = r"\\(?:u(?P<code>[0-9a-fA-F]{4})|x(?P<short>[0-9a-fA-F]{2})|(?P<char>.))"
    return re.sub(pattern, plain, literal[1:-1])


class _Reader:
    """Recursive descent over the tokens of a text."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._at = 0
        self._copies_left = _MOST_COPIES

    def rules(self) -> dict[str, RulePart]:
        """Return all rules by name. Raises LarkUnread."""
        rules: dict[str, RulePart] = {}
        while self._at < len(self._tokens):
            name = self._tokens[self._at][1]
            if not self._begins_rule() or name in rules:
                raise LarkUnread
            self._at += 2
            rules[name] = self._choices(0)
        used = {each[1] for each in self._tokens if each[0] == "name"}
        if "start" not in rules or any(name not in rules for name in used if _is_rule(name)):
            raise LarkUnread
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
            raise LarkUnread
        parts = [self._sequence(depth)]
        while self._take("|"):
            parts.append(self._sequence(depth))
        return OneOf(tuple(parts))

    def _sequence(self, depth: int) -> RulePart:
        parts: list[RulePart] = []
        while self._at < len(self._tokens) and not self._begins_rule():
            kind, text, least, most = self._tokens[self._at]
            if kind == "sign" and text in "|)]":
                break
            self._at += 1
            if kind == "name":
                parts.append(RuleRef(text) if _is_rule(text) else Terminal(text))
            elif kind == "text":
                parts.append(Terminal(text))
            elif (kind, text) in (("sign", "("), ("sign", "[")):
                inner = self._choices(depth + 1)
                if not self._take(")" if text == "(" else "]"):
                    raise LarkUnread
                parts.append(inner if text == "(" else optional(inner))
            elif (kind, text) == ("sign", "..") and parts:
                # The first character of a range represents the whole range.
                self._at += 1
            elif parts and kind == "repeat":
                if most == 0:
                    parts[-1] = TEXT
                else:
                    parts[-1] = self._repeated(parts[-1], least) if least else optional(parts[-1])
            elif kind != "alias":
                raise LarkUnread
        return AllOf(tuple(parts))

    def _repeated(self, part: RulePart, least: int) -> RulePart:
        """Return a part repeated the least number of times, or fewer times if the parts would be too many."""
        size = _size(part)
        copies = min(least, _MOST_REPEATS, 1 + self._copies_left // size)
        self._copies_left -= (copies - 1) * size
        return AllOf((part,) * copies)


def _size(part: RulePart) -> int:
    """Return the number of parts in a part, itself included."""
    return 1 if isinstance(part, RuleRef | Terminal) else 1 + sum(map(_size, part.parts))


def _tokens(text: str) -> list[_Token]:
    found: list[_Token] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise LarkUnread
        at = match.end()
        kind = match.lastgroup if match.lastgroup in ("text", "name", "alias", "sign") else None
        if match["name"]:
            found.append(("name", match["name"], 1, 1))
        elif match["count"]:
            least = int(match["low"] or 0)
            most = match["high"] if match["comma"] else match["low"]
            found.append(("repeat", "", least, int(most) if most else -1))
        elif match["tilde"]:
            found.append(("repeat", "", int(match["least"]), int(match["most"] or match["least"])))
        elif match["sign"] in ("?", "*", "+"):
            found.append(("repeat", "", int(match[0] == "+"), 1 if match[0] == "?" else -1))
        elif kind is not None:
            found.append((kind, match[0], 1, 1))
    return found


def _is_rule(name: str) -> bool:
    return name.lstrip("_")[:1].islower()
