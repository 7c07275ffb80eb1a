"""The way to a complete answer in few tokens, so that a budget never cuts one off.

From any state the closer looks for a short completion: it closes what can be closed, and where a value or a property
must come it tries the shortest texts that the schema has (*pieces*, worked out with the grammar). One token can make
the completion longer by about one piece; from that bound follows how long nothing needs to be looked up:

    tokens left   |----------- free -----------|-- free, looked up --|-- the plan, token by token --|
                                    bound + jump       completion + jump
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from grammar.states import Row, State
from grammar.vocabulary import Vocabulary

MAX_STEPS = 2_000
MAX_SEARCH = 300
MAX_TAILS = 600
DEFAULT_JUMP = 10
_OUTSIDE, _INSIDE, _ESCAPED = range(3)
_NEVER = 100
_PLAIN = (b"0", b'""', b"null", b"[]", b"{}", b"true", b"false", b"[", b"{")


class Pieces:
    """The short texts of one grammar as tokens, shared by all its matchers; worked out when first needed."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        whole: str = "",
        properties: Sequence[str] = (),
        values: Sequence[str] = (),
        detour: str = "",
        is_json: bool = False,
    ) -> None:
        self.vocabulary = vocabulary
        self.is_json = is_json
        # A separator before any piece: after a number, a piece would only be more digits.
        self.closers = [vocabulary.tokenize(text) for text in (b"}", b"]", b",", b":")]
        self.quote = vocabulary.tokenize(b'"')
        self._texts = whole.encode(), [text.encode() for text in (*properties, *values)], detour.encode()
        self._moves: dict[tuple[int, int], int] = {}

    @cached_property
    def whole(self) -> list[int] | None:
        """The shortest answer, if it is known."""
        return self.vocabulary.tokenize(self._texts[0]) or None

    @cached_property
    def listed(self) -> list[list[int]]:
        """Shortest properties and values, in the order in which to try them; empty if the text is no JSON."""
        texts = (*self._texts[1], *_PLAIN) if self.is_json else ()
        return [self.vocabulary.tokenize(text) for text in texts]

    @cached_property
    def tails(self) -> list[list[int]]:
        """Ends of short strings, shortest first: what may lead out of the middle of a string, or of a plain text."""
        if self.is_json:
            texts = [b'""', *(text for text in self._texts[1] if text[:1] == text[-1:] == b'"')]
        else:
            texts = self._texts[1]
        ends = {text[at:] for text in texts for at in range(self.is_json, len(text)) if text[at] & 0xC0 != 0x80}
        return [self.vocabulary.tokenize(end) for end in sorted(ends, key=lambda end: (len(end), end))[:MAX_TAILS]]

    @cached_property
    def jump(self) -> int:
        """About the most tokens by which one token can lengthen the completion."""
        detour = self.vocabulary.tokenize(self._texts[2])
        pieces = self.listed if self.is_json else self.tails
        # A completion is put together from parts, which takes more tokens than a piece as a whole.
        return 4 + 3 * max(map(len, (detour, *pieces))) // 2 if pieces else DEFAULT_JUMP

    @property
    def rank(self) -> Row:
        """How good each token is for a search."""
        return _ranks(self.vocabulary)

    def lexical(self, state: int, token: int) -> int:
        """Inside or outside of a JSON string after a token."""
        move = self._moves.get((state, token))
        if move is None:
            move = self._moves[state, token] = _lexical(state, self.vocabulary.tokens[token])
        return move


@dataclass(frozen=True, slots=True)
class _Mark:
    """What a closer knows at one position of the answer.

    Attributes:
        inside: whether it is in a JSON string.
        plan: where the plan under way starts, and its tokens.
        known: the length of a completion found at a position.
    """

    inside: int = _OUTSIDE
    plan: tuple[int, list[int]] | None = None
    known: tuple[int, int] | None = None


