"""Where another answer has said the same before: what was generated lately, in each namespace by itself.

Answers to like prompts are alike: the grade of a judge, a form filled in, the next turn of an agent. Unlike the prefix
tree this finds them after prompts that differ. (SuffixDecoding, arXiv 2411.04975, drafts from earlier answers too,
with suffix trees.)
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ...radix.namespace import Namespace
from .prompt_lookup import KEY, TOKEN, TOKEN_BITS, key_of, num_alike

_GROUP: Final = 3  # tokens by which places are found
_TAIL: Final = 8  # of the prompt, by which the beginnings of answers are told apart
_LONGEST: Final = 16  # tokens by which places are compared
_CHOICES: Final = 8  # places of a group that are looked at, the latest
_MOST: Final = 1 << 15  # places, each of a token; some 150 bytes


@dataclass(slots=True, eq=False)
class _Answer:
    """What is known of one answer.

    Attributes:
        tokens: of its sequence, which grow; when it has ended, a copy of those that are indexed.
        first: where the indexed ones begin: places are counted from there.
    """

    namespace: Namespace
    tokens: array[int]
    first: int

    def __len__(self) -> int:
        return len(self.tokens) - self.first


class OutputLookup:
    """The answers that were generated last, those under way included: a ring of places at which groups of tokens end.

    Args:
        most: places that are kept, the latest.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._count = 0  # of places so far; the slot of each is its number modulo `most`
        self._entries: list[tuple[_Answer, int, int, int]] = []  # see `enter`
        self._latest: dict[int, int] = {}  # by group

    def enter(self, group: int, answer: _Answer, place: int) -> None:
        """Note that a group of tokens ends there, that a token has come after it, and which place it had before."""
        number = self._count
        entry = answer, place, group, self._latest.get(group, -1)
        if number < self._most:
            self._entries.append(entry)
        else:
            slot = number % self._most
            gone = self._entries[slot][2]
            if self._latest[gone] == number - self._most:
                del self._latest[gone]
            self._entries[slot] = entry
        self._latest[group] = number
        self._count = number + 1

    def places(self, group: int) -> Iterator[tuple[_Answer, int]]:
        """Where a group ended, latest first."""
        number = self._latest.get(group, -1)
        for _ in range(_CHOICES):
            if number < max(0, self._count - self._most):
                return
            answer, place, _, number = self._entries[number % self._most]
            yield answer, place


class OutputIndex:
    """One sequence among the answers: it finds what others said, and they find what it says.

    Args:
        answers: those of all.
        namespace: whose answers alone are looked at.
        tokens: int32 tokens of the sequence, which grows at its end and is only read here.
        num_prompt: how many of them are its prompt.
    """

    def __init__(self, answers: OutputLookup, namespace: Namespace, tokens: array[int], num_prompt: int) -> None:
        self._answers = answers
        self._answer = _Answer(namespace, tokens, max(0, num_prompt - _TAIL))
        self._seed = hash(namespace)
        self._key = key_of(tokens[self._answer.first : num_prompt])  # of the last three tokens that are indexed
        self._num_indexed = num_prompt - self._answer.first
        self._source: _Answer | None = None  # where the last match was found
        self._place = 0  # in it, where the sequence stands now if it still says the same
        self._length = 0  # of the match

    def guess(self, limit: int) -> tuple[int, array[int]]:
        """What came after the longest match of the last tokens in another answer.

        Returns:
            The length of the match (3 to 16, or 0) and up to ``limit`` tokens.
        """
        self._extend()
        if self._source is None or self._place >= len(self._source):
            self._find(limit)
        if self._source is None:
            return 0, array("i")
        begin = self._source.first + self._place
        return self._length, self._source.tokens[begin : begin + limit]

    def end(self) -> None:
        """The sequence has ended: its tokens are no longer read."""
        self._extend()
        answer = self._answer
        answer.tokens, answer.first = answer.tokens[answer.first :], 0

    def _extend(self) -> None:
        """Index the tokens that came since the last call, and see whether they were those of the source."""
        answer, key, source = self._answer, self._key, self._source
        place = self._num_indexed
        for token in answer.tokens[answer.first + place :]:
            if source is not None:
                stands = self._place < len(source) and source.tokens[source.first + self._place] == token
                self._place += 1
                self._length = min(self._length + 1, _LONGEST)
                source = source if stands else None
            if place >= _GROUP:
                self._answers.enter(key ^ self._seed, answer, place)
            key = (key << TOKEN_BITS | token & TOKEN) & KEY
            place += 1
        self._num_indexed, self._key, self._source = place, key, source

    def _find(self, limit: int) -> None:
        """The longest match; of equal ones that after which most is known, and the latest."""
        self._source, best = None, (0, 0)
        here = len(self._answer)
        if here < _GROUP:
            return
        for other, place in self._answers.places(self._key ^ self._seed):
            if other is self._answer or other.namespace != self._answer.namespace:
                continue
            theirs, mine = other.first + place, self._answer.first + here
            length = num_alike(other.tokens, theirs, self._answer.tokens, mine, min(_LONGEST, place, here))
            found = length, min(limit, len(other) - place)
            if length >= _GROUP and found > best:
                best, self._source, self._place, self._length = found, other, place, length
                if best == (_LONGEST, limit):
                    return
