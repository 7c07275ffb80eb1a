"""Output lookup (suffix decoding): drafts from recent outputs of other sequences in the same namespace.

Outputs for similar prompts are similar: grades of a judge, a filled form, an agent's next turn. Unlike the prefix tree,
the lookup works across different prompts. SuffixDecoding (arXiv 2411.04975) does so with suffix trees.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ...radix.namespace import Namespace
from .prompt_lookup import KEY, TOKEN, TOKEN_BITS, key_of, match_length

_GROUP: Final = 3  # tokens of a trigram
_TAIL: Final = 8  # last tokens of the prompt, which tell the beginnings of outputs apart
_LONGEST: Final = 16  # tokens of context that are compared
_CHOICES: Final = 8  # latest positions of a trigram that are compared
_MOST: Final = 1 << 15  # positions kept, one for each token, of some 150 bytes


@dataclass(slots=True, eq=False)
class _Output:
    """The indexed tokens of one sequence.

    Attributes:
        tokens: tokens of the growing sequence; once it has ended, a copy of its indexed tokens.
        first: index of the first indexed token, from which positions count.
    """

    namespace: Namespace
    tokens: array[int]
    first: int

    def __len__(self) -> int:
        return len(self.tokens) - self.first


class OutputLookup:
    """Positions of trigrams in recent and running outputs: a ring of entries with hash chains.

    Args:
        most: number of latest positions that are kept.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._count = 0  # positions so far; the slot of each is its number modulo ``most``
        self._entries: list[tuple[_Output, int, int, int]] = []  # see `add`
        self._latest: dict[int, int] = {}  # by trigram

    def add(self, group: int, output: _Output, position: int) -> None:
        """Add the position after a trigram, which a token follows; it links to the trigram's previous one."""
        number = self._count
        entry = output, position, group, self._latest.get(group, -1)
        if number < self._most:
            self._entries.append(entry)
        else:
            slot = number % self._most
            evicted = self._entries[slot][2]
            if self._latest[evicted] == number - self._most:
                del self._latest[evicted]
            self._entries[slot] = entry
        self._latest[group] = number
        self._count = number + 1

    def positions(self, group: int) -> Iterator[tuple[_Output, int]]:
        """Yield the positions after a trigram, latest first."""
        number = self._latest.get(group, -1)
        for _ in range(_CHOICES):
            if number < max(0, self._count - self._most):
                return
            output, position, _, number = self._entries[number % self._most]
            yield output, position


class OutputIndex:
    """Looks up outputs for one sequence: adds the sequence's own output, and finds matches in the outputs of others.

    Args:
        outputs: outputs of all sequences.
        namespace: namespace in which matches are searched.
        tokens: int32 tokens of the sequence, which grows at its end and is only read.
        num_prompt: number of tokens of its prompt.
    """

    def __init__(self, outputs: OutputLookup, namespace: Namespace, tokens: array[int], num_prompt: int) -> None:
        self._outputs = outputs
        self._own = _Output(namespace, tokens, max(0, num_prompt - _TAIL))
        self._seed = hash(namespace)
        self._key = key_of(tokens[self._own.first : num_prompt])  # key of the last indexed trigram
        self._num_indexed = num_prompt - self._own.first
        self._source: _Output | None = None  # the output of the last match
        self._position = 0  # position in the source behind the match
        self._length = 0  # length of the match

    def lookup(self, limit: int) -> tuple[int, array[int]]:
        """Return the tokens that followed the longest match of the last tokens in another output.

        Returns:
            The length of the match (3 to 16, or 0) and up to ``limit`` tokens.
        """
        self._extend()
        if self._source is None or self._position >= len(self._source):
            self._find(limit)
        if self._source is None:
            return 0, array("i")
        begin = self._source.first + self._position
        return self._length, self._source.tokens[begin : begin + limit]

    def end(self) -> None:
        """Copy the indexed tokens of a sequence that has ended."""
        self._extend()
        own = self._own
        own.tokens, own.first = own.tokens[own.first :], 0

    def _extend(self) -> None:
        """Index the tokens appended since the last call, and follow the source as long as it agrees."""
        own, key, source = self._own, self._key, self._source
        position = self._num_indexed
        for token in own.tokens[own.first + position :]:
            if source is not None:
                agrees = self._position < len(source) and source.tokens[source.first + self._position] == token
                self._position += 1
                self._length = min(self._length + 1, _LONGEST)
                source = source if agrees else None
            if position >= _GROUP:
                self._outputs.add(key ^ self._seed, own, position)
            key = (key << TOKEN_BITS | token & TOKEN) & KEY
            position += 1
        self._num_indexed, self._key, self._source = position, key, source

    def _find(self, limit: int) -> None:
        """Find the longest match; of equal ones that with the most tokens to follow, then the latest."""
        self._source, best = None, (0, 0)
        end = len(self._own)
        if end < _GROUP:
            return
        for other, position in self._outputs.positions(self._key ^ self._seed):
            if other is self._own or other.namespace != self._own.namespace:
                continue
            other_end, own_end = other.first + position, self._own.first + end
            length = match_length(other.tokens, other_end, self._own.tokens, own_end, min(_LONGEST, position, end))
            found = length, min(limit, len(other) - position)
            if length >= _GROUP and found > best:
                best, self._source, self._position, self._length = found, other, position, length
                if best == (_LONGEST, limit):
                    return
