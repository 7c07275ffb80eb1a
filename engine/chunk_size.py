"""How long a step may become while streams run: they all wait for the prompts that it computes beside them."""

from __future__ import annotations

STREAM_WAIT = 0.25  # seconds that a step with prompts in it may take once somebody waits for its next token
LEAST = 32  # tokens of prompts that a step may always have: on a slow machine they too must get on
_SHARE = 0.25  # of a slower step in the estimate
_OUTLIER = 4.0  # a step so many times slower than the estimate is counted as so slow: something else ran


class ChunkLimit:
    """Learns from steps with prompts in them what a token of such a step takes.

    A longer chunk computes a prompt hardly faster where products bound it, which a few dozen rows reach; to those who
    wait for their next token it is a stall.

    A fast step shows what the machine can do, whatever its size. A slow one may be so because something else ran, or
    because it was small: each has a part that does not grow with its tokens. So it counts little by little, and only
    if it took a good part of what a step may take.
    """

    def __init__(self) -> None:
        self._per_token = 0.0  # seconds

    def observe(self, num_tokens: int, num_positions: int, seconds: float) -> None:
        """Take a step over: all its tokens, and how many of them are followed by one that is drawn or judged."""
        if num_tokens - num_positions < LEAST // 2:
            return
        now = seconds / num_tokens
        if not self._per_token or now < self._per_token:
            self._per_token = now
        elif seconds > STREAM_WAIT / 2:
            self._per_token += _SHARE * (min(now, _OUTLIER * self._per_token) - self._per_token)

    def cut(self, budget: int, num_streams: int) -> int:
        """Of a step's budget of tokens, what it may have beside so many running streams; theirs are counted in."""
        if not num_streams or not self._per_token:
            return budget
        return min(budget, max(num_streams + LEAST, int(STREAM_WAIT / self._per_token)))
