"""The server's part of the GPU's run, rehearsed on a CPU: the real script, its server over HTTP, its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.machine.waits import HANG_SECONDS, wait_until

from benchmarks.gpu import adapter_files, checkpoint_files, run, server_times
from benchmarks.gpu.measure import Machine
from benchmarks.serve import server
from benchmarks.serve.server import Server
from rootgraft.api.cli.remote_server import RemoteError

ROOT = Path(__file__).parents[3]
MARK = "ROOTGRAFT_REHEARSAL"  # in the environment of all processes of a rehearsal

FIGURES: dict[str, Any] = {
    "requests": 4,
    "completed": 3,
    "errors": {"timeout": 1},
    "ttft_ms": {"p50": 20.0, "p99": 30.0},
    "itl_ms": {"p50": 4.0, "p99": 6.0},
    "output_tokens_per_s": 100.0,
}


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


def test_a_server_that_ends_at_its_start_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are its last words lost: they are in the results, with the failure."""
    ending = f"{sys.executable} -c \"print('no kernel image'); raise SystemExit(3)\""
    monkeypatch.setattr(checkpoint_files, "write_model", lambda *_: Path("model"))
    monkeypatch.setattr(adapter_files, "write_adapter", lambda *_, **__: Path("adapter"))
    monkeypatch.setattr(server, "Server", lambda _: Server(ending))
    with pytest.raises(RemoteError, match="ended with code 3") as raised:
        list(server_times.run(Machine(torch.device("cpu"), torch.float32, tiny=True)))
    assert "no kernel image" in raised.value.__notes__[0]


def start(out: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHON": sys.executable, MARK: str(out)}
    command = [str(ROOT / "benchmarks/gpu/run.sh"), "--tiny", "--parts", "server", "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def processes_of(out: Path) -> list[psutil.Process]:
    """The living processes of a rehearsal, its first one included."""
    found = []
    for each in psutil.process_iter():
        try:
            if each.environ().get(MARK) == str(out) and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
        except psutil.Error:  # another user's, or it has just ended
            continue
    return found


def content(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_the_part_loads_a_real_server(tmp_path: Path) -> None:
    """Each level's figures are in the file and printed, the one that decides last; no process is left."""
    out, load = tmp_path / "out.json", server_times.SHORT
    process = start(out)
    printed, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0, printed
    found = content(out)
    assert not found["failures"] and not processes_of(out)
    levels = [f"{count} clients" for count in load.clients]
    levels.append(f"{load.clients[1]} clients, {load.adapters} adapters in {load.slots} slots")
    values = {line["name"]: line["value"] for line in found["results"]}
    names = [line.name for level in levels for line in server_times.lines(level, FIGURES)]
    assert list(values) == [*names, "memory lost by the last rounds"]
    assert all(values[f"{level}: requests that failed"] == 0 for level in levels)
    assert all(values[f"{level}: {what}"] > 0 for level in levels for what in ("tokens", "time to first token, p50"))
    assert all(any(name in line for line in printed.splitlines()) for name in names)
    assert printed.splitlines()[-1] == "REHEARSED: server: memory lost by the last rounds: 0 MiB"


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_its_server_ends_with_it_even_if_it_dies(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    process = start(out)

    def words_of_all() -> list[list[str]]:
        return [each.cmdline() for each in processes_of(out) if each.is_running()]

    wait_until(lambda: process.poll() is not None or sum("serve" in words for words in words_of_all()) > 0, 0.1)
    [part] = [each for each in processes_of(out) if "--here" in each.cmdline()]
    part.kill()
    printed, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 1 and not processes_of(out)
    assert content(out)["failures"] == [{"part": "server", "error": "its process ended with code -9", "traceback": ""}]
    assert printed.splitlines()[-1] == "FAILED: server: its process ended with code -9"