class Closer:
    """Plans the end of one answer.

    It keeps a mark for each position, so that tokens taken back leave no trace: what it allows depends on the tokens
    of the answer alone, not on drafts that were tried and dropped.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._marks = [_Mark()]

    def copy(self) -> Closer:
        """An independent closer with the same knowledge."""
        other = Closer(self._pieces)
        other._marks = list(self._marks)
        return other

    @property
    def planned(self) -> list[int]:
        """The tokens of the plan under way that are still to come."""
        plan = self._marks[-1].plan
        return plan[1][len(self._marks) - 1 - plan[0] :] if plan else []

    def follow(self, token: int) -> None:
        """Note an accepted token; a plan that it leaves is dropped."""
        mark, planned = self._marks[-1], self.planned
        inside = self._pieces.lexical(mark.inside, token) if self._pieces.is_json else mark.inside
        self._marks.append(_Mark(inside, mark.plan if planned[:1] == [token] else None, mark.known))

    def rollback(self, count: int) -> None:
        """Forget the last tokens."""
        if count:
            del self._marks[-count:]

    def plan(self, state: State, remaining: int) -> list[int] | None:
        """The tokens to an end if it is time to go there, else None: every token is still free.

        Args:
            state: where the answer stands; left as it is.
            remaining: tokens that may still be generated.
        """
        mark, position, jump = self._marks[-1], len(self._marks) - 1, self._pieces.jump
        if mark.plan is not None:
            return self.planned
        if mark.known is not None and remaining > mark.known[1] + (position - mark.known[0] + 1) * jump:
            return None
        found = self.completion(state)
        if found is None:
            # Nothing was found: look again only after some more tokens.
            self._marks[-1] = replace(mark, known=(position, max(0, remaining - 2 * jump)))
            return None
        near = remaining <= len(found) + jump
        self._marks[-1] = replace(mark, known=(position, len(found)), plan=(position, found) if near else None)
        return found if near else None

    def completion(self, state: State) -> list[int] | None:
        """A short way to an end, or None if none was found."""
        whole = self._pieces.whole
        if len(self._marks) == 1 and whole is not None and _advance(state.copy(), whole):
            return list(whole)
        state, inside = state.copy(), self._marks[-1].inside
        tokens: list[int] = []
        while not state.can_end():
            step = self._step(state, inside)
            if not step or len(tokens) > MAX_STEPS:
                return None
            for token in step:
                inside = self._pieces.lexical(inside, token) if self._pieces.is_json else inside
            tokens += step
        return tokens

    def _step(self, state: State, inside: int) -> list[int] | None:
        """The next tokens of a completion; the state advances by them."""
        pieces = self._pieces
        forced = state.forced()
        if forced:
            tokens = pieces.vocabulary.tokenize(forced)
            return tokens if _advance(state, tokens) else None
        if inside == _OUTSIDE and pieces.is_json:
            found = (
                _first(state, pieces.closers)
                or _first(state, pieces.listed, then=pieces.closers)
                or _first(state, (*pieces.listed, pieces.quote))
            )
        elif inside == _INSIDE:
            found = _first(state, pieces.tails)
        else:
            found = next((tail for tail in pieces.tails if _ends(state, tail)), None)
            found = list(found) if found and _advance(state, found) else None
        return found or self._search(state, inside)

    def _search(self, state: State, inside: int) -> list[int] | None:
        """Out of the middle of a string or a word: breadth first over a few tokens of each kind."""
        row: Row = np.zeros(self._pieces.vocabulary.num_words, dtype=np.int32)
        frontier: list[tuple[State, list[int]]] = [(state.copy(), [])]
        seen = {b""}
        for at, path in frontier:
            if len(frontier) > MAX_SEARCH:
                return None
            at.fill(row)
            for token in self._candidates(row):
                found = [*path, token]
                text = b"".join(self._pieces.vocabulary.tokens[t] for t in found)
                after = at.copy()
                if text in seen or not after.accept(token):
                    continue
                seen.add(text)
                if after.can_end() or (inside and self._closes(after)):
                    return found if _advance(state, found) else None
                frontier.append((after, found))
        return None

    def _closes(self, state: State) -> bool:
        return _advance(state.copy(), self._pieces.quote)

    def _candidates(self, row: Row) -> list[int]:
        """The best allowed token of each kind."""
        rank = self._pieces.rank
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[: len(rank)])
        best = allowed[np.argsort(rank[allowed], kind="stable")]
        kinds, first = np.unique(rank[best] >> 8, return_index=True)
        return [int(best[index]) for kind, index in zip(kinds, first, strict=True) if kind < _NEVER]


def _advance(state: State, tokens: Sequence[int]) -> bool:
    """Accept all of some tokens, or none."""
    for count, token in enumerate(tokens):
        if not state.accept(token):
            state.rollback(count)
            return False
    return True


def _ends(state: State, tokens: Sequence[int]) -> bool:
    """Whether some tokens lead to an end."""
    after = state.copy()
    return _advance(after, tokens) and after.can_end()


def _first(state: State, pieces: Iterable[list[int]], then: Sequence[list[int]] = ()) -> list[int] | None:
    """The first piece that the state accepts as a whole, if one of `then` may follow; it advances by the piece."""
    hopeless: set[int] = set()
    for piece in pieces:
        if piece[0] in hopeless:
            continue
        if _advance(state, piece):
            if not then or state.can_end() or any(_advance(state.copy(), tokens) for tokens in then):
                return list(piece)
            state.rollback(len(piece))
        elif not _advance(state.copy(), piece[:1]):
            hopeless.add(piece[0])
    return None


def _lexical(state: int, text: bytes) -> int:
    for byte in text:
        if state == _ESCAPED:
            state = _INSIDE
        elif byte == 0x22:
            state = _INSIDE if state == _OUTSIDE else _OUTSIDE
        elif byte == 0x5C and state == _INSIDE:
            state = _ESCAPED
    return state


@lru_cache(maxsize=4)
def _ranks(vocabulary: Vocabulary) -> Row:
    """For each token kind * 256 + preference within the kind; a kind of 100 is never tried."""
    rank: Row = np.full(vocabulary.size, _NEVER << 8, dtype=np.int32)
    for token, text in enumerate(vocabulary.tokens):
        if text and token not in vocabulary.special and token not in vocabulary.eos:
            kind, size = _kind(text), min(len(text), 255)
            rank[token] = (kind << 8) + (255 - size if kind < 10 else size)
    return rank


def _kind(text: bytes) -> int:
    """Long runs of letters, digits or blanks (kinds below 10), and single characters by what they are."""
    if len(text) == 1:
        return 11 if text.isdigit() else 12 if text.islower() else 13 if text.isupper() else 14 + text[0] % 32
    if text.isalpha():
        return 1
    if text.isdigit():
        return 2
    return 3 if not set(text) & set(b'"\\{}[],:') else 50
