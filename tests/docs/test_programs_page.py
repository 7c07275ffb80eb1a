"""``docs/guide/programs.md`` against the code: every method and every example is in it, and its first program runs."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from support.api.api_live import Live

from rootgraft.api.cli.options import RunBatchOptions
from rootgraft.programs import Branch, Fork, Report, Session

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "guide" / "programs.md").read_text()


def test_every_method_is_told_of() -> None:
    names = {name for cls in (Branch, Session) for name in vars(cls) if not name.startswith("_")} - {"close"}
    assert {name for name in names if not re.search(rf"`(session\.|branch\.)?{name}\(", TEXT)} == set()
    assert all(f"fork.{name}(" in TEXT for name in ("map", "join")) and {"map", "join"} <= vars(Fork).keys()
    assert len(fields(Report)) == 7


def test_every_example_is_told_of() -> None:
    told = set(re.findall(r"^\| `(\w+\.py)` \|", TEXT, re.MULTILINE))
    assert told == {path.name for path in (ROOT / "examples").glob("*.py") if "URL" in path.read_text()}


def test_the_first_program_runs(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    live.async_engine.say = lambda request, index: '{"score": 3, "reason": "why"}'
    code = TEXT.partition("```python\n")[2].partition("```")[0]
    exec(code.replace("http://127.0.0.1:8000", live.url), {"__name__": "program"})
    assert "Grade(score=3, reason='why')" in capsys.readouterr().out


def test_the_options_of_run_batch_are_those_in_the_text() -> None:
    assert {"-i", "-o"} == {spec.metadata["short"] for spec in fields(RunBatchOptions) if spec.metadata["short"]}
