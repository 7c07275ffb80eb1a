"""Threads by tenant: shares, calls that are cancelled, the end."""

from __future__ import annotations

import asyncio
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


async def test_what_a_cancelled_call_has_opened_is_closed(threads: TenantThreads, gate: threading.Event) -> None:
    """Also if it ends long after; a call that failed or was not made has opened nothing."""
    begun, discarded = threading.Event(), list[int]()

    def open_slowly() -> int:
        begun.set()
        gate.wait()
        return 7

    def fail_slowly() -> int:
        gate.wait()
        raise LookupError("no")

    running = asyncio.ensure_future(threads.call("a", open_slowly, discarded.append))
    failing = asyncio.ensure_future(threads.call("a", fail_slowly, discarded.append))
    waiting = asyncio.ensure_future(threads.call("a", lambda: 9, discarded.append))
    while not begun.is_set() or threads.slots.num_held < 2:
        await asyncio.sleep(0)
    for task in (running, failing, waiting):
        task.cancel()
    ends = await asyncio.gather(running, failing, waiting, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)
    assert discarded == []
    gate.set()
    assert await threads.call("a", lambda: 5, discarded.append) == 5
    threads.shutdown()
    assert discarded == [7]
