"""Calls on a pool that may start no thread: each call has a result, and is made once at most."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from support.machine.waits import HANG_SECONDS

from rootgraft.tenancy.tenant_threads import TenantThreads
from rootgraft.tenancy.thread_calls import NoThread, call_on


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield patch


def test_a_call_without_a_thread_fails_and_is_never_made(no_threads: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    with ThreadPoolExecutor(2) as pool:
        assert isinstance(call_on(pool, lambda: made.append(1)).exception(HANG_SECONDS), NoThread)
        no_threads.undo()
        call_on(pool, lambda: made.append(2)).result(HANG_SECONDS)
    assert made == [2]


def test_results_errors_and_cancelled_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled: Future[int] = Future()
    cancelled.cancel()
    with ThreadPoolExecutor(1) as pool:
        assert call_on(pool, lambda: 3).result(HANG_SECONDS) == 3
        assert isinstance(call_on(pool, lambda: 1 // 0).exception(HANG_SECONDS), ZeroDivisionError)
        assert call_on(pool, lambda: 1 // 0, cancelled) is cancelled
        assert call_on(pool, lambda: 4).result(HANG_SECONDS) == 4


def test_a_tenants_call_without_a_thread_gives_its_turn_back(no_threads: pytest.MonkeyPatch) -> None:
    threads = TenantThreads(1, "test")
    failed = [threads.submit("a", lambda: 1) for _ in range(3)]
    assert all(isinstance(each.exception(HANG_SECONDS), NoThread) for each in failed)
    assert threads.slots.num_held == threads.slots.num_waiting == 0
    no_threads.undo()
    assert threads.submit("a", lambda: 2).result(HANG_SECONDS) == 2
    threads.shutdown()
