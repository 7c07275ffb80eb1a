"""A short form of ``benchmarks/soak.py``: everything must hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.heavy
def test_half_a_minute_of_chaos_leaves_nothing_behind(tmp_path: Path) -> None:
    output = tmp_path / "soak.json"
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", "0.5", "--output", str(output)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert output.exists(), ran.stderr
    figures = json.loads(output.read_text())
    failed = [name for name, holds in figures["holds"].items() if not holds]
    assert not failed and ran.returncode == 0, (failed, figures["wrong"], ran.stderr)
    assert figures["clients"]["answered"] > 20 and figures["clients"]["left"] > 5
