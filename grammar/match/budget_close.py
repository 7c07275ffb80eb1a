"""Closing within the token budget: of the tokens that the grammar allows, those after which some end still fits.

The budget excludes what no longer fits and changes nothing else: among the tokens that are left the model chooses as it
would without a budget. For choices and expressions the fewest tokens to an end are known (`LeastEnds`). Elsewhere a
token is tested: a search puts a short completion together behind it. It closes what can be closed, and where a value or
a property is required it tries the shortest texts that the schema has (`ClosingTexts`, computed at compile time). One
token lengthens the completion by about one such text (the *jump*), which bounds how long no token needs to be tested:

    tokens left   |----------- every token fits -----------|------- the drawn token is tested -------|
                                              completion + jump                                  the end

A test takes a fraction of a millisecond, but there are as many tokens as a vocabulary has. So the sampler tests the
token that it has drawn, and draws another one only where that does not fit (`BudgetCheck`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .backends import BackendState, Row, advance, leads_to_end, rollback_unless_failed
from .closing_texts import FREE, INSIDE, OUTSIDE, ClosingTexts
from .completion_search import MAX_TOKENS, CompletionSearch
from .least_ends import State
from .token_kinds import SINGLE, token_kinds

# Tokens that a completion may exceed the budget by: it is not followed then, but its rest may fit later.
BEYOND = 200
# Fewest tokens from a search that found nothing to the next one.
PAUSE = 8
# Tokens, beyond twice those that fit, up to which an end after a token is searched: it may be cut into fewer.
BEYOND_TEST = 20
MAX_CHECKS = 64  # positions of which the check is kept, more than a step has drafts
MAX_SUFFIXES = 40  # of a known completion, tried before a search
MAX_TRIES = 600  # tokens that a search after a token may try
TIE = 3  # tokens by which another end than the first one found may be shorter
# Tokens up to which each one is tested alone.
MAX_SINGLE = 512


class BudgetCheck(Protocol):
    """Tells at one position which tokens leave room for an end."""

    def fits(self, token: int) -> bool:
        """Return whether an end fits after an allowed token; an end token fits."""

    def alike(self, token: int) -> NDArray[np.int64]:
        """Return the tokens that fit if this one does, and do not if it does not."""

    def known(self) -> Row:
        """Return a mask of allowed tokens that are known to fit, at least one, without a search."""

    def limits(self) -> Row:
        """Return the mask of all allowed tokens that fit, which may take long."""


class RowCheck:
    """A check by a mask."""

    def __init__(self, row: Row) -> None:
        self._row = row

    def fits(self, token: int) -> bool:
        return bool(int(self._row[token >> 5]) >> (token & 31) & 1)

    def alike(self, token: int) -> NDArray[np.int64]:
        return np.array([token])

    def known(self) -> Row:
        return self._row

    def limits(self) -> Row:
        return self._row


class _Tests:
    """Results of tests at one position.

    Equal masks do not make positions of a string equal: characters may be counted, and what was written before may not
    be repeated. So an end that was found at an earlier position is followed again before it is taken.

    Args:
        earlier: results at a position of the same string with the same mask.

    Attributes:
        row: the grammar's mask there.
        found: the completion there.
        ends: an end after a token; true if a search found no shorter one.
        earlier: the same at earlier positions.
        shorter: the shortest end that was found in place of another one.
    """

    def __init__(self, row: Row, found: list[int], earlier: _Tests | None = None) -> None:
        self.row = row
        self.found = found
        self.ends: dict[int, tuple[list[int] | None, bool]] = {}
        self.earlier: dict[int, tuple[list[int] | None, bool]] = (
            {} if earlier is None else earlier.earlier | earlier.ends
        )
        self.shorter: dict[tuple[int, ...], list[int]] = {} if earlier is None else earlier.shorter

    @cached_property
    def num_allowed(self) -> int:
        return int(np.unpackbits(self.row.view(np.uint8)).sum())


@dataclass(frozen=True, slots=True)
class _Position:
    """What is known at one position of the answer.

    Attributes:
        lexical: inside or outside of a JSON string, or in free text, which needs no closing.
        known: position and tokens of the last completion found.
        retry_at: after a search that found nothing, the tokens left at which to search again.
        check: of the next token.
        tests: of the last check, here or before.
        state: of the language whose least ends are known.
    """

    lexical: int = OUTSIDE
    known: tuple[int, list[int]] | None = None
    retry_at: int | None = None
    check: EndCheck | None = None
    tests: _Tests | None = None
    state: State = 0


class BudgetClose:
    """Tells for one answer which tokens leave room for an end.

    A `_Position` is kept for each token, so that a rollback leaves no trace: what fits depends on the tokens of the
    answer alone, not on drafts that were tried and dropped.

    Args:
        free: the answer begins as free text.
    """

    def __init__(self, texts: ClosingTexts, *, free: bool = False) -> None:
        self._texts = texts
        self._search = CompletionSearch(texts)
        self.num_shortest = texts.num_shortest
        start: State = texts.least_ends.start if texts.least_ends is not None else 0
        self._positions = [_Position(FREE if free else OUTSIDE, state=start)]

    @property
    def is_free(self) -> bool:
        """Whether this is free text outside of its structured parts."""
        return self._positions[-1].lexical == FREE

    def copy(self) -> BudgetClose:
        """Return an independent copy."""
        other = BudgetClose(self._texts)
        other._positions = list(self._positions)
        return other

    def follow(self, token: int, *, free: bool = False) -> None:
        """Record an accepted token.

        Args:
            free: free text follows.
        """
        last, position, least_ends = self._positions[-1], len(self._positions), self._texts.least_ends
        if position > MAX_CHECKS and self._positions[-MAX_CHECKS].check is not None:
            self._positions[-MAX_CHECKS] = replace(self._positions[-MAX_CHECKS], check=None)
        if free:
            self._positions.append(_Position(FREE))
            return
        end = last.check.end_after(token) if last.check is not None else None
        known = last.known if end is None else (position, end)
        lexical = self._texts.lexical(last.lexical, token)
        state = last.state if least_ends is None else least_ends.after(last.state, token)
        self._positions.append(_Position(lexical, known, last.retry_at, None, last.tests, state))

    def rollback(self, count: int) -> None:
        if count:
            del self._positions[-count:]

    def must_search(self, remaining: int) -> bool:
        """Return whether `check` has work to do: perhaps not every token fits."""
        last, position = self._positions[-1], len(self._positions) - 1
        if self._texts.least_ends is not None:
            return remaining <= self._texts.least_ends.most
        if self.is_free or (last.retry_at is not None and remaining > last.retry_at):
            return False
        known = last.known
        return known is None or remaining <= len(known[1]) + (position - known[0] + 1) * self._texts.jump

    def check(self, state: BackendState, row: Row, remaining: int) -> BudgetCheck | None:
        """Return the check of the next token; None if all that are allowed fit.

        Where no end fits at all, or none is known, nothing is excluded.

        Args:
            state: of the answer; left as it is.
            row: the mask of the tokens that the grammar allows.
            remaining: tokens that may still be generated.
        """
        if not self.must_search(remaining):
            return None
        least_ends = self._texts.least_ends
        if least_ends is not None:
            position = self._positions[-1]
            if least_ends.least(position.state) > remaining:
                return None
            kept = row & (least_ends.fitting(position.state, remaining - 1) | self._texts.end_row)
            return None if (kept == row).all() else RowCheck(kept)
        known = self._positions[-1].check
        if known is not None and known.most == remaining - 1:
            return known
        found = self._end_within(state, remaining)
        if found is None or remaining > len(found) + self._texts.jump:
            return None
        last = self._positions[-1]
        tests = last.tests
        if tests is not None and (last.lexical != INSIDE or len(tests.found) != len(found) or (tests.row != row).any()):
            tests = None
        tests = _Tests(row.copy(), found, earlier=tests)
        check = EndCheck(self._search, self._texts, state.copy(), last.lexical, remaining - 1, tests)
        self._positions[-1] = replace(last, check=check, tests=tests)
        return check

    def _end_within(self, state: BackendState, remaining: int) -> list[int] | None:
        """Return a completion that fits, the known one if its rest still leads to an end; None if none was found."""
        last, position = self._positions[-1], len(self._positions) - 1
        found = self._known_suffix(state)
        if found is None or len(found) > remaining:
            found = self.completion(state, remaining + BEYOND)
        if found is None or len(found) > remaining:
            # All streams wait for a search, and one that finds nothing takes longest: search again only a few times.
            self._positions[-1] = replace(last, retry_at=min(remaining * 3 // 4, remaining - PAUSE))
            return None
        self._positions[-1] = replace(last, known=(position, found))
        return found

    def completion(self, state: BackendState, most: int = MAX_TOKENS) -> list[int] | None:
        """Search a short completion of about `most` tokens at most; None if none was found."""
        shortest = self._texts.shortest
        if len(self._positions) == 1 and (shortest or self._texts.search_failed):
            return list(shortest) or None
        return self._search.shortest(state, self._positions[-1].lexical, most)

    def _known_suffix(self, state: BackendState) -> list[int] | None:
        """Return the longest suffix of the known completion that leads to an end from here; None if none does.

        In the middle of a value that is usually all of it, after the value its rest. The end that a check has found
        after the last token is all of it, and a search may not find one as short. Only where no suffix ends the answer
        is what is under way ended first, if the state knows how. Trying takes a fraction of a search; there may be
        shorter completions.
        """
        known = self._positions[-1].known
        tokens = known[1] if known else []
        after = state.copy()
        found = _suffix_to_end(after, tokens)
        end = self._texts.vocabulary.tokenize_bpe(state.string_end()) if found is None and tokens else []
        if end and advance(after, end):
            found = _suffix_to_end(after, tokens)
        return found if found is None else end + found


def _suffix_to_end(state: BackendState, tokens: list[int]) -> list[int] | None:
    """Return the longest suffix that completes the answer, None if none does; the state is left as it is."""
    for start in range(min(len(tokens), MAX_SUFFIXES)):
        count = state.advance(tokens[start:])
        if count == len(tokens) - start and state.can_end():
            rollback_unless_failed(state, count)
            return tokens[start:]
        rollback_unless_failed(state, count)
    return None


class EndCheck:
    """Tests after which tokens an end of at most so many tokens follows, by a search for one.

    Args:
        state: of the answer; belongs to the check.
        lexical: its lexical state.
        most: tokens of an end.
        tests: what is known; added to.
    """

    def __init__(
        self, search: CompletionSearch, texts: ClosingTexts, state: BackendState, lexical: int, most: int, tests: _Tests
    ) -> None:
        self._search = search
        self._texts = texts
        self._state = state
        self._lexical = lexical
        self.most = most
        self._tests = tests

    def fits(self, token: int) -> bool:
        """Return whether an end fits after an allowed token, by a search of bounded length."""
        return self._fits(token, None)

    def _fits(self, token: int, left: list[int] | None) -> bool:
        if token in self._texts.vocabulary.eos:
            return True
        end = self.end_after(token, left)
        return end is not None and len(end) <= self.most

    def known(self) -> Row:
        """Return the tokens after which an end has been found that fits, and the end token where it may come."""
        fitting = [token for token, (end, _) in self._tests.ends.items() if end is not None and len(end) <= self.most]
        row = np.zeros_like(self._tests.row)
        words = row.view(np.uint32)
        for token in (*fitting, *self._tests.found[:1], *self._texts.vocabulary.eos):
            words[token >> 5] |= np.uint32(1 << (token & 31))
        return row & self._tests.row

    def end_after(self, token: int, left: list[int] | None = None) -> list[int] | None:
        """Return a short end after a token, None if none was found: one that fits, if there is one.

        Args:
            left: tries that its search may take, which it lessens; None for those of one search.
        """
        if self._tests.found[:1] == [token]:
            return self._tests.found[1:]
        end, is_shortest = self._tests.ends.get(token, (None, False))
        if not is_shortest and (end is None or len(end) > self.most):
            end, is_shortest = self._tests.ends[token] = self._find_end(token, left)
        return end

    def alike(self, token: int) -> NDArray[np.int64]:
        """Return the tokens that are alike one for the end of the answer.

        In a string that admits all tokens of a length these are, and among many other tokens those of one shape.
        """
        kinds = token_kinds(self._texts.vocabulary)
        if self._tests.num_allowed <= MAX_SINGLE or self._tests.found[:1] == [token]:
            return np.array([token])
        length = int(kinds.lengths[token])
        if self._lexical == INSIDE and length < SINGLE:
            [members] = np.nonzero(kinds.lengths == length)
            members = members[_bits(self._tests.row, members)]
            ends = {self._length(int(each)) for each in members[[0, len(members) // 2, -1]]} if len(members) else set()
            if len(members) >= kinds.num_of_length[length] - 1 and ends == {self._length(token)}:
                return members[~np.isin(members, self._tests.found[:1])]
        [members] = np.nonzero(kinds.shapes == kinds.shapes[token])
        return members[~np.isin(members, self._tests.found[:1])]

    def limits(self) -> Row:
        """Return the mask of all allowed tokens that fit."""
        row = self._tests.row
        left = np.unpackbits(row.view(np.uint8), bitorder="little").astype(np.bool_)
        good = np.zeros(len(left), dtype=np.bool_)
        while len(some := np.flatnonzero(left)):
            token = int(some[0])
            members = np.append(self.alike(token), token)
            good[members[left[members]]] = self._fits(token, None)
            left[members] = False
        mask: Row = np.packbits(good, bitorder="little").view(np.int32)
        return mask

    def _length(self, token: int) -> int:
        end = self.end_after(token)
        return -1 if end is None else len(end)

    def _find_end(self, token: int, left: list[int] | None) -> tuple[list[int] | None, bool]:
        """Return a short end after a token, and whether a search found no shorter one."""
        tests, after = self._tests, self._state.copy()
        if not after.accept(token):
            return None, True
        if self._stays_in_string(token) and leads_to_end(after, tests.found):
            return tests.found, True
        earlier, is_shortest = tests.earlier.get(token, (None, False))
        if earlier is not None and len(earlier) <= self.most and leads_to_end(after, earlier):
            return earlier, is_shortest
        for size in range(min(len(tests.found), self.most) + 1):
            if leads_to_end(after, end := tests.found[len(tests.found) - size :]):
                return end, False
        if is_shortest and tests.num_allowed > MAX_SINGLE and (earlier is None or len(earlier) > self.most):
            return earlier, True  # of a string that admits so much, another search would find no more
        lexical = self._texts.lexical(self._lexical, token)
        if left is not None and left[0] <= 0:
            return None, False
        found = self._search.shortest(after, lexical, 2 * self.most + BEYOND_TEST, tries=MAX_TRIES, left=left)
        if found is not None and self.most < len(found) <= self.most + TIE:
            found = self._shorter(after, lexical, found)
        return found, True

    def _shorter(self, after: BackendState, lexical: int, end: list[int]) -> list[int]:
        """Return an end that fits in place of one that is a little too long, if there is one.

        Where several tokens lead to the same end, it is looked for once.
        """
        tests = self._tests
        known = tests.shorter.get(tuple(end))
        if known is None or not (known is end or leads_to_end(after, known)):
            known = self._search.shortest(after, lexical, 2 * self.most + BEYOND_TEST, self.most, MAX_TRIES) or end
            tests.shorter[tuple(end)] = known
        return known

    def _stays_in_string(self, token: int) -> bool:
        """Whether a string that the completion ends at once goes on with a token: its end is then as far as before."""
        tokens, found = self._texts.vocabulary.tokens, self._tests.found
        is_inside = self._lexical == INSIDE and self._texts.lexical(INSIDE, token) == INSIDE
        return is_inside and b'"' not in tokens[token] and bool(found) and tokens[found[0]][:1] == b'"'


def _bits(row: Row, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
    bits: NDArray[np.bool_] = (row.view(np.uint32)[tokens >> 5] >> (tokens & 31).astype(np.uint32)) & 1 > 0
    return bits
