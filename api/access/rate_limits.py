"""What each key may use in a minute: token buckets on requests and on tokens, and OpenAI's headers about them.

A request takes its prompt and all that it may generate out of the bucket of tokens, and gives back at its end what it
has not used. One that may use more than the bucket ever holds takes what there is at most; what it uses beyond that
is owed, and later requests wait for it.
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
"""All names that ``RateLimits.headers`` may give."""


class TokenBucket:
    """Fills evenly, up to what a minute brings. ``level`` is below zero while something is owed."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        """What is in it."""
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60)
        self._at = now
        return self._level

    def add(self, amount: float, now: float) -> None:
        """Put something in, or take it out (negative)."""
        self._level = self.level(now) + amount
        self._level = min(self._level, self.per_minute)

    def seconds_until(self, amount: float, now: float) -> float:
        """When that much will be in it, if nobody takes any."""
        return max(0.0, amount - self.level(now)) * 60 / self.per_minute


@dataclass(slots=True)
class _Buckets:
    """Of one key, by what they count."""

    requests: TokenBucket | None
    tokens: TokenBucket | None

    def items(self) -> tuple[tuple[str, TokenBucket], ...]:
        both = (("requests", self.requests), ("tokens", self.tokens))
        return tuple((kind, bucket) for kind, bucket in both if bucket is not None)


@dataclass(slots=True)
class Reservation:
    """What a running request has taken of its key's tokens."""

    bucket: TokenBucket | None
    amount: float

    def settle(self, used: int, now: float) -> None:
        """The request has ended: give back what it did not use, or owe what it used beyond."""
        if self.bucket is not None:
            self.bucket.add(self.amount - used, now)


class RateLimits:
    """The buckets of all keys that have limits. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, _Buckets] = {}

    def reserve(self, key: Key, num_tokens: int) -> Reservation:
        """Take a request and its tokens. Rejection (429) if one of them is not there; then nothing is taken."""
        now = self._clock()
        buckets = self._of(key)
        wanted = {"requests": 1.0, "tokens": float(num_tokens)}
        for kind, bucket in buckets.items():
            amount = wanted[kind] = min(wanted[kind], bucket.per_minute)
            if bucket.level(now) < amount:
                raise self._refusal(key, kind, bucket, amount, now)
        for kind, bucket in buckets.items():
            bucket.add(-wanted[kind], now)
        return Reservation(buckets.tokens, wanted["tokens"])

    def settle(self, reservation: Reservation, used: int) -> None:
        """A request has ended and has used so many tokens, prompt included."""
        reservation.settle(used, self._clock())

    def headers(self, key: Key) -> dict[str, str]:
        """OpenAI's headers on how the key stands; none for a key without limits."""
        now = self._clock()
        headers = {}
        for kind, bucket in self._of(key).items():
            headers[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
            headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.level(now))))
            headers[f"x-ratelimit-reset-{kind}"] = duration(bucket.seconds_until(bucket.per_minute, now))
        return headers

    def _of(self, key: Key) -> _Buckets:
        """The buckets of a key; full ones if its limits are new."""
        limits = (key.requests_per_minute, key.tokens_per_minute)
        if limits == (None, None):
            self._buckets.pop(key.name, None)
            return _NO_BUCKETS
        found = self._buckets.get(key.name)
        if found is None or tuple(b and b.per_minute for b in (found.requests, found.tokens)) != limits:
            now = self._clock()
            found = _Buckets(*(None if limit is None else TokenBucket(limit, now) for limit in limits))
            self._buckets[key.name] = found
        return found

    def _refusal(self, key: Key, kind: str, bucket: TokenBucket, amount: float, now: float) -> Rejection:
        seconds = bucket.seconds_until(amount, now)
        message = (
            f"The key {key.name} may use {bucket.per_minute} {kind} a minute, and this request needs {amount:.0f} "
            f"where {max(0.0, bucket.level(now)):.0f} are left. Try again in {duration(seconds)}."
        )
        return Rejection(429, message, f"{kind}_per_minute", seconds, kind=kind)


_NO_BUCKETS = _Buckets(None, None)


def duration(seconds: float) -> str:
    """As OpenAI writes it: ``120ms``, ``1.5s``, ``6m0s``."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}m{math.ceil(rest)}s" if minutes else f"{rest:.3g}s"
