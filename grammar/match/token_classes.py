"""Token classes: the vocabulary grouped by the effect of each token in a string, for masks of string automata.

In a string that an automaton follows, only the classes of a token's characters matter. Tokens with the same sequence of
classes are equivalent, and there are far fewer sequences than tokens. For example, with the two classes letter and
blank, all words of one length have the same sequence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..regex.char_classes import CharClasses
from ..vocabulary import Vocabulary
from .json_chars import CLEAN, INVALID, NOTHING, json_chars

_PRIME = np.uint64(0x9E3779B97F4A7C15)
ARRAY_BYTES = 128  # Size in bytes of an array object without its numbers.


class TokenClasses:
    """The tokens grouped by the classes of their characters, from one state of the decoder.

    Attributes:
        group: int32 [vocabulary], the group of each token; group 0 holds the tokens that cannot be in a string.
        sequences: uint8 [groups, longest], classes of characters, padded. After group 0, the longest sequences come
            first.
        lengths: int32 [groups], number of characters of each sequence.
        pending: for each set of classes that may complete a character, the groups that end in the middle of such a
            character.
        counts: for each column of `sequences`, the number of groups that reach as far as this column.
        num_bytes: size in memory.
    """

    def __init__(self, vocabulary: Vocabulary, classes: CharClasses, state: int) -> None:
        chars = json_chars(classes)
        data, starts, lengths, ids = text_bytes(vocabulary)
        num = len(starts)
        # Within a character only few tokens can follow.
        active = np.flatnonzero(chars.next[state, data[starts]] != INVALID)
        states = np.full(num, INVALID, dtype=np.uint16)
        states[active] = state
        closed = np.zeros(num, dtype=np.bool_)
        hashes = np.zeros(num, dtype=np.uint64)
        counts = np.zeros(num, dtype=np.int32)
        columns: list[tuple[NDArray[np.int64], NDArray[np.uint8]]] = []
        at = 0
        while len(active):
            active = active[lengths[active] > at]
            bytes_ = data[starts[active] + at]
            before = states[active]
            emitted = chars.emits[before, bytes_]
            states[active] = after = chars.next[before, bytes_]
            some = emitted != NOTHING
            done = active[some]
            hashes[done] = (hashes[done] + emitted[some] + np.uint64(1)) * _PRIME
            columns.append((done, emitted[some]))
            ends = emitted == chars.closing
            closed[active[ends]] = True
            counts[active[some & ~ends]] += 1
            active = active[(after != INVALID) & ~ends]
            at += 1
        hashes += states.astype(np.uint64) * np.uint64(0x1000193) + np.uint64(7)
        valid = np.flatnonzero(states != INVALID)
        _, first, inverse = np.unique(hashes[valid], return_index=True, return_inverse=True)
        self._fill(columns, counts + closed, valid[first], inverse, chars.stay)
        chosen = valid[first][self._order]
        self.lengths = np.concatenate(([0], counts[chosen])).astype(np.int32)
        pending: dict[tuple[int, ...], list[int]] = {}
        for number, end in enumerate(states[chosen].tolist()):
            if end != CLEAN:
                pending.setdefault(chars.reach[end], []).append(number + 1)
        self.pending = [(np.array(reach), np.array(groups)) for reach, groups in pending.items()]
        self.group = np.zeros(vocabulary.size, dtype=np.int32)
        self.group[ids[valid]] = self._rank[inverse] + 1
        del self._order, self._rank
        cut = [array for pair in self.pending for array in pair]
        arrays: list[NDArray[Any]] = [self.group, self.sequences, self.lengths, *cut]
        self.num_bytes = sum(array.nbytes + ARRAY_BYTES for array in arrays) + 40 * len(self.counts)

    def _fill(
        self,
        columns: list[tuple[NDArray[np.int64], NDArray[np.uint8]]],
        sizes: NDArray[np.int32],
        chosen: NDArray[np.int64],
        inverse: NDArray[np.int64],
        stay: int,
    ) -> None:
        """Write the sequences of the chosen tokens, one token for each group, the longest sequence first."""
        self._order = np.argsort(-sizes[chosen], kind="stable")
        self._rank = np.empty(len(chosen), dtype=np.int64)
        self._rank[self._order] = np.arange(len(chosen))
        longest = int(sizes[chosen].max(initial=0))
        row_of = np.full(len(sizes), -1, dtype=np.int64)
        row_of[chosen] = self._rank + 1
        self.sequences: NDArray[np.uint8] = np.full((len(chosen) + 1, longest), stay, np.uint8, "F")
        filled = np.zeros(len(chosen) + 1, dtype=np.int64)
        for tokens, emitted in columns:
            rows = row_of[tokens]
            kept = rows > 0
            rows = rows[kept]
            self.sequences[rows, filled[rows]] = emitted[kept]
            filled[rows] += 1
        self.counts = [int((filled > column).sum()) for column in range(longest)]


def token_classes(vocabulary: Vocabulary, classes: CharClasses, state: int = CLEAN) -> TokenClasses:
    """Return the groups from the vocabulary's cache. Computing them takes some ten milliseconds for 50,000 tokens."""
    key = TokenClasses, classes, state
    known: TokenClasses | None = vocabulary.cache.get(key)
    if known is None:
        known = TokenClasses(vocabulary, classes, state)
        vocabulary.cache.put(key, known, known.num_bytes)
    return known


_Bytes = tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


def text_bytes(vocabulary: Vocabulary) -> _Bytes:
    """Return the bytes of all text tokens in one array, and the start, length and id of each token."""
    return vocabulary.derived(_text_bytes)


def _text_bytes(vocabulary: Vocabulary) -> _Bytes:
    ids = [i for i, text in enumerate(vocabulary.tokens) if text and i not in vocabulary.special]
    lengths = np.array([len(vocabulary.tokens[i]) for i in ids], dtype=np.int64)
    data = np.frombuffer(b"".join(vocabulary.tokens[i] for i in ids), dtype=np.uint8)
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1])).astype(np.int64)
    return data, starts, lengths, np.array(ids, dtype=np.int64)
