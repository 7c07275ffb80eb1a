"""Reasoning matcher: follows a thought before an answer. The grammar applies to the answer, however the thought ends.

    BEGIN --start mark--> THOUGHT --end mark--> GAP --answer--> ANSWER
      '------------------------- answer ------------------------^

A thought is free text. Its end mark is forced when the thought has used up its token budget, or when the tokens left
just suffice for the end mark and the shortest answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..thought_rules import ThoughtRules
from ..vocabulary import Vocabulary
from .backends import Row
from .budget_close import BudgetCheck, RowCheck
from .matcher import Matcher
from .thought_marks import thought_mark, thought_row

# Number of tokens kept for an answer whose shortest form is not known.
UNKNOWN_ANSWER = 200


class _Phase(Enum):
    BEGIN = auto()
    THOUGHT = auto()
    GAP = auto()
    ANSWER = auto()


class _Place(NamedTuple):
    """The place after a token: in the start mark, the thought, the end mark or the answer.

    Attributes:
        at: number of bytes of the start mark (BEGIN) or end mark (THOUGHT) that the text ends with; in GAP, number of
            newlines that may still come.
        origin: position of the first token of the thought, or of the answer (BEGIN, ANSWER); -1 if the text in BEGIN
            can only become a thought.
    """

    phase: _Phase
    at: int = 0
    origin: int = -1


class _Answer:
    """Text after the thought: forced tokens (the lead), then an answer under a grammar, or free text without one."""

    def __init__(self, lead: Sequence[int], matcher: Matcher | None) -> None:
        self._lead = lead
        self.matcher = matcher
        self._num_own = 0  # Number of tokens of the lead or of free text that were accepted.

    @property
    def num_tokens(self) -> int:
        return self._num_own + (self.matcher.num_tokens if self.matcher else 0)

    @property
    def follows_grammar(self) -> bool:
        """Whether the lead is complete and the grammar applies to the next token."""
        return self.matcher is not None and self._num_own == len(self._lead)

    @property
    def num_shortest(self) -> int | None:
        shortest = self.matcher.num_shortest if self.matcher else None
        return None if shortest is None else len(self._lead) + shortest

    def parser_to_fill(self) -> Any | None:
        return self.matcher.parser_to_fill() if self.matcher is not None and self.follows_grammar else None

    def take_as_filled(self) -> None:
        if self.matcher is not None:
            self.matcher.take_as_filled()

    def fill_grammar_mask(self, row: Row, remaining: int | None) -> BudgetCheck | None:
        if self._num_own < len(self._lead):
            row[:] = 0
            _allow(row, self._lead[self._num_own :][:1])
        elif self.matcher is None:
            row[:] = -1
        else:
            return self.matcher.fill_grammar_mask(row, remaining)
        return None

    def accept(self, token: int) -> bool:
        if self._num_own == len(self._lead) and self.matcher is not None:
            return self.matcher.accept(token)
        if self._num_own < len(self._lead) and self._lead[self._num_own] != token:
            return False
        self._num_own += 1
        return True

    def rollback_to(self, num_tokens: int) -> None:
        if self.matcher is not None:
            self.matcher.rollback(min(self.matcher.num_tokens, self.num_tokens - num_tokens))
        self._num_own = min(self._num_own, num_tokens)

    def draft(self, limit: int) -> list[int]:
        if self.matcher is None or self._num_own < len(self._lead):
            return list(self._lead[self._num_own :][:limit])
        return self.matcher.draft(limit)


class _WithOthers:
    """The check of an answer in a place where other tokens are allowed too: tokens of a mark, or newlines.

    Args:
        others: the other tokens.
        fit: whether the answer still fits after one of the other tokens.
    """

    def __init__(self, answer: BudgetCheck, others: frozenset[int], fit: bool) -> None:
        self._answer = answer
        self._others = others
        self._fit = fit

    def fits(self, token: int) -> bool:
        """Return whether an end fits after a token, read as part of the answer or as another token."""
        return (self._fit and token in self._others) or self._answer.fits(token)

    def alike(self, token: int) -> NDArray[np.int64]:
        """Return the tokens that are taken as equivalent to ``token``: see `BudgetCheck.alike`."""
        alike = self._answer.alike(token)
        return alike[~np.isin(alike, list(self._others))] if token not in self._others else np.array([token])

    def costs(self, token: int) -> dict[int, int]:
        """Return the cost of testing a token and the tokens compared with it: see `BudgetCheck.costs`."""
        return {} if self._fit and token in self._others else self._answer.costs(token)

    def known(self) -> Row:
        """Return a mask of allowed tokens that are known to fit without a search."""
        row = self._answer.known().copy()
        _allow(row, list(self._others) if self._fit else [])
        return row

    def limits(self) -> Row:
        """Return the mask of all allowed tokens that fit."""
        row = self._answer.limits().copy()
        _allow(row, list(self._others) if self._fit else [])
        return row


class ReasoningMatcher:
    """Follows a thought and the answer after it. Used like a `Matcher`, by the same threads.

    Args:
        matcher: matcher of the answer, at the beginning of the answer; None for free text.
    """

    def __init__(self, vocabulary: Vocabulary, rules: ThoughtRules, matcher: Matcher | None) -> None:
        self._vocabulary = vocabulary
        self._budget = rules.budget
        self._newlines = rules.newlines
        self._start, self._end = thought_mark(vocabulary, rules.start), thought_mark(vocabulary, rules.end)
        self._answer = _Answer(vocabulary.tokenize_named(rules.lead, bpe=True), matcher)
        self._is_bound = matcher is not None
        self._must_answer = matcher is not None and not matcher.is_open_ended
        self._is_open = rules.is_open
        self._tokens: list[int] = []
        self._places = [_Place(_Phase.THOUGHT if rules.is_open else _Phase.BEGIN, origin=0)]

    @property
    def num_tokens(self) -> int:
        """Number of accepted tokens of the thought, its marks and the answer, the end token included."""
        return len(self._tokens)

    @property
    def is_done(self) -> bool:
        matcher = self._answer.matcher
        return matcher is not None and matcher.is_done

    @property
    def is_whole(self) -> bool:
        """Whether an answer that is cut off here is complete."""
        is_answer = self._phase is not _Phase.THOUGHT and (self._phase is _Phase.GAP or self._place.origin >= 0)
        matcher = self._answer.matcher
        return is_answer and matcher is not None and self._answer.follows_grammar and matcher.is_whole

    @property
    def may_go_on(self) -> bool:
        """Whether text other than white space may follow: see `Matcher.may_go_on`."""
        return self._answer.matcher is not None and self._answer.matcher.may_go_on

    @property
    def may_draft(self) -> bool:
        """Whether drafts may follow: see `Matcher.may_draft`. No draft spans the end of the thought and the answer."""
        if self._phase is _Phase.ANSWER and self._answer.follows_grammar and self._answer.matcher is not None:
            return self._answer.matcher.may_draft
        return self._phase not in (_Phase.BEGIN, _Phase.GAP)

    @property
    def failure(self) -> str | None:
        """Why the grammar's backend can allow no further token; None if it has not failed."""
        return self._answer.matcher.failure if self._answer.matcher else None

    @property
    def num_shortest(self) -> int | None:
        """Number of tokens of the shortest answer, and of the end of a thought begun in the prompt; None if unknown."""
        shortest = self._answer.num_shortest
        return shortest if shortest is None or not self._is_open else shortest + len(self._end.tokens)

    def fill_mask(self, row: Row, remaining: int | None = None) -> None:
        """Write the bitmask of the tokens that may come next. Arguments and errors: see `Matcher.fill_mask`."""
        check = self.fill_grammar_mask(row, remaining)
        if check is not None:
            row[:] = check.limits()

    def parser_to_fill(self) -> Any | None:
        """See `Matcher.parser_to_fill`. None before the answer begins, and if the answer is free text."""
        return self._answer.parser_to_fill() if self._place.phase is _Phase.ANSWER else None

    def take_as_filled(self) -> None:
        """See `Matcher.take_as_filled`. To be called only for a row for which `parser_to_fill` returned a parser."""
        self._answer.take_as_filled()

    def fill_grammar_mask(self, row: Row, remaining: int | None = None) -> BudgetCheck | None:
        """Write the mask without regard to the budget of the answer: see `Matcher.fill_grammar_mask`."""
        place = self._place
        match place.phase:
            case _Phase.BEGIN:
                return self._fill_begin(row, remaining)
            case _Phase.THOUGHT:
                return self._fill_thought(row, remaining)
            case _Phase.GAP:
                return self._fill_with(row, remaining, 1, [token for _, token in self._newline_tokens(place.at)])
            case _Phase.ANSWER:
                return self._answer.fill_grammar_mask(row, remaining)

    def _fill_thought(self, row: Row, remaining: int | None) -> BudgetCheck | None:
        """Fill the mask within the thought. After each allowed token, the end mark and the shortest answer fit."""
        at = self._place.at
        closing = np.zeros_like(row)
        _allow(closing, self._end.closing(at)[:1])
        if self._must_close(None):
            row[:] = closing
            return None
        if self._is_bound:
            row[:] = thought_row(self._vocabulary, self._end, at, may_end=not self._must_answer)
        else:
            row[:] = -1
        return RowCheck(closing) if self._must_close(remaining) else None

    def _fill_with(self, row: Row, remaining: int | None, count: int, tokens: Sequence[int]) -> BudgetCheck | None:
        """Fill the mask of the answer and of the other ``tokens``, after which ``count`` tokens fewer remain for it."""
        check = self._answer.fill_grammar_mask(row, remaining)
        if not tokens or (check is None and self._fits(remaining, count)):
            _allow(row, tokens)
            return check
        own = check or RowCheck(row.copy())
        _allow(row, tokens)
        return _WithOthers(own, frozenset(tokens), self._fits(remaining, count))

    def _fill_begin(self, row: Row, remaining: int | None) -> BudgetCheck | None:
        place, tokens = self._place, self._start.next_tokens(self._place.at)
        if place.origin >= 0:
            return self._fill_with(row, remaining, self._start.longest + self._end.most_closing, tokens)
        row[:] = 0
        _allow(row, tokens)
        return None

    def is_slow(self, remaining: int) -> bool:
        """Return whether the next mask is likely to take long: see `Matcher.is_slow`."""
        matcher = self._asked_matcher
        return matcher is not None and matcher.is_slow(remaining)

    def prepare(self, remaining: int | None) -> None:
        """Fill the next mask ahead of time: see `Matcher.prepare`."""
        if (matcher := self._asked_matcher) is not None:
            matcher.prepare(remaining)

    def accept(self, token: int) -> bool:
        """Advance by a token. Returns False, and changes nothing, if it is not allowed here.

        `fill_mask` checks the budgets; this method does not.
        """
        is_text = 0 <= token < len(self._vocabulary.tokens)
        if self.is_done or (self._is_bound and not is_text):
            return False
        place = self._after(token, self._vocabulary.tokens[token] if is_text else b"")
        if place is None:
            return False
        self._tokens.append(token)
        self._places.append(place)
        return True

    def replay(self, token: int, remaining: int) -> bool:
        """Advance by a token that was drawn elsewhere: see `Matcher.replay`."""
        if (matcher := self._asked_matcher) is not None:
            matcher.replan(remaining)
        return self.accept(token)

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` tokens. Raises ValueError if fewer were accepted."""
        if not 0 <= count <= self.num_tokens:
            raise ValueError(f"cannot take back {count} of {self.num_tokens} tokens")
        if not count:
            return
        before = self._answer_origin
        del self._tokens[self.num_tokens - count :], self._places[len(self._places) - count :]
        origin = self._answer_origin
        if origin == before >= 0:
            self._answer.rollback_to(self.num_tokens - origin)
            return
        self._answer.rollback_to(0)
        for token in self._tokens[origin:] if origin >= 0 else ():
            self._answer.accept(token)

    def admits(self, tokens: Sequence[int]) -> int:
        """Return how many leading tokens of a draft, from a source other than the grammar, are allowed here.

        Under a grammar, the tokens of a draft after the end mark of the thought are not counted. The state is left
        unchanged.
        """
        if self._phase is _Phase.ANSWER and self._answer.follows_grammar and self._answer.matcher is not None:
            return self._answer.matcher.admits(tokens)
        if not self.may_draft:
            return 0
        start = self.num_tokens
        for token in tokens[: self._most_admitted]:
            if token in self._vocabulary.eos or not self.accept(token) or self._hands_over:
                break
        admitted = self.num_tokens - start
        self.rollback(admitted)
        return admitted

    def draft(self, limit: int) -> list[int]:
        """Return a draft of tokens that must come next: see `Matcher.draft`."""
        if self._phase is _Phase.ANSWER:
            return self._answer.draft(limit)
        is_closing = self._phase is _Phase.THOUGHT and self._must_close(None)
        return self._end.closing(self._place.at)[:limit] if is_closing else []

    @property
    def _place(self) -> _Place:
        return self._places[-1]

    @property
    def _phase(self) -> _Phase:
        return self._places[-1].phase

    @property
    def _answer_origin(self) -> int:
        """Position of the first token that the answer has accepted; -1 if it has accepted none."""
        place = self._place
        return place.origin if place.phase in (_Phase.BEGIN, _Phase.ANSWER) else -1

    @property
    def _num_thought(self) -> int:
        return self.num_tokens - self._place.origin

    @property
    def _hands_over(self) -> bool:
        """Whether the thought has ended and the answer under the grammar begins with the next token."""
        return self._phase is _Phase.GAP

    @property
    def _most_admitted(self) -> int | None:
        """Largest number of draft tokens for which the thought's budget has room; None for no limit."""
        if self._budget is None or self._phase is not _Phase.THOUGHT:
            return None
        return max(0, self._budget - self._num_thought) + self._end.most_closing

    @property
    def _asked_matcher(self) -> Matcher | None:
        """The grammar's matcher if it determines the next mask, alone or with other tokens; else None."""
        place = self._place
        is_asked = place.phase in (_Phase.GAP, _Phase.ANSWER) or (place.phase is _Phase.BEGIN and place.origin >= 0)
        return self._answer.matcher if is_asked and self._answer.follows_grammar else None

    def _must_close(self, remaining: int | None) -> bool:
        """Whether the end mark must come now: the thought's budget is used up, or the shortest answer would not fit."""
        if self._budget is not None and self._num_thought >= self._budget:
            return True
        return not self._fits(remaining, self._end.most_closing + 1)

    def _fits(self, remaining: int | None, count: int) -> bool:
        """Whether the shortest answer still fits after ``count`` more tokens."""
        if remaining is None or not self._must_answer:
            return True
        shortest = self._answer.num_shortest
        return remaining >= count + (UNKNOWN_ANSWER if shortest is None else shortest)

    def _after(self, token: int, data: bytes) -> _Place | None:
        """Return the place after a token; None if the token is not allowed. Advances the answer."""
        place, end = self._place, self.num_tokens + 1
        match place.phase:
            case _Phase.BEGIN:
                return self._begin(place, token, data)
            case _Phase.THOUGHT:
                if self._must_answer and token in self._vocabulary.eos:
                    return None
                return self._think(place.at, data, place.origin)
            case _Phase.GAP:
                if self._answer.accept(token):
                    return _Place(_Phase.ANSWER, origin=end - 1)
                is_newline = (len(data), token) in self._newline_tokens(place.at)
                return _Place(_Phase.GAP, place.at - len(data)) if is_newline else None
            case _Phase.ANSWER:
                return place if self._answer.accept(token) else None

    def _begin(self, place: _Place, token: int, data: bytes) -> _Place | None:
        """Return the place after one of the first tokens. Until the start mark ends, the answer is followed too."""
        answers = place.origin >= 0 and self._answer.accept(token)
        text = data if place.at else data.lstrip()
        found = self._start.begin(place.at, text)
        if found is None or not (text or answers):
            return _Place(_Phase.ANSWER, origin=place.origin) if answers else None
        at, rest = found
        if rest is None and answers:
            return _Place(_Phase.BEGIN, at, place.origin)
        thought = _Place(_Phase.BEGIN, at) if rest is None else self._think(0, rest, self.num_tokens + 1)
        if thought is None:
            # The token contains the whole thought and text after it. Only the answer can allow such a token.
            return _Place(_Phase.ANSWER, origin=place.origin) if answers else None
        self._answer.rollback_to(0)
        return thought

    def _think(self, at: int, data: bytes, origin: int) -> _Place | None:
        """Return the place after a token in the thought. An answer under a grammar must begin with a new token."""
        at, rest = self._end.follow(at, data)
        if rest is None:
            return _Place(_Phase.THOUGHT, at, origin)
        if not self._is_bound:
            return _Place(_Phase.ANSWER, origin=self.num_tokens + 1)
        return None if rest else _Place(_Phase.GAP, self._newlines)

    def _newline_tokens(self, most: int) -> list[tuple[int, int]]:
        """Return the tokens that consist of at most ``most`` newlines, each with its number of newlines."""
        found = ((count, self._vocabulary.token_of(b"\n" * count)) for count in range(1, most + 1))
        return [(count, token) for count, token in found if token is not None]


def _allow(row: Row, tokens: Sequence[int]) -> None:
    for token in tokens:
        row.view(np.uint32)[token >> 5] |= np.uint32(1 << (token & 31))


AnswerMatcher: TypeAlias = Matcher | ReasoningMatcher
