"""Field probabilities: computes the probability of each value in a JSON answer, among all values that were allowed.

The text of the answer is read byte by byte. The probability of a byte is a ratio: of the probability of those allowed
tokens that agree with the generated text before the byte and have a byte there, the share of the tokens that also agree
in this byte. The probability of a field is the product over its bytes. So the probability of a token that closes one
value and begins the next is divided between the two values, and other tokens that spell the same text count too. If a
text can be spelled in one way only, the product equals the product of the tokens' probabilities. Spaces between fields
are not a choice of value and do not count.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np

from ...grammar.schema.answer_fields import AnswerFields, Place
from ...grammar.schema.document import pointer_join
from ..types import AllowedLogprobs

_BLANKS = frozenset(b" \t\n\r")
_OF_NUMBERS = frozenset(b"0123456789+-.eE")
_LONGEST_NUMBER = 4_000
"""Largest number of characters of a number that is parsed; Python parses no integer of more than 4,300 digits."""
_LITERALS = (b"true", b"false", b"null")
_BEFORE_VALUE = _BLANKS | frozenset(b"]")
_NEXT = frozenset(b",}")
_FIRST = frozenset(b'"}')
_END = b"\xff"
"""Represents the text of an end token, because no UTF-8 text contains this byte."""


@dataclass(frozen=True, slots=True)
class FieldProbability:
    """The probability of the value generated at one place of a JSON answer, among all values that the schema allows
    there.

    Attributes:
        path: place in the answer, as a JSON Pointer.
        kind: ``value``, or ``presence`` for whether an optional property is present.
        value: the generated value; for ``presence``, True or False.
    """

    path: str
    kind: str
    value: Any
    probability: float


class _Step:
    """The allowed tokens at one position, grouped by the number of leading bytes that each shares with the sampled
    token.

    Args:
        drawn: bytes of the sampled token.
        allowed: (bytes, probability) of each allowed token.
    """

    def __init__(self, drawn: bytes, allowed: Sequence[tuple[bytes, float]]) -> None:
        # Index: number of leading bytes. Value: probability of the tokens that share exactly this many bytes; summed up
        # below.
        self._agreeing = [0.0] * (len(drawn) + 2)
        # Key: offset of the first byte in which a token differs. Value: probability by the token's byte at this offset.
        self._differing: defaultdict[int, dict[int, float]] = defaultdict(dict)
        for text, probability in allowed:
            length, other = _difference(drawn, text)
            self._agreeing[length] += probability
            if other is not None:
                masses = self._differing[length]
                masses[other] = masses.get(other, 0.0) + probability
        for length in range(len(drawn), 0, -1):
            self._agreeing[length] += self._agreeing[length + 1]
        self._agreeing.pop(0)

    def share(self, at: int, is_other: Callable[[int], bool]) -> float:
        """Return the probability of the sampled byte at ``at``, among this byte and those for which ``is_other`` is
        true.
        """
        agreeing = self._agreeing[at]
        others = sum(mass for byte, mass in self._differing.get(at, {}).items() if is_other(byte))
        return agreeing / (agreeing + others) if agreeing else 0.0

    def share_of_end(self, at: int) -> float:
        """Return the probability that a number ends before the sampled byte at ``at``, which does not belong to it."""
        masses = self._differing.get(at, {})
        longer = sum(mass for byte, mass in masses.items() if byte in _OF_NUMBERS)
        ended = self._agreeing[at] + sum(masses.values()) - longer
        return ended / (ended + longer) if ended else 0.0


def _difference(drawn: bytes, text: bytes) -> tuple[int, int | None]:
    """Return the number of leading bytes in which two tokens agree, and the byte of ``text`` after them.

    The second result is None if one of the tokens ends there.
    """
    most = min(len(drawn), len(text))
    if drawn[:most] == text[:most]:
        return most, None
    at = next(at for at in range(most) if drawn[at] != text[at])
    return at, text[at]


class _State(Enum):
    VALUE = auto()
    STRING = auto()
    NUMBER = auto()
    LITERAL = auto()
    FIRST_KEY = auto()
    NEXT_KEY = auto()
    KEY = auto()
    COLON = auto()
    AFTER = auto()
    WHOLE = auto()


@dataclass(slots=True)
class _Container:
    """An object or array of the answer that is not closed yet.

    Attributes:
        properties: properties of an object, in the order of the answer.
        optional: optional properties that are not yet known to be present or absent.
    """

    is_object: bool
    place: Place
    path: str
    properties: Mapping[str, Place] = field(default_factory=dict)
    optional: list[str] = field(default_factory=list)
    num_items: int = 0


class FieldReader:
    """Computes field probabilities from an answer, token by token.

    Args:
        token_bytes: returns the bytes of a token.
        ends: tokens that may end the answer and have no text in it.
    """

    def __init__(self, fields: AnswerFields, token_bytes: Callable[[int], bytes], ends: frozenset[int]) -> None:
        self._fields = fields
        self._token_bytes = token_bytes
        self._ends = ends
        self._containers: list[_Container] = []
        self._state = _State.VALUE
        self._place, self._path = fields.root, ""
        self._is_read = fields.has_choices(fields.root)
        self._text = bytearray()
        self._is_escaped = False
        self._probability = 1.0
        self._found: list[FieldProbability] = []

    def push(self, drawn: AllowedLogprobs) -> list[FieldProbability]:
        """Process the next token. Returns the fields that it completes."""
        data = self._text_of(drawn.token)
        if data == _END and self._state is not _State.NUMBER:
            return []
        step: _Step | None = None

        def made() -> _Step:
            nonlocal step
            step = step or _Step(data, self._allowed(drawn))
            return step

        for at, byte in enumerate(data):
            self._read(byte, at, made)
        found, self._found = self._found, []
        return found

    def _text_of(self, token: int) -> bytes:
        return _END if token in self._ends else self._token_bytes(token)

    def _allowed(self, drawn: AllowedLogprobs) -> list[tuple[bytes, float]]:
        ids = np.frombuffer(drawn.ids, np.int32).tolist()
        probabilities = np.exp(np.frombuffer(drawn.logprobs, np.float32).astype(np.float64)).tolist()
        return list(zip(map(self._text_of, ids), probabilities, strict=True))

    def _read(self, byte: int, at: int, step: Callable[[], _Step]) -> None:
        match self._state:
            case _State.STRING | _State.LITERAL | _State.KEY:
                self._read_text(byte, at, step)
            case _State.NUMBER if byte in _OF_NUMBERS:
                self._read_text(byte, at, step)
            case _State.NUMBER:
                self._end_number(at, step)
                self._read(byte, at, step)
            case _ if byte in _BLANKS:
                pass
            case _State.VALUE:
                self._begin_value(byte, at, step)
            case _State.FIRST_KEY | _State.AFTER:
                self._read_next(byte, at, step)
            case _State.NEXT_KEY:
                self._begin_text(byte, _State.KEY)
            case _State.COLON:
                self._state = _State.VALUE

    # The following methods read values.

    def _begin_value(self, byte: int, at: int, step: Callable[[], _Step]) -> None:
        if byte in b"{[":
            self._begin_container(byte)
            return
        if byte == ord("]"):
            self._end_container()
            return
        self._probability = 1.0
        if self._is_read:
            self._probability = step().share(at, lambda other: other not in _BEFORE_VALUE)
        state = _State.STRING if byte == ord('"') else _State.NUMBER if byte in b"-0123456789" else _State.LITERAL
        self._begin_text(byte, state)

    def _begin_text(self, byte: int, state: _State) -> None:
        self._text[:] = bytes((byte,))
        self._is_escaped = False
        self._state = state

    def _read_text(self, byte: int, at: int, step: Callable[[], _Step]) -> None:
        self._text.append(byte)
        if self._is_read:
            self._probability *= step().share(at, lambda other: True)
        if self._state is _State.LITERAL and bytes(self._text) in _LITERALS:
            self._end_value()
        elif self._state in (_State.STRING, _State.KEY):
            is_end = byte == ord('"') and not self._is_escaped
            self._is_escaped = byte == ord("\\") and not self._is_escaped
            if is_end:
                self._end_key() if self._state is _State.KEY else self._end_value()

    def _end_number(self, at: int, step: Callable[[], _Step]) -> None:
        if self._is_read:
            self._probability *= step().share_of_end(at)
        self._end_value()

    def _end_value(self) -> None:
        if self._is_read and not (self._state is _State.NUMBER and len(self._text) > _LONGEST_NUMBER):
            value = json.loads(bytes(self._text))
            if self._fields.is_choice(self._place, value):
                self._found.append(FieldProbability(self._path, "value", value, self._probability))
        self._leave_value()

    def _leave_value(self) -> None:
        self._state = _State.AFTER if self._containers else _State.WHOLE

    # The following methods read objects and arrays.

    def _begin_container(self, byte: int) -> None:
        new = _Container(byte == ord("{"), self._place, self._path)
        self._containers.append(new)
        if new.is_object:
            new.properties, optional = self._fields.properties(new.place), self._fields.optional(new.place)
            new.optional = [name for name in new.properties if name in optional]
            self._state = _State.FIRST_KEY
            self._is_read = bool(new.optional)
        else:
            self._begin_item(new)

    def _begin_item(self, array: _Container) -> None:
        self._place = self._fields.item(array.place, array.num_items)
        self._path = pointer_join(array.path, array.num_items)
        self._is_read = self._fields.has_choices(self._place)
        array.num_items += 1
        self._state = _State.VALUE

    def _end_container(self) -> None:
        self._containers.pop()
        self._leave_value()

    def _read_next(self, byte: int, at: int, step: Callable[[], _Step]) -> None:
        """Read the byte after ``{`` or a value, which begins a key, is a comma, or closes the object or array."""
        at_hand = self._containers[-1]
        if not at_hand.is_object:
            self._begin_item(at_hand) if byte == ord(",") else self._end_container()
            return
        self._is_read = bool(at_hand.optional)
        self._probability = 1.0
        if self._is_read:
            others = _FIRST if self._state is _State.FIRST_KEY else _NEXT
            self._probability = step().share(at, lambda other: other in others)
        if byte == ord("}"):
            self._pass_over(at_hand, at_hand.optional)
            self._end_container()
        elif byte == ord(","):
            self._state = _State.NEXT_KEY
        else:
            self._begin_text(byte, _State.KEY)

    def _end_key(self) -> None:
        at_hand, name = self._containers[-1], json.loads(bytes(self._text))
        names = list(at_hand.properties)
        if name in at_hand.properties:
            before = set(names[: names.index(name)])
            self._pass_over(at_hand, [each for each in at_hand.optional if each in before])
        if name in at_hand.optional:
            self._tell_presence(at_hand, name, is_present=True)
        at_hand.optional = [each for each in at_hand.optional if each != name]
        self._place = at_hand.properties.get(name, ())
        self._path = pointer_join(at_hand.path, name)
        self._is_read = self._fields.has_choices(self._place)
        self._state = _State.COLON

    def _pass_over(self, at_hand: _Container, names: Sequence[str]) -> None:
        """Report that optional properties are absent, with the probability of the text generated in their place."""
        for name in names:
            self._tell_presence(at_hand, name, is_present=False)
        at_hand.optional = [each for each in at_hand.optional if each not in names]

    def _tell_presence(self, at_hand: _Container, name: str, *, is_present: bool) -> None:
        path = pointer_join(at_hand.path, name)
        self._found.append(FieldProbability(path, "presence", is_present, self._probability))
