"""Guesses of the tokens that come next, made without another model, and how many of them are worth computing.

Four sources, each with its own record of hits for each sequence:

    grammar   the text that the sequence's grammar forces, and the way to its end once the budget forces that
    tree      what came next when the same tokens were last computed in the same namespace
    ngram     what came next where the sequence itself has said the same before, the prompt included
    answer    what came next where another answer in the same namespace has said the same lately

What a source guesses is compared with what is then drawn, whether it was computed or not. So a source that is wrong
costs nothing but its look-up, and is heard again as soon as it is right. Of a guess whose tokens stand with probability
p each, the i-th stands with p^i, and is computed if that is worth what it costs. A sequence begins with the p that the
source had lately in all sequences, but with no high one: it must show itself that its text is of the kind that repeats.

Looking costs too: some 20 us a row of a step that takes 10 ms. A sequence whose guesses are worth nothing for long is
therefore asked only once in several tokens. Its grammar is asked in every step: forced text is short.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum

from ..engine_stats import EngineStats
from ..kv_cache.prefix_cache import PrefixCache
from ..sequence.sequence import Sequence
from ..speculative import SpeculativeConfig
from ..token_cost import TokenCost
from .output_lookup import OutputIndex, OutputLookup
from .prompt_lookup import NgramIndex

_MARGIN = 1.25  # by which a draft must be better than its price, which is an estimate
_CHEAPEST = 0.01  # no draft is free
_SURE = 8  # tokens of a match from which on it counts as a long one
_PRIOR_TRIALS = 2.0
_MOST_TRIALS = 20.0
_MOST_TRIALS_OF_ALL = 200.0
_SUREST = 0.99
_LATENESS = 0.1  # of a step, by which it takes longer if the device waits for its plan
_PATIENCE = 4  # looks worth nothing after which the next ones are twice as many tokens apart
_LONGEST_REST = 8  # tokens


class DraftSource(StrEnum):
    """Where a guess comes from."""

    GRAMMAR = "grammar"
    TREE = "tree"
    NGRAM = "ngram"
    ANSWER = "answer"


@dataclass(slots=True)
class _Rate:
    """How likely a token of a source is to be the one drawn, given that those before it were.

    Attributes:
        most: trials that weigh most, the last ones.
        of_all: the same of all sequences, which learns with it.
    """

    hits: float
    trials: float = _PRIOR_TRIALS
    most: float = _MOST_TRIALS
    of_all: _Rate | None = None

    @property
    def value(self) -> float:
        return min(self.hits / self.trials, _SUREST)

    def observe(self, hits: int, trials: int) -> None:
        """Count."""
        self.hits, self.trials = self.hits + hits, self.trials + trials
        if self.trials > self.most:
            self.hits, self.trials = self.hits * self.most / self.trials, self.most
        if self.of_all:
            self.of_all.observe(hits, trials)


_PRIORS = (0.9, 0.7, 0.7, 0.4, 0.7, 0.4)  # of _Rates, in their order


@dataclass(frozen=True, slots=True)
class _Rates:
    """The records of the sources. Where one finds little or much to go by, it has two."""

    grammar: _Rate
    tree: _Rate
    long_match: _Rate
    short_match: _Rate
    long_answer: _Rate
    short_answer: _Rate

    @classmethod
    def of_all(cls) -> _Rates:
        """Those of all sequences, before there is any."""
        return cls(*(_Rate(prior * _MOST_TRIALS, _MOST_TRIALS, _MOST_TRIALS_OF_ALL) for prior in _PRIORS))

    def begin(self) -> _Rates:
        """Those of a new sequence, these being of all."""
        of_all = (self.grammar, self.tree, self.long_match, self.short_match, self.long_answer, self.short_answer)
        values = (min(rate.value, prior) for rate, prior in zip(of_all, _PRIORS, strict=True))
        return _Rates(*(_Rate(value * _PRIOR_TRIALS, of_all=of) for value, of in zip(values, of_all, strict=True)))


@dataclass(slots=True)
class _Guess:
    """What a source says comes next: at least one token.

    Attributes:
        at: where the first of the tokens would stand.
    """

    source: DraftSource
    rate: _Rate
    tokens: Seq[int]
    at: int


@dataclass(slots=True)
class _Track:
    """What is known of one sequence.

    Attributes:
        guesses: the last ones of each source, which have yet to be compared with what was drawn.
        due: how many tokens the sequence has when it is to be asked again.
        num_idle: looks, the last ones, that were worth nothing.
        used: source of the drafts in the step under way.
    """

    index: NgramIndex
    answers: OutputIndex
    rates: _Rates
    guesses: list[_Guess] = field(default_factory=list)
    due: int = 0
    num_idle: int = 0
    used: DraftSource | None = None

    def compare(self, tokens: array[int], *, every: bool) -> None:
        """Learn from what was drawn since the guesses were made: those of every source, or the grammar's alone."""
        told, self.guesses = self.guesses, []
        for guess in told:
            if every or guess.source is DraftSource.GRAMMAR:
                drawn = tokens[guess.at : guess.at + len(guess.tokens)]
                hits = _num_common(guess.tokens, drawn)
                guess.rate.observe(hits, min(hits + 1, len(drawn)))
            else:
                self.guesses.append(guess)

    def rest(self, num_tokens: int, useful: bool) -> None:
        """A look is over: the next one is due after one token, or after more if the last ones were of no use."""
        self.num_idle = 0 if useful else self.num_idle + 1
        self.due = num_tokens + min(_LONGEST_REST, 1 << self.num_idle // _PATIENCE)


class Proposer:
    """Drafts for all sequences. Reads them, and the cache; keeps its own record of each until ``forget``.

    Args:
        config: not with method off.
        cache: whose tree is a source.
        stats: counters to write to.
    """

    def __init__(self, config: SpeculativeConfig, cache: PrefixCache, stats: EngineStats) -> None:
        self._method = config.method
        self._most = config.num_speculative_tokens
        self._cache = cache
        self._stats = stats
        self._token_cost = TokenCost()
        self._answers = OutputLookup()
        self._rates = _Rates.of_all()
        self._tracks: dict[int, _Track] = {}

    def rests(self, sequence: Sequence) -> bool:
        """Whether there is nothing to be asked about a sequence in this step."""
        track = self._tracks.get(sequence.id)
        return track is not None and len(sequence.tokens) < track.due and not sequence.matcher

    def propose(self, sequence: Sequence, limit: int, num_rows: int) -> Seq[int]:
        """Drafts for a running sequence that draws in this step: text that its grammar admits, no end among it.

        Args:
            sequence: whose tokens are all known to the step.
            limit: most drafts.
            num_rows: rows that draw in this step.
        """
        for _, count, guess in self._ranked(sequence, limit, num_rows):
            if drafts := _possible(sequence, guess.tokens[:count]):
                self._tracks[sequence.id].used = guess.source
                return drafts
        return ()

    def worth(self, sequence: Sequence, limit: int, num_rows: int) -> float:
        """Tokens that drafts would be worth to a sequence in a step that is under way without any. As ``propose``."""
        return max((worth for worth, _, _ in self._ranked(sequence, limit, num_rows)), default=0.0)

    def is_worth_waiting(self, worth: float, num_rows: int) -> bool:
        """Whether drafts of such worth make up for a plan that is made late: then the device waits for the host."""
        return worth > _LATENESS * num_rows

    def settle(self, sequence: Sequence, num_drafts: int, num_drawn: int) -> None:
        """Take note that a step computed drafts of a sequence, at least one, and how many tokens it drew."""
        if used := self._tracks[sequence.id].used:
            self._stats.count_drafts(used, num_drafts, min(num_drafts, max(0, num_drawn - 1)))

    def forget(self, sequence_id: int) -> None:
        """A sequence has ended."""
        if track := self._tracks.pop(sequence_id, None):
            track.answers.end()

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step in which each token was drawn after, how long it took."""
        self._token_cost.observe(num_tokens, seconds)

    def _ranked(self, sequence: Sequence, limit: int, num_rows: int) -> list[tuple[float, int, _Guess]]:
        """The guesses that are worth something, best first: what each is worth in tokens, and how many to compute."""
        track = self._tracks.get(sequence.id) or self._begin(sequence)
        num_tokens = len(sequence.tokens)
        is_due = num_tokens >= track.due
        track.compare(sequence.tokens, every=is_due)
        guesses = self._guesses(sequence, track)
        track.guesses += guesses
        found = []
        if guesses:
            price = min(1.0, max(_CHEAPEST, _MARGIN * self._token_cost.threshold(num_rows)))
            ranked = ((*_worth(guess, min(limit, self._most), price), guess) for guess in guesses)
            found = sorted((each for each in ranked if each[1]), key=lambda each: -each[0])
        if is_due:
            track.rest(num_tokens, any(guess.source is not DraftSource.GRAMMAR for _, _, guess in found))
        return found

    def _begin(self, sequence: Sequence) -> _Track:
        """A new sequence."""
        tokens = sequence.tokens
        answers = OutputIndex(self._answers, sequence.path.namespace, tokens, sequence.num_prompt)
        track = self._tracks[sequence.id] = _Track(NgramIndex(tokens), answers, self._rates.begin())
        return track

    def _guesses(self, sequence: Sequence, track: _Track) -> list[_Guess]:
        """What the sources say comes next: the grammar, and the others if they are due."""
        rates, at, is_auto = track.rates, len(sequence.tokens), self._method == "auto"
        guesses = []
        if sequence.matcher and is_auto and (forced := sequence.matcher.draft(self._most)):
            guesses.append(_Guess(DraftSource.GRAMMAR, rates.grammar, forced, at))
        if at < track.due:
            return guesses
        length, tokens = track.index.guess(self._most)
        if length:
            rate = rates.long_match if length >= _SURE else rates.short_match
            guesses.append(_Guess(DraftSource.NGRAM, rate, tokens, at))
        if sequence.lease and is_auto and (after := self._cache.following(sequence.lease, sequence.tokens, self._most)):
            guesses.append(_Guess(DraftSource.TREE, rates.tree, after, at))
        if self._cache.sharing and is_auto:
            length, tokens = track.answers.guess(self._most)
            if length:
                rate = rates.long_answer if length >= _SURE else rates.short_answer
                guesses.append(_Guess(DraftSource.ANSWER, rate, tokens, at))
        return guesses


def _worth(guess: _Guess, limit: int, price: float) -> tuple[float, int]:
    """What a guess is worth in tokens, and how many of it are worth computing."""
    rate = guess.rate.value
    if rate <= price:
        return 0.0, 0
    count = min(len(guess.tokens), limit, int(math.log(price) / math.log(rate)))
    return rate * (1 - rate**count) / (1 - rate) - count * price, max(count, 0)


def _possible(sequence: Sequence, tokens: Seq[int]) -> Seq[int]:
    """The first of some tokens, up to one that ends the sequence or that its grammar does not admit."""
    end = len(tokens)
    if not sequence.stop_ids.isdisjoint(tokens):
        end = next(at for at, token in enumerate(tokens) if token in sequence.stop_ids)
    if sequence.matcher:
        end = sequence.matcher.admits(tokens[:end])
    return tokens[:end]


def _num_common(left: Seq[int], right: Seq[int]) -> int:
    """How many first tokens are equal."""
    count = 0
    for mine, other in zip(left, right, strict=False):
        if mine != other:
            break
        count += 1
    return count
