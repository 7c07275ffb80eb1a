"""What the server's part of the GPU's run writes and reads; ``benchmarks/gpu/run.sh --tiny --parts server`` runs it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import run, server_times
from benchmarks.gpu.engine_runs import TINY
from benchmarks.gpu.measure import Machine
from rootgraft.engine.loading.load_model import load_model

CPU = torch.device("cpu")
FIGURES: dict[str, Any] = {
    "requests": 4,
    "completed": 3,
    "errors": {"timeout": 1},
    "ttft_ms": {"p50": 20.0, "p99": 30.0},
    "itl_ms": {"p50": 4.0, "p99": 6.0},
    "output_tokens_per_s": 100.0,
}


def test_the_model_is_one_that_the_engine_loads(tmp_path: Path) -> None:
    folder = server_times.write_model(tmp_path / "model", TINY, Machine(CPU, torch.float32, tiny=True))
    model = load_model(folder, dtype=torch.float32, device=CPU, max_positions=32)
    assert model.config.vocab_size == TINY.vocab
    assert json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"].keys() >= {"a", "<299>"}


def test_a_level_gives_its_deciding_figures() -> None:
    found = {line.name: line.value for line in server_times.lines("32 clients", FIGURES)}
    assert found["32 clients: p99 of it against p50"] == 1.5
    assert found["32 clients: requests that failed"] == 1
    decided = {name for part, name in run.TARGETS if part == "server"}
    load = server_times.FULL
    churn = f"{load.clients[1]} clients, {load.adapters} adapters in {load.slots} slots"
    names = {line.name for level in ("32 clients", churn) for line in server_times.lines(level, FIGURES)}
    assert decided - names == {"memory lost by the last rounds"}


def test_a_load_that_fails_says_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[command.index("--sweep") + 1] == "1,2"
        return subprocess.CompletedProcess(command, 1, "", "no such model")

    monkeypatch.setattr(subprocess, "run", refuses)
    with pytest.raises(RuntimeError, match="code 1: no such model"):
        server_times.sweep("http://127.0.0.1:1/v1", server_times.SHORT, (1, 2))
