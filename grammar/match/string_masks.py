"""String masks: which tokens a string automaton admits, from the groups of tokens and one pass over their classes."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from ..regex.string_automaton import DEAD, START, StringAutomaton
from ..vocabulary import Vocabulary
from .json_chars import BACKSLASH, CLEAN, INVALID, NOTHING, json_chars
from .token_classes import TokenClasses, token_classes

MAX_CACHED = 512  # states of which the ends of all groups are kept
MAX_CACHED_BYTES = 16 << 20


class StringRule:
    """A string automaton over one vocabulary, shared by all answers on all threads.

    A position in a string is the automaton's state, the characters so far, and the decoder's state.
    """

    def __init__(self, automaton: StringAutomaton, vocabulary: Vocabulary) -> None:
        self.automaton = automaton
        self.chars = json_chars(automaton.classes)
        self._vocabulary = vocabulary
        self._finish = automaton.can_finish
        self._last = automaton.last_count
        closing = [self._closed if ends else DEAD for ends in automaton.accepting]
        rows = [
            [*row, end, state] for state, (row, end) in enumerate(zip(automaton.transitions, closing, strict=False))
        ]
        num_classes = automaton.classes.num
        rows.append([DEAD] * num_classes + [DEAD, self._closed])
        self._width = num_classes + 2
        self._flat = np.array(rows, dtype=np.int32).ravel()
        self._rows = rows
        counts = np.arange(self._last + 1)
        in_range = counts >= automaton.least
        if automaton.most is not None:
            in_range &= counts <= automaton.most
        self._table = np.vstack((self._finish, in_range[None])).ravel()
        self._lock = Lock()
        self._cached: OrderedDict[tuple[int, int], NDArray[np.int32]] = OrderedDict()
        # Computed here, where no stream waits for it: the groups at a character's beginning and after a backslash.
        decoders = CLEAN, int(self.chars.next[CLEAN, BACKSLASH])
        self._tokens = {each: token_classes(vocabulary, automaton.classes, each) for each in decoders}
        self._next = self.chars.next.tolist()
        self._emits = self.chars.emits.tolist()

    @property
    def _closed(self) -> int:
        """The state after the closing quote."""
        return len(self.automaton.accepting)

    @property
    def start(self) -> tuple[int, int, int]:
        return START, 0, CLEAN

    def after(self, position: tuple[int, int, int], byte: int) -> tuple[int, int, int] | None:
        """Return the position after a byte other than the closing quote; None if there is none."""
        state, count, decoder = position
        emitted, decoder = self._emits[decoder][byte], self._next[decoder][byte]
        if decoder == INVALID:
            return None
        if emitted == NOTHING:
            return state, count, decoder
        state, count = self._rows[state][emitted], min(count + 1, self._last)
        return None if state == DEAD else (state, count, decoder)

    def may_close(self, position: tuple[int, int, int]) -> bool:
        state, count, decoder = position
        return decoder == CLEAN and self.automaton.may_end(state, count)

    def can_finish(self, position: tuple[int, int, int]) -> bool:
        """Return whether a closing quote can still be reached."""
        state, count, decoder = position
        if decoder == CLEAN:
            return bool(self._finish[state, count])
        count = min(count + 1, self._last)
        return any(self._finish[self._rows[state][number], count] for number in self.chars.reach[decoder])

    def allowed(self, position: tuple[int, int, int]) -> NDArray[np.bool_]:
        """Return the tokens with which the string goes on or closes, bool [vocabulary].

        What a token has after the closing quote is not looked at.
        """
        state, count, decoder = position
        tokens = self._groups(decoder)
        ends = self._ends(state, decoder)
        counts = np.minimum(tokens.lengths + count, self._last)
        good = self._table[ends * (self._last + 1) + counts]
        good[0] = False
        for reach, some in tokens.pending:
            targets = self._flat[ends[some, None] * self._width + reach]
            counted = np.minimum(counts[some] + 1, self._last)[:, None]
            good[some] = self._table[targets * (self._last + 1) + counted].any(axis=1)
        found: NDArray[np.bool_] = good[tokens.group]
        return found

    def _groups(self, decoder: int) -> TokenClasses:
        known = self._tokens.get(decoder)
        if known is None:
            known = self._tokens[decoder] = token_classes(self._vocabulary, self.automaton.classes, decoder)
        return known

    def _ends(self, state: int, decoder: int) -> NDArray[np.int32]:
        """Return the automaton's state after each group of tokens."""
        key = state, decoder
        with self._lock:
            known = self._cached.get(key)
            if known is not None:
                self._cached.move_to_end(key)
                return known
        tokens = self._groups(decoder)
        ends = np.full(len(tokens.lengths), state, dtype=np.int32)
        for column, count in enumerate(tokens.counts):
            reached = ends[1 : count + 1]
            ends[1 : count + 1] = self._flat[reached * self._width + tokens.sequences[1 : count + 1, column]]
        ends[0] = DEAD
        with self._lock:
            self._cached[key] = ends
            while len(self._cached) > max(8, min(MAX_CACHED, MAX_CACHED_BYTES // ends.nbytes)):
                self._cached.popitem(last=False)
        return ends

    def rest(self, position: tuple[int, int, int]) -> bytes | None:
        """Return the bytes of a shortest end of the string, its quote included; None in the middle of a character."""
        state, count, decoder = position
        path = self.automaton.rest(state, count) if decoder == CLEAN else None
        return None if path is None else b"".join(map(self.chars.spelling, path)) + b'"'
