"""Memory of KV pages is taken before steps write them, once, and not for a pool that nobody fills."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.machine.waits import HANG_SECONDS

from rootgraft.engine.batch import Batch, Row
from rootgraft.engine.models import kv_pool
from rootgraft.engine.models.kv_pool import KvPrefault

PAGE_SIZE, PAGE_BYTES, AT_ONCE = 16, 1024, 4

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a thread has no niceness of its own")


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Pool:
    """Notes when memory was taken, page by page."""

    page_size, page_bytes = PAGE_SIZE, PAGE_BYTES

    def __init__(self, num_pages: int, clock: Clock) -> None:
        self.num_pages = num_pages
        self.taken: dict[int, float] = {}
        self._clock = clock

    def populate(self, first: int) -> int:
        end = min(first + AT_ONCE, self.num_pages)
        for page in range(first, end):
            assert page not in self.taken, "no page twice"
            self.taken[page] = self._clock.now
        return end


def step(*pages_of_rows: tuple[int, ...]) -> Batch:
    rows = [Row(i, 0, (1,), 0, pages, draws=True, num_generated=0) for i, pages in enumerate(pages_of_rows)]
    return Batch(rows=tuple(rows))


def settle() -> None:
    for thread in threading.enumerate():
        if thread.name == "kv-ahead":
            thread.join()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(kv_pool, "time", clock)
    monkeypatch.setattr(kv_pool, "_AHEAD_TOKENS", 16 * PAGE_SIZE)
    return clock


def start(pool: Pool) -> KvPrefault:
    ahead = KvPrefault(pool)  # type: ignore[arg-type]
    settle()
    return ahead


def test_the_first_pages_have_memory_before_a_step(clock: Clock) -> None:
    pool = Pool(40, clock)
    start(pool)
    assert pool.taken == dict.fromkeys(range(16), 0.0)


def test_bytes_are_a_limit_too(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pool, "_AHEAD_BYTES", 8 * PAGE_BYTES)
    pool = Pool(40, clock)
    start(pool)
    assert [*pool.taken] == [*range(8)]


def test_while_there_is_work_only_what_is_needed_soon_is_taken(clock: Clock) -> None:
    pool = Pool(60, clock)
    ahead = start(pool)
    clock.now = 10.0
    ahead.reach(step((3, 15)))
    settle()
    at_once = [page for page, when in pool.taken.items() if when == 10.0]
    later = [page for page, when in pool.taken.items() if when > 10.0]
    assert at_once == [*range(16, 20)], "a quarter of what is to lie ahead"
    assert later == [*range(20, 32)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(num_pages=st.integers(1, 99), steps=st.lists(st.lists(st.integers(0, 98), max_size=3), max_size=9))
def test_pages_in_use_are_followed(clock: Clock, num_pages: int, steps: list[list[int]]) -> None:
    pool = Pool(num_pages, clock)
    ahead = start(pool)
    used = 0
    for pages in steps:
        inside = tuple(page for page in pages if page < num_pages)
        used = max([used, *(page + 1 for page in inside)])
        ahead.reach(step((), inside, ()))
        settle()
        assert {*pool.taken} >= {*range(min(used + 16, num_pages))}
        assert len(pool.taken) < min(used + 16, num_pages) + AT_ONCE


ENDS_AT_ONCE = """
import torch
from rootgraft.engine.models.kv_pool import KvPrefault

class Pool:
    num_pages, page_size, page_bytes = 1 << 30, 16, 1
    layers = torch.zeros(1000)

    def populate(self, first):
        for _ in range(10):
            self.layers.unbind(0)
        return first + 1

ahead = KvPrefault(Pool())
"""


def test_an_interpreter_ends_in_peace_while_memory_is_taken() -> None:
    """A daemon thread that is in native code then would abort it ("terminate called without an active exception")."""
    ended = subprocess.run([sys.executable, "-P", "-c", ENDS_AT_ONCE], capture_output=True, timeout=HANG_SECONDS)
    assert (ended.returncode, ended.stderr) == (0, b"")
