"""Closing within the token budget: allows only tokens after which some end of the answer still fits.

The budget excludes the tokens after which no end fits and changes nothing else: among the other tokens the model
chooses as it would without a budget. For choices and expressions the fewest tokens to an end are known (`LeastEnds`).
Elsewhere a token is tested: a search composes a short completion after it. The search closes open strings and
containers; where a value or a property is required, it tries the shortest texts of the schema (`ClosingTexts`, computed
at compile time). One token lengthens the completion by at most about one such text (the *jump*). So no token is tested
while this many tokens are left:

    tokens left   |----------- every token fits -----------|------- the drawn token is tested -------|
                                              completion + jump                                  the end

A test takes a fraction of a millisecond, so the whole vocabulary cannot be tested. Therefore the sampler tests the
token that it has drawn, and draws another one only if that token does not fit (`BudgetCheck`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .backends import (
    BackendState,
    BoundedState,
    Row,
    SearchExhausted,
    advance,
    leads_to_end,
    rollback_unless_failed,
)
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
# So many suffixes of a known completion are tried before a search.
MAX_SUFFIXES = 40
MAX_TRIES = 200  # tokens that the test of one token may try
TIE = 3  # tokens by which another end than the first one found may be shorter
# Tokens up to which each one is tested alone.
MAX_SINGLE = 512


class BudgetCheck(Protocol):
    """Tells at one position which tokens leave room for an end."""

    def fits(self, token: int) -> bool:
        """Return whether an end fits after an allowed token; an end token fits."""

    def alike(self, token: int) -> NDArray[np.int64]:
        """Return the tokens that fit if this one does, and do not if it does not."""

    def costs(self, token: int) -> dict[int, int]:
        """Return, by token, the work of testing a token and some tokens that may be alike it, in tokens tried.

        The result does not depend on whether they were tested before.
        """

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

    def costs(self, token: int) -> dict[int, int]:
        return {}

    def known(self) -> Row:
        return self._row

    def limits(self) -> Row:
        return self._row


class _Test(NamedTuple):
    """What a test of a token has found: a short end after it, None if none was found, and the tokens that it tried."""

    end: list[int] | None
    cost: int


class _Searched(NamedTuple):
    """The findings of the searches up to a position.

    Attributes:
        known: position and tokens of the last completion found.
        retry_at: number of tokens left at which to search again, after a search that found nothing.
        check: check of the next token.
        remaining: number of tokens left when the position was searched; None for the findings of earlier positions.
    """

    known: tuple[int, list[int]] | None = None
    retry_at: int | None = None
    check: EndCheck | None = None
    remaining: int | None = None


_NOTHING = _Searched()


@dataclass(frozen=True, slots=True)
class _Position:
    """The findings at one position of the answer.

    Attributes:
        lexical: inside or outside of a JSON string, or in free text, which needs no closing.
        before: findings of the positions before.
        here: findings after a search at this position; None before the search. They are valid only for the number of
            tokens left at the search: after a thought, the number varies with the end of the thought, and drafts try
            several ends.
        state: state of the language whose least ends are known.
    """

    lexical: int = OUTSIDE
    before: _Searched = _NOTHING
    here: _Searched | None = None
    state: State = 0

    def searched(self, remaining: int) -> _Searched:
        """Return what is found with so many tokens left."""
        return self.here if self.here is not None and self.here.remaining == remaining else self.before


class BudgetClose:
    """Determines for one answer which tokens leave room for an end.

    A `_Position` is kept for each token, so that a rollback leaves no trace: the result depends on the tokens of the
    answer alone, not on drafts that were tried and dropped.

    Args:
        free: whether the answer begins as free text.
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
            free: whether free text follows.
        """
        last, position, least_ends = self._positions[-1], len(self._positions), self._texts.least_ends
        if position > MAX_CHECKS and (old := self._positions[-MAX_CHECKS]).here is not None:
            self._positions[-MAX_CHECKS] = replace(old, here=old.here._replace(check=None))
        if free:
            self._positions.append(_Position(FREE))
            return
        searched = last.here or last.before
        end = searched.check.end_after(token) if searched.check is not None else None
        known = searched.known if end is None else (position, end)
        lexical = self._texts.lexical(last.lexical, token)
        state = last.state if least_ends is None else least_ends.after(last.state, token)
        self._positions.append(_Position(lexical, _Searched(known, searched.retry_at), None, state))

    def rollback(self, count: int) -> None:
        if count:
            del self._positions[-count:]

    def must_search(self, remaining: int) -> bool:
        """Return whether `check` has work to do: perhaps not every token fits."""
        last, position = self._positions[-1], len(self._positions) - 1
        if self._texts.least_ends is not None:
            return remaining <= self._texts.least_ends.most
        known, retry_at, _, _ = last.searched(remaining)
        if self.is_free or (retry_at is not None and remaining > retry_at):
            return False
        return known is None or remaining <= len(known[1]) + (position - known[0] + 1) * self._texts.jump

    def _is_pausing(self, remaining: int) -> bool:
        """Return whether no end is searched for now, because a search found none: one that is there at once counts."""
        retry_at = self._positions[-1].searched(remaining).retry_at
        return not self.is_free and retry_at is not None and remaining > retry_at

    def check(self, state: BackendState, row: Row, remaining: int) -> BudgetCheck | None:
        """Return the check of the next token; None if an end fits after every allowed token.

        Where no end fits at all, or none is known, nothing is excluded.

        Args:
            state: state of the answer, which is left unchanged.
            row: the mask of the tokens that the grammar allows.
            remaining: tokens that may still be generated.
        """
        last = self._positions[-1]
        if last.here is not None and last.here.remaining != remaining:
            last = self._positions[-1] = replace(last, here=None)
        if not self.must_search(remaining) and not (self._is_pausing(remaining) and state.can_end()):
            return None
        least_ends = self._texts.least_ends
        if least_ends is not None:
            if least_ends.least(last.state) > remaining:
                return None
            kept = row & (least_ends.fitting(last.state, remaining - 1) | self._texts.end_row)
            return None if (kept == row).all() else RowCheck(kept)
        if last.here is not None and last.here.check is not None:
            return last.here.check
        found = self._end_within(state, remaining)
        if found is None:
            # All streams wait for a search, and one that finds nothing takes longest: search again only a few times.
            retry_at = min(remaining * 3 // 4, remaining - PAUSE)
            self._positions[-1] = replace(last, here=_Searched(last.before.known, retry_at, None, remaining))
            return None
        check: EndCheck | None = None
        if remaining <= len(found) + self._texts.jump:
            searched = state.search_copy()
            check = EndCheck(self._search, self._texts, searched, last.lexical, remaining - 1, row.copy(), found)
        known = len(self._positions) - 1, found
        self._positions[-1] = replace(last, here=_Searched(known, last.before.retry_at, check, remaining))
        return check

    def _end_within(self, state: BackendState, remaining: int) -> list[int] | None:
        """Return a completion that fits, the known one if its rest still leads to an end; None if none was found.

        If the whole budget is smaller than the shortest answer, no completion fits, and a search would take its full
        time.
        """
        if len(self._positions) - 1 + remaining < (self.num_shortest or 0):
            return None
        found = self._known_suffix(state)
        if found is None or len(found) > remaining:
            found = self.completion(state, remaining + BEYOND)
        return None if found is None or len(found) > remaining else found

    def completion(self, state: BackendState, most: int = MAX_TOKENS) -> list[int] | None:
        """Search a short completion of about `most` tokens at most; None if none was found."""
        shortest = self._texts.shortest
        if len(self._positions) == 1 and (shortest or self._texts.search_failed):
            return list(shortest) or None
        return self._search.shortest(state.search_copy(), self._positions[-1].lexical, most)

    def _known_suffix(self, state: BackendState) -> list[int] | None:
        """Return the longest suffix of the known completion that leads to an end from here; None if none does.

        In the middle of a value the whole completion usually leads to an end; after the value, its rest does. The end
        that a check has found after the last token is used as a whole, as a search may not find one as short. If no
        suffix ends the answer, the present entry or string is ended first, if the state knows an end for it. This takes
        a fraction of the time of a search; shorter completions may exist.
        """
        known = self._positions[-1].before.known
        tokens = known[1] if known else []
        after = state.search_copy()
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
    """Tests, by search, after which tokens an end of at most ``most`` tokens follows.

    The result and the cost of a test depend on the tokens of the answer alone, never on other tests. So drafts, which
    cause more tests, change no draw.

    Args:
        state: state of the answer, which belongs to the check.
        lexical: its lexical state.
        most: largest number of tokens of an end.
        row: the grammar's mask.
        found: a completion that was found before.
    """

    def __init__(
        self,
        search: CompletionSearch,
        texts: ClosingTexts,
        state: BackendState,
        lexical: int,
        most: int,
        row: Row,
        found: list[int],
    ) -> None:
        self._search = search
        self._texts = texts
        self._state = state
        self._lexical = lexical
        self.most = most
        self._row = row
        self._found = found
        self._tests: dict[int, _Test] = {}
        self._sampled: dict[int, tuple[int, ...]] = {}

    def fits(self, token: int) -> bool:
        """Return whether an end fits after an allowed token, by a search of bounded length."""
        if token in self._texts.vocabulary.eos:
            return True
        end = self.end_after(token)
        return end is not None and len(end) <= self.most

    def costs(self, token: int) -> dict[int, int]:
        """See `BudgetCheck.costs`."""
        tested = (token, *self._compared(token))
        return {each: self._test(each).cost for each in tested if each not in self._texts.vocabulary.eos}

    def known(self) -> Row:
        """Return the mask of the first token of the completion, and of the end token where it may come."""
        row = np.zeros_like(self._row)
        words = row.view(np.uint32)
        for token in (*self._found[:1], *self._texts.vocabulary.eos):
            words[token >> 5] |= np.uint32(1 << (token & 31))
        return row & self._row

    def end_after(self, token: int) -> list[int] | None:
        """Return a short end after a token, None if none was found: one that fits, if there is one."""
        return self._test(token).end

    def alike(self, token: int) -> NDArray[np.int64]:
        """Return the tokens that are equivalent to one with regard to the end of the answer.

        Between JSON values, all white space is equivalent. In a string that admits all tokens of a length, the tokens
        of equal length are; among many other tokens, the tokens of one shape are.
        """
        if self._lexical == OUTSIDE and self._texts.is_blank(token):
            allowed = np.flatnonzero(np.unpackbits(self._row.view(np.uint8), bitorder="little"))
            return np.array([each for each in allowed.tolist() if self._texts.is_blank(each)])
        if self._num_allowed <= MAX_SINGLE:
            return np.array([token])
        kinds, compared = token_kinds(self._texts.vocabulary), self._compared(token)
        if compared and self._length(compared[-1]) == self._length(token):
            members = self._members(int(kinds.lengths.numbers[token]))
        else:
            members = kinds.shapes.members(int(kinds.shapes.numbers[token]))
        return members[~np.isin(members, self._found[:1])]

    @cached_property
    def _num_allowed(self) -> int:
        return int(np.unpackbits(self._row.view(np.uint8)).sum())

    def _compared(self, token: int) -> tuple[int, ...]:
        """Return the samples of a token's length up to the first one whose end has another length."""
        samples, length = self._samples(token), self._length(token)
        count = next((at for at, each in enumerate(samples, 1) if self._length(each) != length), len(samples))
        return samples[:count]

    def _samples(self, token: int) -> tuple[int, ...]:
        """Return tokens of the length of one, which are tested to find whether all of this length are alike."""
        kinds = token_kinds(self._texts.vocabulary)
        length = int(kinds.lengths.numbers[token])
        if length >= SINGLE or self._num_allowed <= MAX_SINGLE:
            return ()
        samples = self._sampled.get(length)
        if samples is None:
            members = self._members(length)
            is_whole = len(members) >= max(1, len(kinds.lengths.members(length)) - 1)
            samples = self._sampled[length] = tuple(members[[0, len(members) // 2, -1]].tolist()) if is_whole else ()
        return samples

    def _members(self, length: int) -> NDArray[np.int64]:
        """Return the allowed tokens of a length."""
        members = token_kinds(self._texts.vocabulary).lengths.members(length)
        return members[_bits(self._row, members)]

    def limits(self) -> Row:
        """Return the mask of all allowed tokens that fit."""
        row = self._row
        left = np.unpackbits(row.view(np.uint8), bitorder="little").astype(np.bool_)
        good = np.zeros(len(left), dtype=np.bool_)
        while len(some := np.flatnonzero(left)):
            token = int(some[0])
            members = np.append(self.alike(token), token)
            good[members[left[members]]] = self.fits(token)
            left[members] = False
        mask: Row = np.packbits(good, bitorder="little").view(np.int32)
        return mask

    def _length(self, token: int) -> int:
        end = self.end_after(token)
        return -1 if end is None else len(end)

    def _test(self, token: int) -> _Test:
        test = self._tests.get(token)
        if test is None:
            left = [MAX_TRIES]
            end = self._find_end(token, left)
            test = self._tests[token] = _Test(end, MAX_TRIES - left[0])
        return test

    def _find_end(self, token: int, left: list[int]) -> list[int] | None:
        """Return a short end after a token, by at most ``left`` tokens tried."""
        if self._found[:1] == [token]:
            return self._found[1:]
        after = BoundedState(self._state, left)
        if not after.accept(token):
            return None
        try:
            known = self._known_end(after, token, left)
            if known is not None or not self.most:
                return known
            lexical, most = self._texts.lexical(self._lexical, token), 2 * self.most + BEYOND_TEST
            return self._search.shortest(self._state, lexical, most, self.most, left, near=self.most + TIE)
        except SearchExhausted:
            return None
        finally:
            rollback_unless_failed(self._state, 1)

    def _known_end(self, after: BackendState, token: int, left: list[int]) -> list[int] | None:
        """Return the completion, or a part of it, that also ends the answer after a token and fits.

        If a string goes on, the completion is still as short an end as before, even if it does not fit. Free text
        accepts every part as a whole, so half of the work is kept for a search.
        """
        if not self.most:
            return [] if after.can_end() else None
        found = self._found
        if (len(found) <= self.most or self._stays_in_string(token)) and leads_to_end(after, found):
            return found
        for size in range(min(len(found) - 1, self.most), -1, -1):
            if left[0] < MAX_TRIES // 2:
                break
            if leads_to_end(after, end := found[len(found) - size :]):
                return end
        return None

    def _stays_in_string(self, token: int) -> bool:
        """Whether a string that the completion ends at once goes on with a token: its end is then as far as before."""
        tokens, found = self._texts.vocabulary.tokens, self._found
        is_inside = self._lexical == INSIDE and self._texts.lexical(INSIDE, token) == INSIDE
        return is_inside and b'"' not in tokens[token] and bool(found) and tokens[found[0]][:1] == b'"'


def _bits(row: Row, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
    bits: NDArray[np.bool_] = (row.view(np.uint32)[tokens >> 5] >> (tokens & 31).astype(np.uint32)) & 1 > 0
    return bits
