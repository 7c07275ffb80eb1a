"""Worker processes of untrusted programs: limits, errors, and what becomes of others meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import psutil
import pytest
from support.machine.waits import HANG_SECONDS

from benchmarks.hostile_programs import LOOPS
from rootgraft.engine.errors import CapacityError
from rootgraft.engine.sandbox.program_pool import ProgramFailed, ProgramPool, ProgramRefused, ProgramStopped
from rootgraft.grammar.compile.worker_handle import WorkerProcess
from rootgraft.tenancy.current_tenant import CURRENT_TENANT
from rootgraft.tenancy.tenant_threads import TenantThreads

RENDER = "engine.text.chat_template:render_job"


def source(text: str) -> dict[str, object]:
    return {"source": text, "variables": {}}


@pytest.fixture(autouse=True)
def no_tenant() -> Iterator[None]:
    token = CURRENT_TENANT.set("")
    yield
    CURRENT_TENANT.reset(token)


@pytest.fixture
def pool() -> Iterator[ProgramPool]:
    pool = ProgramPool(2)
    yield pool
    pool.close()


def test_a_program_is_run(pool):
    assert pool.run(RENDER, 2.0, source("{{ 1 + 1 }}")) == b"2"


def test_a_program_that_takes_long_is_ended_and_others_are_run(pool):
    outcome: list[Exception] = []

    def run() -> None:
        try:
            pool.run(RENDER, 1.0, source(LOOPS))
        except ProgramRefused as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert pool.run(RENDER, 2.0, source("a")) == b"a"
    thread.join(HANG_SECONDS)
    [error] = outcome
    assert isinstance(error, ProgramStopped) and str(error) == "takes longer than 1 s"
    assert pool.run(RENDER, 2.0, source("b")) == b"b"


def test_memory_is_bounded(pool):
    with pytest.raises(ProgramRefused, match=r"^needs more than 64 MiB"):
        pool.run(RENDER, 5.0, source("{{ 'a' * (200 * 1000 * 1000) }}"), memory=64 << 20)
    assert pool.run(RENDER, 2.0, source("b")) == b"b"


def test_errors_of_ours_are_told_whole_and_others_by_their_kind(pool):
    with pytest.raises(ProgramFailed, match=r"^The chat template refuses the messages: no\.$"):
        pool.run(RENDER, 2.0, source("{{ raise_exception('no') }}"))
    with pytest.raises(ProgramRefused, match=r"^fails: KeyError: 'source'"):
        pool.run(RENDER, 2.0, {})


def test_a_worker_that_is_killed_is_replaced(pool):
    before = set(psutil.Process().children())
    pool.run(RENDER, 2.0, source("a"))
    for worker in set(psutil.Process().children()) - before:
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait(HANG_SECONDS)
    assert pool.run(RENDER, 2.0, source("b")) == b"b"


def test_workers_that_are_killed_over_a_job_are_no_fault_of_the_program(pool, monkeypatch):
    """As by the kernel when memory is short: another one is tried, then the client may ask again."""
    runs: list[int] = []

    def run(self: WorkerProcess, job: bytes, seconds: float) -> bytes:
        runs.append(len(runs))
        self._process.kill()
        return was_run(self, job, seconds)

    was_run = WorkerProcess.run
    monkeypatch.setattr(WorkerProcess, "run", run)
    with pytest.raises(CapacityError, match="try again"):
        pool.run(RENDER, 2.0, source("a"))
    assert len(runs) == 2
    monkeypatch.undo()
    assert pool.run(RENDER, 2.0, source("a")) == b"a"


def in_tenant(tenant: str, call: Callable[[], object]) -> threading.Thread:
    """Make a call for a tenant, on a thread."""

    def work() -> None:
        CURRENT_TENANT.set(tenant)
        with suppress(ProgramRefused, CapacityError):
            call()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_programs_of_a_tenant_that_take_long_leave_a_process_to_others(pool):
    hostile = [in_tenant("a", lambda: pool.run(RENDER, 600.0, source(LOOPS))) for _ in range(5)]
    CURRENT_TENANT.set("b")
    assert pool.run(RENDER, 2.0, source("b")) == b"b"
    assert all(thread.is_alive() for thread in hostile)
    pool.close()
    for thread in hostile:
        thread.join(HANG_SECONDS)
    assert not any(thread.is_alive() for thread in hostile)


async def test_calls_of_a_tenant_leave_threads_to_others_and_hold_them_until_they_end(pool, monkeypatch):
    monkeypatch.setattr(pool, "_threads", threads := TenantThreads(4, "test", 8))
    gate, begun = threading.Event(), []

    def stuck() -> None:
        begun.append(1)
        gate.wait()

    CURRENT_TENANT.set("a")
    calls = [asyncio.create_task(pool.off_loop(stuck)) for _ in range(6)]
    while threads.slots.num_waiting < 4 or len(begun) < 2:
        await asyncio.sleep(0)
    with pytest.raises(CapacityError, match="Too many requests are waiting"):
        await pool.off_loop(stuck)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert threads.slots.num_held == 2, "their threads still run"
    CURRENT_TENANT.set("b")
    assert await pool.off_loop(CURRENT_TENANT.get) == "b"
    gate.set()
    threads.shutdown()
    assert threads.slots.num_held == 0


def test_workers_end_with_the_pool(pool):
    before = set(psutil.Process().children())
    pool.run(RENDER, 2.0, source("a"))
    workers = set(psutil.Process().children()) - before
    pool.close()
    assert workers and not any(worker.is_running() for worker in workers)
