"""What one more token in a step costs, learnt from the steps themselves."""

from __future__ import annotations

_MEMORY = 64.0  # steps after which an observation counts little
_PRIOR_SPREAD = 4.0  # the prior's weight, as a variance of tokens: steps that differ by more outweigh it
_PRIOR_TOKENS = 16.0  # before anything is known, a step's fixed part is taken for that of so many tokens
_OUTLIER = 4.0  # a step slower than so many times the mean is counted as so slow: something else ran


class TokenCost:
    """Seconds of a step as base + slope * tokens: a regression in which recent steps weigh most.

    While all steps are alike they tell nothing of the slope, and the prior decides; the more they differ in tokens,
    the less it does. Only steps in which every row draws are to be observed: tokens of a prompt cost less.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._tokens = self._seconds = 0.0  # means
        self._spread = self._joint = 0.0  # variance of tokens, covariance

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take a step over."""
        if self._weight:
            seconds = min(seconds, _OUTLIER * self._seconds)
        self._weight = min(self._weight + 1.0, _MEMORY)
        share = 1.0 / self._weight
        tokens_off, seconds_off = num_tokens - self._tokens, seconds - self._seconds
        self._tokens += share * tokens_off
        self._seconds += share * seconds_off
        self._spread = (1 - share) * (self._spread + share * tokens_off * tokens_off)
        self._joint = (1 - share) * (self._joint + share * tokens_off * seconds_off)

    def threshold(self, num_rows: int) -> float:
        """How likely a draft must be to stand, 0 to 1, for its cost to be worth it in a step of so many rows.

        A draft costs the slope. One that stands saves its row a token's share of a later step: the slope and the
        row's part of the base.
        """
        slope = self._slope()
        base = max(0.0, self._seconds - slope * self._tokens)
        saved = slope + base / max(1, num_rows)
        return slope / saved if saved > 0 else 1.0 / (1.0 + _PRIOR_TOKENS)

    def _slope(self) -> float:
        prior = self._seconds / (self._tokens + _PRIOR_TOKENS)
        learnt = (self._joint + _PRIOR_SPREAD * prior) / (self._spread + _PRIOR_SPREAD)
        return max(learnt, 0.0)
