"""The way to a complete answer in few tokens, so that a budget never cuts one off.

From any state the closer looks for a short completion: it closes what can be closed, and where a value or a property
must come it tries the shortest texts that the schema has (*pieces*, worked out with the grammar). One token can make
the completion longer by about one piece; from that bound follows how long nothing needs to be looked up:

    tokens left   |----------- free -----------|-- free, looked up --|-- the plan, token by token --|
                                    bound + jump       completion + jump
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest

import numpy as np

from .backends import BackendState, Bounded, Exhausted, Row, advance, leads_to_end, take_back
from .closing_texts import ESCAPED, FREE, INSIDE, NEVER, OUTSIDE, ClosingTexts

MAX_TOKENS = 2_000
MAX_STEPS = 800
# Tokens beyond the budget that a way may have: it cannot be completed, but how far it leads is worth something.
BEYOND = 200
HEAD_START = 40
# Tokens to go on after a search that found nothing, at least, before the next one.
PAUSE = 8
# Tokens that a search may try. Searches that find a way in a schema try up to 800, in structural tags up to 10,000.
MAX_TRIES = 12_000
MAX_SEARCH = 300
MAX_RESTS_OF_KNOWN = 40  # of a completion that was found before, tried before a search


@dataclass(frozen=True, slots=True)
class _Mark:
    """What a closer knows at one position of the answer.

    Attributes:
        inside: whether it is in a JSON string, or in free text, in which nothing needs to be closed.
        plan: where the plan under way starts, and its tokens.
        known: the tokens of a completion found at a position.
        again: where nothing was found: tokens left when to look again.
    """

    inside: int = OUTSIDE
    plan: tuple[int, list[int]] | None = None
    known: tuple[int, list[int]] | None = None
    again: int | None = None


class BudgetClose:
    """Plans the end of one answer.

    It keeps a mark for each position, so that tokens taken back leave no trace: what it allows depends on the tokens
    of the answer alone, not on drafts that were tried and dropped.

    Args:
        free: the answer begins as free text.
    """

    def __init__(self, pieces: ClosingTexts, *, free: bool = False) -> None:
        self._pieces = pieces
        self._marks = [_Mark(FREE if free else OUTSIDE)]

    @property
    def is_free(self) -> bool:
        """Whether this is free text outside of its structured parts."""
        return self._marks[-1].inside == FREE

    @property
    def num_shortest(self) -> int | None:
        """Tokens of the shortest answer, if it is known."""
        return self._pieces.num_shortest

    def copy(self) -> BudgetClose:
        """An independent closer with the same knowledge."""
        other = BudgetClose(self._pieces)
        other._marks = list(self._marks)
        return other

    @property
    def planned(self) -> list[int]:
        """The tokens of the plan under way that are still to come."""
        plan = self._marks[-1].plan
        return plan[1][len(self._marks) - 1 - plan[0] :] if plan else []

    def follow(self, token: int, *, free: bool = False) -> None:
        """Note an accepted token; a plan that it leaves is dropped.

        Args:
            free: what follows is free text.
        """
        if free:
            self._marks.append(_Mark(FREE))
            return
        mark, planned = self._marks[-1], self.planned
        inside = self._pieces.lexical(mark.inside, token)
        self._marks.append(_Mark(inside, mark.plan if planned[:1] == [token] else None, mark.known, mark.again))

    def rollback(self, count: int) -> None:
        """Forget the last tokens."""
        if count:
            del self._marks[-count:]

    def must_search(self, remaining: int) -> bool:
        """Whether `plan` has to look for an end: none is planned, and one may be needed soon."""
        mark, position = self._marks[-1], len(self._marks) - 1
        if self.is_free or mark.plan is not None or (mark.again is not None and remaining > mark.again):
            return False
        known = mark.known
        return known is None or remaining <= len(known[1]) + (position - known[0] + 1) * self._pieces.jump

    def plan(self, state: BackendState, remaining: int) -> list[int] | None:
        """The tokens to an end if it is time to go there, else None: every token is still free.

        Args:
            state: where the answer stands; left as it is.
            remaining: tokens that may still be generated.
        """
        mark, position = self._marks[-1], len(self._marks) - 1
        if not self.must_search(remaining):
            return None if mark.plan is None else self.planned
        rest = self._rest_of_known(state)
        if rest and remaining > len(rest) + self._pieces.jump:
            self._marks[-1] = replace(mark, known=(position, rest))
            return None
        found = self.completion(state, remaining + BEYOND)
        if found is None:
            # All streams wait for a search, and one that finds nothing takes longest: only a few of them.
            self._marks[-1] = replace(mark, again=min(remaining * 3 // 4, remaining - PAUSE))
            return None
        near = remaining <= len(found) + self._pieces.jump
        self._marks[-1] = replace(mark, known=(position, found), plan=(position, found) if near else None)
        return found if near else None

    def _rest_of_known(self, state: BackendState) -> list[int] | None:
        """A rest of the completion that is known, if it leads to an end from here too: there may be shorter ones.

        In the middle of a value that is usually all of it, behind the value what came after. To find that out takes a
        fraction of what a search does.
        """
        known = self._marks[-1].known
        tokens = known[1] if known else []
        after = state.copy()
        for start in range(min(len(tokens), MAX_RESTS_OF_KNOWN)):
            taken = after.advance(tokens[start:])
            if taken == len(tokens) - start and after.can_end():
                return tokens[start:]
            take_back(after, taken)
        return None

    def completion(self, state: BackendState, most: int = MAX_TOKENS) -> list[int] | None:
        """A short way to an end, or None if none of about `most` tokens was found."""
        whole, inside = self._pieces.whole, self._marks[-1].inside
        if len(self._marks) == 1 and (whole or self._pieces.is_hopeless):
            return list(whole) or None
        try:
            return self._search_ways(Bounded(state, [MAX_TRIES]), inside, most)
        except Exhausted:
            return None

    def _search_ways(self, state: BackendState, inside: int, most: int) -> list[int] | None:
        """The first of several walks to an end."""
        pieces = self._pieces
        walk = self._walk(state.copy(), inside, most)
        # Values may have to differ before an array is complete; other text may be taken for JSON, and quotes in it for
        # those of a string. Whichever walk arrives first is right, but the plain one has a start.
        others = [self._walk(state.copy(), inside, most, turning=True)] if pieces.listed else []
        if pieces.rests:
            others += [self._walk(state.copy(), inside, most, first) for first in (pieces.ends, pieces.rests)]
            others.append(self._walk(state.copy(), INSIDE if inside == OUTSIDE else OUTSIDE, most))
        for found in chain(islice(walk, HEAD_START), chain.from_iterable(zip_longest(walk, *others))):
            if found is not None:
                return found
        return None

    def _walk(
        self, state: BackendState, inside: int, most: int, first: Sequence[list[int]] = (), *, turning: bool = False
    ) -> Iterator[list[int] | None]:
        """A step to an end each time, and the tokens of all steps at the end; nothing more where there is no way.

        Args:
            state: advances.
            inside: where it stands in JSON.
            most: tokens that a way may have.
            first: what to try before all else.
            turning: try other values in each step.
        """
        tokens: list[int] = []
        for turn in range(MAX_STEPS):
            if state.can_end():
                yield tokens
                return
            step = self._step(state, inside, first, turn if turning else 0)
            if not step or len(tokens) > min(most, MAX_TOKENS):
                return
            for token in step:
                inside = self._pieces.lexical(inside, token)
            tokens += step
            yield None

    def _step(self, state: BackendState, inside: int, first: Sequence[list[int]], turn: int) -> list[int] | None:
        """The next tokens of a completion; the state advances by them."""
        pieces = self._pieces
        forced = state.forced()
        if forced:
            tokens = pieces.vocabulary.tokenize_forced(forced)
            return tokens if advance(state, tokens) else None
        end = next((end for end in pieces.ends if leads_to_end(state, end)), None)
        if end is not None and advance(state, end):
            return list(end)
        found = _first(state, first) or self._json_step(state, inside, turn)
        return found or _first(state, pieces.rests) or self._search(state, inside)

    def _json_step(self, state: BackendState, inside: int, turn: int) -> list[int] | None:
        """The next tokens by where the state stands in a JSON text; of other texts, the rest of a short one."""
        pieces = self._pieces
        if inside == INSIDE:
            return _first(state, pieces.tails)
        if pieces.is_json and inside != ESCAPED:
            turn %= len(pieces.listed)
            listed = [*pieces.listed[turn:], *pieces.listed[:turn]] if turn else pieces.listed
            return (
                _first(state, pieces.closers)
                or _first(state, listed, then=pieces.closers)
                or _first(state, (*listed, pieces.quote))
            )
        tail = next((tail for tail in pieces.tails if leads_to_end(state, tail)), None)
        return list(tail) if tail and advance(state, tail) else None

    def _search(self, state: BackendState, inside: int) -> list[int] | None:
        """Out of the middle of a string or a word: breadth first over a few tokens of each kind."""
        row: Row = np.zeros(self._pieces.vocabulary.num_words, dtype=np.int32)
        frontier: list[tuple[BackendState, list[int]]] = [(state.copy(), [])]
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
                if after.can_end() or (inside in (INSIDE, ESCAPED) and self._closes(after)):
                    return found if advance(state, found) else None
                frontier.append((after, found))
        return None

    def _closes(self, state: BackendState) -> bool:
        return advance(state.copy(), self._pieces.quote)

    def _candidates(self, row: Row) -> list[int]:
        """The best allowed token of each kind."""
        rank = self._pieces.rank
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[: len(rank)])
        best = allowed[np.argsort(rank[allowed], kind="stable")]
        kinds, first = np.unique(rank[best] >> 8, return_index=True)
        return [int(best[index]) for kind, index in zip(kinds, first, strict=True) if kind < NEVER]


def _first(state: BackendState, pieces: Sequence[list[int]], then: Sequence[list[int]] = ()) -> list[int] | None:
    """The first piece that the state accepts as a whole, if one of `then` may follow; it advances by the piece."""
    hopeless: set[int] = set()
    for piece in pieces:
        if piece[0] in hopeless:
            continue
        taken = state.advance(piece)
        if taken == len(piece) and (not then or state.can_end() or _goes_on(state, then)):
            return list(piece)
        take_back(state, taken)
        if not taken:
            hopeless.add(piece[0])
    return None


def _goes_on(state: BackendState, then: Sequence[list[int]]) -> bool:
    """Whether one of some pieces may follow; the state is left as it is."""
    after = state.copy()
    return any(advance(after, tokens) for tokens in then)
