"""What ``benchmarks/gpu`` would do on a GPU, rehearsed in the interpreter: parts run and write their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from support.engine.core_hooks import worker_of
from support.machine.thoroughness import taking_turns

from benchmarks.gpu import engine_runs, lora_correctness, run
from benchmarks.gpu.measure import Line, Machine
from rootgraft.kernels.triton import launch

ROOT = Path(__file__).parents[3]
PARTS = run.PARTS.keys() - {"server"}  # see test_server_times.py
CPU = Machine(torch.device("cpu"), torch.float32, tiny=True)


IN_ONE_PROCESS = """
import sys
from pathlib import Path
sys.path.insert(1, "tests")
from benchmarks.gpu import run
from support.kernels import interpreter_speed
interpreter_speed.hasten()
results = run.Results(Path(sys.argv[1]))
for part in sys.argv[2:]:
    run.run_part(part, True, results)
raise SystemExit(results.report())
"""


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_the_whole_benchmark_in_its_tiny_form(tmp_path: Path) -> None:
    """Two parts as on a GPU, each in a process; a third of the others, in turns, in one, which spares imports."""
    alone, together = tmp_path / "alone.json", tmp_path / "together.json"
    few = ["ceilings", "states"]
    others = taking_turns(sorted(PARTS - set(few)), 3)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHON": sys.executable}
    results: list[dict[str, Any]] = []
    for out, command in (
        (alone, [str(ROOT / "benchmarks/gpu/run.sh"), "--tiny", "--out", str(alone), "--parts", *few]),
        (together, [sys.executable, "-c", IN_ONE_PROCESS, str(together), *others]),
    ):
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
        assert done.returncode == 0, done.stderr + done.stdout
        results += json.loads(out.read_text())["results"]
    assert {line["part"] for line in results} == {*few, *others}
    assert all(line["value"] <= 1 for line in results if line["part"] in run.CHECKS)
    assert not any("left out" in line["note"] for line in results)


def test_an_engine_is_gone_before_the_next_one_is_made(tmp_path: Path) -> None:
    """On a GPU of 80 GB there is no room for two, and a name that still stands for the first keeps none of it."""
    folder = engine_runs.TINY.write(tmp_path)
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64, "kv_cache_memory": 0.01}
    with engine_runs.engine(CPU, engine_runs.TINY, folder, **limits) as first:
        held = [weakref.ref(each) for each in (first.core, worker_of(first.core).model.embedding)]
        assert all(each() is not None for each in held)
    assert [each() for each in held] == [None, None]


def fine(_: Machine) -> Iterator[Line]:
    yield Line("lora", "fine", 1.0, "ms")


def broken(_: Machine) -> Iterator[Line]:
    yield Line("lora", "before the fault", 1.0, "ms")
    raise RuntimeError("an illegal memory access")


def content(file: Path) -> tuple[list[str], list[dict[str, str]]]:
    found: dict[str, Any] = json.loads(file.read_text())
    return [line["name"] for line in found["results"]], found["failures"]


def test_a_section_that_fails_is_a_result_and_loses_no_other(tmp_path: Path, capsys: Any) -> None:
    results = run.Results(tmp_path / "out.json")
    with (
        mock.patch.dict(run.PARTS, {"lora": (broken, fine)}),
        mock.patch.object(launch, "DEVICE_TYPES", launch.DEVICE_TYPES),
    ):
        run.run_part("lora", True, results)
    names, [failure] = content(tmp_path / "out.json")
    assert names == ["before the fault", "fine"]
    assert failure["part"] == "lora" and failure["error"] == "RuntimeError: an illegal memory access"
    assert "in broken" in failure["traceback"]
    assert results.report() == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAILED: lora: RuntimeError: an illegal memory access"


def test_a_part_whose_process_dies_loses_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    seen: list[list[str]] = []

    def start(part: str, tiny: bool, file: Path, seconds: float) -> int:
        seen.append(content(out)[0] if out.exists() else [])
        if part == "kernels":
            return -11  # before it wrote anything
        results = run.Results(file)
        results.add(Line(part, f"of {part}", 1.0, "ms"))
        return -9 if part == "lora" else 0

    monkeypatch.setattr(run, "start", start)
    run.run_parts(["ceilings", "kernels", "lora", "sampling"], True, run.Results(out))
    names, failures = content(out)
    assert names == ["of ceilings", "of lora", "of sampling"]
    assert [(each["part"], each["error"]) for each in failures] == [
        ("kernels", "its process ended with code -11"),
        ("lora", "its process ended with code -9"),
    ]
    assert seen == [[], ["of ceilings"], ["of ceilings"], ["of ceilings", "of lora"]]


HANGING = """#!/bin/sh
sleep 1000 &
echo $! > "$(dirname "$0")/left-behind"
"""


@pytest.mark.parametrize("hangs", [True, False])
def test_a_part_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, hangs: bool) -> None:
    """What it has written until then is kept; a process that it started ends with it, whether it hangs or not."""
    file, script = tmp_path / "part.json", tmp_path / "python"
    run.Results(file).add(Line("lora", "before it hung", 1.0, "ms"))
    script.write_text(HANGING + ("wait\n" if hangs else ""))
    script.chmod(0o755)
    monkeypatch.setattr(run.sys, "executable", str(script))
    out = tmp_path / "out.json"
    results = run.Results(out)
    assert run.start("lora", True, file, 2 if hangs else 60) == (124 if hangs else 0)
    left = int((tmp_path / "left-behind").read_text())
    psutil.wait_procs([psutil.Process(left)] if psutil.pid_exists(left) else [], timeout=60)
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE
    results.take(file)
    assert content(out)[0] == ["before it hung"]


OWN_SESSION = """#!/bin/sh
setsid sh -c 'sleep 1000 & echo $! > "$0"; wait' "$(dirname "$0")/left-behind" &
while [ ! -s "$(dirname "$0")/left-behind" ]; do :; done
kill -9 $$
"""
ADOPTING = """
import sys
from pathlib import Path
from benchmarks.gpu import run
run.adopt_orphans()
folder = Path(sys.argv[1])
run.sys.executable = str(folder / "python")
print(run.start("lora", True, folder / "part.json", 60))
"""


def test_a_part_that_dies_takes_processes_of_other_sessions_with_it(tmp_path: Path) -> None:
    """As those of a server, of which only the first hears that the part has ended, and takes its time to end others."""
    script = tmp_path / "python"
    script.write_text(OWN_SESSION)
    script.chmod(0o755)
    command = [sys.executable, "-c", ADOPTING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stdout == "-9\n", done.stderr
    assert not psutil.pid_exists(int((tmp_path / "left-behind").read_text()))


def test_a_process_that_dies_while_it_writes_leaves_what_it_had(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    results = run.Results(out)
    results.add(Line("lora", "whole", 1.0, "ms"))
    with mock.patch.object(Path, "replace", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        results.add(Line("lora", "cut", 1.0, "ms"))
    assert content(out)[0] == ["whole"]


def test_one_part_has_a_process_of_its_own_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """So the figures that decide are printed, and its death is in the file, even if a fault of the device ends it."""
    out = tmp_path / "out.json"

    def start(part: str, tiny: bool, file: Path, seconds: float) -> int:
        results = run.Results(file)
        results.add(Line("products", "layer, 1 rows, the fastest of each", 100.0, "us"))
        return -11

    monkeypatch.setattr(run, "start", start)
    monkeypatch.setattr(run.sys, "argv", ["run", "--parts", "products", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == 1
    assert content(out)[1] == [{"part": "products", "error": "its process ended with code -11", "traceback": ""}]
    assert capsys.readouterr().out.splitlines()[1:] == [
        "REACHED: layer, 1 rows, the fastest of each: 100 us, at most 106",
        "NOT MEASURED: layer, 64 rows, the fastest of each",
        "FAILED: products: its process ended with code -11",
    ]


def test_a_run_ends_before_the_device_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part gets the time that is left; those for which there is none are named."""
    clock, given = [100.0], []

    def start(part: str, tiny: bool, file: Path, seconds: float) -> int:
        given.append((part, seconds))
        clock[0] += 270
        return 0

    monkeypatch.setattr(run.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(run, "start", start)
    run.run_parts(["kernels", "products", "lora"], True, run.Results(tmp_path / "out.json"))
    assert run.RUN_SECONDS == 540 and given == [("kernels", 540), ("products", 270)]
    _, [failure] = content(tmp_path / "out.json")
    assert failure["part"] == "lora" and "no time was left" in failure["error"]


def test_the_figures_that_decide_come_last(tmp_path: Path, capsys: Any) -> None:
    results = run.Results(tmp_path / "out.json")
    for value, name in ((4.0, "decode step, 1 rows of 1024"), (7.0, "decode step, 64 rows of 1024"), (1.0, "another")):
        results.add(Line("end_to_end", name, value, "ms"))
    results.add(Line("end_to_end", "decode step, 64 rows that share 4096", 0.0, "ms", note="left out: no room"))
    assert results.report() == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "REACHED: decode step, 1 rows of 1024: 4 ms, at most 4.05",
        "MISSED: decode step, 64 rows of 1024: 7 ms, at most 6.35",
    ]


def test_a_rehearsal_decides_nothing(tmp_path: Path, capsys: Any) -> None:
    """Its sizes mean nothing, though some of its lines have the names of targets."""
    results = run.Results(tmp_path / "out.json")
    results.add(Line("quantised", "int4 g128, all products of a step of 1 rows", 4638.0, "ms"))
    results.add(Line("quantised", "widened qkv, 1 row", 3.0, "us"))
    results.add(Line("ranks", "two ranks against one", 0.25, "of tolerance"))
    assert results.report(["quantised", "ranks"], tiny=True) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "REHEARSED: quantised: widened qkv, 1 row: 3 us",
        "REHEARSED: ranks: two ranks against one: 0.25 of tolerance",
    ]


def test_a_result_without_its_kernel_is_wrong() -> None:
    """On a CPU without interpreted kernels other ones compute all of it: nothing of a GPU's would have been checked."""
    lines = list(lora_correctness.run(CPU))
    assert lines and all(line.value == float("inf") for line in lines)
    assert all(line.note.startswith("never launched: ") for line in lines)
