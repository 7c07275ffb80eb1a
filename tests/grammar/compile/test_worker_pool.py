"""Who gets which worker, and when others are started."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from threading import Event
from types import SimpleNamespace

import pytest
from support.machine.waits import HANG_SECONDS

from rootgraft.grammar.compile import compile_service, worker_handle, worker_pool
from rootgraft.grammar.compile.compile_service import CompileService, compile_workers
from rootgraft.grammar.compile.worker_handle import (
    HUNGRY_SECONDS,
    STUCK_SECONDS,
    WorkerDied,
    WorkerHandle,
    WorkerStarved,
)
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.vocabulary import Vocabulary


class Starts:
    """Stands for `WorkerHandle`: each start waits until the test says what comes of it."""

    def __init__(self) -> None:
        self.asked: SimpleQueue[Future[Exception | None]] = SimpleQueue()
        self.are_first: list[bool] = []

    def __call__(self, vocabulary: Vocabulary, *, yields: bool, is_first: bool, ending: Event) -> FakeWorkerHandle:
        self.are_first.append(is_first)
        outcome: Future[Exception | None] = Future()
        self.asked.put(outcome)
        failure = outcome.result(HANG_SECONDS)
        if failure is not None:
            raise failure
        return FakeWorkerHandle(yields)

    def next(self, failure: Exception | None = None) -> None:
        """What comes of the start that waits longest, or of the next one."""
        self.asked.get(timeout=HANG_SECONDS).set_result(failure)


class FakeWorkerHandle:
    def __init__(self, yields: bool) -> None:
        self.yields = yields
        self.is_alive = True
        self.num_jobs = 0

    def kill(self) -> None:
        self.is_alive = False


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    starts = Starts()
    monkeypatch.setattr(compile_service, "WorkerHandle", starts)
    return starts


@pytest.fixture
def takers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_who_waits_for_a_start_takes_whichever_is_free_first(starts, takers, vocabulary):
    workers = compile_workers(vocabulary, 2, yields=False)
    starts.next()
    worker = workers.acquire()
    second = takers.submit(workers.acquire)
    unfinished = starts.asked.get(timeout=HANG_SECONDS)
    workers.release(worker)
    assert second.result(HANG_SECONDS) is worker
    unfinished.set_result(None)
    other = takers.submit(workers.acquire).result(HANG_SECONDS)
    assert other is not worker
    third = takers.submit(workers.acquire)
    workers.release(other)
    assert third.result(HANG_SECONDS) is other
    assert starts.asked.empty()
    workers.close()


def test_a_worker_is_replaced_after_so_many_grammars(starts, takers, vocabulary, monkeypatch):
    monkeypatch.setattr(worker_pool, "MOST_JOBS", 3)
    workers = compile_workers(vocabulary, 1, yields=False)
    starts.next()
    used = []
    for _ in range(3):
        worker = workers.acquire()
        worker.num_jobs += 1
        used.append(worker)
        workers.release(worker)
    assert used == used[:1] * 3 and not used[0].is_alive
    starts.next()
    assert workers.acquire().is_alive
    workers.close()


def test_one_that_failed_is_replaced_at_once(starts, vocabulary):
    workers = compile_workers(vocabulary, 1, yields=False)
    starts.next()
    worker = workers.acquire()
    workers.discard(worker)
    assert not worker.is_alive
    starts.next()
    assert workers.acquire().is_alive
    assert starts.are_first == [True, False]
    workers.close()


def test_nobody_waits_for_the_first_one_that_yields(starts, vocabulary):
    workers = compile_workers(vocabulary, 1, yields=True)
    unfinished = starts.asked.get(timeout=HANG_SECONDS)
    with pytest.raises(WorkerStarved):
        workers.acquire()
    unfinished.set_result(None)
    while not workers._idle:
        time.sleep(0)
    assert workers.acquire().yields
    workers.close()


def test_one_that_takes_the_place_of_another_is_waited_for_but_not_for_ever(starts, takers, vocabulary, monkeypatch):
    workers = compile_workers(vocabulary, 1, yields=True)
    starts.next()
    while not workers._idle:
        time.sleep(0)
    workers.discard(workers.acquire())
    taken = takers.submit(workers.acquire)
    starts.next()
    worker = taken.result(HANG_SECONDS)
    another = takers.submit(workers.acquire)  # waits for the grammar that is being compiled, however long that takes
    workers.release(worker)
    assert another.result(HANG_SECONDS) is worker
    monkeypatch.setattr(worker_pool, "START_PATIENCE", 0.01)
    workers.discard(worker)
    with pytest.raises(WorkerStarved):
        workers.acquire()
    starts.next()
    workers.close()


@pytest.mark.parametrize("failure", [WorkerDied(), OSError(24, "too many open files"), MemoryError()])
def test_who_waits_hears_of_a_start_that_fails_and_the_next_one_tries_again(starts, takers, vocabulary, failure):
    workers = compile_workers(vocabulary, 1, yields=False)
    taken = takers.submit(workers.acquire)
    while not workers._waiting:
        time.sleep(0)
    starts.next(failure)
    with pytest.raises(WorkerDied):
        taken.result(HANG_SECONDS)
    taken = takers.submit(workers.acquire)
    starts.next()
    assert taken.result(HANG_SECONDS).is_alive
    workers.close()


def test_after_the_end_there_are_none(starts, takers, vocabulary):
    workers = compile_workers(vocabulary, 2, yields=False)
    starts.next()
    busy = workers.acquire()
    waiting = takers.submit(workers.acquire)
    late = starts.asked.get(timeout=HANG_SECONDS)
    closing = threading.Thread(target=workers.close)
    closing.start()
    with pytest.raises(WorkerDied):
        waiting.result(HANG_SECONDS)
    late.set_result(None)
    closing.join(HANG_SECONDS)
    workers.release(busy)
    assert not busy.is_alive and not workers._idle
    with pytest.raises(WorkerDied):
        workers.acquire()


def test_grammars_are_compiled_by_fresh_processes_in_the_end(vocabulary, monkeypatch):
    monkeypatch.setattr(worker_pool, "MOST_JOBS", 1)
    service = CompileService(vocabulary, workers=1, seconds=20)
    try:
        for value in range(2):
            assert service.compile(GrammarSpec.json_schema({"const": value})).result(HANG_SECONDS)
    finally:
        service.close()


@pytest.fixture
def answers_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[float]], WorkerHandle]]:
    """Make a worker that answers after some looks, each of which takes so many seconds and the worker no time."""

    def make(looks: list[float]) -> WorkerHandle:
        now = [5.0]

        def select(read: list[object], *_: object) -> tuple[list[object], ...]:
            if not looks:
                return (read,)
            now[0] += looks.pop(0)
            return ([],)

        monkeypatch.setattr(worker_handle, "time", SimpleNamespace(monotonic=lambda: now[0]))
        monkeypatch.setattr(worker_handle, "select", SimpleNamespace(select=select))
        monkeypatch.setattr(WorkerHandle, "_processor_seconds", lambda self: 0.0)
        handle = object.__new__(WorkerHandle)
        handle._process = SimpleNamespace(stdout=object(), pid=os.getpid())  # type: ignore[assignment]
        handle._ending = Event()
        return handle

    yield make


def test_a_pause_of_all_processes_is_no_time_that_a_worker_took(answers_after):
    """A container that is paused for minutes, a process that is stopped: nothing ran meanwhile."""
    answers_after([0.1, 900.0, 0.1])._wait(2.0, starves=False)
    with pytest.raises(WorkerDied):
        answers_after([HUNGRY_SECONDS] * (int(STUCK_SECONDS / HUNGRY_SECONDS) + 2))._wait(2.0, starves=False)
    with pytest.raises(WorkerStarved):
        answers_after([HUNGRY_SECONDS] * 2)._wait(2.0, starves=True)
