"""The commit draws which cases of a large set a pass takes: each in its turn, and all of them on demand."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from support.machine import thoroughness


@pytest.mark.parametrize("share", [1, 3, 4])
@pytest.mark.parametrize("place", [0, 2])
def test_turns_in_a_row_take_every_case_once(monkeypatch: pytest.MonkeyPatch, share: int, place: int) -> None:
    monkeypatch.delenv("ROOTGRAFT_THOROUGH", raising=False)
    cases, taken = range(10), list[int]()
    for number in range(20, 20 + share):
        monkeypatch.setattr(thoroughness, "turn", lambda number=number: number)
        taken += thoroughness.taking_turns(cases, share, place)
    assert sorted(taken) == list(cases)
    monkeypatch.setenv("ROOTGRAFT_THOROUGH", "1")
    assert thoroughness.taking_turns(cases, share, place) == list(cases)


@pytest.mark.skipif(shutil.which("git") is None, reason="asks git")
def test_the_turn_is_that_of_the_commit() -> None:
    command = ["git", "rev-parse", "HEAD"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    assert thoroughness.turn.__wrapped__() == int(found.stdout[:8] or "0", 16)
