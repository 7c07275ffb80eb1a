"""The compile service: limits that kill, one compile for many, a bounded memory of results."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from support.machine.waits import HANG_SECONDS

from rootgraft.grammar.compile import compile_service, worker_handle
from rootgraft.grammar.compile.compile_service import ERROR_BYTES, CompileQueueFull, CompileService, compile_workers
from rootgraft.grammar.compile.compile_worker import (
    LOADING_NICE,
    MOST_NICE,
    NICE,
    decode_vocabulary,
    encode_job,
    encode_vocabulary,
)
from rootgraft.grammar.compile.compiled_grammar import CompiledGrammar
from rootgraft.grammar.compile.worker_handle import (
    _STEADY,
    _YIELD,
    WorkerDied,
    WorkerHandle,
    WorkerStarved,
    WorkerTimeout,
)
from rootgraft.grammar.compile.worker_pool import WorkerPool
from rootgraft.grammar.errors import CompileUnavailable, GrammarError, GrammarTimeout
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def service(vocabulary: Vocabulary) -> Iterator[CompileService]:
    service = CompileService(vocabulary, workers=1, seconds=20)
    yield service
    service.close()


def test_a_grammar_is_compiled_once(service, grammars):
    spec = GrammarSpec.json_schema({"type": "integer", "minimum": 3})
    before = service.stats.compiled
    first, second = service.compile(spec), service.compile(spec)
    assert first.result(HANG_SECONDS) is second.result(HANG_SECONDS) is service.compile(spec).result(HANG_SECONDS)
    assert service.stats.compiled == before + 1
    assert grammars.admits(first.result(), "12")
    assert not grammars.admits(first.result(), "2")


def test_a_refusal_is_remembered_with_its_pointer(service):
    spec = GrammarSpec.json_schema({"items": {"type": "nope"}})
    refused, hits = service.stats.refused, service.stats.hits
    for _ in range(2):
        with pytest.raises(GrammarError) as caught:
            service.compile(spec).result(HANG_SECONDS)
        assert (caught.value.keyword, caught.value.pointer) == ("type", "/items/type")
    assert (service.stats.refused, service.stats.hits) == (refused + 1, hits + 1)


def test_a_refusal_that_is_asked_for_again_and_again_keeps_no_frames(service):
    spec = GrammarSpec.regex("(?=a)b")
    refusals = []
    for _ in range(3):
        with pytest.raises(GrammarError) as caught:
            service.compile(spec).result(HANG_SECONDS)
        refusals.append(caught.value)
    depths = [len(list(traceback.walk_tb(each.__traceback__))) for each in refusals]
    assert len(set(map(id, refusals))) == 3 and depths[1] == depths[2]


def test_a_compile_beyond_the_clock_is_stopped_and_the_next_one_served(vocabulary):
    service = CompileService(vocabulary, workers=1, seconds=0.3)
    try:
        with pytest.raises(GrammarTimeout, match=r"takes longer than 0.3 s of processor time") as caught:
            service.compile(_endless()).result(HANG_SECONDS)
        assert caught.value.keyword == "enum"
        assert service.stats.stopped == 1
        assert service.compile(GrammarSpec.json_schema({"const": 1})).result(HANG_SECONDS)
    finally:
        service.close()


def _endless(count: int = 250) -> GrammarSpec:
    """Within the static limits, and more than a second of work: many objects whose keys all differ."""
    values = [{f"k{i}_{j}": [i, j] for j in range(12)} for i in range(count)]
    return GrammarSpec.json_schema({"enum": values})


def test_a_compile_beyond_the_memory_limit_is_refused(vocabulary):
    service = CompileService(vocabulary, workers=1, seconds=20, memory_bytes=1 << 20)
    try:
        with pytest.raises(GrammarError, match="more than 1 MiB"):
            service.compile(_endless()).result(HANG_SECONDS)
    finally:
        service.close()


def test_a_worker_that_was_killed_while_idle_is_replaced_and_no_grammar_is_to_blame(service, vocabulary):
    worker = WorkerHandle(vocabulary)
    os.kill(worker._process.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        worker.compile(b"", 5)
    worker._process.wait()
    service._yielding._idle.append(worker)
    assert service.compile(GrammarSpec.json_schema({"const": "lives"})).result(HANG_SECONDS)


def _die_by(number: signal.Signals, times: int) -> Callable[[WorkerHandle, bytes, float], bytes]:
    """Return a ``compile`` whose worker is ended by a signal at its first jobs."""
    compile_, left = WorkerHandle.compile, [number] * times

    def die(self: WorkerHandle, job: bytes, seconds: float) -> bytes:
        if left:
            os.kill(self._process.pid, left.pop())
            raise self._end()
        return compile_(self, job, seconds)

    return die


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_a_worker_that_dies_at_work_is_replaced_and_the_grammar_tried_again(service, monkeypatch, number):
    with monkeypatch.context() as patched:
        patched.setattr(WorkerHandle, "compile", _die_by(number, 1))
        assert service.compile(GrammarSpec.json_schema({"const": f"lives on {number}"})).result(HANG_SECONDS)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_that_are_killed_from_outside_are_no_fault_of_the_grammar(service, monkeypatch, number):
    spec = GrammarSpec.json_schema({"const": f"is asked for again after {number}"})
    refused = service.stats.refused
    with monkeypatch.context() as patched:
        patched.setattr(WorkerHandle, "compile", _die_by(number, 2))
        with pytest.raises(CompileUnavailable, match="could not be compiled now"):
            service.compile(spec).result(HANG_SECONDS)
    assert service.compile(spec).result(HANG_SECONDS)
    assert service.stats.refused == refused


def test_a_grammar_over_which_every_worker_ends_itself_is_refused(service, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(WorkerHandle, "compile", _die_by(signal.SIGABRT, 2))
        with pytest.raises(GrammarTimeout, match="crashes the compiler"):
            service.compile(GrammarSpec.json_schema({"const": "aborts"})).result(HANG_SECONDS)


def test_the_kernel_that_looks_first_at_the_processor_time_says_the_same(vocabulary):
    worker = WorkerHandle(vocabulary)
    os.kill(worker._process.pid, signal.SIGXCPU)
    try:
        assert isinstance(worker._end(), WorkerTimeout)
    finally:
        worker.kill()


def test_a_worker_that_is_only_slow_is_waited_for_and_kept(vocabulary, monkeypatch):
    """The clock runs ten thousand times as fast as the worker: a limit by the clock would have ended it."""
    clock = itertools.count(0, 1_000.0)
    monkeypatch.setattr(worker_handle, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(worker_handle, "MOST_BETWEEN_LOOKS", 1_000.0)
    monkeypatch.setattr(worker_handle, "HUNGRY_SECONDS", 0.005)
    monkeypatch.setattr(worker_handle, "STUCK_SECONDS", 1e9)
    service = CompileService(vocabulary, workers=1, seconds=20)
    try:
        service._steady_until = float("inf")
        worker = service._steady.acquire()
        service._steady.release(worker)
        assert service.compile(_endless(20)).result(HANG_SECONDS)  # many times HUNGRY_SECONDS
        assert service._steady.acquire() is worker
    finally:
        service.close()
        worker.kill()


def test_a_worker_that_gets_no_processor_time_for_long_hangs_and_no_grammar_is_to_blame(vocabulary, monkeypatch):
    monkeypatch.setattr(worker_handle, "STUCK_SECONDS", 0.5)
    worker = WorkerHandle(vocabulary)
    os.kill(worker._process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(WorkerDied):
            worker.compile(encode_job(GrammarSpec.json_object(), 5.0, 1 << 30), 5.0)
    finally:
        worker.kill()


def test_a_worker_yields_the_cores_unless_it_starves(vocabulary, monkeypatch):
    compile_ = WorkerHandle.compile
    tried: list[bool] = []

    def starve(self: WorkerHandle, job: bytes, seconds: float) -> bytes:
        tried.append(self.yields)
        if self.yields:
            raise WorkerStarved
        return compile_(self, job, seconds)

    monkeypatch.setattr(WorkerHandle, "compile", starve)
    monkeypatch.setattr("rootgraft.grammar.compile.worker_handle._YIELD", _STEADY)  # this machine may be busy
    service = CompileService(vocabulary, workers=1, seconds=20)
    try:
        while not service._yielding._idle:
            time.sleep(0)
        for value in range(2):
            assert service.compile(GrammarSpec.json_schema({"const": value})).result(HANG_SECONDS)
        assert tried == [True, False, False]
        monkeypatch.setattr(WorkerHandle, "compile", compile_)
        service._steady_until = 0.0
        while not service._yielding._idle:
            time.sleep(0)
        assert service.compile(GrammarSpec.json_schema({"const": 3})).result(HANG_SECONDS)
        assert service._yielding._idle and all(worker.yields for worker in service._yielding._idle)
    finally:
        service.close()


def test_a_worker_that_yields_is_of_the_class_of_what_is_idle():
    program = f"import sys; {_YIELD}; sys.exit(os.sched_getscheduler(0))"
    assert subprocess.run([sys.executable, "-I", "-S", "-c", program], check=False).returncode == os.SCHED_IDLE


@pytest.mark.parametrize("engine", [0, 3, 12])
def test_a_worker_is_nicer_than_its_engine_however_nice_that_is(engine):
    wanted = min(os.getpriority(os.PRIO_PROCESS, 0) + engine + LOADING_NICE, MOST_NICE)
    program = f"""
