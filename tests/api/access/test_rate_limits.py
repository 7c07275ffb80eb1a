"""What a key may use in a minute: buckets, refunds, debts, headers."""

from __future__ import annotations

import contextlib
import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api.limit_fakes import Clock, limited, refused

from rootgraft.api.access.rate_limits import RateLimits, duration
from rootgraft.api.errors import Rejection


def test_requests_per_minute() -> None:
    clock = Clock()
    limits = RateLimits(clock)
    key = limited(requests=30)
    for _ in range(30):
        limits.reserve(key, 5)
    assert refused(lambda: limits.reserve(key, 5)) == (429, "requests_per_minute", 2)
    assert limits.headers(key) == {
        "x-ratelimit-limit-requests": "30",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
    }
    clock.now = 2.0
    limits.reserve(key, 5)
    assert refused(lambda: limits.reserve(key, 5))[2] == 2
    clock.now = 3.8  # nine tenths of a request
    with pytest.raises(Rejection, match="needs 1, and 0 are left"):
        limits.reserve(key, 5)
    assert limits.headers(key)["x-ratelimit-remaining-requests"] == "0"
    clock.now = 1e6
    assert limits.headers(key)["x-ratelimit-remaining-requests"] == "30"


def test_the_first_request_may_take_a_whole_bucket() -> None:
    """While the clock goes on with each look at it."""
    ticks = itertools.count()
    limits = RateLimits(lambda: float(next(ticks)))
    limits.reserve(limited(requests=1, tokens=100), 100)


def test_tokens_are_reserved_and_given_back() -> None:
    clock = Clock()
    limits = RateLimits(clock)
    key = limited(requests=100, tokens=600)
    first = limits.reserve(key, 400)
    assert refused(lambda: limits.reserve(key, 400)) == (429, "tokens_per_minute", 20)
    assert limits.headers(key)["x-ratelimit-remaining-requests"] == "99", "a refused request takes nothing"
    limits.settle(first, 100)
    limits.reserve(key, 400)
    assert limits.headers(key)["x-ratelimit-remaining-tokens"] == "100"


def test_a_request_beyond_the_bucket_takes_all_of_it_and_owes_the_rest() -> None:
    clock = Clock()
    limits = RateLimits(clock)
    key = limited(tokens=600)
    reservation = limits.reserve(key, 10_000)
    limits.settle(reservation, 1_200)
    assert limits.headers(key)["x-ratelimit-remaining-tokens"] == "0"
    assert refused(lambda: limits.reserve(key, 1))[2] == 61
    clock.now = 61
    limits.reserve(key, 1)


def test_limits_that_change_with_the_file_begin_anew() -> None:
    limits = RateLimits(Clock())
    limits.reserve(limited(requests=1), 1)
    refused(lambda: limits.reserve(limited(requests=1), 1))
    limits.reserve(limited(requests=2), 1)
    assert limits.headers(limited()) == {}
    for _ in range(9):
        limits.reserve(limited(), 10**9)


@given(seed=st.integers(0, 2**32))
def test_no_more_is_served_than_the_rate_and_one_bucket(seed: int) -> None:
    """What all requests have used never exceeds one bucket and what has come in since."""
    rng = random.Random(seed)
    clock = Clock()
    limits = RateLimits(clock)
    key = limited(tokens=600)
    running: list[tuple[Any, int]] = []
    used = 0
    for _ in range(200):
        clock.now += rng.random() * 3
        most = rng.randint(1, 300)
        with contextlib.suppress(Rejection):
            running.append((limits.reserve(key, most), rng.randint(0, most)))
        if running and rng.random() < 0.6:
            reservation, amount = running.pop(rng.randrange(len(running)))
            limits.settle(reservation, amount)
            used += amount
        assert used <= 600 + 10 * clock.now + 1e-6


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.1201, "121ms"), (1, "1s"), (1.5, "1.5s"), (60, "1m0s"), (361.2, "6m2s")]
)
def test_durations_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
