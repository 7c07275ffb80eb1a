"""Rate limits of API keys: token buckets for requests and tokens per minute, and OpenAI's rate limit headers.

A request reserves the tokens of its prompt and ``max_tokens`` in the bucket of tokens, and returns the unused part at
its end. A request that is larger than the bucket reserves a full bucket. If it uses more, the level becomes negative,
and later requests have to wait.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import Rejection
from .api_keys import Key

LIMIT_HEADERS = tuple(
    f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)
"""Names of all headers that ``RateLimits.headers`` may return."""


class TokenBucket:
    """Token bucket that fills evenly up to ``per_minute``. Its level is negative after use beyond a reservation."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        """Return the level after filling up to ``now``."""
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60)
        self._at = now
        return self._level

    def add(self, amount: float, now: float) -> None:
        self._level = self.level(now) + amount

    def seconds_until(self, amount: float, now: float) -> float:
        """Return the seconds until the level reaches ``amount``, if nothing else is taken."""
        return max(0.0, amount - self.level(now)) * 60 / self.per_minute


@dataclass(slots=True)
class _Buckets:
    """The buckets of one key; None for no limit."""

    requests: TokenBucket | None
    tokens: TokenBucket | None

    def items(self) -> tuple[tuple[str, TokenBucket], ...]:
        both = (("requests", self.requests), ("tokens", self.tokens))
        return tuple((kind, bucket) for kind, bucket in both if bucket is not None)


@dataclass(slots=True)
class Reservation:
    """Tokens that a running request has reserved in its key's bucket."""

    bucket: TokenBucket | None
    amount: float

    def settle(self, used: int, now: float) -> None:
        """Return the unused tokens to the bucket, or take the tokens that were used beyond the reservation."""
        if self.bucket is not None:
            self.bucket.add(self.amount - used, now)


class RateLimits:
    """The buckets of all keys that have limits. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, _Buckets] = {}

    def reserve(self, key: Key, num_tokens: int) -> Reservation:
        """Reserve a request and its tokens, both or neither. Raises Rejection (429) if a bucket holds too few."""
        now = self._clock()
        buckets = self._of(key, now)
        wanted = {"requests": 1.0, "tokens": float(num_tokens)}
        for kind, bucket in buckets.items():
            amount = wanted[kind] = min(wanted[kind], bucket.per_minute)
            if bucket.level(now) < amount:
                raise self._refusal(key, kind, bucket, amount, now)
        for kind, bucket in buckets.items():
            bucket.add(-wanted[kind], now)
        return Reservation(buckets.tokens, wanted["tokens"])

    def settle(self, reservation: Reservation, used: int) -> None:
        """Settle the reservation of a request that has ended, given the number of tokens used, including the prompt."""
        reservation.settle(used, self._clock())

    def headers(self, key: Key) -> dict[str, str]:
        """Return OpenAI's rate limit headers for a key. A key without limits has none."""
        now = self._clock()
        headers = {}
        for kind, bucket in self._of(key, now).items():
            headers[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
            headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.level(now))))
            headers[f"x-ratelimit-reset-{kind}"] = duration(bucket.seconds_until(bucket.per_minute, now))
        return headers

    def _of(self, key: Key, now: float) -> _Buckets:
        """Return the buckets of a key. If the key's limits are new, the buckets are full."""
        limits = (key.requests_per_minute, key.tokens_per_minute)
        if limits == (None, None):
            self._buckets.pop(key.name, None)
            return _NO_BUCKETS
        found = self._buckets.get(key.name)
        if found is None or tuple(b and b.per_minute for b in (found.requests, found.tokens)) != limits:
            found = _Buckets(*(None if limit is None else TokenBucket(limit, now) for limit in limits))
            self._buckets[key.name] = found
        return found

    def _refusal(self, key: Key, kind: str, bucket: TokenBucket, amount: float, now: float) -> Rejection:
        seconds = bucket.seconds_until(amount, now)
        message = (
            f"The key {key.name} may use {bucket.per_minute} {kind} per minute. This request needs {amount:.0f}, and "
            f"{max(0, math.floor(bucket.level(now)))} are left. Try again in {duration(seconds)}."
        )
        return Rejection(429, message, f"{kind}_per_minute", seconds, kind=kind)


_NO_BUCKETS = _Buckets(None, None)


def duration(seconds: float) -> str:
    """Format seconds like OpenAI: ``120ms``, ``1.5s``, ``6m0s``."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}m{math.ceil(rest)}s" if minutes else f"{rest:.3g}s"
