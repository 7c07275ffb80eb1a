"""Acceptance rates: how likely a draft is accepted, by its source and by the length of the match that it follows.

The longer a match, the likelier its next token is right: in copies of a document that a small model sampled, the rate
is 0.2 after one token and 0.9 after sixteen. So the rates of lookups are kept by classes of match length. As an
accepted draft makes the match longer, each draft of a run has the rate of the length that the match would then have.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass

HIGHEST_RATE = 0.99
_LENGTHS = (1, 2, 3, 4, 6, 9, 16)  # the shortest match of each class
_OF_LENGTHS = (0.1, 0.3, 0.45, 0.6, 0.7, 0.75, 0.85)  # prior acceptance of each class
_OF_OTHERS = {"grammar": 0.9, "tree": 0.85, "model": 0.7}
_LONGEST = 16  # the longest match with a class of its own
_ENDLESS = 1 << 16  # a number of drafts that is never reached
_GLOBAL_TRIALS, _MOST_GLOBAL_TRIALS = 20.0, 200.0
_PRIOR_TRIALS, _MOST_TRIALS = 4.0, 20.0
_MODEL_TRIALS, _MOST_MODEL_TRIALS = 10.0, 100.0  # a draft model is right about as often in all texts


@dataclass(slots=True)
class AcceptanceRate:
    """The probability that a draft is accepted if those before it are.

    Attributes:
        most: number of last trials that count (exponential decay).
        overall: the rate over all sequences, which is updated with this one.
    """

    hits: float
    trials: float
    most: float = _MOST_TRIALS
    overall: AcceptanceRate | None = None

    @property
    def value(self) -> float:
        return min(self.hits / self.trials, HIGHEST_RATE)

    @property
    def lower_bound(self) -> float:
        """The value less a standard error."""
        value = self.value
        return max(0.0, value - math.sqrt(value * (1 - value) / (self.trials + 1)))

    def observe(self, hits: int, trials: int) -> None:
        """Count drafts, and how many of them were right."""
        self.hits, self.trials = self.hits + hits, self.trials + trials
        if self.trials > self.most:
            self.hits, self.trials = self.hits * self.most / self.trials, self.most
        if self.overall:
            self.overall.observe(hits, trials)


Runs = Seq[tuple[AcceptanceRate, int]]
"""The rates of a run of drafts, first to last, each with the number of drafts that have it."""


def chances(runs: Runs, most: int) -> list[float]:
    """Return the probability of each of the first ``most`` drafts that it is accepted if those before it are."""
    found: list[float] = []
    for rate, count in runs:
        found += [rate.value] * min(count, most - len(found))
        if len(found) == most:
            break
    return found


def observe(runs: Runs, hits: int, trials: int) -> None:
    """Count ``trials`` leading drafts of a run, the first ``hits`` of which were right."""
    for rate, count in runs:
        rate.observe(min(hits, count), min(trials, count))
        hits, trials = max(0, hits - count), trials - count
        if trials <= 0:
            return


class AcceptanceRates:
    """The acceptance rates of all sources, over all sequences or for one sequence.

    Args:
        overall: the rates over all sequences, with which the rates of one sequence start; None for the rates over all
            sequences, which start at their priors.
    """

    def __init__(self, overall: AcceptanceRates | None = None) -> None:
        if overall is None:
            self._others = {name: _global_rate(prior) for name, prior in _OF_OTHERS.items()}
            self._matches = [_global_rate(prior) for prior in _OF_LENGTHS]
            self._answers = [_global_rate(prior) for prior in _OF_LENGTHS]
        else:
            self._others = {name: _initial_rate(rate) for name, rate in overall._others.items()}
            self._matches = [_initial_rate(rate) for rate in overall._matches]
            self._answers = [_initial_rate(rate) for rate in overall._answers]
            model = overall.model
            self._others["model"] = AcceptanceRate(
                model.value * _MODEL_TRIALS, _MODEL_TRIALS, _MOST_MODEL_TRIALS, model
            )

    @property
    def model(self) -> AcceptanceRate:
        """The rate of a draft model."""
        return self._others["model"]

    def of_grammar(self) -> Runs:
        return ((self._others["grammar"], _ENDLESS),)

    def of_tree(self) -> Runs:
        return ((self._others["tree"], _ENDLESS),)

    def of_model(self) -> Runs:
        return ((self.model, _ENDLESS),)

    def of_match(self, length: int) -> Runs:
        """Return the rates of drafts behind a match of so many tokens in the sequence itself."""
        return [(self._matches[index], count) for index, count in _RUNS[min(length, _LONGEST)]]

    def of_answer(self, length: int) -> Runs:
        """Return the rates of drafts behind a match of so many tokens in another answer."""
        return [(self._answers[index], count) for index, count in _RUNS[min(length, _LONGEST)]]


def _global_rate(prior: float) -> AcceptanceRate:
    return AcceptanceRate(prior * _GLOBAL_TRIALS, _GLOBAL_TRIALS, _MOST_GLOBAL_TRIALS)


def _initial_rate(overall: AcceptanceRate) -> AcceptanceRate:
    """Return the rate of a new sequence: that of all sequences, which few trials of its own outweigh."""
    return AcceptanceRate(overall.value * _PRIOR_TRIALS, _PRIOR_TRIALS, overall=overall)


def _runs_of(length: int) -> list[tuple[int, int]]:
    """Return the classes of the drafts behind a match, each with the number of drafts that are of it."""
    runs = []
    for index in range(bisect_right(_LENGTHS, length) - 1, len(_LENGTHS)):
        after = _LENGTHS[index + 1] if index + 1 < len(_LENGTHS) else _ENDLESS
        runs.append((index, after - length))
        length = after
    return runs


_RUNS = [[], *(_runs_of(length) for length in range(1, _LONGEST + 1))]
