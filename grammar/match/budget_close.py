"""Closing within the token budget: allows only tokens after which an end of the answer still fits in the budget.

The budget excludes the tokens after which no end fits and changes nothing else: among the other tokens the model
chooses as it would without a budget. For choices and regular expressions, the fewest tokens to an end are known for
each state (`LeastEnds`). For other grammars, a token is tested: a search composes a short completion that follows the
token. The search closes open strings and containers. Where a value or a property is required, it tries the shortest
texts of the schema (`ClosingTexts`, computed when the grammar is compiled). One token lengthens the completion by at
most about one such text (the *jump*). So no token is tested while more tokens are left than the completion and the
jump take:

    tokens left   |----------- every token fits -----------|------- the drawn token is tested -------|
                                                  completion + jump                                  the end

A test takes a fraction of a millisecond, so the whole vocabulary cannot be tested. Therefore the sampler tests only
the token that it has drawn, and draws another one if that token does not fit (`BudgetCheck`).
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

# Number of tokens by which a completion may exceed the budget. Such a completion is not used, but a suffix of it may
# fit a few tokens later.
BEYOND = 200
# After a search that found nothing, at least this many tokens are generated before the next search.
PAUSE = 8
# The search of an end after a token looks for up to twice the tokens that fit, plus this number. A longer end may fit
# once its text is tokenized into fewer tokens.
BEYOND_TEST = 20
MAX_CHECKS = 64  # Number of positions whose check is kept: more than the drafts of a step.
# Number of suffixes of a known completion that are tried before a search starts.
MAX_SUFFIXES = 40
MAX_TRIES = 200  # Limit of the tokens that the test of one token may try.
TIE = 3  # A search goes on for a shorter end only if the first one exceeds the limit by more than this many tokens.
# If a grammar allows at most this number of tokens, each token is tested on its own, not as one of a group.
MAX_SINGLE = 512


class BudgetCheck(Protocol):
    """Determines, at one position of the answer, after which tokens an end still fits in the budget."""

    def fits(self, token: int) -> bool:
        """Return whether an end fits after ``token``, which the grammar allows. An end token always fits."""

    def alike(self, token: int) -> NDArray[np.int64]:
        """Return the tokens that are taken as equivalent to ``token``: they all fit, or none of them does."""

    def costs(self, token: int) -> dict[int, int]:
        """Return the cost of testing ``token`` and the tokens compared with it, as the number of tokens tried for each.

        The result does not depend on whether the tokens were tested before.
        """

    def known(self) -> Row:
        """Return a mask of allowed tokens that are known to fit without a search. It has at least one token."""

    def limits(self) -> Row:
        """Return the mask of all allowed tokens that fit. This may take long, as every group of tokens is tested."""


class RowCheck:
    """A check whose result is known for all tokens, as a mask."""

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
    """The result of a test: a short end after the token, or None if none was found, and the number of tokens tried."""

    end: list[int] | None
    cost: int


class _Searched(NamedTuple):
    """The results of the searches up to one position.

    Attributes:
        known: position and tokens of the last completion found; None if no completion was found.
        retry_at: after a search that found nothing, the number of tokens left at which the next search starts.
        check: check of the next token; None if every allowed token fits.
        remaining: number of tokens left when the position was searched; None for what earlier positions found.
    """

    known: tuple[int, list[int]] | None = None
    retry_at: int | None = None
    check: EndCheck | None = None
    remaining: int | None = None


_NOTHING = _Searched()


@dataclass(frozen=True, slots=True)
class _Position:
    """The data kept for one position of the answer.

    Attributes:
        lexical: lexical state: outside or inside of a JSON string, or in free text, which may end anywhere.
        before: results of the searches at earlier positions.
        here: result of the search at this position; None before the search. It is valid only for the number of tokens
            left at the search. After a thought that number depends on where the thought ends, and drafts try several
            places.
        state: state of the language if its least ends are known (`LeastEnds`).
    """

    lexical: int = OUTSIDE
    before: _Searched = _NOTHING
    here: _Searched | None = None
    state: State = 0

    def searched(self, remaining: int) -> _Searched:
        """Return what is known at this position if ``remaining`` tokens are left."""
        return self.here if self.here is not None and self.here.remaining == remaining else self.before


class BudgetClose:
    """Determines, for one answer, after which tokens an end still fits in the budget.

    A `_Position` is kept for each token, so that a rollback removes all effects of the tokens that it undoes: the
    result depends on the tokens of the answer alone, not on drafts that were tried and dropped.

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
        """Whether the position is in free text, outside of the structured parts of the answer."""
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
        """Return whether `check` must search an end, because some tokens may not fit."""
        last, position = self._positions[-1], len(self._positions) - 1
        if self._texts.least_ends is not None:
            return remaining <= self._texts.least_ends.most
        known, retry_at, _, _ = last.searched(remaining)
        if self.is_free or (retry_at is not None and remaining > retry_at):
            return False
        return known is None or remaining <= len(known[1]) + (position - known[0] + 1) * self._texts.jump

    def _is_pausing(self, remaining: int) -> bool:
        """Return whether the next search is put off because an earlier one found nothing.

        Meanwhile `check` starts a search only where the answer could end at once.
        """
        retry_at = self._positions[-1].searched(remaining).retry_at
        return not self.is_free and retry_at is not None and remaining > retry_at

    def check(self, state: BackendState, row: Row, remaining: int) -> BudgetCheck | None:
        """Return the check of the next token; None if an end fits after every allowed token.

        If no end fits, or none is known, the budget excludes no token and the result is None.

        Args:
            state: state of the answer, which is left unchanged.
            row: the mask of the tokens that the grammar allows.
            remaining: number of tokens that may still be generated.
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
            # All streams wait for a search, and a search that finds nothing takes longest. So it is repeated only a
            # few times.
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
        """Return a completion of at most ``remaining`` tokens; None if none was found.

        The known completion is used if a suffix of it still leads to an end. If the whole budget is smaller than the
        shortest answer, nothing is searched: no completion fits, and a search would take its full time.
        """
        if len(self._positions) - 1 + remaining < (self.num_shortest or 0):
            return None
        found = self._known_suffix(state)
        if found is None or len(found) > remaining:
            found = self.completion(state, remaining + BEYOND)
        return None if found is None or len(found) > remaining else found

    def completion(self, state: BackendState, most: int = MAX_TOKENS) -> list[int] | None:
        """Search a completion of at most about ``most`` tokens; None if none was found."""
        shortest = self._texts.shortest
        if len(self._positions) == 1 and (shortest or self._texts.search_failed):
            return list(shortest) or None
        return self._search.shortest(state.search_copy(), self._positions[-1].lexical, most)

    def _known_suffix(self, state: BackendState) -> list[int] | None:
        """Return the longest suffix of the known completion that leads to an end from here; None if none does.

        In the middle of a value the whole completion usually leads to an end; after the value, the rest of the
        completion does. The end that a check has found after the last token is used whole, because a new search may not
        find one as short. If no suffix completes the answer, the entry or string that has begun is ended first, if the
        state knows an end for it. All of this takes a fraction of the time of a search. Shorter completions may exist.
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
    """Return the longest suffix of ``tokens`` that completes the answer; None if none does. The state is unchanged."""
    for start in range(min(len(tokens), MAX_SUFFIXES)):
        count = state.advance(tokens[start:])
        if count == len(tokens) - start and state.can_end():
            rollback_unless_failed(state, count)
            return tokens[start:]
        rollback_unless_failed(state, count)
    return None


