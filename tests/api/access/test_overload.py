"""The queue of what has no token yet: room, shares, drain rate, and the tickets that hold places in it."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from typing import Any

import pytest
from support.api.limit_fakes import Clock, limited, refused

from rootgraft.api.access.overload import ROOM, Load, QueueLimits
from rootgraft.api.access.rate_limits import RateLimits
from rootgraft.api.access.request_admission import Demand, RequestAdmission
from rootgraft.api.access.wait_estimate import Capacity, Work, work_of
from rootgraft.api.errors import Rejection
from rootgraft.api.observe.metrics import Metrics
from rootgraft.api.observe.request_observer import RequestObserver
from rootgraft.api.observe.token_usage import UsageCount
from rootgraft.engine.serving.output_processor import Finish, TextDelta
from rootgraft.engine.serving.request import TextRequest
from rootgraft.engine.types import FinishReason, Priority, SamplingParams, Usage

R, I, B = Priority  # noqa: E741


def load(
    sequences: int = 1, tokens: int = 10, tenant: str = "", priority: Priority = I, may_be_deferred: bool = False
) -> Load:
    return Load(tenant, priority, sequences, tokens, may_be_deferred=may_be_deferred)


def join(queue_limits: QueueLimits, joined: Load) -> Work:
    """Join with one sequence; its work."""
    work = work_of(joined.tokens, joined.tokens, 0, 0)
    queue_limits.join(joined, work)
    return work


def fill(queue_limits: QueueLimits, **fields: Any) -> int:
    """Join one by one until one is refused; how many were taken."""
    count = 0
    while True:
        try:
            queue_limits.check(load(**fields))
        except Rejection:
            return count
        join(queue_limits, load(**fields))
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
    work = join(queue_limits, load(tokens=800))
    assert refused(lambda: queue_limits.check(load(tokens=101)))[:2] == (503, "max_queued_tokens")
    queue_limits.check(load(tokens=100))
    queue_limits.leave(load(tokens=800), work, begun=True)
    assert (queue_limits.sequences, queue_limits.tokens) == (0, 0)


def test_a_tenant_alone_takes_half_and_the_next_finds_room() -> None:
    queue_limits = QueueLimits(100, 10**6, 60, Clock())
    assert fill(queue_limits, tenant="a") == 50
    assert refused(lambda: queue_limits.check(load(tenant="a")))[:2] == (429, "tenant_share")
    assert fill(queue_limits, tenant="b") == 25
    assert fill(queue_limits, tenant="c") == 13
    queue_limits.check(load(tenant="d"))
    assert fill(QueueLimits(100, 10**6, 60, Clock()), tenant="") == 90, "without tenants there is nobody to share with"


def test_waiting_tokens_are_parted_as_requests_are() -> None:
    queue_limits = QueueLimits(100, 1000, 60, Clock())
    work = join(queue_limits, load(tenant="a", tokens=400))
    join(queue_limits, load(tenant="a", tokens=100))
    assert refused(lambda: queue_limits.check(load(tenant="a", tokens=1)))[:2] == (429, "tenant_share")
    queue_limits.check(load(tenant="b", tokens=400))
    queue_limits.leave(load(tenant="a", tokens=400), work, begun=True)
    queue_limits.check(load(tenant="a", tokens=400))
    alone = QueueLimits(100, 1000, 60, Clock())
    join(alone, load(tokens=500))
    alone.check(load(tokens=400))


KNOWN = Capacity(
    rows=4, usable=4, tokens_per_second=1000, pairs_per_second=math.inf, short=200, steps=1
)  # an engine that was measured


def measured(clock: Clock, capacity: Capacity) -> QueueLimits:
    """A queue before an engine whose last answers had ten tokens and took a second each."""
    queue_limits = QueueLimits(10**6, 10**9, 60, clock, lambda: capacity)
    for _ in range(64):
        one = work_of(10, 10, 0, 200)
        queue_limits.join(load(), one)
        queue_limits.leave(load(), one, begun=True)
        answer = queue_limits.begin(load(), 100)
        clock.now += 1
        queue_limits.end(answer, 10)
    return queue_limits


def add(queue_limits: QueueLimits, num_tokens: int, most: int = 100, **fields: Any) -> None:
    work = work_of(num_tokens, num_tokens, queue_limits.answer_tokens(most), 200)
    queue_limits.join(load(tokens=num_tokens, **fields), work)


def test_prompts_before_a_long_one_are_waited_for_and_a_short_one_passes_them() -> None:
    queue_limits = measured(Clock(), KNOWN)
    for _ in range(3):
        add(queue_limits, 40_000)
    assert queue_limits.expected_wait(replace(load(), is_short=False)) == pytest.approx(120)
    assert refused(lambda: queue_limits.check(replace(load(), is_short=False))) == (503, "queue_slow", 60)
    assert queue_limits.expected_wait(load()) == 0
    queue_limits.check(load())
    queue_limits.check(replace(load(priority=B), is_short=False))
    queue_limits.check(replace(load(priority=R), is_short=False))


def test_what_is_computed_of_prompts_in_progress_is_not_waited_for() -> None:
    queue_limits = measured(Clock(), replace(KNOWN, computed=30_000))
    add(queue_limits, 40_000)
    assert queue_limits.expected_wait(replace(load(), is_short=False)) == pytest.approx(10)


def test_a_free_row_is_not_waited_for_and_a_taken_one_by_the_answers_that_ended() -> None:
    clock = Clock()
    queue_limits = measured(clock, replace(KNOWN, running=4))
    add(queue_limits, 10)
    for _ in range(4):
        queue_limits.begin(load(), 100)
    assert queue_limits.expected_wait(load()) == pytest.approx(1), "two of four, which all end in a second"
    for _ in range(399):
        add(queue_limits, 10)
    assert queue_limits.expected_wait(load()) == pytest.approx(101)
    free = measured(clock, replace(KNOWN, rows=500, usable=500, running=4))
    for _ in range(400):
        add(free, 10)
    assert free.expected_wait(load()) == pytest.approx(4), "prompts of 4000 tokens alone"


def test_no_time_that_passes_makes_the_estimate_grow() -> None:
    clock = Clock()
    queue_limits = measured(clock, replace(KNOWN, running=4))
    for _ in range(4):
        queue_limits.begin(load(), 100)
    for _ in range(400):
        add(queue_limits, 10)
    before = queue_limits.expected_wait(load())
    for _ in range(20):
        clock.now += 10
        assert queue_limits.expected_wait(load()) <= before
        before = queue_limits.expected_wait(load())


def test_nothing_is_expected_of_an_engine_that_is_not_known_or_not_measured() -> None:
    for capacity in (Capacity(), replace(KNOWN, running=4)):
        queue_limits = QueueLimits(10**6, 10**9, 60, Clock(), lambda capacity=capacity: capacity)
        for _ in range(4):
            queue_limits.begin(load(), 100)
        for _ in range(400):
            add(queue_limits, 10)
        assert queue_limits.expected_wait(load()) == pytest.approx(4 if capacity.rows else 0)


def test_a_tenant_waits_for_its_own_and_its_turns() -> None:
    queue_limits = measured(Clock(), replace(KNOWN, running=4))
    for _ in range(4):
        queue_limits.begin(load(), 100)
    for _ in range(400):
        add(queue_limits, 10, tenant="many")
    for _ in range(3):
        add(queue_limits, 10, tenant="few")
    assert queue_limits.expected_wait(load(tenant="many")) > 90
    assert queue_limits.expected_wait(load(tenant="few")) < 3
    assert queue_limits.expected_wait(load(tenant="new")) < 2


def test_who_may_wait_for_a_grammar_counts_once_the_engine_says_that_it_does_not() -> None:
    said = [replace(KNOWN, running=4, steps=step, deferred=deferred) for step, deferred in enumerate((0, 0, 0, 200, 0))]
    now = said[0]
    queue_limits = QueueLimits(10**6, 10**9, 60, Clock(), lambda: now)
    for _ in range(400):
        add(queue_limits, 10, may_be_deferred=True)
    waits = []
    for now in said:  # noqa: B007
        waits.append(queue_limits.expected_wait(load()))
    assert waits == pytest.approx([0, 0, 4, 2, 4])


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
