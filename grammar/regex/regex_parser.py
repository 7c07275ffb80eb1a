"""Parser of ECMA-262 patterns into a syntax tree; Python's extensions are accepted where they are unambiguous."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from .charset import MAX_CODE_POINT, CharSet, fold_case, single, union

MAX_NESTING = 50
MAX_REPEAT = 10_000


class RegexError(Exception):
    """A pattern that cannot be used, with the reason."""


class Anchor(Enum):
    """The beginning or end of the string."""

    START = "^"
    END = "$"


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of a set."""

    chars: CharSet


@dataclass(frozen=True, slots=True)
class Cat:
    """A concatenation; of nothing, the empty string."""

    items: tuple[RegexNode, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of several expressions."""

    items: tuple[RegexNode, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """An expression `least` to `most` times (None: unbounded)."""

    item: RegexNode
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Lookahead:
    """A lookahead, its source not yet parsed; ``fold`` says whether the letters of its source have no case."""

    source: str
    negative: bool
    fold: bool


RegexNode: TypeAlias = "Chars | Cat | Alt | Repeat | Lookahead | Anchor"

_DIGIT = CharSet(((0x30, 0x39),))
_WORD = CharSet(((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)))
_SPACE = CharSet(((9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
                  (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)))  # fmt: skip
_WIDE = {
    "d": CharSet(_DIGIT.ranges, ("Nd",)),
    "w": CharSet(_WORD.ranges, ("L", "N", "M", "Pc")),
    "s": CharSet((*_SPACE.ranges, (0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF))),
}
_NARROW = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_CATEGORY = re.compile(r"\{(?:gc=|General_Category=)?(L[ulmot]?|N[dlo]?|M[nce]?|S[cmko]?|Letter|Number|Mark)\}")
_LONG_NAMES = {"Letter": "L", "Number": "N", "Mark": "M"}


def parse_nodes(pattern: str, *, wide: bool, fold: bool = False) -> RegexNode:
    """Parse a pattern; anchors and lookaheads stay in place.

    Args:
        pattern: the pattern in ECMA-262 syntax.
        wide: whether classes have the characters that at least one validator includes; otherwise only characters that
            all validators include.
        fold: whether letters have no case, as after ``(?i)`` at the beginning.

    Raises:
        RegexError: the pattern cannot be parsed or is not supported.
    """
    flags = re.match(r"\(\?i\)", pattern)
    parser = _Parser(pattern[flags.end() :] if flags else pattern, wide, fold=fold or bool(flags))
    node = parser.alternatives(0)
    if parser.at < len(parser.text):
        raise RegexError(f"unmatched ')' at position {parser.at}")
    return node


class _Parser:
    def __init__(self, text: str, wide: bool, fold: bool) -> None:
        self.text = text
        self.at = 0
        self.wide = wide
        self.fold = fold

    def peek(self, length: int = 1) -> str:
        return self.text[self.at : self.at + length]

    def next_char(self) -> str:
        if self.at >= len(self.text):
            raise RegexError("it ends too early")
        self.at += 1
        return self.text[self.at - 1]

    def alternatives(self, depth: int) -> RegexNode:
        if depth > MAX_NESTING:
            raise RegexError(f"more than {MAX_NESTING} groups inside each other")
        options = [self.sequence(depth)]
        while self.peek() == "|":
            self.at += 1
            options.append(self.sequence(depth))
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def sequence(self, depth: int) -> RegexNode:
        items: list[RegexNode] = []
        while self.peek() not in ("", "|", ")"):
            items.append(self.quantified(self.atom(depth)))
        return items[0] if len(items) == 1 else Cat(tuple(items))

    def quantified(self, item: RegexNode) -> RegexNode:
        bounds = self.quantifier()
        if bounds is None:
            return item
        if isinstance(item, Anchor | Lookahead):
            raise RegexError("a repeated anchor or lookaround")
        if self.peek() == "?":
            self.at += 1  # lazy or greedy is the same language
        elif self.peek() in ("+", "*") or self.quantifier() is not None:
            raise RegexError(f"nothing to repeat at position {self.at}")
        return Repeat(item, *bounds)

    def quantifier(self) -> tuple[int, int | None] | None:
        char = self.peek()
        if char in ("*", "+", "?") and char:
            self.at += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        match = _COUNT.match(self.text, self.at)
        if not match or not match[1] + match[3]:
            return None
        if not match[1]:
            raise RegexError(f"{match[0]!r} is text in some regex dialects and a repeat in others")
        self.at = match.end()
        least = int(match[1] or 0)
        most = int(match[3]) if match[3] else None if match[2] else least
        if max(least, most or 0) > MAX_REPEAT:
            raise RegexError(f"a repeat count of {max(least, most or 0)}; the limit is {MAX_REPEAT}")
        if most is not None and most < least:
            raise RegexError(f"a repeat from {least} to {most}")
        return least, most

    def atom(self, depth: int) -> RegexNode:
        start = self.at
        char = self.next_char()
        if char == "(":
            return self.group(depth)
        if char == "[":
            return Chars(self.char_class())
        if char == ".":
            dot = ((10, 10),) if self.wide else ((10, 10), (13, 13), (0x2028, 0x2029))
            return Chars(CharSet(dot, negated=True))
        if char == "^":
            return Anchor.START
        if char == "$":
            return Anchor.END
        if char == "\\":
            return Chars(self.folded(self.escape(in_class=False)))
        if char in "*+?":
            raise RegexError(f"nothing to repeat at position {start}")
        return Chars(self.folded(single(char)))

    def folded(self, chars: CharSet) -> CharSet:
        """Return a set with all cases of its letters if letters have no case here, by the present reading."""
        try:
            return fold_case(chars, wide=self.wide) if self.fold else chars
        except ValueError as error:
            raise RegexError(str(error)) from None

    def group(self, depth: int) -> RegexNode:
        if self.peek() == "?":
            if self.peek(2) in ("?=", "?!"):
                return self.lookahead()
            if self.peek(3) in ("?<=", "?<!"):
                raise RegexError("a lookbehind")
            opening = re.compile(r"\?(?::|P?<[A-Za-z_]\w*>)").match(self.text, self.at)
            if not opening:
                raise RegexError(f"the group {'(' + self.peek(3)!r} is unknown")
            self.at = opening.end()
        node = self.alternatives(depth + 1)
        if self.next_char() != ")":
            raise RegexError("a group is not closed")
        return node

    def lookahead(self) -> RegexNode:
        negative = self.peek(2) == "?!"
        self.at += 2
        start = self.at
        inner = _Parser(self.text, self.wide, self.fold)
        inner.at = start
        inner.alternatives(1)
        self.at = inner.at
        if self.next_char() != ")":
            raise RegexError("a lookahead is not closed")
        return Lookahead(self.text[start : self.at - 1], negative, self.fold)

    def char_class(self) -> CharSet:
        negated = self.peek() == "^"
        self.at += negated
        self.wide ^= negated  # the complement of a wide reading is a narrow one
        items: list[CharSet] = []
        while self.peek() != "]":
            items.append(self.class_range())
        if not items and "]" in self.text[self.at + 1 :]:
            raise RegexError("'[]' is an empty class in some regex dialects, and begins with ']' in others")
        self.at += 1
        self.wide ^= negated
        return union(items).complement() if negated else union(items)

    def class_range(self) -> CharSet:
        low = self.class_item()
        if self.peek() != "-" or self.peek(2) in ("-]", "-"):
            return self.folded(low)
        self.at += 1
        high = self.class_item()
        first, last = _only(low), _only(high)
        if first is None or last is None:
            return union((self.folded(low), single("-"), self.folded(high)))
        if first > last:
            raise RegexError(f"the range {chr(first)}-{chr(last)} is out of order")
        return self.folded(CharSet(((first, last),)))

    def class_item(self) -> CharSet:
        char = self.next_char()
        return self.escape(in_class=True) if char == "\\" else single(char)

    def escape(self, *, in_class: bool) -> CharSet:
        char = self.next_char()
        if char in "dws":
            return (_WIDE if self.wide else _NARROW)[char]
        if char in "DWS":
            return (_NARROW if self.wide else _WIDE)[char.lower()].complement()
        if char in _CONTROLS:
            return single(_CONTROLS[char])
        if char == "b" and in_class:
            return single("\b")
        if char in "bB":
            raise RegexError("a word boundary")
        if char == "c" and self.peek().isalpha():
            return single(chr(ord(self.next_char()) % 32))
        if char in "xu":
            return self.code_point(char)
        if char in "pP":
            return self.category(char)
        return self.identity(char)

    def identity(self, char: str) -> CharSet:
        if char == "0" and not self.peek().isdigit():
            return single("\0")
        if char.isdigit() or char == "k":
            raise RegexError("a back-reference")
        if char.isascii() and char.isalpha():
            raise RegexError(f"the escape '\\{char}' is unknown")
        return single(char)

    def code_point(self, kind: str) -> CharSet:
        if kind == "u" and self.peek() == "{":
            match = re.compile(r"\{([0-9a-fA-F]{1,6})\}").match(self.text, self.at)
        else:
            match = re.compile(rf"([0-9a-fA-F]{{{2 if kind == 'x' else 4}}})").match(self.text, self.at)
        if not match:
            raise RegexError(f"a bad '\\{kind}' escape")
        self.at = match.end()
        code = int(match[1], 16)
        low = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self.text, self.at)
        if 0xD800 <= code < 0xDC00 and low:
            self.at = low.end()
            code = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if code > MAX_CODE_POINT or 0xD800 <= code < 0xE000:
            raise RegexError("half of a surrogate pair")
        return single(chr(code))

    def category(self, kind: str) -> CharSet:
        match = _CATEGORY.match(self.text, self.at)
        if not match:
            raise RegexError("a Unicode property other than letters, numbers, marks and symbols")
        if self.fold and match[1][0] in "LM":
            raise RegexError(
                f"'\\{kind}{match[0]}' without case, which means different letters in different regex dialects"
            )
        self.at = match.end()
        chars = CharSet(properties=(_LONG_NAMES.get(match[1], match[1]),))
        return chars if kind == "p" else chars.complement()


def _only(chars: CharSet) -> int | None:
    """Return the code point of a set of one, else None."""
    simple = len(chars.ranges) == 1 and not (chars.negated or chars.properties or chars.nested)
    return chars.ranges[0][0] if simple and chars.ranges[0][0] == chars.ranges[0][1] else None