class EndCheck:
    """Tests, by search, after which tokens an end of at most ``most`` tokens follows.

    The result and the cost of a test depend on the tokens of the answer alone, never on other tests. So speculative
    drafts, which cause more tests, do not change which tokens are drawn.

    Args:
        state: state of the answer; the check owns it.
        lexical: lexical state of the answer.
        most: largest number of tokens of an end that fits.
        row: mask of the tokens that the grammar allows.
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
        """Return whether an end fits after ``token``, which the grammar allows, by a search of limited length."""
        if token in self._texts.vocabulary.eos:
            return True
        end = self.end_after(token)
        return end is not None and len(end) <= self.most

    def costs(self, token: int) -> dict[int, int]:
        """See `BudgetCheck.costs`."""
        tested = (token, *self._compared(token))
        return {each: self._test(each).cost for each in tested if each not in self._texts.vocabulary.eos}

    def known(self) -> Row:
        """Return a mask of the first token of the known completion, and of the end tokens if they are allowed."""
        row = np.zeros_like(self._row)
        words = row.view(np.uint32)
        for token in (*self._found[:1], *self._texts.vocabulary.eos):
            words[token >> 5] |= np.uint32(1 << (token & 31))
        return row & self._row

    def end_after(self, token: int) -> list[int] | None:
        """Return a short end after ``token``, None if none was found. The end may be longer than the budget."""
        return self._test(token).end

    def alike(self, token: int) -> NDArray[np.int64]:
        """Return the tokens that are taken as equivalent to ``token`` with regard to the end of the answer.

        Between JSON values, all white space is equivalent. In a string in which all tokens of a length are allowed, the
        tokens of equal length are equivalent. Elsewhere the tokens of equal shape are equivalent, if many are allowed.
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
        """Return the samples of the length of ``token``, up to and with the first one whose end has another length."""
        samples, length = self._samples(token), self._length(token)
        count = next((at for at, each in enumerate(samples, 1) if self._length(each) != length), len(samples))
        return samples[:count]

    def _samples(self, token: int) -> tuple[int, ...]:
        """Return some tokens as long as ``token``; testing them shows whether all of this length are equivalent."""
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
        """Return the allowed tokens of ``length`` characters."""
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
        """Return a short end after ``token``, for which at most ``left`` tokens are tried; None if none was found."""
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
        """Return the completion found before the token, or a suffix of it that fits, if it ends the answer after it.

        If the token only lengthens a string that the completion closes at once, the end is as far away as before. So
        the whole completion is returned, even if it does not fit. In free text every token is allowed, so each suffix
        is tried to its last token. Therefore the trials stop when half of the tokens that may be tried are used up; the
        other half is left for a search.

        Args:
            left: list with the number of tokens that may still be tried.
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
        """Whether a token only lengthens a string that the completion closes at once; its end is as far as before."""
        tokens, found = self._texts.vocabulary.tokens, self._found
        is_inside = self._lexical == INSIDE and self._texts.lexical(INSIDE, token) == INSIDE
        return is_inside and b'"' not in tokens[token] and bool(found) and tokens[found[0]][:1] == b'"'


def _bits(row: Row, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
    bits: NDArray[np.bool_] = (row.view(np.uint32)[tokens >> 5] >> (tokens & 31).astype(np.uint32)) & 1 > 0
    return bits
