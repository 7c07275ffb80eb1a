"""Character sets of regular expressions (ranges, Unicode properties, complements), and spellings of characters."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from ..sized_cache import sized_cache

MAX_CODE_POINT = 0x10FFFF
SET_BYTES = 160  # Memory of a range or of the name of a set.
MAX_FOLDED = 2_000
LAST_CASED = 0x1FFFF  # No letter beyond it has another case.
Range = tuple[int, int]

SHORT_ESCAPES = {0x22: '\\"', 0x5C: "\\\\", 0x08: "\\b", 0x0C: "\\f", 0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t"}
# Characters that a JSON string must escape: controls below U+0020, quote, backslash.
ESCAPED = (*range(0x20), 0x22, 0x5C)
_PLAIN = r"[^\x22\x5C\x00-\x1F]"
_LONG_ESCAPE = r"\\u00(?:0[0-7be-f]|1[0-9a-f])"
_NUM_LONG = len(ESCAPED) - len(SHORT_ESCAPES)
_SPELLED = re.compile(r'[\x00-\x1f"\\]')
# One character of a JSON string in its only permitted spelling.
JSON_CHAR = rf"(?:{_PLAIN}|\\[\x22\x5Cbfnrt]|{_LONG_ESCAPE})"


class _Escapes(dict[int, str]):
    """Rust regex for each code point: ASCII letters and digits as they are, all others as hexadecimal escapes."""

    def __missing__(self, code: int) -> str:
        return f"\\x{{{code:X}}}"


_ESCAPES = _Escapes({code: chr(code) for code in range(128) if chr(code).isalnum()})


@dataclass(frozen=True, slots=True)
class CharSet:
    """A set of code points: the union of ranges, properties and complements, or the complement of this union.

    Attributes:
        ranges: inclusive (first, last) pairs.
        properties: Unicode general categories by their Rust and ECMAScript name (``"L"``, ``"Nd"``).
        nested: complemented sets inside a class, as in ``[\\D_]``.
        negated: whether the set is the complement of this union.
    """

    ranges: tuple[Range, ...] = ()
    properties: tuple[str, ...] = ()
    nested: tuple[CharSet, ...] = ()
    negated: bool = False

    def __contains__(self, char: str) -> bool:
        code = ord(char)
        for first, last in self.ranges:  # first, as most sets have nothing else and this is a hot path
            if first <= code <= last:
                return not self.negated
        if not self.properties and not self.nested:
            return self.negated
        inside = any(unicodedata.category(char).startswith(name) for name in self.properties) or any(
            char in other for other in self.nested
        )
        return inside != self.negated

    @property
    def num_parts(self) -> int:
        """Ranges and properties, those of nested sets included."""
        return len(self.ranges) + len(self.properties) + sum(1 + each.num_parts for each in self.nested)

    def complement(self) -> CharSet:
        return CharSet(self.ranges, self.properties, self.nested, not self.negated)

    def to_rust(self) -> str:
        """Return the set as a character class of Rust's regex syntax."""
        inner = "".join(_rust_range(*pair) for pair in _without_surrogates(self.ranges))
        inner += "".join(rf"\p{{{name}}}" for name in self.properties)
        inner += "".join(other.to_rust() for other in self.nested)
        if not inner:
            return r"[\x{0}-\x{10FFFF}]" if self.negated else r"[\x{61}&&\x{62}]"
        return f"[{'^' if self.negated else ''}{inner}]"

    def to_json(self) -> str:
        """Return the Rust regex of the set's characters as a JSON string spells them; cached."""
        return _set_to_json(self)

    def _to_json(self) -> str:
        escaped = [code for code in ESCAPED if chr(code) in self]
        if len(escaped) == len(ESCAPED) and self.negated and not (self.ranges or self.properties or self.nested):
            return JSON_CHAR
        if not escaped:
            return self.to_rust()
        parts = [] if self._only_escaped() else [f"[{self.to_rust()}&&{_PLAIN}]"]
        parts += [rust_literal(json_spelling(chr(code))) for code in escaped if code in SHORT_ESCAPES]
        long = [f"{code:02x}" for code in escaped if code not in SHORT_ESCAPES]
        parts += [_LONG_ESCAPE] if len(long) == _NUM_LONG else [rf"\\u00(?:{'|'.join(long)})"] if long else []
        return f"(?:{'|'.join(parts)})" if parts else r"[\x{61}&&\x{62}]"

    def _only_escaped(self) -> bool:
        if self.negated or self.properties or self.nested:
            return False
        return all(code in ESCAPED for first, last in self.ranges for code in (first, last)) and all(
            last - first < 32 and all(code in ESCAPED for code in range(first, last + 1)) for first, last in self.ranges
        )


@sized_cache(4 << 20, lambda text, chars: len(text) + SET_BYTES * (1 + chars.num_parts))
def _set_to_json(chars: CharSet) -> str:
    return chars._to_json()