import os, time
from threading import get_native_id
from rootgraft.grammar.compile.compile_worker import LOADING_NICE, NICE, _run_nice
os.nice({engine} + NICE)
def work():
    end = time.monotonic() + {HANG_SECONDS}
    while (found := os.getpriority(os.PRIO_PROCESS, get_native_id())) != {wanted} and time.monotonic() < end:
        time.sleep(0.001)
    print(found)
_run_nice(work, LOADING_NICE)
"""
    command = [sys.executable, "-P", "-c", program]
    assert int(subprocess.run(command, check=True, capture_output=True, cwd="/").stdout) == wanted


@pytest.mark.parametrize("is_first", [True, False])
def test_a_worker_that_is_ready_is_nicer_than_its_engine(vocabulary, is_first):
    worker = WorkerHandle(vocabulary, is_first=is_first)
    try:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, worker._process.pid) == min(own + NICE, MOST_NICE)
    finally:
        worker.kill()


def test_a_worker_that_gets_no_processor_time_starves(vocabulary, monkeypatch):
    monkeypatch.setattr("rootgraft.grammar.compile.worker_handle._YIELD", _STEADY)
    monkeypatch.setattr("rootgraft.grammar.compile.worker_handle.HUNGRY_SECONDS", 1_000.0)
    worker = WorkerHandle(vocabulary, yields=True)
    monkeypatch.setattr("rootgraft.grammar.compile.worker_handle.HUNGRY_SECONDS", 0.05)
    os.kill(worker._process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(WorkerStarved):
            worker.compile(encode_job(GrammarSpec.json_object(), 5.0, 1 << 30), 5.0)
    finally:
        worker.kill()


def test_a_worker_that_never_gets_ready_does_not_keep_a_pool_that_closes(vocabulary, monkeypatch):
    """On a machine whose cores are busy one of low priority takes longer to start than an engine may take to end."""
    monkeypatch.setattr(
        "rootgraft.grammar.compile.worker_handle._SERVE", "import time; time.sleep(100_000) # {is_first}"
    )
    monkeypatch.setattr("rootgraft.grammar.compile.worker_handle.START_SECONDS", 10_000.0)
    before = set(psutil.Process().children())
    pool = compile_workers(vocabulary, 1, yields=False)
    while not set(psutil.Process().children()) - before:
        time.sleep(0.01)
    pool.close()
    assert set(psutil.Process().children()) <= before  # of which some may have ended
    with pytest.raises(WorkerDied):
        pool.acquire()


def test_a_worker_that_compiles_does_not_keep_a_service_that_closes(vocabulary):
    service = CompileService(vocabulary, workers=1, seconds=10_000.0)
    worker = service._steady.acquire()
    os.kill(worker._process.pid, signal.SIGSTOP)
    service._steady.release(worker)
    service._steady_until = time.monotonic() + 1_000.0  # the worker that yields is not asked
    future = service.compile(GrammarSpec.json_object())
    while worker.num_jobs == 0:
        time.sleep(0.01)
    service.close()
    assert isinstance(future.exception(HANG_SECONDS), CompileUnavailable) and not worker.is_alive


@pytest.mark.parametrize(("yields", "error"), [(True, WorkerStarved), (False, WorkerDied)])
def test_a_stopped_worker_that_reads_nothing_is_given_up(vocabulary, monkeypatch, yields, error):
    monkeypatch.setattr("rootgraft.grammar.compile.worker_handle._YIELD", _STEADY)
    worker = WorkerHandle(vocabulary)
    worker.yields = yields
    monkeypatch.setattr("rootgraft.grammar.compile.worker_handle.STUCK_SECONDS", 1.0)
    os.kill(worker._process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(error):
            worker.compile(bytes(1 << 21), 5.0)  # more than a pipe holds
    finally:
        worker.kill()


def test_a_worker_that_starves_at_its_start_keeps_no_grammar_waiting(vocabulary, monkeypatch):
    init, go_on = WorkerHandle.__init__, threading.Event()

    def starve(self: WorkerHandle, vocabulary: Vocabulary, *, yields: bool, **_: object) -> None:
        if yields:
            go_on.wait(HANG_SECONDS)
        init(self, vocabulary, yields=False)

    monkeypatch.setattr(WorkerHandle, "__init__", starve)
    service = CompileService(vocabulary, workers=1, seconds=20)
    try:
        assert service.compile(GrammarSpec.json_schema({"const": 1})).result(HANG_SECONDS)
    finally:
        go_on.set()
        service.close()


def test_a_grammar_along_which_the_library_failed_is_compiled_again(service):
    spec = GrammarSpec.json_schema({"const": "spoilt"})
    first = service.compile(spec).result(HANG_SECONDS)
    first._rebuild()
    second = service.compile(spec).result(HANG_SECONDS)
    assert second is not first
    assert service.compile(spec).result(HANG_SECONDS) is second


@pytest.mark.parametrize("error", [OSError(24, "too many open files"), MemoryError()])
def test_what_goes_wrong_here_is_not_held_against_a_grammar_for_ever(service, monkeypatch, error):
    def fail(self: WorkerPool) -> WorkerHandle:
        raise error

    spec = GrammarSpec.json_schema({"const": type(error).__name__})
    with monkeypatch.context() as patched:
        patched.setattr(WorkerPool, "acquire", fail)
        with pytest.raises(CompileUnavailable, match="could not be compiled"):
            service.compile(spec).result(HANG_SECONDS)
    assert service.compile(spec).result(HANG_SECONDS)


def test_a_worker_beside_which_something_raises_is_not_busy_for_ever(vocabulary, monkeypatch):
    service = CompileService(vocabulary, workers=1, seconds=20)

    def fail(*_):
        raise MemoryError

    try:
        with monkeypatch.context() as patched:
            patched.setattr("rootgraft.grammar.compile.compile_service.encode_job", fail)
            with pytest.raises(CompileUnavailable, match="could not be compiled"):
                service.compile(GrammarSpec.json_schema({"const": 1})).result(HANG_SECONDS)
        assert service.compile(GrammarSpec.json_schema({"const": 2})).result(HANG_SECONDS)
    finally:
        service.close()


def test_results_are_dropped_by_bytes(vocabulary):
    # A vocabulary of its own: what other tests have left in the cache of a shared one is counted too.
    service = CompileService(replace(vocabulary), workers=1, seconds=20, cache_bytes=300_000)
    try:
        for value in range(8):
            service.compile(GrammarSpec.json_schema({"const": value})).result(HANG_SECONDS)
        assert service.stats.cached < 8
        assert service.stats.cached_bytes <= 300_000
        before = service.stats.compiled
        service.compile(GrammarSpec.json_schema({"const": 7})).result(HANG_SECONDS)
        assert service.stats.compiled == before
        service.compile(GrammarSpec.json_schema({"const": 0})).result(HANG_SECONDS)
        assert service.stats.compiled == before + 1
    finally:
        service.close()


def test_the_queue_is_bounded_and_closing_answers_everyone(vocabulary):
    service = CompileService(vocabulary, workers=1, seconds=20, most_pending=2)
    futures = [service.compile(GrammarSpec.json_schema({"const": value})) for value in range(2)]
    with pytest.raises(CompileQueueFull, match="2 grammars wait"):
        for value in range(2, 2000):
            futures.append(service.compile(GrammarSpec.json_schema({"const": value})))
    service.close()
    assert all(future.done() for future in futures)


class GatedService(CompileService):
    """Compiles nothing: refuses each grammar once its gate is open, and notes the order."""

    def __init__(self, vocabulary: Vocabulary, workers: int, most_pending: int, **limits: int) -> None:
        self.begun: list[bytes] = []
        self.gates: dict[bytes, threading.Event] = {}
        super().__init__(vocabulary, workers=workers, most_pending=most_pending, **limits)

    def ask(self, name: str, tenant: str, *, stuck: bool = False) -> Future[Any]:
        spec = GrammarSpec.regex(name)
        self.gates.setdefault(spec.content, threading.Event())
        if not stuck:
            self.gates[spec.content].set()
        return self.compile(spec, tenant)

    def open_all(self) -> None:
        for gate in self.gates.values():
            gate.set()

    def _compiled(self, spec: GrammarSpec) -> CompiledGrammar:
        self.begun.append(spec.content)
        assert self.gates[spec.content].wait(HANG_SECONDS)
        raise GrammarError("regex", "", "was seen")


@pytest.fixture
def gated(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., GatedService]]:
    monkeypatch.setattr(
        compile_service, "compile_workers", lambda *_, **__: SimpleNamespace(close=lambda: None), raising=True
    )
    made: list[GatedService] = []

    def make(workers: int, most_pending: int, **limits: int) -> GatedService:
        made.append(GatedService(replace(vocabulary), workers, most_pending, **limits))
        return made[-1]

    yield make
    for service in made:
        service.open_all()
        service.close()


def test_grammars_of_a_tenant_that_take_long_leave_a_worker_to_others(gated):
    service = gated(2, 256)
    of_a = [service.ask(f"a{number}", "a", stuck=True) for number in range(9)]
    assert isinstance(service.ask("b", "b").exception(HANG_SECONDS), GrammarError)
    assert not any(future.done() for future in of_a) and service.begun[-1] == b"b" and len(service.begun) == 2
    service.open_all()
    assert all(isinstance(future.exception(HANG_SECONDS), GrammarError) for future in of_a)


def test_a_grammar_that_another_tenant_asked_for_has_the_turn_of_who_comes_later_too(gated):
    """Tenant a has a long queue, at whose end is a grammar that tenant b needs as well."""
    service = gated(2, 256)
    of_a = [service.ask(f"a{number}", "a", stuck=True) for number in range(5)]
    shared = service.ask("shared", "a")
    assert service.ask("shared", "b") is shared
    assert isinstance(shared.exception(HANG_SECONDS), GrammarError)
    assert not any(future.done() for future in of_a) and len(service.begun) == 2
    service.open_all()
    wait(of_a, HANG_SECONDS)
    assert service._slots.num_waiting == 0 and service.stats.pending == 0


def test_a_tenant_queues_as_many_grammars_as_it_leaves(gated):
    service = gated(1, 8)
    service.ask("begun", "a", stuck=True)
    for tenant, share in (("a", 4), ("b", 2), ("c", 1)):
        futures = [service.ask(f"{tenant}{number}", tenant, stuck=True) for number in range(share)]
        with pytest.raises(CompileQueueFull):
            service.ask(f"{tenant}-more", tenant)
        assert service.ask(f"{tenant}0", tenant, stuck=True) is futures[0], "what it has asked for already"
    service.open_all()
    assert service.ask("a3", "a").exception(HANG_SECONDS)
    assert service.ask("a-more", "a").exception(HANG_SECONDS)


def test_without_keys_one_tenant_has_all_workers_and_places(gated):
    service = gated(2, 8)
    futures = [service.ask(f"n{number}", "", stuck=True) for number in range(10)]
    with pytest.raises(CompileQueueFull):
        service.ask("more", "")
    service.open_all()
    assert not wait(futures, HANG_SECONDS).not_done


def test_a_tenant_that_fills_the_cache_loses_its_own(gated):
    service = gated(1, 8, cache_bytes=4 * ERROR_BYTES)
    for name, tenant in [("b0", "b"), ("b1", "b"), *((f"a{number}", "a") for number in range(9))]:
        assert service.ask(name, tenant).exception(HANG_SECONDS)
    assert service.stats.cached == 4 and service.stats.cached_bytes == 4 * ERROR_BYTES
    begun = len(service.begun)
    for name in ("b0", "b1", "a7", "a8"):
        assert service.ask(name, "c").exception(HANG_SECONDS)
    assert len(service.begun) == begun, "those that are kept are not compiled again"
    service.ask("a6", "a").exception(HANG_SECONDS)
    assert len(service.begun) == begun + 1


def test_a_vocabulary_survives_the_pipe(vocabulary):
    copy = decode_vocabulary(encode_vocabulary(vocabulary))
    assert (copy.tokens, copy.special, copy.eos, copy.size) == (
        vocabulary.tokens,
        vocabulary.special,
        vocabulary.eos,
        vocabulary.size,
    )
