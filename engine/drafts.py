"""Guesses of the tokens that come next, made without another model, and how many of them are worth computing.

Four sources, each with its own record of hits for each sequence:

    grammar   the text that the sequence's grammar forces, and the way to its end once the budget forces that
    tree      what came next when the same tokens were last computed in the same namespace
    ngram     what came next where the sequence itself has said the same before, the prompt included
    answer    what came next where another answer in the same namespace has said the same lately

Every source guesses in every step; what it guesses is compared with what is then drawn, whether it was computed or not.
So a source that is wrong costs nothing but its look-up, and is heard again as soon as it is right. Of a guess whose
tokens stand with probability p each, the i-th stands with p^i, and is computed if that is worth what it costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum

from engine.answers import AnswerIndex, Answers
from engine.cache import PrefixCache
from engine.ngrams import NgramIndex
from engine.pace import Pace
from engine.sequence import Sequence
from engine.speculative import SpeculativeConfig
from engine.stats import EngineStats

_MARGIN = 1.25  # by which a draft must be better than its price, which is an estimate
_CHEAPEST = 0.01  # no draft is free
_SURE = 8  # tokens of a match from which on it counts as a long one
_PRIOR_TRIALS = 2.0
_MOST_TRIALS = 20.0
_SUREST = 0.99
_LATENESS = 0.1  # of a step, by which it takes longer if the device waits for its plan


class Source(StrEnum):
    """Where a guess comes from."""

    GRAMMAR = "grammar"
    TREE = "tree"
    NGRAM = "ngram"
    ANSWER = "answer"


@dataclass(slots=True)
class _Rate:
    """How likely a token of a source is to be the one drawn, given that those before it were."""

    hits: float
    trials: float = _PRIOR_TRIALS

    @property
    def value(self) -> float:
        return min(self.hits / self.trials, _SUREST)

    def observe(self, hits: int, trials: int) -> None:
        """Count, so that the last 20 trials weigh most."""
        self.hits, self.trials = self.hits + hits, self.trials + trials
        scale = min(1.0, _MOST_TRIALS / self.trials)
        self.hits, self.trials = self.hits * scale, self.trials * scale


@dataclass(frozen=True, slots=True)
class _Guess:
    source: Source
    rate: _Rate
    tokens: Seq[int]


@dataclass(slots=True)
class _Track:
    """What is known of one sequence: its index, the records of its sources, and the guesses of the step under way."""

    index: NgramIndex
    answers: AnswerIndex
    grammar: _Rate = field(default_factory=lambda: _Rate(0.9 * _PRIOR_TRIALS))
    tree: _Rate = field(default_factory=lambda: _Rate(0.7 * _PRIOR_TRIALS))
    long_match: _Rate = field(default_factory=lambda: _Rate(0.7 * _PRIOR_TRIALS))
    short_match: _Rate = field(default_factory=lambda: _Rate(0.4 * _PRIOR_TRIALS))
    long_answer: _Rate = field(default_factory=lambda: _Rate(0.7 * _PRIOR_TRIALS))
    short_answer: _Rate = field(default_factory=lambda: _Rate(0.4 * _PRIOR_TRIALS))
    guesses: list[_Guess] = field(default_factory=list)
    used: Source | None = None


class Drafter:
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
        self._pace = Pace()
        self._answers = Answers()
        self._tracks: dict[int, _Track] = {}

    def propose(self, sequence: Sequence, limit: int, num_rows: int) -> Seq[int]:
        """Drafts for a running sequence that draws in this step: text that its grammar admits, no end among it.

        Args:
            sequence: whose tokens are all known to the step.
            limit: most drafts.
            num_rows: rows that draw in this step.
        """
        track = self._guess(sequence)
        for _, count, guess in self._ranked(track, limit, num_rows):
            if count and (drafts := _possible(sequence, guess.tokens[:count])):
                track.used = guess.source
                return drafts
        return ()

    def worth(self, sequence: Sequence, limit: int, num_rows: int) -> float:
        """Tokens that drafts would be worth to a sequence in a step that is under way without any. As ``propose``."""
        return max((worth for worth, _, _ in self._ranked(self._guess(sequence), limit, num_rows)), default=0.0)

    def is_worth_waiting(self, worth: float, num_rows: int) -> bool:
        """Whether drafts of such worth make up for a plan that is made late: then the device waits for the host."""
        return worth > _LATENESS * num_rows

    def settle(self, sequence: Sequence, num_drafts: int, drawn: Seq[int]) -> None:
        """Take note of what a step drew for a sequence, ``num_drafts`` of its drafts having been computed."""
        track = self._tracks[sequence.id]
        for guess in track.guesses:
            hits = _common(guess.tokens, drawn)
            guess.rate.observe(hits, min(hits + 1, len(guess.tokens), len(drawn)))
        if num_drafts and track.used:
            self._stats.count_drafts(track.used, num_drafts, min(num_drafts, max(0, len(drawn) - 1)))

    def forget(self, sequence_id: int) -> None:
        """A sequence has ended."""
        if track := self._tracks.pop(sequence_id, None):
            track.answers.end()

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step in which each token was drawn after, how long it took."""
        self._pace.observe(num_tokens, seconds)

    def _guess(self, sequence: Sequence) -> _Track:
        """Ask the sources about a sequence. Returns what is known of it, their guesses included."""
        track = self._tracks.get(sequence.id)
        if track is None:
            tokens = sequence.tokens
            answers = AnswerIndex(self._answers, sequence.path.namespace, tokens, sequence.num_prompt)
            track = self._tracks[sequence.id] = _Track(NgramIndex(tokens), answers)
        track.used = None
        track.guesses = self._guesses(sequence, track)
        return track

    def _ranked(self, track: _Track, limit: int, num_rows: int) -> list[tuple[float, int, _Guess]]:
        """The guesses, best first: what each is worth in tokens, and how many of it are worth computing."""
        price = min(1.0, max(_CHEAPEST, _MARGIN * self._pace.threshold(num_rows)))
        worth = [(*_worth(guess, min(limit, self._most), price), guess) for guess in track.guesses]
        return sorted(worth, key=lambda each: -each[0])

    def _guesses(self, sequence: Sequence, track: _Track) -> list[_Guess]:
        """What each source says comes next, if it says anything."""
        length, tokens = track.index.guess(self._most)
        guesses = [_Guess(Source.NGRAM, track.long_match if length >= _SURE else track.short_match, tokens)]
        if self._method == "auto":
            if sequence.matcher:
                guesses.append(_Guess(Source.GRAMMAR, track.grammar, sequence.matcher.draft(self._most)))
            if sequence.lease:
                after = self._cache.following(sequence.lease, sequence.tokens, self._most)
                guesses.append(_Guess(Source.TREE, track.tree, after))
            if self._cache.sharing:
                length, tokens = track.answers.guess(self._most)
                rate = track.long_answer if length >= _SURE else track.short_answer
                guesses.append(_Guess(Source.ANSWER, rate, tokens))
        return [guess for guess in guesses if len(guess.tokens)]


def _worth(guess: _Guess, limit: int, price: float) -> tuple[float, int]:
    """What a guess is worth in tokens, and how many of it are worth computing."""
    rate = guess.rate.value
    if rate <= price:
        return 0.0, 0
    count = min(len(guess.tokens), limit, int(math.log(price) / math.log(rate)))
    return rate * (1 - rate**count) / (1 - rate) - count * price, max(count, 0)


def _possible(sequence: Sequence, tokens: Seq[int]) -> Seq[int]:
    """The first of some tokens, up to one that ends the sequence or that its grammar does not admit."""
    end = next((at for at, token in enumerate(tokens) if token in sequence.stop_ids), len(tokens))
    if sequence.matcher:
        end = sequence.matcher.admits(tokens[:end])
    return tokens[:end]


def _common(left: Seq[int], right: Seq[int]) -> int:
    """How many first tokens are equal."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (mine, other) in pairs if mine != other), min(len(left), len(right)))
