"""Closing within the token budget: plans a short completion in time, so that an answer is never cut off.

From any state the search puts together a short completion: it closes what can be closed, and where a value or a
property is required it tries the shortest texts that the schema has (`ClosingTexts`, computed at compile time). One
token lengthens the completion by about one such text (the *jump*), which bounds how long no search is needed:

    tokens left   |----------- free -----------|--- free, searched ---|-- the plan, token by token --|
                                    bound + jump      completion + jump
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest

import numpy as np

from .backends import BackendState, BoundedState, Row, SearchExhausted, advance, leads_to_end, rollback_unless_failed
from .closing_texts import ESCAPED, FREE, INSIDE, NEVER, OUTSIDE, ClosingTexts, ranks

MAX_TOKENS = 2_000
MAX_STEPS = 800
# Tokens that a completion may exceed the budget by: it cannot be finished then, but it can be begun.
BEYOND = 200
HEAD_START = 40
# Fewest tokens from a search that found nothing to the next one.
PAUSE = 8
# Tokens that a search may try. Successful searches in a schema try up to 800, in structural tags up to 10,000.
MAX_TRIES = 12_000
MAX_SEARCH = 300
MAX_SUFFIXES = 40  # of a known completion, tried before a search


@dataclass(frozen=True, slots=True)
class _Position:
    """What is known at one position of the answer.

    Attributes:
        lexical: inside or outside of a JSON string, or in free text, which needs no closing.
        plan: start and tokens of the plan being followed.
        known: position and tokens of the last completion found.
        retry_at: after a search that found nothing, the tokens left at which to search again.
    """

    lexical: int = OUTSIDE
    plan: tuple[int, list[int]] | None = None
    known: tuple[int, list[int]] | None = None
    retry_at: int | None = None


class BudgetClose:
    """Plans the end of one answer.

    A `_Position` is kept for each token, so that a rollback leaves no trace: masks depend on the tokens of the answer
    alone, not on drafts that were tried and dropped.

    Args:
        free: the answer begins as free text.
    """

    def __init__(self, texts: ClosingTexts, *, free: bool = False) -> None:
        self._texts = texts
        self.num_shortest = texts.num_shortest
        self._positions = [_Position(FREE if free else OUTSIDE)]

    @property
    def margin(self) -> int:
        """Tokens before the end of a budget within which a plan may end the answer."""
        return self._texts.jump

    @property
    def is_free(self) -> bool:
        """Whether this is free text outside of its structured parts."""
        return self._positions[-1].lexical == FREE

    def copy(self) -> BudgetClose:
        """Return an independent copy."""
        other = BudgetClose(self._texts)
        other._positions = list(self._positions)
        return other

    @property
    def planned(self) -> list[int]:
        plan = self._positions[-1].plan
        return plan[1][len(self._positions) - 1 - plan[0] :] if plan else []

    def follow(self, token: int, *, free: bool = False) -> None:
        """Record an accepted token; a plan that has another token next is dropped.

        Args:
            free: free text follows.
        """
        if free:
            self._positions.append(_Position(FREE))
            return
        last, planned = self._positions[-1], self.planned
        lexical = self._texts.lexical(last.lexical, token)
        plan = last.plan if planned[:1] == [token] else None
        self._positions.append(_Position(lexical, plan, last.known, last.retry_at))

    def rollback(self, count: int) -> None:
        if count:
            del self._positions[-count:]

    def must_search(self, remaining: int) -> bool:
        """Return whether `plan` has to search: there is no plan, and one may be needed soon."""
        last, position = self._positions[-1], len(self._positions) - 1
        if self.is_free or last.plan is not None or (last.retry_at is not None and remaining > last.retry_at):
            return False
        known = last.known
        return known is None or remaining <= len(known[1]) + (position - known[0] + 1) * self._texts.jump

    def plan(self, state: BackendState, remaining: int) -> list[int] | None:
        """Return the tokens to an end if the budget requires it now, else None: every token is still free.

        Args:
            state: of the answer; left as it is.
            remaining: tokens that may still be generated.
        """
        last, position = self._positions[-1], len(self._positions) - 1
        if not self.must_search(remaining):
            return None if last.plan is None else self.planned
        suffix = self._known_suffix(state)
        if suffix and remaining > len(suffix) + self._texts.jump:
            self._positions[-1] = replace(last, known=(position, suffix))
            return None
        found = self.completion(state, remaining + BEYOND)
        if found is None:
            # All streams wait for a search, and one that finds nothing takes longest: search again only a few times.
            self._positions[-1] = replace(last, retry_at=min(remaining * 3 // 4, remaining - PAUSE))
            return None
        is_near = remaining <= len(found) + self._texts.jump
        self._positions[-1] = replace(last, known=(position, found), plan=(position, found) if is_near else None)
        return found if is_near else None

    def _known_suffix(self, state: BackendState) -> list[int] | None:
        """Return the longest suffix of the known completion that leads to an end from here; None if none does.

        In the middle of a value that is usually all of it, after the value its rest. A string that is under way is
        ended first, if the state knows how. Trying takes a fraction of a search; there may be shorter completions.
        """
        known = self._positions[-1].known
        tokens = known[1] if known else []
        after = state.copy()
        end = self._texts.vocabulary.tokenize_bpe(state.string_end()) if tokens else []
        if not advance(after, end):
            return None
        for start in range(min(len(tokens), MAX_SUFFIXES)):
            count = after.advance(tokens[start:])
            if count == len(tokens) - start and after.can_end():
                return end + tokens[start:]
            rollback_unless_failed(after, count)
        return None

    def completion(self, state: BackendState, most: int = MAX_TOKENS) -> list[int] | None:
        """Search a short completion of about `most` tokens at most; None if none was found."""
        shortest, lexical = self._texts.shortest, self._positions[-1].lexical
        if len(self._positions) == 1 and (shortest or self._texts.search_failed):
            return list(shortest) or None
        try:
            return self._search_walks(BoundedState(state, [MAX_TRIES]), lexical, most)
        except SearchExhausted:
            return None

    def _search_walks(self, state: BackendState, lexical: int, most: int) -> list[int] | None:
        """Interleave several walks; return the completion of the first that ends."""
        texts = self._texts
        walk = self._walk(state.copy(), lexical, most)
        # Values may have to differ before an array is complete; other text may be taken for JSON, and quotes in it for
        # those of a string. Any walk that ends is right; the plain one gets a head start.
        others = [self._walk(state.copy(), lexical, most, rotate=True)] if texts.listed else []
        if texts.rests:
            others += [self._walk(state.copy(), lexical, most, first) for first in (texts.ends, texts.rests)]
            flipped = INSIDE if lexical == OUTSIDE else OUTSIDE
            others += [self._walk(state.copy(), flipped, most, first) for first in ([], texts.ends)]
        for found in chain(islice(walk, HEAD_START), chain.from_iterable(zip_longest(walk, *others))):
            if found is not None:
                return found
        return None

    def _walk(
        self, state: BackendState, lexical: int, most: int, first: Sequence[list[int]] = (), *, rotate: bool = False
    ) -> Iterator[list[int] | None]:
        """Yield None per closing text appended, then the finished token list; stop early where no text fits.

        Args:
            state: advances.
            lexical: its lexical state.
            most: tokens of a completion.
            first: texts to try before all others.
            rotate: begin with another of the listed texts in each step.
        """
        tokens: list[int] = []
        for turn in range(MAX_STEPS):
            if state.can_end():
                yield tokens
                return
            step = self._step(state, lexical, first, turn if rotate else 0)
            if not step or len(tokens) > min(most, MAX_TOKENS):
                return
            for token in step:
                lexical = self._texts.lexical(lexical, token)
            tokens += step
            yield None

    def _step(self, state: BackendState, lexical: int, first: Sequence[list[int]], turn: int) -> list[int] | None:
        """Advance the state by the next tokens of a completion and return them."""
        texts = self._texts
        # Before what is forced, which may be the first letter of two ends.
        end = next((end for end in texts.ends if leads_to_end(state, end)), None)
        if end is not None and advance(state, end):
            return list(end)
        forced = state.forced()
        if forced:
            tokens = texts.vocabulary.tokenize_forced(forced)
            return tokens if advance(state, tokens) else None
        found = _accept_first(state, first) or self._json_step(state, lexical, turn)
        return found or _accept_first(state, texts.rests) or self._search(state, lexical)

    def _json_step(self, state: BackendState, lexical: int, turn: int) -> list[int] | None:
        """Advance by a text that fits the lexical state; in text that is not JSON, by the rest of a short one."""
        texts = self._texts
        end = state.string_end()
        if end:
            tokens = texts.vocabulary.tokenize_bpe(end)
            return tokens if advance(state, tokens) else None
        if lexical == INSIDE:
            return _accept_first(state, texts.tails)
        if texts.is_json and lexical != ESCAPED:
            turn %= len(texts.listed)
            listed = [*texts.listed[turn:], *texts.listed[:turn]] if turn else texts.listed
            return (
                _accept_first(state, texts.closers)
                or _accept_first(state, listed, then=texts.closers)
                or _accept_first(state, (*listed, texts.quote))
            )
        tail = next((tail for tail in texts.tails if leads_to_end(state, tail)), None)
        return list(tail) if tail and advance(state, tail) else None

    def _search(self, state: BackendState, lexical: int) -> list[int] | None:
        """Search breadth first out of the middle of a string or word, over a few tokens of each kind."""
        row: Row = np.zeros(self._texts.vocabulary.num_words, dtype=np.int32)
        frontier: list[tuple[BackendState, list[int]]] = [(state.copy(), [])]
        seen = {b""}
        for node, path in frontier:
            if len(frontier) > MAX_SEARCH:
                return None
            node.fill(row)
            for token in self._candidates(row):
                found = [*path, token]
                text = b"".join(self._texts.vocabulary.tokens[t] for t in found)
                after = node.copy()
                if text in seen or not after.accept(token):
                    continue
                seen.add(text)
                if after.can_end() or (lexical in (INSIDE, ESCAPED) and advance(after.copy(), self._texts.quote)):
                    return found if advance(state, found) else None
                frontier.append((after, found))
        return None

    def _candidates(self, row: Row) -> list[int]:
        """Return the best allowed token of each kind."""
        rank = ranks(self._texts.vocabulary)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[: len(rank)])
        best = allowed[np.argsort(rank[allowed], kind="stable")]
        kinds, first = np.unique(rank[best] >> 8, return_index=True)
        return [int(best[index]) for kind, index in zip(kinds, first, strict=True) if kind < NEVER]


def _accept_first(state: BackendState, texts: Sequence[list[int]], then: Sequence[list[int]] = ()) -> list[int] | None:
    """Advance by the first text that the state accepts and return it.

    Args:
        then: if given, one of these must be able to follow, unless the text completes the answer.
    """
    rejected: set[int] = set()  # first tokens
    for text in texts:
        if text[0] in rejected:
            continue
        count = state.advance(text)
        if count == len(text) and (not then or state.can_end() or _accepts_any(state, then)):
            return list(text)
        rollback_unless_failed(state, count)
        if not count:
            rejected.add(text[0])
    return None


def _accepts_any(state: BackendState, texts: Sequence[list[int]]) -> bool:
    after = state.copy()
    return any(advance(after, tokens) for tokens in texts)
