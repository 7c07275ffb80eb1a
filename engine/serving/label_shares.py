"""Label shares: the probabilities of a question's labels, computed from the logprobs of the labels' tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import EngineError


def label_logprobs(by_token: Sequence[Sequence[float]], num_ends: int = 1) -> list[float]:
    """Return the logprob of each label.

    Args:
        by_token: logprobs of the tokens of each ending, label by label (``EndingTree.by_token``).
        num_ends: number of endings of each label. The probabilities of a label's endings are added.
    """
    sums = [math.fsum(each) for each in by_token]
    return [_log_sum(sums[at : at + num_ends]) for at in range(0, len(sums), num_ends)]


def _log_sum(logprobs: Sequence[float]) -> float:
    """Return the logarithm of the sum of the probabilities (log-sum-exp)."""
    most = max(logprobs)
    return (
        most if len(logprobs) == 1 or most == -math.inf else most + math.log(sum(math.exp(p - most) for p in logprobs))
    )


@dataclass(frozen=True, slots=True)
class LabelShares:
    """Probabilities of the labels of a question.

    Attributes:
        shares: probability of each label, given that the answer is one of the labels; the shares sum to 1.
        mass: total probability of all labels among all texts that the model might generate.
    """

    shares: tuple[float, ...]
    mass: float

    @classmethod
    def of(cls, logprobs: Sequence[float]) -> LabelShares:
        """Return the shares from the logprob of each label.

        Raises EngineError if all are -inf, or if one is not a number.
        """
        best = max(logprobs)
        if not math.isfinite(best) or any(map(math.isnan, logprobs)):
            raise EngineError("The model gives no probability to any label of a question.")
        weights = [math.exp(logprob - best) for logprob in logprobs]
        total = math.fsum(weights)
        return cls(tuple(weight / total for weight in weights), min(1.0, math.exp(best) * total))

    @property
    def best(self) -> int:
        """Index of the likeliest label; the first one if several are equal."""
        return max(range(len(self.shares)), key=self.shares.__getitem__)

    @property
    def confidence(self) -> float:
        """Probability of the likeliest label among all texts that the model might generate."""
        return self.shares[self.best] * self.mass

    @property
    def mean(self) -> float:
        """Expected index of the label under the shares."""
        return math.fsum(index * share for index, share in enumerate(self.shares))
