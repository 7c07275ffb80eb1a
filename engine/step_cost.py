"""Step cost: what a token adds to a step, learnt from the steps, for drafts and for the size of prefill chunks."""

from __future__ import annotations

STREAM_WAIT = 0.25  # seconds that a step with prompt tokens may take while streams run
LEAST = 32  # prompt tokens that a step may always have, so that prefill goes on even on a slow machine
_SLOWER_WEIGHT = 0.25  # of a slower step in the estimate of ``ChunkLimit``
_OUTLIER = 4.0  # a step this many times slower than expected counts as that slow: something else ran

_MEMORY = 64.0  # steps after which an observation counts little
_PRIOR_SPREAD = 4.0  # the prior's weight, as a variance of tokens: steps that differ by more outweigh it
_PRIOR_TOKENS = 16.0  # the prior: a step's fixed cost is that of so many tokens


class TokenCost:
    """Seconds of a step as base + slope * tokens: a linear regression that weighs recent steps most.

    Steps of equal size say nothing about the slope, and the prior decides; the more they differ in tokens, the less it
    does. Only steps in which every row draws are to be observed: prompt tokens cost less.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._tokens = self._seconds = 0.0  # means
        self._spread = self._joint = 0.0  # variance of tokens, covariance

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

        A draft costs the slope. An accepted one saves its row a token's share of a later step: the slope and the row's
        part of the base.

        Args:
            prior: of steps of all sizes, whose slope decides where steps of this size hardly differ.
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


class ChunkLimit:
    """Bounds prefill chunks by time while streams run, from the seconds per token of steps with prompt tokens.

    Beyond a few dozen rows, where the products are compute-bound, a longer chunk hardly speeds up prefill, but it
    stalls the streams. A fast step shows what the machine can do, whatever its size. A slow one may be slow because
    something else ran, or by its fixed cost if it was small: it counts little by little, and only if it took a good
    part of ``STREAM_WAIT``.
    """

    def __init__(self) -> None:
        self._per_token = 0.0  # seconds

    def observe(self, num_tokens: int, num_positions: int, seconds: float) -> None:
        """Update the estimate by a step of ``num_tokens`` tokens, ``num_positions`` of them sampling positions."""
        if num_tokens - num_positions < LEAST // 2:
            return
        now = seconds / num_tokens
        if not self._per_token or now < self._per_token:
            self._per_token = now
        elif seconds > STREAM_WAIT / 2:
            self._per_token += _SLOWER_WEIGHT * (min(now, _OUTLIER * self._per_token) - self._per_token)

    def cut(self, budget: int, num_streams: int) -> int:
        """Return the part of a step's token budget to use beside ``num_streams`` streams, theirs included."""
        if not num_streams or not self._per_token:
            return budget
        return min(budget, max(num_streams + LEAST, int(STREAM_WAIT / self._per_token)))
