"""String masks: the tokens that a string automaton allows, computed for groups of tokens in one pass."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..regex.string_automaton import DEAD, START, StringAutomaton
from ..vocabulary import Vocabulary
from .json_chars import BACKSLASH, CLEAN, INVALID, NOTHING, json_chars
from .token_classes import TokenClasses, token_classes

_Position = tuple[int, int, int]  # State of the automaton, number of characters so far, and state of the decoder.


@dataclass(frozen=True, slots=True)
class _Arrays:
    """The transitions and ends of an automaton as arrays, to follow all tokens of a mask at once.

    Attributes:
        width: number of cells in the row of a state: one for each class of characters, one for the closing quote, and
            one for the padding that stands for no character.
        targets: int32, the state after each cell, row by row.
        offsets: int32, the offset at which the row of each target begins.
        good: bool, for each state and count: whether the string can still end or, after the closing quote, has ended.
    """

    width: int
    targets: NDArray[np.int32]
    offsets: NDArray[np.int32]
    good: NDArray[np.bool_]


class StringRule:
    """A string automaton with the tokens of one vocabulary, shared by all answers and all threads.

    The results that are computed while answers are generated are kept in the vocabulary's cache, which is bounded, as
    the number of states and lengths is not.
    """

    def __init__(self, automaton: StringAutomaton, vocabulary: Vocabulary) -> None:
        self.automaton = automaton
        self.chars = json_chars(automaton.classes)
        self._vocabulary = vocabulary
        self._finish = automaton.can_finish
        self._last = automaton.last_count
        self._rows = _rows(automaton)
        self._arrays = _arrays(automaton, self._rows)
        self._bytes = frozenset(byte for byte in range(256) if vocabulary.token_of(bytes((byte,))) is not None)
        self._completed: dict[int, dict[int, bytes]] = {}
        # Two groupings are computed here, where no stream waits: at the beginning of a character and after a backslash.
        decoders = CLEAN, int(self.chars.next[CLEAN, BACKSLASH])
        self._tokens = {each: token_classes(vocabulary, automaton.classes, each) for each in decoders}
        self._next, self._emits = self.chars.next_rows, self.chars.emits_rows
        self._key = object()  # Key of the results of this rule in the vocabulary's cache.

    @property
    def shared(self) -> list[tuple[object, int]]:
        """Return the tables that other rules with the same character classes share, and their sizes in bytes."""
        groups = [(each, each.num_bytes) for each in self._tokens.values()]
        return [(self.chars, self.chars.num_bytes), *groups]

    @property
    def start(self) -> _Position:
        return START, 0, CLEAN

    def after(self, position: _Position, byte: int) -> _Position | None:
        """Return the position after a byte other than the closing quote; None if the byte cannot follow."""
        state, count, decoder = position
        emitted, decoder = self._emits[decoder][byte], self._next[decoder][byte]
        if decoder == INVALID:
            return None
        if emitted == NOTHING:
            return state, count, decoder
        state, count = self._rows[state][emitted], min(count + 1, self._last)
        return None if state == DEAD else (state, count, decoder)

    def may_close(self, position: _Position) -> bool:
        state, count, decoder = position
        return decoder == CLEAN and self.automaton.may_end(state, count)

    def can_finish(self, position: _Position) -> bool:
        """Return whether the string can still be closed."""
        state, count, decoder = position
        if decoder == CLEAN:
            return bool(self._finish[state, count])
        count = min(count + 1, self._last)
        return any(self._finish[self._rows[state][number], count] for number in self.chars.reach[decoder])

    def allowed(self, position: _Position) -> NDArray[np.bool_]:
        """Return the tokens that continue or close the string, bool [vocabulary].

        The text of a token after the closing quote is not checked.
        """
        state, count, decoder = position
        tokens = self._groups(decoder)
        ends = self._ends(state, decoder)
        counts = np.minimum(tokens.lengths + count, self._last)
        arrays = self._arrays
        good = arrays.good.take(ends * (self._last + 1) + counts)
        good[0] = False
        for reach, some in tokens.pending:
            targets = arrays.targets[ends[some, None] * arrays.width + reach]
            counted = np.minimum(counts[some] + 1, self._last)[:, None]
            good[some] = arrays.good[targets * (self._last + 1) + counted].any(axis=1)
        found: NDArray[np.bool_] = good.take(tokens.group)
        return found

    def _groups(self, decoder: int) -> TokenClasses:
        return self._tokens.get(decoder) or token_classes(self._vocabulary, self.automaton.classes, decoder)

    def _ends(self, state: int, decoder: int) -> NDArray[np.int32]:
        """Return the state of the automaton after each group of tokens."""
        key = self._key, state, decoder
        known: NDArray[np.int32] | None = self._vocabulary.cache.get(key)
        if known is not None:
            return known
        tokens = self._groups(decoder)
        arrays = self._arrays
        offsets = np.full(len(tokens.lengths), state * arrays.width, dtype=np.int32)
        for column, count in enumerate(tokens.counts):
            after = offsets[1 : count + 1] + tokens.sequences[1 : count + 1, column]
            arrays.offsets.take(after, out=offsets[1 : count + 1], mode="clip")
        ends = offsets // arrays.width
        ends[0] = DEAD
        self._vocabulary.cache.put(key, ends, ends.nbytes)
        return ends

    def rest(self, position: _Position) -> bytes | None:
        """Return the bytes of a shortest end of the string with its quote; None if no tokens spell it. Cached."""
        key = self._key, position
        known: bytes | None = self._vocabulary.cache.get(key)
        if known is None:
            known = self._with_tokens(self._rest(position))  # Empty if no tokens spell an end.
            self._vocabulary.cache.put(key, known, len(known))
        return known or None

    def _with_tokens(self, end: bytes | None) -> bytes:
        with suppress(ValueError):
            self._vocabulary.tokenize(end or b"")
            return end or b""
        return b""

    def _rest(self, position: _Position) -> bytes | None:
        state, count, decoder = position
        if decoder == CLEAN:
            path = self.automaton.rest(state, count)
            return None if path is None else b"".join(map(self.chars.spelling, path)) + b'"'
        count = min(count + 1, self._last)
        ends = [
            more + end
            for number, more in self._completions(decoder).items()
            if (end := self._rest((self._rows[state][number], count, CLEAN))) is not None
        ]
        return min(ends, key=len, default=None)

    def _completions(self, decoder: int) -> dict[int, bytes]:
        known = self._completed.get(decoder)
        if known is None:
            known = self._completed[decoder] = self.chars.completions(decoder, self._bytes)
        return known


def _rows(automaton: StringAutomaton) -> list[tuple[int, ...]]:
    """Return the target states of each state, then those of the state after the closing quote."""
    closed = len(automaton.accepting)
    ends = [closed if accepts else DEAD for accepts in automaton.accepting]
    rows = [(*row, end, state) for state, (row, end) in enumerate(zip(automaton.transitions, ends, strict=False))]
    return [*rows, (*[DEAD] * automaton.classes.num, DEAD, closed)]


def _arrays(automaton: StringAutomaton, rows: list[tuple[int, ...]]) -> _Arrays:
    width = automaton.classes.num + 2
    targets = np.array(rows, dtype=np.int32).ravel()
    counts = np.arange(automaton.last_count + 1)
    in_range = counts >= automaton.least
    if automaton.most is not None:
        in_range &= counts <= automaton.most
    good = np.vstack((automaton.can_finish, in_range[None])).ravel()
    return _Arrays(width, targets, targets * np.int32(width), good)
