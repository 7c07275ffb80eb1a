"""Step cost model: predicts the seconds of a step from its rows and contexts, learnt from the steps as they end.

    seconds = base + a * decode tokens + b * context that they read + c * prefill tokens + d * prefill pairs

Learnt by normalised least mean squares on logarithms: after a step, the logarithm of each coefficient moves in
proportion to its share of the prediction. So coefficients stay positive, decode steps leave those of prefill as they
are, and a machine that becomes twice as slow is followed as fast as one that becomes twice as fast.
"""

from __future__ import annotations

from math import exp, log, sqrt
from typing import NamedTuple

from ..batch import Batch

# Coefficients before the first step, in seconds: those of a slow machine. The first step scales them all.
_PRIOR = (16e-3, 2e-3, 1e-6, 1e-3, 0.5e-6)
_RATE = 0.25  # of an error that a step corrects, once a few steps are known
_SLOWEST = log(2.0)  # a step this much slower than predicted counts as that slow: something else ran


class StepWork(NamedTuple):
    """What the time of a step depends on.

    Attributes:
        decode_tokens: tokens of rows with one known token, drafts included.
        decode_context: tokens of KV that those rows read.
        prefill_tokens: tokens of all other rows.
        prefill_pairs: query-key pairs of their causal attention.
    """

    decode_tokens: int = 0
    decode_context: int = 0
    prefill_tokens: int = 0
    prefill_pairs: int = 0


class StepCostModel:
    """Predicts the seconds of a step as a linear function of its ``StepWork``. Deterministic given the steps."""

    def __init__(self) -> None:
        self._costs = list(_PRIOR)
        self._num_steps = 0

    def seconds(self, work: StepWork) -> float:
        """Return the predicted seconds of a step."""
        return sum(self._parts(work))

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from a step that took ``seconds``; one in which the clock did not move says nothing."""
        if seconds <= 0:
            return
        parts = self._parts(work)
        predicted = sum(parts)
        error = log(seconds / predicted)
        self._num_steps += 1
        if self._num_steps == 1:
            self._costs = [cost * exp(error) for cost in self._costs]
            return
        shares = [part / predicted for part in parts]
        move = min(error, _SLOWEST) * max(_RATE, 1 / self._num_steps) / sum(share * share for share in shares)
        self._costs = [cost * exp(move * share) for cost, share in zip(self._costs, shares, strict=True)]

    def prefill_seconds(self, start: int, end: int) -> float:
        """Return what computing prompt positions ``start`` to ``end`` adds to a step."""
        _, _, _, per_token, per_pair = self._costs
        return per_token * (end - start) + per_pair * num_pairs(start, end)

    def prefill_tokens(self, start: int, seconds: float) -> int:
        """Return how many prompt tokens from position ``start`` on add at most ``seconds`` to a step."""
        _, _, _, per_token, per_pair = self._costs
        linear = per_token + per_pair * (start + 0.5)
        return int(2 * seconds / (linear + sqrt(linear * linear + 2 * per_pair * seconds)))

    def draft_tokens(self, seconds: float) -> int:
        """Return how many drafts add at most ``seconds`` to a step."""
        return int(seconds / self._costs[1])

    def _parts(self, work: StepWork) -> list[float]:
        return [cost * amount for cost, amount in zip(self._costs, (1, *work), strict=True)]


def work_of(batch: Batch) -> StepWork:
    """Return the work of a planned step."""
    decode_tokens = decode_context = prefill_tokens = prefill_pairs = 0
    for row in batch.rows:
        count, end = len(row.tokens), row.start + len(row.tokens)
        if count - row.num_drafts == 1:
            decode_tokens += count
            decode_context += end
        else:
            prefill_tokens += count
            prefill_pairs += num_pairs(row.start, end)
    return StepWork(decode_tokens, decode_context, prefill_tokens, prefill_pairs)


def num_pairs(start: int, end: int) -> int:
    """Return the query-key pairs of causal attention at positions ``start`` to ``end``."""
    return (end * (end + 1) - start * (start + 1)) // 2
