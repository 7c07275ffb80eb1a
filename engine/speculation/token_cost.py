"""Token cost: what a token adds to a step in which every row draws, learnt from the steps, for drafts."""

from __future__ import annotations

_OUTLIER = 4.0  # a step this many times slower than expected counts as that slow: something else ran

_MEMORY = 64.0  # steps after which an observation counts little
_PRIOR_SPREAD = 4.0  # the prior's weight, as a variance of tokens: steps that differ by more outweigh it
_PRIOR_TOKENS = 16.0  # the prior: a step's fixed cost is that of so many tokens


class TokenCost:
    """Seconds of a step as base + slope * tokens: a linear regression that weighs recent steps most.

    If all steps have equal sizes, the prior decides the slope; the more they differ in tokens, the less weight the
    prior has. Only steps in which every row draws must be observed: prompt tokens cost less.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._tokens = self._seconds = 0.0  # means of tokens and seconds
        self._spread = self._joint = 0.0  # variance of tokens; covariance of tokens and seconds

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Add a step to the regression."""
        if self._weight:
            seconds = min(seconds, _OUTLIER * self._seconds)
        self._weight = min(self._weight + 1.0, _MEMORY)
        share = 1.0 / self._weight
        tokens_off, seconds_off = num_tokens - self._tokens, seconds - self._seconds
        self._tokens += share * tokens_off
        self._seconds += share * seconds_off
        self._spread = (1 - share) * (self._spread + share * tokens_off * tokens_off)
        self._joint = (1 - share) * (self._joint + share * tokens_off * seconds_off)

    def threshold(self, num_rows: int, prior: TokenCost | None = None) -> float:
        """Return the least acceptance probability, 0 to 1, at which a draft pays in a step of ``num_rows`` rows.

        A draft costs the slope. An accepted draft saves its row a token's share of a later step: the slope and the
        row's part of the base.

        Args:
            prior: cost of steps of all sizes, whose slope decides where steps of this size hardly differ.
        """
        slope = self._slope(None if prior is None else prior._slope())
        base = max(0.0, self._seconds - slope * self._tokens)
        saved = slope + base / max(1, num_rows)
        return slope / saved if saved > 0 else 1.0 / (1.0 + _PRIOR_TOKENS)

    def seconds(self, num_tokens: int) -> float:
        """Return the expected seconds of a step; 0 before one was observed."""
        return max(0.0, self._seconds + self._slope() * (num_tokens - self._tokens))

    def _slope(self, prior: float | None = None) -> float:
        if prior is None:
            prior = self._seconds / (self._tokens + _PRIOR_TOKENS)
        learnt = (self._joint + _PRIOR_SPREAD * prior) / (self._spread + _PRIOR_SPREAD)
        return max(learnt, 0.0)