def union(sets: Iterable[CharSet]) -> CharSet:
    """Return the union of several sets."""
    ranges: list[Range] = []
    properties: list[str] = []
    nested: list[CharSet] = []
    for item in sets:
        if item.negated:
            nested.append(item)
        else:
            ranges += item.ranges
            properties += item.properties
            nested += item.nested
    return CharSet(tuple(ranges), tuple(dict.fromkeys(properties)), tuple(nested))


def single(char: str) -> CharSet:
    return CharSet(((ord(char), ord(char)),))


def fold_case(chars: CharSet, *, wide: bool) -> CharSet:
    """Return the set with the other cases of its letters added, for case-insensitive patterns.

    Args:
        chars: the set; a complement is returned as it is, so the sets that it excludes must have been folded.
        wide: whether to add each character that some reader takes for the same letter, as U+212A for ``k``; otherwise
            only those that all readers do.

    Raises:
        ValueError: the set is too large to fold letter by letter.
    """
    if chars.negated:
        return chars
    if sum(last - first for first, last in chars.ranges) > MAX_FOLDED:
        raise ValueError(f"a case-insensitive class of more than {MAX_FOLDED} characters")
    cases = _wide_cases() if wide else {}
    extra: set[int] = set()
    for first, last in chars.ranges:
        for code in range(first, last + 1):
            extra.update(cases.get(code, ()) if wide else _narrow_cases(code))
    return CharSet((*chars.ranges, *((code, code) for code in sorted(extra))), chars.properties, chars.nested)


def _narrow_cases(code: int) -> list[int]:
    """Return the other cases of a letter on which Python's ``re`` and readers that fold by Unicode's table agree."""
    char = chr(code)
    variants = {char.lower(), char.upper()} - {char, _new_pairs().get(char)}
    return [ord(each) for each in variants if len(each) == 1 and each.casefold() == char.casefold()]


@lru_cache(maxsize=1)
def _new_pairs() -> dict[str, str]:
    """Return the other case of each letter that got it in Unicode 16 or 17, which only some readers know as yet.

    Python has tables of Unicode 14 in version 3.11, and of Unicode 16 in version 3.14.
    """
    latin = {0x19B: 0xA7DC, 0x264: 0xA7CB, 0xA7CC: 0xA7CD, 0xA7CE: 0xA7CF, 0xA7D2: 0xA7D3, 0xA7D4: 0xA7D5}
    garay = {0x10D50 + letter: 0x10D70 + letter for letter in range(22)}
    beria_erfe = {0x16EA0 + letter: 0x16EBB + letter for letter in range(25)}
    pairs = latin | {0xA7DA: 0xA7DB, 0x1C89: 0x1C8A} | garay | beria_erfe
    return {chr(one): chr(other) for pair in pairs.items() for one, other in (pair, pair[::-1])}


@lru_cache(maxsize=1)
def _wide_cases() -> dict[int, tuple[int, ...]]:
    """Return all characters that any mapping of case joins with each letter, directly or by way of others."""
    groups: dict[str, set[str]] = {}

    def join(*texts: str) -> None:
        joined = {each for text in texts for each in groups.get(text, {text})}
        groups.update(dict.fromkeys(joined, joined))

    for char in map(chr, range(LAST_CASED + 1)):
        if char.swapcase() != char:
            join(char, char.lower(), char.upper(), char.title(), char.casefold())
    for pair in _new_pairs().items():
        join(*pair)
    # Unicode's simple mapping, which Python does not offer by itself, makes i of the capital letter with a dot.
    join("i", "\u0130")
    return {
        ord(char): tuple(ord(each) for each in joined if len(each) == 1 and each != char)
        for char, joined in groups.items()
        if len(char) == 1
    }


def json_spelling(char: str) -> str:
    """Return a character's spelling inside a JSON string: itself, a short escape, or ``\\u00xx``."""
    code = ord(char)
    if code in SHORT_ESCAPES:
        return SHORT_ESCAPES[code]
    return f"\\u{code:04x}" if code < 0x20 else char


def json_string(text: str) -> str:
    """Return the only permitted JSON spelling of a string, with quotes."""
    return f'"{_SPELLED.sub(lambda match: json_spelling(match[0]), text)}"'


def rust_literal(text: str) -> str:
    """Return the Rust regex that matches a text and nothing else."""
    return text.translate(_ESCAPES)


def _rust_range(first: int, last: int) -> str:
    low, high = rust_literal(chr(first)), rust_literal(chr(last))
    return low if first == last else f"{low}-{high}"


def _without_surrogates(ranges: Iterable[Range]) -> Iterable[Range]:
    for first, last in ranges:
        if first < 0xD800:
            yield first, min(last, 0xD7FF)
        if last > 0xDFFF:
            yield max(first, 0xE000), last
