"""Step cost model: predicts the seconds of a step from its rows and contexts, and learns from finished steps::

    seconds = base + a * decode tokens + b * context that they read + c * prefill tokens + d * prefill pairs

An extended Kalman filter estimates the logarithms of the coefficients, so that coefficients stay positive and errors
are relative. The filter models two kinds of change: changes of the machine's speed, which are a factor common to all
coefficients, and changes of single coefficients, in proportion to the time that steps spend on them. So the first step
corrects the common factor, and a few chunks suffice to distinguish the coefficients. A thousand decode steps do not
make the known cost of prefill less certain.
"""

from __future__ import annotations

from math import exp, log, sqrt
from operator import mul
from typing import NamedTuple

from ..batch import Batch

# Coefficients before the first step, in seconds. They are those of a slow machine.
_PRIOR = (16e-3, 2e-3, 1e-6, 1e-3, 0.5e-6)
# Variances of logarithms. The first two are the variances of the common factor and of each coefficient before the first
# step. The next two are the amounts by which these variances grow in each step. The last one is the variance of the
# measured time of a step.
_COMMON, _OWN = 25.0, 1.0
_COMMON_DRIFT, _OWN_DRIFT = 0.03**2, 0.03**2
_NOISE = 0.1**2
_SHORTEST = 1e-6  # Shortest time of a step in seconds.
# Bounds of a coefficient, in seconds. They lie far beyond the values of any machine.
_LEAST_COST, _MOST_COST = 1e-15, 1e3
# Limit on the logarithm of a step's slowdown against its prediction. A step that exceeds it counts as this slow,
# because other work ran on the machine.
_SLOWEST = log(2.0)


class StepWork(NamedTuple):
    """The quantities on which the time of a step depends.

    Attributes:
        decode_tokens: tokens of rows with one known token, including draft tokens.
        decode_context: tokens whose KV these rows read.
        prefill_tokens: tokens of all other rows.
        prefill_pairs: query-key pairs in the causal attention of the prefill tokens.
    """

    decode_tokens: int = 0
    decode_context: int = 0
    prefill_tokens: int = 0
    prefill_pairs: int = 0


class StepCostModel:
    """Predicts the seconds of a step as a linear function of its ``StepWork``.

    The same steps always give the same estimates.
    """

    def __init__(self) -> None:
        self._costs = list(_PRIOR)
        count = range(len(_PRIOR))
        self._covariance = [[_COMMON + (_OWN if i == j else 0.0) for j in count] for i in count]

    def seconds(self, work: StepWork) -> float:
        """Return the predicted seconds of a step."""
        return sum(self._parts(work))

    def observe(self, work: StepWork, seconds: float) -> None:
        """Update the estimates with a step that took ``seconds``.

        A step in which the clock did not advance is ignored.
        """
        if seconds <= 0:
            return
        parts = self._parts(work)
        predicted = sum(parts)
        shares = [part / predicted for part in parts]  # Gradient of the logarithm of the prediction.
        spread = [sum(map(mul, row, shares)) for row in self._covariance]
        variance = sum(map(mul, spread, shares)) + _NOISE
        error = min(log(max(seconds, _SHORTEST) / predicted), max(_SLOWEST, 2 * sqrt(variance)))
        moved = (cost * exp(each * error / variance) for cost, each in zip(self._costs, spread, strict=True))
        self._costs = [min(max(cost, _LEAST_COST), _MOST_COST) for cost in moved]
        for i, row in enumerate(self._covariance):
            gain = spread[i] / variance
            for j, each in enumerate(spread):
                row[j] += _COMMON_DRIFT - gain * each
            row[i] += _OWN_DRIFT * shares[i]

    def prefill_seconds(self, start: int, end: int) -> float:
        """Return the predicted seconds by which prompt positions ``start`` to ``end`` lengthen a step."""
        _, _, _, per_token, per_pair = self._costs
        return per_token * (end - start) + per_pair * num_pairs(start, end)

    def prefill_tokens(self, start: int, seconds: float) -> int:
        """Return the number of prompt tokens from position ``start`` on that lengthen a step by at most ``seconds``."""
        _, _, _, per_token, per_pair = self._costs
        linear = per_token + per_pair * (start + 0.5)
        return int(2 * seconds / (linear + sqrt(linear * linear + 2 * per_pair * seconds)))

    def prefill_rates(self, chunk: int) -> tuple[float, float]:
        """Return upper bounds of the prompt tokens and of the query-key pairs that are computed in a second.

        The bounds lie two standard deviations above the estimates, so that before the first step they exclude almost
        nothing. Each bound assumes that steps compute only prompts, and that the other quantity takes no time.

        Args:
            chunk: number of prompt tokens of a step, which share the step's fixed cost.
        """
        per_step, _, _, per_token, per_pair = self._costs
        shares = (per_step / chunk / (per_step / chunk + per_token), 0.0, 0.0)
        weights = (*shares, 1 - shares[0], 0.0)
        spread = [sum(map(mul, row, weights)) for row in self._covariance]
        deviation = sqrt(max(0.0, sum(map(mul, spread, weights))))
        tokens = exp(2 * deviation) / (per_step / chunk + per_token)
        return tokens, exp(2 * sqrt(max(0.0, self._covariance[4][4]))) / per_pair

    def overhead_tokens(self) -> float:
        """Return the number of prompt tokens that take as long as the fixed cost of a step."""
        return self._costs[0] / self._costs[3]

    def draft_tokens(self, seconds: float) -> int:
        """Return the number of draft tokens that lengthen a step by at most ``seconds``."""
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
    """Return the number of query-key pairs of causal attention at positions ``start`` to ``end``."""
    return (end * (end + 1) - start * (start + 1)) // 2
