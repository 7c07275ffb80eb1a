"""Decoder of the bytes of a JSON string: UTF-8 and escapes become the character classes of an automaton."""

from __future__ import annotations

from array import array
from collections.abc import Container

import numpy as np
from numpy.typing import NDArray

from ..regex.char_classes import CharClasses
from ..regex.charset import ESCAPED, SHORT_ESCAPES, json_spelling
from ..sized_cache import sized_cache

QUOTE, BACKSLASH = 0x22, 0x5C
# Returned for a byte that completes no character.
NOTHING = 254
# Two decoder states; all other states are in the middle of a character.
CLEAN, INVALID = 0, 1
_CONTINUATION = range(0x80, 0xC0)
_COMMON = (*b"a0A -_.:/1", *range(0x20, 0x7F), 0xE000)


class JsonChars:
    """The decoder for one partition of the characters into classes.

    Each character has exactly one spelling that the grammar admits. The quote that closes the string has a class of its
    own (`closing`); bytes after it are ignored.

    Attributes:
        closing: number of the class of the closing quote.
        stay: number of a class that leaves the automaton in its state; used for padding.
        next: uint16 [states, 256], the state after a byte.
        emits: uint8 [states, 256], the class of the character that a byte completes, or `NOTHING`.
        next_rows, emits_rows: `next` and `emits` with one object for each row, which is faster to read byte by byte.
        reach: for each state, the classes of the characters that may complete the one that has begun, ascending; empty
            outside of a character.
        num_bytes: size in memory.
    """

    def __init__(self, classes: CharClasses) -> None:
        if classes.num > NOTHING - 2:
            raise ValueError(f"{classes.num} character classes; the limit is {NOTHING - 2}")
        self.classes = classes
        self.closing, self.stay = classes.num, classes.num + 1
        self._rows: list[dict[int, tuple[int, int]]] = [{}, {}]
        self._numbers: dict[tuple[tuple[int, tuple[int, int]], ...], int] = {}
        self._spelled: dict[int, bytes] = {}
        self._rows[CLEAN] = self._clean()
        num = len(self._rows)
        self.next: NDArray[np.uint16] = np.full((num, 256), INVALID, dtype=np.uint16)
        self.emits: NDArray[np.uint8] = np.full((num, 256), NOTHING, dtype=np.uint8)
        for state, row in enumerate(self._rows):
            for byte, (after, emitted) in row.items():
                self.next[state, byte], self.emits[state, byte] = after, emitted
        # Lists of Python integers would take eight times the memory: some megabytes for the letters of all languages.
        self.next_rows: list[array[int]] = [array("H", row.tobytes()) for row in self.next]
        self.emits_rows: list[bytes] = [row.tobytes() for row in self.emits]
        self.reach = [self._reach(state) if state > INVALID else () for state in range(num)]
        del self._rows, self._numbers
        self.num_bytes = 1800 * num + sum(80 + 8 * len(each) for each in self.reach)

    def spelling(self, number: int) -> bytes:
        """Return the bytes of a common character of a class, spelled as in a JSON string. Cached."""
        known = self._spelled.get(number)
        if known is None:
            known = self._spelled[number] = self._spelling(number)
        return known

    def _spelling(self, number: int) -> bytes:
        codes = (code for code in _COMMON if self.classes.of(code) == number)
        code = next(codes, None)
        if code is None:
            starts = zip(self.classes.starts, self.classes.classes, strict=True)
            code = next(start for start, each in starts if each == number and not 0xD800 <= start <= 0xDFFF)
        return json_spelling(chr(code)).encode()

    def completions(self, state: int, usable: Container[int]) -> dict[int, bytes]:
        """Return, for each class in ``usable`` that may complete the present character, bytes that complete it."""
        found: dict[int, bytes] = {}
        nexts, emits = self.next_rows[state], self.emits_rows[state]
        for byte, after in enumerate(nexts):
            if after == INVALID or byte not in usable:
                continue
            emitted = emits[byte]
            if after == CLEAN:
                found.setdefault(emitted, bytes((byte,)))
            else:
                for number, rest in self.completions(after, usable).items():
                    found.setdefault(number, bytes((byte, *rest)))
        return found

    def _clean(self) -> dict[int, tuple[int, int]]:
        row = {byte: (CLEAN, self.classes.of(byte)) for byte in range(0x20, 0x80)}
        row[QUOTE] = CLEAN, self.closing
        row[BACKSLASH] = self._escape(), NOTHING
        for lead in (*range(0xC2, 0xE0), *range(0xE0, 0xF0), *range(0xF0, 0xF5)):
            length = 1 if lead < 0xE0 else 2 if lead < 0xF0 else 3
            bits = lead & (0x1F, 0x0F, 0x07)[length - 1]
            state = self._rest(bits, length, (0x80, 0x800, 0x10000)[length - 1])
            if state != INVALID:
                row[lead] = state, NOTHING
        return row

    def _rest(self, bits: int, length: int, least: int) -> int:
        """Return the state in which ``length`` more bytes of a character must follow."""
        first, last = bits << 6 * length, ((bits + 1) << 6 * length) - 1
        if last < least or first > 0x10FFFF or (first >= 0xD800 and last <= 0xDFFF):
            return INVALID
        only = self.classes.only(first, last)
        if only is not None and first >= least and last <= 0x10FFFF and not (first <= 0xDFFF and last >= 0xD800):
            return self._uniform(only, length)
        row: dict[int, tuple[int, int]] = {}
        for byte in _CONTINUATION:
            code = bits << 6 | byte & 0x3F
            if length > 1:
                state = self._rest(code, length - 1, least)
                if state != INVALID:
                    row[byte] = state, NOTHING
            elif code >= least and not 0xD800 <= code <= 0xDFFF and code <= 0x10FFFF:
                row[byte] = CLEAN, self.classes.of(code)
        return self._number(row)

    def _uniform(self, number: int, length: int) -> int:
        after = (self._uniform(number, length - 1), NOTHING) if length > 1 else (CLEAN, number)
        return self._number(dict.fromkeys(_CONTINUATION, after))

    def _escape(self) -> int:
        """Return the state after a backslash."""
        spelled: dict[bytes, int] = {}
        for code in ESCAPED:
            spelled[json_spelling(chr(code)).encode()[1:]] = self.classes.of(code)
        assert len(spelled) >= len(SHORT_ESCAPES)
        return self._prefix(spelled)

    def _prefix(self, spelled: dict[bytes, int]) -> int:
        row: dict[int, tuple[int, int]] = {}
        for byte in {text[0] for text in spelled}:
            rest = {text[1:]: number for text, number in spelled.items() if text[0] == byte}
            row[byte] = (CLEAN, rest[b""]) if b"" in rest else (self._prefix(rest), NOTHING)
        return self._number(row)

    def _number(self, row: dict[int, tuple[int, int]]) -> int:
        """Return the number of the state that has these transitions; it is added if it is new."""
        if not row:
            return INVALID
        key = tuple(sorted(row.items()))
        if key not in self._numbers:
            self._numbers[key] = len(self._rows)
            self._rows.append(row)
        return self._numbers[key]

    def _reach(self, state: int) -> tuple[int, ...]:
        found: set[int] = set()
        for after, emitted in set(self._rows[state].values()):
            found |= {emitted} if after == CLEAN else set(self._reach(after))
        return tuple(sorted(found))


# The cache holds some hundreds of decoders of usual size, and at least one of the largest.
@sized_cache(32 << 20, lambda made, _: made.num_bytes)
def json_chars(classes: CharClasses) -> JsonChars:
    return JsonChars(classes)
