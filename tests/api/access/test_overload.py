"""The queue of what has no token yet: room, shares, drain rate, and the tickets that hold places in it."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from support.api.limit_fakes import Clock, limited, refused

from rootgraft.api.access.overload import ROOM, Load, QueueLimits
from rootgraft.api.access.rate_limits import RateLimits
from rootgraft.api.access.request_admission import Demand, RequestAdmission
from rootgraft.api.errors import Rejection
from rootgraft.api.observe.metrics import Metrics
from rootgraft.api.observe.request_observer import RequestObserver
from rootgraft.api.observe.token_usage import UsageCount
from rootgraft.engine.serving.output_processor import Finish, TextDelta
from rootgraft.engine.serving.request import TextRequest
from rootgraft.engine.types import FinishReason, Priority, SamplingParams, Usage

R, I, B = Priority  # noqa: E741


def load(sequences: int = 1, tokens: int = 10, tenant: str = "", priority: Priority = I) -> Load:
    return Load(tenant, priority, sequences, tokens)


def fill(queue_limits: QueueLimits, **fields: Any) -> int:
    """Join one by one until one is refused; how many were taken."""
    count = 0
    while True:
        try:
            queue_limits.check(load(**fields))
        except Rejection:
            return count
        queue_limits.join(load(**fields))
        count += 1


def test_each_band_leaves_room_for_those_before_it() -> None:
    queue_limits = QueueLimits(100, 10**6, 60, Clock())
    assert fill(queue_limits, priority=B) == ROOM[B] * 100
    assert fill(queue_limits, priority=I) == (ROOM[I] - ROOM[B]) * 100
    assert fill(queue_limits, priority=R) == 10
    assert refused(lambda: queue_limits.check(load(priority=R))) == (503, "max_queued_requests", 1)
    assert [queue_limits.waiting(band) for band in Priority] == [10, 40, 50]


def test_tokens_are_bounded_too_and_an_empty_queue_takes_anything() -> None:
    queue_limits = QueueLimits(100, 1000, 60, Clock())
    queue_limits.check(load(tokens=5000))
    queue_limits.join(load(tokens=800))
    assert refused(lambda: queue_limits.check(load(tokens=101)))[:2] == (503, "max_queued_tokens")
    queue_limits.check(load(tokens=100))
    queue_limits.leave(load(tokens=800), 800, begun=True)
    assert (queue_limits.sequences, queue_limits.tokens) == (0, 0)


def test_a_tenant_alone_takes_half_and_the_next_finds_room() -> None:
    queue_limits = QueueLimits(100, 10**6, 60, Clock())
    assert fill(queue_limits, tenant="a") == 50
    assert refused(lambda: queue_limits.check(load(tenant="a")))[:2] == (429, "tenant_share")
    assert fill(queue_limits, tenant="b") == 25
    assert fill(queue_limits, tenant="c") == 13
    queue_limits.check(load(tenant="d"))
    assert fill(QueueLimits(100, 10**6, 60, Clock()), tenant="") == 90, "without tenants there is nobody to share with"


def test_the_drain_rate_tells_the_wait_and_when_to_come_back() -> None:
    clock = Clock()
    queue_limits = QueueLimits(10**6, 10**9, 60, clock)
    for _ in range(1000):
        queue_limits.join(load())
    assert queue_limits.expected_wait("", B) == 0, "nothing is known yet"
    for _ in range(300):  # five a second
        clock.now += 0.2
        queue_limits.leave(load(), 10, begun=True)
    assert queue_limits.expected_wait("", B) == pytest.approx(700 / 5, rel=0.03)
    status, reason, retry = refused(lambda: queue_limits.check(load()))
    assert (status, reason) == (503, "queue_slow") and retry == pytest.approx(80, abs=5)
    queue_limits.check(load(priority=B))
    assert queue_limits.expected_wait("", R) == 0
    queue_limits.check(load(priority=R))


def test_a_tenant_waits_for_its_own_and_its_turns() -> None:
    clock = Clock()
    queue_limits = QueueLimits(10**6, 10**9, 5, clock)
    for _ in range(100):
        queue_limits.join(load(tenant="many"))
    for _ in range(50):  # ten a second
        clock.now += 0.1
        queue_limits.leave(load(tenant="many"), 10, begun=True)
    queue_limits.join(load(tenant="many"))
    assert refused(lambda: queue_limits.check(load(tenant="many")))[:2] == (503, "queue_slow")
    for _ in range(20):
        queue_limits.check(load(tenant="few"))
        queue_limits.join(load(tenant="few"))
    assert (
        queue_limits.expected_wait("few", I) == pytest.approx(4.0, rel=0.1)
        and queue_limits.expected_wait("many", I) > 7
    )


def test_the_rate_follows_and_a_standstill_counts() -> None:
    clock = Clock()
    queue_limits = QueueLimits(10**6, 10**9, 1e9, clock)
    for _ in range(10_000):
        queue_limits.join(load())
    for rate in (50, 5):
        for _ in range(60 * rate):
            clock.now += 1 / rate
            queue_limits.leave(load(), 10, begun=True)
        assert queue_limits.expected_wait("", B) == pytest.approx(queue_limits.sequences / rate, rel=0.1)
    before = queue_limits.expected_wait("", B)
    clock.now += 30
    assert queue_limits.expected_wait("", B) > 5 * before


def test_a_bunch_that_has_just_begun_does_not_promise_more_of_them() -> None:
    """As a server does that starts with free rows: sixteen begin together, and again whenever they end together."""
    clock = Clock()
    queue_limits = QueueLimits(10**6, 10**9, 1e9, clock)
    for _ in range(1000):
        queue_limits.join(load())
    for _ in range(12):
        for _ in range(16):
            clock.now += 0.01
            queue_limits.leave(load(), 10, begun=True)
        if clock.now > 0.5:
            assert queue_limits.expected_wait("", B) == pytest.approx(queue_limits.sequences * 0.8 / 16, rel=0.1)
        clock.now += 0.64


def test_time_without_a_queue_and_aborts_say_nothing_about_the_rate() -> None:
    clock = Clock()
    queue_limits = QueueLimits(10**6, 10**9, 60, clock)
    for _ in range(50):
        for _ in range(2):
            queue_limits.join(load())
        clock.now += 0.2
        for _ in range(2):
            queue_limits.leave(load(), 10, begun=True)
        clock.now += 1000
    for _ in range(100):
        queue_limits.join(load())
    for _ in range(50):
        queue_limits.leave(load(), 10, begun=False)
    assert queue_limits.expected_wait("", B) == pytest.approx(50 * 0.1, rel=0.1)


def test_one_that_waits_alone_says_nothing_about_the_rate() -> None:
    """A first request while the server warms up, or a long prompt: others would have begun with it."""
    clock = Clock()
    queue_limits = QueueLimits(10**6, 10**9, 60, clock)
    for _ in range(4):
        queue_limits.join(load())
        clock.now += 8
        queue_limits.leave(load(), 10, begun=True)
    queue_limits.join(load())
    clock.now += 8
    for _ in range(32):
        queue_limits.check(load())
        queue_limits.join(load())
        clock.now += 0.001
    queue_limits.leave(load(), 10, begun=True)
    clock.now += 1
    queue_limits.check(load())
    for _ in range(8):
        queue_limits.leave(load(), 10, begun=True)
    assert 3 < queue_limits.expected_wait("", B) < 6, "eight in a second, and in the next again after a second's pause"


def test_an_old_rate_is_forgotten_while_one_waits_alone() -> None:
    clock = Clock()
    queue_limits = QueueLimits(10**6, 10**9, 60, clock)

    def drain(seconds: float) -> None:
        """Ten waited, and leave one by one but the last."""
        while queue_limits.sequences < 10:
            queue_limits.join(load())
        for _ in range(9):
            clock.now += seconds
            queue_limits.leave(load(), 10, begun=True)

    drain(2.0)
    clock.now += 1000
    drain(0.1)
    for _ in range(9):
        queue_limits.join(load())
    assert 1 <= queue_limits.expected_wait("", B) < 2, "ten a second, not one in two seconds"


def test_the_first_of_a_shared_prompt_says_nothing_about_the_rate() -> None:
    """Fifteen wait for what one computes in six seconds; a slow machine must not refuse who comes then."""
    clock = Clock()
    queue_limits = QueueLimits(10**6, 10**9, 60, clock)
    for _ in range(16):
        queue_limits.join(load())
    clock.now += 6
    queue_limits.leave(load(), 10, begun=True)
    assert queue_limits.expected_wait("", I) == 0
    for _ in range(3):
        clock.now += 0.5
        queue_limits.leave(load(), 10, begun=True)
        queue_limits.check(load())
    assert 12 < queue_limits.expected_wait("", I) < 60


def request(num_prompt: int = 10, n: int = 1, max_tokens: int = 20) -> TextRequest:
    return TextRequest(array("i", range(num_prompt)), SamplingParams(max_tokens=max_tokens), n=n)


def delta(index: int, tokens: int = 1, ended: bool = False, prompt: int = 0) -> TextDelta:
    finish = Finish(FinishReason.STOP, Usage(0, 0, 0)) if ended else None
    return TextDelta(index, "", tuple(range(tokens)), finish=finish, prompt=prompt)


def test_a_ticket_holds_places_until_first_tokens_and_tokens_until_its_end() -> None:
    queue_limits, limits = QueueLimits(100, 10**6, 60, Clock()), RateLimits(Clock())
    key = limited(tokens=1000)
    requests = [request(n=2), request(num_prompt=5)]
    ticket = RequestAdmission(queue_limits, limits).admit(key, Demand.of(requests))
    observer = RequestObserver(Metrics("tiny", dict), requests, ticket, UsageCount())

    def left() -> str:
        return limits.headers(key)["x-ratelimit-remaining-tokens"]

    assert (queue_limits.sequences, queue_limits.tokens, left()) == (3, 15, str(1000 - 15 - 60))
    observer.observe([delta(0, 3), delta(1, 0)])
    assert (queue_limits.sequences, queue_limits.tokens) == (2, 5)
    observer.observe([delta(0), delta(1, 0, ended=True)])
    assert (queue_limits.sequences, queue_limits.tokens) == (1, 5), "a prompt's tokens count once, however many answers"
    observer.observe([delta(0, 2, prompt=1)])
    assert (queue_limits.sequences, queue_limits.tokens) == (0, 0)
    observer.end("abort")
    assert left() == str(1000 - 15 - 6)


def test_a_ticket_that_was_never_used_gives_all_back() -> None:
    queue_limits, limits = QueueLimits(100, 10**6, 60, Clock()), RateLimits(Clock())
    key = limited(requests=10, tokens=1000)
    RequestAdmission(queue_limits, limits).admit(key, Demand.of([request()])).close()
    assert queue_limits.sequences == 0
    assert limits.headers(key)["x-ratelimit-remaining-tokens"] == "1000"
