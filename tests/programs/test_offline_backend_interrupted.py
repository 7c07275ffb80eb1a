"""Programs on the offline class, interrupted or over a broken engine: nothing runs on, and the next one works."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

import pytest
from support.engine.core_hooks import core_of
from support.engine.fake_worker import FakeWorker
from support.engine.injected_faults import Fault
from support.engine.interrupts import wait_for_branches

from rootgraft import LLM
from rootgraft.programs import Branch, ProgramError, Session


@pytest.fixture
def llm(offline: Session) -> LLM:
    """The engine of a session that is closed."""
    offline.close()
    return offline._backend._llm  # type: ignore[attr-defined,no-any-return]


def test_an_interrupt_that_reaches_no_caller_comes_again(alarm: Callable[[float], None]) -> None:
    class Gone:
        pass

    gone, ended = Gone(), False

    def callback(_: object) -> None:
        nonlocal ended
        alarm(0.01)
        time.sleep(60)
        ended = True

    kept = weakref.ref(gone, callback)
    with pytest.raises(KeyboardInterrupt):
        del gone
        time.sleep(60)
    assert kept() is None and not ended


def check_idle(llm: LLM) -> None:
    core = core_of(llm)
    while core.has_work:
        llm.step()
    core.check()
    stats = core.stats()
    assert stats["running"] == stats["waiting"] == stats["pages_private"] == 0


def ask_on(branch: Branch, number: int) -> None:
    for turn in range(200):
        branch.user(f"{number}.{turn}").gen("x", max_tokens=50)


@pytest.mark.parametrize("kind", ["gen", "map"])
def test_an_interrupt_leaves_nothing_behind(llm: LLM, alarm: Callable[[float], None], kind: str) -> None:
    for number in range(5):
        with pytest.raises(KeyboardInterrupt), Session(llm) as session:
            session.user(f"Question {number}")
            alarm(0.01 + number * 0.02)
            if kind == "map":
                session.map(ask_on, range(4))
            while True:
                session.gen("x", max_tokens=60)
        alarm(0)
        wait_for_branches()
        check_idle(llm)
    with Session(llm) as session:
        assert session.user("?").gen("x", max_tokens=3) is not None


def test_an_interrupted_call_is_aborted(llm: LLM, alarm: Callable[[float], None]) -> None:
    """In a session that stays open nothing runs for nobody."""
    with Session(llm) as session:
        session.user("?")
        with pytest.raises(KeyboardInterrupt):
            alarm(0.05)
            while True:  # one call may end sooner
                session.gen("x", max_tokens=5000)
        assert session.begin().user("!").gen("y", max_tokens=3) is not None
    check_idle(llm)


@pytest.mark.parametrize("calls", [0, 1, 5])
def test_a_broken_step_fails_the_calls_that_ran_and_no_later_one(llm: LLM, calls: int) -> None:
    with Session(llm) as session:
        session.user("?")
        with Fault((FakeWorker, "launch"), calls, RuntimeError("a broken step"), late=False).injected():
            with pytest.raises(ProgramError, match="a broken step"):
                session.gen("x", max_tokens=50)
            assert session.gen("y", max_tokens=3) is not None
    check_idle(llm)


def test_choices_of_a_select_that_fails_are_given_up_together(llm: LLM) -> None:
    with Session(llm) as session:
        session.user("?")
        fault = Fault((LLM, "begin"), 1, RuntimeError("a bug"), late=False)
        with fault.injected(), pytest.raises(ProgramError, match="a bug"):
            session.select("x", ["the fox", "a dog", "is"])
        assert session.select("x", ["the fox", "a dog"]) in ("the fox", "a dog")
    check_idle(llm)


def test_an_engine_that_was_closed_fails_calls_and_keeps_nobody_waiting(llm: LLM) -> None:
    session = Session(llm)
    llm.close()
    for _ in range(2):
        with pytest.raises(ProgramError, match="was closed"):
            session.user("?").gen("x")
    session.close()
