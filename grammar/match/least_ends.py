"""Least ends: the fewest tokens to an end of the answer, exact for choices and regular expressions.

For each state of such a language, a shortest path over the vocabulary's tokens is computed. So the tokens after which
an end still fits in a budget are known without a search. For choices, a state is the text so far; for a regular
expression, it is a state of the automaton over bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..regex.string_automaton import DEAD, START, StringAutomaton
from ..vocabulary import Vocabulary
from .backends import Row
from .token_classes import text_bytes

# Limits of the number of states of an expression's automaton, and of the bytes of its longest way to an end. Beyond
# them the general search is used.
MAX_NODES = 400
MAX_BYTES = 400
NONE = -1
UNREACHED = 1 << 20
State: TypeAlias = bytes | int


class LeastEnds(Protocol):
    """The fewest tokens to an end from each state of one language. Shared by all answers and all threads.

    Attributes:
        most: upper bound of the fewest tokens to an end, over all states from which an end can be reached.
    """

    @property
    def most(self) -> int: ...

    @property
    def start(self) -> State: ...

    def after(self, state: State, token: int) -> State:
        """Return the state after a token that the grammar allows."""

    def least(self, state: State) -> int:
        """Return the fewest tokens to an end; 0 if the answer may end in this state."""

    def fitting(self, state: State, most: int) -> Row:
        """Return the mask of the text tokens after which an end of at most ``most`` tokens follows."""

    def shortest(self) -> tuple[int, ...] | None:
        """Return the answer of the fewest tokens; None if the tokens of the vocabulary cannot spell any answer."""


def _shortest(ends: LeastEnds) -> tuple[int, ...] | None:
    state, found = ends.start, list[int]()
    if ends.least(state) >= UNREACHED:
        return None
    while left := ends.least(state):
        words = ends.fitting(state, left - 1).view(np.uint32)
        word = int(np.flatnonzero(words)[0])
        found.append(32 * word + (int(words[word]) & -int(words[word])).bit_length() - 1)
        state = ends.after(state, found[-1])
    return tuple(found)


class ChoiceEnds:
    """The least ends of a list of texts. A state is the bytes so far."""

    def __init__(self, options: Sequence[str], vocabulary: Vocabulary) -> None:
        self._options = sorted({option.encode() for option in options})
        self._vocabulary = vocabulary
        self._counts: dict[bytes, list[int]] = {}
        self.most = max(map(len, self._options), default=0)
        self.start = b""

    def after(self, state: State, token: int) -> State:
        assert isinstance(state, bytes)
        return state + self._vocabulary.tokens[token]

    def least(self, state: State) -> int:
        assert isinstance(state, bytes)
        return min((self._counted(option)[len(state)] for option in self._under(state)), default=UNREACHED)

    def fitting(self, state: State, most: int) -> Row:
        """See `LeastEnds.fitting`."""
        assert isinstance(state, bytes)
        begin, row = len(state), np.zeros(self._vocabulary.num_words, dtype=np.uint32)
        for option in self._under(state):
            counts = self._counted(option)
            for end in range(begin + 1, len(option) + 1):
                token = self._vocabulary.token_of(option[begin:end]) if counts[end] <= most else None
                if token is not None:
                    row[token >> 5] |= np.uint32(1 << (token & 31))
        return row.view(np.int32)

    def shortest(self) -> tuple[int, ...] | None:
        return _shortest(self)

    def _under(self, prefix: bytes) -> list[bytes]:
        """Return the options that start with ``prefix``."""
        first = bisect_left(self._options, prefix)
        return self._options[first : bisect_left(self._options, prefix + b"\xff", first)]

    def _counted(self, option: bytes) -> list[int]:
        counts = self._counts.get(option)
        if counts is None:
            counts = self._counts[option] = self._vocabulary.fewest_counts(option)
        return counts


class _Rest(NamedTuple):
    """A state within a character whose class is known: the state after it, its remaining bytes, and the next ones."""

    target: int
    left: int
    low: int = 0x80
    high: int = 0xBF


class _Part(NamedTuple):
    """A state within a character whose class is not yet known: the state before it, and its bytes so far."""

    state: int
    data: bytes


_Node: TypeAlias = int | _Rest | _Part  # An int is a state of the automaton between two characters.


class LanguageTooLarge(Exception):
    """The automaton has more states, or longer ways to an end, than the computation byte by byte allows."""


class RegularEnds:
    """The least ends of a regular language, computed from its automaton over code points.

    The automaton is followed byte by byte, because a token may end in the middle of a character.

    Raises:
        LanguageTooLarge: the automaton has too many states, or too long ways to an end.
    """

    def __init__(self, automaton: StringAutomaton, vocabulary: Vocabulary) -> None:
        if len(automaton.accepting) > MAX_NODES or automaton.last_count:
            raise LanguageTooLarge
        self._automaton = automaton
        self._vocabulary = vocabulary
        self._nodes: list[_Node] = []
        self._numbers: dict[_Node, int] = {}
        self._rows: list[NDArray[np.int32]] = []
        # Key of the tables of states after each token in the vocabulary's cache; they take some megabytes in all.
        self._key = object()
        self.start = self._number(START)
        self._counts = self._count(self._explore())
        self.most = 4 * self._longest + 4

    @cached_property
    def _longest(self) -> int:
        """Largest number of characters of a shortest way to an end, over all states."""
        counts = {state for state, ends in enumerate(self._automaton.accepting) if ends}
        longest, found = 0, set(counts)
        while counts:
            counts = {
                state
                for state, row in enumerate(self._automaton.transitions)
                if state not in found and not found.isdisjoint(row)
            }
            found |= counts
            longest += bool(counts)
        if 4 * longest > MAX_BYTES:
            raise LanguageTooLarge
        return longest

    def after(self, state: State, token: int) -> State:
        """See `LeastEnds.after`."""
        assert isinstance(state, int)
        for byte in self._vocabulary.tokens[token]:
            state = NONE if state == NONE else int(self._rows[state][byte])
        return state

    def least(self, state: State) -> int:
        assert isinstance(state, int)
        return UNREACHED if state == NONE else int(self._counts[state])

    def fitting(self, state: State, most: int) -> Row:
        """See `LeastEnds.fitting`."""
        assert isinstance(state, int)
        allowed = np.zeros(self._vocabulary.num_words * 32, dtype=np.bool_)
        if state != NONE:
            ids = text_bytes(self._vocabulary)[3]
            targets = self._after(state)
            allowed[ids] = (targets != NONE) & (self._counts[targets] <= most)
        row: Row = np.packbits(allowed, bitorder="little").view(np.int32)
        return row

    def shortest(self) -> tuple[int, ...] | None:
        return _shortest(self)

    def _explore(self) -> list[NDArray[np.int32]]:
        """Return, for each state that can be reached from the start, the states after each token."""
        reached: list[NDArray[np.int32]] = []
        while len(reached) < len(self._nodes):
            after = np.unique(self._walk(len(reached)))
            reached.append(after[after != NONE])
        return reached

    def _count(self, reached: list[NDArray[np.int32]]) -> NDArray[np.int32]:
        """Return the fewest tokens to an end of each state, computed breadth first from the ends."""
        counts = np.full(len(self._nodes), UNREACHED, dtype=np.int32)
        for number, node in enumerate(self._nodes):
            if isinstance(node, int) and self._automaton.accepting[node]:
                counts[number] = 0
        for count in range(1, len(self._nodes) + 1):
            found = [
                number
                for number, after in enumerate(reached)
                if counts[number] == UNREACHED and (counts[after] == count - 1).any()
            ]
            counts[found] = count
        return counts

    def _after(self, number: int) -> NDArray[np.int32]:
        """Return the result of ``_walk``, cached."""
        key, cache = (self._key, number), self._vocabulary.cache
        known: NDArray[np.int32] | None = cache.get(key)
        if known is None:
            known = self._walk(number)
            cache.put(key, known, known.nbytes)
        return known

    def _walk(self, number: int) -> NDArray[np.int32]:
        """Return the states after each text token, from one state; ``NONE`` for a token that cannot follow."""
        data, starts, lengths, _ = text_bytes(self._vocabulary)
        states = np.full(len(starts), number, dtype=np.int32)
        active, at = np.arange(len(starts)), 0
        while len(active):
            before = states[active]
            targets = np.full(len(active), NONE, dtype=np.int32)
            for state in np.unique(before).tolist():
                some = before == state
                targets[some] = self._row(state)[data[starts[active[some]] + at]]
            states[active] = targets
            at += 1
            active = active[(targets != NONE) & (lengths[active] > at)]
        return states

    def _number(self, node: _Node) -> int:
        number = self._numbers.get(node)
        if number is None:
            number = self._numbers[node] = len(self._nodes)
            if number > MAX_NODES:
                raise LanguageTooLarge
            self._nodes.append(node)
            self._rows.append(np.zeros(0, dtype=np.int32))
        return number

    def _row(self, number: int) -> NDArray[np.int32]:
        """Return the states after each byte, from one state."""
        row = self._rows[number]
        if not len(row):
            row = self._rows[number] = np.array(
                [self._step(self._nodes[number], byte) for byte in range(256)], np.int32
            )
        return row

    def _step(self, node: _Node, byte: int) -> int:
        if isinstance(node, _Rest):
            if not node.low <= byte <= node.high:
                return NONE
            return self._number(node.target if node.left == 1 else _Rest(node.target, node.left - 1))
        data = bytes((byte,)) if isinstance(node, int) else node.data + bytes((byte,))
        state = node if isinstance(node, int) else node.state
        codes = _codes(data)
        if codes is None:
            return NONE
        number = self._automaton.classes.only(*codes)
        if number is None:
            return self._number(_Part(state, data))
        target = self._automaton.transitions[state][number]
        left = _size(data[0]) - len(data)
        if target == DEAD:
            return NONE
        return self._number(_Rest(target, left, *_next_byte(data)) if left else target)


def _size(lead: int) -> int:
    return 1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4


def _next_byte(data: bytes) -> tuple[int, int]:
    """Return the first and last value of the next byte of a character that begins with ``data``."""
    if len(data) > 1:
        return 0x80, 0xBF
    low = {0xE0: 0xA0, 0xF0: 0x90}.get(data[0], 0x80)
    return low, {0xED: 0x9F, 0xF4: 0x8F}.get(data[0], 0xBF)


def _codes(data: bytes) -> tuple[int, int] | None:
    """Return the first and last code point of the characters that begin with ``data``; None if there are none."""
    lead = data[0]
    if 0x80 <= lead < 0xC2 or lead > 0xF4:
        return None
    size = _size(lead)
    if len(data) > 1:
        low, high = _next_byte(data[:1])
        if not low <= data[1] <= high or not all(0x80 <= byte <= 0xBF for byte in data[2:]):
            return None
    first, last = data, data
    while len(first) < size:
        low, high = _next_byte(first)
        first += bytes((low,))
        last += bytes((_next_byte(last)[1],))
    return ord(first.decode()), ord(last.decode())
