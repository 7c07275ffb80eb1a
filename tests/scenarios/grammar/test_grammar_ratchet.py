"""The JSON Schema test suite's cases: each may get better, never worse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.grammar.evaluate import evaluate

DATA = Path(__file__).parents[2] / "grammar" / "data"
ORDER = ("unsound", "refused", "sound", "sound and complete")


@pytest.mark.heavy
def test_no_schema_has_become_worse(real_vocabulary):
    rows = [json.loads(line) for line in (DATA / "test_suite.jsonl").read_text("utf-8").split("\n") if line]
    expected = json.loads((DATA / "ratchet.json").read_text())
    report = evaluate(rows, real_vocabulary, outputs=6)
    assert report.verdicts.keys() == expected.keys()
    worse = {
        name: (expected[name], verdict)
        for name, verdict in report.verdicts.items()
        if ORDER.index(verdict) < ORDER.index(expected[name])
    }
    assert not worse, report.surprises
    assert "unsound" not in report.verdicts.values()
