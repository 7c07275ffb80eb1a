"""The queue of what has no token yet: room, shares, drain rate, and the tickets that hold places in it."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from test_rate_limits import Clock, limited, refused

from rootgraft.api.access.caller import Caller
from rootgraft.api.access.overload import ROOM, Backlog, Load
from rootgraft.api.access.rate_limits import RateLimits
from rootgraft.api.access.request_admission import Admission
from rootgraft.api.errors import Rejection
from rootgraft.engine.serving.output_processor import Finish, TextDelta
from rootgraft.engine.serving.request import TextRequest
from rootgraft.engine.types import FinishReason, Priority, SamplingParams, Usage

R, I, B = Priority  # noqa: E741


def load(sequences: int = 1, tokens: int = 10, tenant: str = "", priority: Priority = I) -> Load:
    return Load(tenant, priority, sequences, tokens)


def fill(backlog: Backlog, **fields: Any) -> int:
    """Join one by one until one is refused; how many were taken."""
    count = 0
    while True:
        try:
            backlog.check(load(**fields))
        except Rejection:
            return count
        backlog.join(load(**fields))
        count += 1


def test_each_band_leaves_room_for_those_before_it() -> None:
    backlog = Backlog(100, 10**6, 60, Clock())
    assert fill(backlog, priority=B) == ROOM[B] * 100
    assert fill(backlog, priority=I) == (ROOM[I] - ROOM[B]) * 100
    assert fill(backlog, priority=R) == 10
    assert refused(lambda: backlog.check(load(priority=R))) == (503, "queue_full", 1)
    assert [backlog.waiting(band) for band in Priority] == [10, 40, 50]


def test_tokens_are_bounded_too_and_an_empty_queue_takes_anything() -> None:
    backlog = Backlog(100, 1000, 60, Clock())
    backlog.check(load(tokens=5000))
    backlog.join(load(tokens=800))
    assert refused(lambda: backlog.check(load(tokens=101)))[:2] == (503, "queue_full")
    backlog.check(load(tokens=100))
    backlog.leave(load(tokens=800), 800, begun=True)
    assert (backlog.sequences, backlog.tokens) == (0, 0)


def test_a_tenant_alone_takes_half_and_the_next_finds_room() -> None:
    backlog = Backlog(100, 10**6, 60, Clock())
    assert fill(backlog, tenant="a") == 50
    assert refused(lambda: backlog.check(load(tenant="a")))[:2] == (429, "tenant_share")
    assert fill(backlog, tenant="b") == 25
    assert fill(backlog, tenant="c") == 13
    backlog.check(load(tenant="d"))
    assert fill(Backlog(100, 10**6, 60, Clock()), tenant="") == 90, "without tenants there is nobody to share with"


def test_the_drain_rate_tells_the_wait_and_when_to_come_back() -> None:
    clock = Clock()
    backlog = Backlog(10**6, 10**9, 60, clock)
    for _ in range(1000):
        backlog.join(load())
    assert backlog.expected_wait("", B) == 0, "nothing is known yet"
    for _ in range(300):  # five a second
        clock.now += 0.2
        backlog.leave(load(), 10, begun=True)
    assert backlog.expected_wait("", B) == pytest.approx(700 / 5, rel=0.03)
    status, reason, retry = refused(lambda: backlog.check(load()))
    assert (status, reason) == (503, "queue_slow") and retry == pytest.approx(80, abs=5)
    backlog.check(load(priority=B))
    assert backlog.expected_wait("", R) == 0
    backlog.check(load(priority=R))


def test_a_tenant_waits_for_its_own_and_its_turns() -> None:
    clock = Clock()
    backlog = Backlog(10**6, 10**9, 5, clock)
    for _ in range(100):
        backlog.join(load(tenant="many"))
    for _ in range(50):  # ten a second
        clock.now += 0.1
        backlog.leave(load(tenant="many"), 10, begun=True)
    backlog.join(load(tenant="many"))
    assert refused(lambda: backlog.check(load(tenant="many")))[:2] == (503, "queue_slow")
    for _ in range(20):
        backlog.check(load(tenant="few"))
        backlog.join(load(tenant="few"))
    assert backlog.expected_wait("few", I) == pytest.approx(4.0, rel=0.1) and backlog.expected_wait("many", I) > 7


def test_the_rate_follows_and_a_standstill_counts() -> None:
    clock = Clock()
    backlog = Backlog(10**6, 10**9, 1e9, clock)
    for _ in range(10_000):
        backlog.join(load())
    for rate in (50, 5):
        for _ in range(60 * rate):
            clock.now += 1 / rate
            backlog.leave(load(), 10, begun=True)
        assert backlog.expected_wait("", B) == pytest.approx(backlog.sequences / rate, rel=0.1)
    before = backlog.expected_wait("", B)
    clock.now += 30
    assert backlog.expected_wait("", B) > 5 * before


def test_a_bunch_that_has_just_begun_does_not_promise_more_of_them() -> None:
    """As a server does that starts with free rows: sixteen begin together, and again whenever they end together."""
    clock = Clock()
    backlog = Backlog(10**6, 10**9, 1e9, clock)
    for _ in range(1000):
        backlog.join(load())
    for _ in range(12):
        for _ in range(16):
            clock.now += 0.01
            backlog.leave(load(), 10, begun=True)
        if clock.now > 0.5:
            assert backlog.expected_wait("", B) == pytest.approx(backlog.sequences * 0.8 / 16, rel=0.1)
        clock.now += 0.64


def test_time_without_a_queue_and_aborts_say_nothing_about_the_rate() -> None:
    clock = Clock()
    backlog = Backlog(10**6, 10**9, 60, clock)
    for _ in range(50):
        for _ in range(2):
            backlog.join(load())
        clock.now += 0.2
        for _ in range(2):
            backlog.leave(load(), 10, begun=True)
        clock.now += 1000
    for _ in range(100):
        backlog.join(load())
    for _ in range(50):
        backlog.leave(load(), 10, begun=False)
    assert backlog.expected_wait("", B) == pytest.approx(50 * 0.1, rel=0.1)


def test_one_that_waits_alone_says_nothing_about_the_rate() -> None:
    """A first request while the server warms up, or a long prompt: others would have begun with it."""
    clock = Clock()
    backlog = Backlog(10**6, 10**9, 60, clock)
    for _ in range(4):
        backlog.join(load())
        clock.now += 8
        backlog.leave(load(), 10, begun=True)
    backlog.join(load())
    clock.now += 8
    for _ in range(32):
        backlog.check(load())
        backlog.join(load())
        clock.now += 0.001
    backlog.leave(load(), 10, begun=True)
    clock.now += 1
    backlog.check(load())
    for _ in range(8):
        backlog.leave(load(), 10, begun=True)
    assert 3 < backlog.expected_wait("", B) < 6, "eight in a second, and in the next again after a second's pause"


def request(num_prompt: int = 10, n: int = 1, max_tokens: int = 20) -> TextRequest:
    return TextRequest(array("i", range(num_prompt)), SamplingParams(max_tokens=max_tokens), n=n)


def delta(index: int, tokens: int = 1, ended: bool = False) -> TextDelta:
    finish = Finish(FinishReason.STOP, Usage(0, 0, 0)) if ended else None
    return TextDelta(index, "", tuple(range(tokens)), finish=finish)


def test_a_ticket_holds_places_until_first_tokens_and_tokens_until_its_end() -> None:
    backlog, limits = Backlog(100, 10**6, 60, Clock()), RateLimits(Clock())
    key = limited(tokens=1000)
    caller = Caller(key, "", None, {})
    ticket = Admission(backlog, limits).admit(caller, [request(n=2), request(num_prompt=5)])

    def left() -> str:
        return limits.headers(key)["x-ratelimit-remaining-tokens"]

    assert (backlog.sequences, backlog.tokens, left()) == (3, 15, str(1000 - 15 - 60))
    ticket.note(0, [delta(0, 3), delta(1, 0)])
    assert (backlog.sequences, backlog.tokens) == (2, 5)
    ticket.note(0, [delta(0), delta(1, 0, ended=True)])
    ticket.note(1, [delta(0, 2)])
    assert (backlog.sequences, backlog.tokens) == (0, 0)
    ticket.close()
    assert left() == str(1000 - 15 - 6)


def test_a_ticket_that_was_never_used_gives_all_back() -> None:
    backlog, limits = Backlog(100, 10**6, 60, Clock()), RateLimits(Clock())
    key = limited(requests=10, tokens=1000)
    Admission(backlog, limits).admit(Caller(key, "", None, {}), [request()]).close()
    assert backlog.sequences == 0
    assert limits.headers(key)["x-ratelimit-remaining-tokens"] == "1000"
