"""Programs on the real scheduler, cache and tree: branches that arrive together compute their common part once."""

from __future__ import annotations

import pytest
from pydantic import BaseModel
from support.engine.core_hooks import core_of, scheduler_of

from rootgraft.programs import Branch, ProgramError, Session
from rootgraft.programs.branch_calls import stop_string

LONG = "the quick brown fox jumps over the lazy dog and of to in is " * 8


class Pair(BaseModel):
    left: bool
    right: bool


def test_branches_that_arrive_together_compute_their_common_part_once(offline: Session) -> None:
    def ask(branch: Branch, number: int) -> str:
        return branch.user(f"Question {number}").gen("x", max_tokens=200)  # the first still runs when the others come

    offline.system(LONG)
    offline.map(ask, range(8))
    report = offline.report()
    alone = report.prompt // 8
    common = alone - 30  # tokens; a question with what stands around it takes fewer
    assert report.calls == 8 and report.cached >= 7 * (common - 16)
    assert report.computed < 2 * alone
    assert report.forked >= common - 16  # of those that came while another still ran


def test_a_warmed_prompt_is_found(offline: Session) -> None:
    offline.system(LONG).warm()
    before = offline.report()
    offline.user("Question").gen("x", max_tokens=1)
    spent = offline.report() - before
    assert spent.cached > 0.8 * spent.prompt and before.cached == 0


def test_branches_are_sessions_and_a_warmed_prompt_may_be_pinned(offline: Session) -> None:
    offline.system(LONG).warm(pin=60)
    offline.map(lambda branch, number: branch.user(f"{number}").gen("x", max_tokens=1), range(3))
    session_pins = scheduler_of(core_of(offline._backend._llm)).session_pins  # type: ignore[attr-defined]
    stats = session_pins.stats()
    assert stats["sessions"] == 4 and stats["pins"] == 1  # that of root, and one for each branch
    assert stats["pages_of_sessions"] >= stats["pages_pinned"] > 0


def test_select_scores_choices_over_one_cached_prompt(offline: Session) -> None:
    offline.system(LONG).user("Which?").warm()
    before = offline.report()
    assert offline.select("x", ["the fox", "a dog", "is"]) in ("the fox", "a dog", "is")
    spent = offline.report() - before
    assert spent.calls == 1 and spent.completion == 0 and spent.cached > 0.8 * spent.prompt
    assert set(offline.scores["x"]) == {"the fox", "a dog", "is"}


def test_forms_hold_and_streams_add_up(offline: Session) -> None:
    offline.user("?")
    assert isinstance(offline.gen("a", schema=Pair, max_tokens=60), Pair)
    assert offline.gen("b", choices=["yes", "no"]) in ("yes", "no")
    assert "".join(offline.stream("c", max_tokens=5)) == offline["c"]
    for _ in offline.stream("d", max_tokens=300):
        break
    assert "d" not in offline.values and offline.gen("e", max_tokens=2) is not None


def test_errors_name_the_branch_and_leave_the_others_alone(offline: Session) -> None:
    fork = offline.user("?").fork(3)
    with pytest.raises(ProgramError, match=r"branch root/1, gen 'x'"):
        fork.map(lambda branch, top: branch.gen("x", temperature=top, max_tokens=4), [0, 9, 1])
    assert "x" in fork[0].values and "x" in fork[2].values
    with pytest.raises(ProgramError, match="regex"):
        offline.gen("y", regex="(")
    with pytest.raises(ProgramError, match="root, gen 'z'"):
        offline.gen("z", adapter="nobody")
    offline.close()
    with pytest.raises(ProgramError, match="closed"):
        offline.gen("z")


def test_a_step_that_fails_fails_what_ran(offline: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = offline._backend._llm  # type: ignore[attr-defined]

    def broken() -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(core_of(llm), "step", broken)
    with pytest.raises(ProgramError, match="the device is gone"):
        offline.user("?").gen("x")
    monkeypatch.undo()
    assert offline.gen("x", max_tokens=1) is not None


def test_an_answer_that_its_budget_made_shorter_is_whole(offline: Session) -> None:
    """None is taken for one that a stop string cut off."""
    offline.user("name one")
    for budget in range(4, 40, 3):
        found = offline.gen(f"x{budget}", regex='"[a-z ]{1,200}"', max_tokens=budget)
        assert found.startswith('"') and found.endswith('"')
    assert stop_string("budget", ()) is None and stop_string("budget", ("budget",)) == "budget"
    assert stop_string("end", ("end",)) == "end"
