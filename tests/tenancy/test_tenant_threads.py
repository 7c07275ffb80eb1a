"""Threads by tenant: shares, calls that are cancelled, the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait

import pytest
from support.machine.waits import HANG_SECONDS

from rootgraft.tenancy.tenant_slots import ShareFull
from rootgraft.tenancy.tenant_threads import TenantThreads
from rootgraft.tenancy.thread_calls import NoThread


@pytest.fixture
def gate() -> threading.Event:
    return threading.Event()


@pytest.fixture
def threads(gate: threading.Event) -> Iterator[TenantThreads]:
    made = TenantThreads(4, "test", 8)
    yield made
    gate.set()
    made.shutdown()


def fail() -> None:
    raise LookupError("no")


def test_calls_that_hang_leave_threads_to_others(threads: TenantThreads, gate: threading.Event) -> None:
    stuck = [threads.submit("a", gate.wait) for _ in range(6)]
    with pytest.raises(ShareFull):
        threads.submit("a", gate.wait)
    assert threads.submit("b", lambda: 7).result(HANG_SECONDS) == 7
    assert isinstance(threads.submit("b", fail).exception(HANG_SECONDS), LookupError)
    assert threads.slots.num_held == 2 and not any(each.done() for each in stuck)
    gate.set()
    assert not wait(stuck, HANG_SECONDS).not_done


def test_a_call_that_is_cancelled_is_not_made_and_gives_its_place_back(
    threads: TenantThreads, gate: threading.Event
) -> None:
    stuck = [threads.submit("a", gate.wait) for _ in range(2)]
    made: list[int] = []
    waiting: list[Future[None]] = [threads.submit("a", lambda: made.append(1)) for _ in range(4)]
    assert all(each.cancel() for each in waiting) and threads.slots.num_waiting == 0
    gate.set()
    assert threads.submit("a", lambda: made).result(HANG_SECONDS) == [] and not wait(stuck, HANG_SECONDS).not_done


def test_calls_that_wait_at_the_end_are_never_made(gate: threading.Event) -> None:
    threads = TenantThreads(1, "test")
    running, waiting = threads.submit("", gate.wait), threads.submit("", lambda: 1)
    closing = threading.Thread(target=threads.shutdown)
    closing.start()
    while not threads._threads._shutdown:
        closing.join(0.01)
    gate.set()
    closing.join(HANG_SECONDS)
    assert running.done() and isinstance(waiting.exception(HANG_SECONDS), NoThread) and not closing.is_alive()
