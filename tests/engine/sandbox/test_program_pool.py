"""Worker processes of untrusted programs: limits, errors, and what becomes of others meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import psutil
import pytest

from rootgraft.engine.sandbox.program_pool import ProgramFailed, ProgramPool, ProgramRefused, ProgramStopped

WAIT = 60
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
RENDER = "engine.text.chat_template:render_job"


def source(text: str) -> dict[str, object]:
    return {"source": text, "variables": {}}


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
            pool.run(RENDER, 1.0, source(ENDLESS))
        except ProgramRefused as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert pool.run(RENDER, 2.0, source("a")) == b"a"
    thread.join(WAIT)
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
        worker.wait(WAIT)
    assert pool.run(RENDER, 2.0, source("b")) == b"b"


def test_workers_end_with_the_pool(pool):
    before = set(psutil.Process().children())
    pool.run(RENDER, 2.0, source("a"))
    workers = set(psutil.Process().children()) - before
    pool.close()
    assert workers and not any(worker.is_running() for worker in workers)
