"""What ``benchmarks/gpu`` would do on a GPU, rehearsed in the interpreter: every part runs and writes its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = {"correctness", "ceilings", "kernels", "lora", "sampling", "end_to_end"}


@pytest.mark.heavy
def test_the_whole_benchmark_in_its_tiny_form(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHON": sys.executable}
    command = [str(ROOT / "benchmarks/gpu/run.sh"), "--tiny", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr + done.stdout
    results = json.loads(out.read_text())["results"]
    assert {line["part"] for line in results} == PARTS
    assert all(line["value"] <= 1 for line in results if line["part"] == "correctness")
    assert not any("left out" in line["note"] for line in results)
