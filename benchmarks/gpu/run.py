"""Runs the parts in order, prints a table and writes JSON. See ``run.sh``.

Each part has a process of its own: an error on a device spoils every later call of the process that met it. What a part
found before it failed is kept, and the results are written anew after each line and each part.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu import (
    ceilings,
    correctness,
    draft_times,
    end_to_end,
    engine_correctness,
    expert_correctness,
    expert_times,
    kernel_times,
    lora_correctness,
    lora_times,
    product_times,
    quantised_times,
    sampling_times,
    server_times,
    state_times,
)
from benchmarks.gpu.measure import Line, Machine
from rootgraft.kernels.triton import launch

Section = Callable[[Machine], Iterator[Line]]


def _under_ceilings(run: Callable[..., Iterator[Line]]) -> Section:
    """A section that is compared with the ceilings of the device, which it measures first."""
    return lambda machine: run(machine, ceilings.measure(machine))


def _ranks(machine: Machine) -> Iterator[Line]:
    """Run two ranks on one device, whose tiny models the helpers of the tests make."""
    if missing := [name for name in ("support", "transformers") if importlib.util.find_spec(name) is None]:
        yield Line("ranks", "two ranks against one", 0.0, "", note=f"left out: no {', '.join(missing)} here")
        return
    from benchmarks.gpu import two_ranks

    yield from two_ranks.run(machine)


# The sections of each part; one that fails does not keep the next ones from running.
PARTS: dict[str, tuple[Section, ...]] = {
    "correctness": (
        correctness.run,
        lora_correctness.run,
        expert_correctness.run,
        quantised_times.check,
        state_times.check,
    ),
    "engine": (engine_correctness.run,),
    "ceilings": (lambda machine: iter(ceilings.lines(ceilings.measure(machine))),),
    "kernels": (_under_ceilings(kernel_times.run),),
    "products": (_under_ceilings(product_times.run),),
    "quantised": (_under_ceilings(quantised_times.run),),
    "lora": (_under_ceilings(lora_times.run),),
    "states": (_under_ceilings(state_times.run),),
    "experts": (_under_ceilings(expert_times.run),),
    "sampling": (_under_ceilings(sampling_times.run),),
    "end_to_end": (_under_ceilings(end_to_end.run),),
    "drafts": (draft_times.run,),
    "server": (server_times.run,),
    "ranks": (_ranks,),
}

CHECKS = ("correctness", "engine", "ranks")
"""Parts in which a value above 1 is a failure."""

RUN_SECONDS = 540.0
"""What all parts of a run may take: a device is lent for ten minutes, in which what was found must come back."""

_PR_SET_CHILD_SUBREAPER = 36  # Constant of prctl(2).

LEAST_SECONDS = 30.0
"""The time left below which a part is not begun."""

TARGETS: dict[tuple[str, str], float] = {
    ("kernels", "extend, 2048 tokens of 2048, gathered"): 95,
    ("kernels", "extend, 8192 tokens of 8192, gathered"): 1000,
    ("kernels", "decode, 1 rows of 1024"): 8,
    ("kernels", "decode, 64 rows that share 4096, read together"): 22,
    ("sampling", "draw, top_p 0.9, 1 rows, peaked"): 150,
    ("sampling", "draw, top_p 0.9, 1 rows, flat"): 150,
    ("sampling", "draw, top_p 0.9, 128 rows, peaked"): 350,
    ("sampling", "draw, top_p 0.9, 128 rows, flat"): 350,
    ("sampling", "draw, temperature 0.8, 128 rows, flat"): 350,
    ("products", f"layer, 1 rows, {product_times.FASTEST}"): 106.0,
    ("products", f"layer, 64 rows, {product_times.FASTEST}"): 116.0,
    ("experts", "route, softmax, 64 tokens"): 6.0,
    ("experts", "route, of the best groups, 64 tokens"): 8.0,
    ("experts", "sum, 2048 tokens"): 30.0,
    **{
        ("drafts", f"{rows} rows, {kind}: time against none"): 1.02 for kind in draft_times.KINDS for rows in (1, 8, 32)
    },
    # Of 2.7 and 3.3 ms for a step of one row 0.7 are for the other kernels.
    ("quantised", "int4 g128, all products of a step of 1 rows"): 2.0,
    ("quantised", "fp8 128, all products of a step of 1 rows"): 2.6,
    ("lora", "layer, 1 token, rank 16: within against apart"): 1.0,
    ("lora", "layer, 64 tokens of 8 adapters: within against apart"): 1.0,
    ("lora", "layer, 64 tokens of 8 adapters, rank 64: within against apart"): 1.0,
    ("end_to_end", "decode step, 1 rows of 1024"): 4.05,
    ("end_to_end", "decode step, 64 rows of 1024"): 6.35,
    **{
        ("end_to_end", f"decode step, 64 rows of 1024, {number} adapters{limit}: against none"): 1.08
        for number in (1, 8)
        for limit in ("", f", rank limit {end_to_end.DEFAULT_RANK_LIMIT}")
    },
    ("end_to_end", "decode step, 64 rows that share 4096"): 5.45,
    ("end_to_end", "decode step, 128 rows of 4096, KV of 8 bits"): 14.0,
    ("end_to_end", "token of 32 rows of 1024, with a JSON schema: against free text"): 1.05,
    ("server", "32 clients: p99 of it against p50"): 2.0,
    ("server", "32 clients, 64 adapters in 8 slots: p99 of it against p50"): 2.0,
    ("server", "32 clients, 64 adapters in 8 slots: requests that failed"): 0.0,
    ("server", "memory lost by the last rounds"): 64.0,
    ("ranks", "two ranks against one"): 1.0,
}
"""The most that decides for what was built, by part and line, of 8B (the server: 1B) on an H200, in the line's unit."""


class Results:
    """Results and failures of the parts. Every change is written to the file."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._began = time.perf_counter()
        self.device = "unknown"
        self.lines: list[dict[str, Any]] = []
        self.failures: list[dict[str, str]] = []

    def add(self, line: Line) -> None:
        self.lines.append({**dataclasses.asdict(line), "share": line.share})
        self.write()

    def fail(self, part: str, error: str, log: str = "") -> None:
        self.failures.append({"part": part, "error": error, "traceback": log})
        self.write()

    def take(self, file: Path) -> None:
        """Add what a part's process has written."""
        found = json.loads(file.read_text())
        self.device = found["device"]
        self.lines += found["results"]
        self.failures += found["failures"]
        self.write()

    def write(self) -> None:
        content = {
            "device": self.device,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "seconds": round(time.perf_counter() - self._began, 1),
            "failures": self.failures,
            "results": self.lines,
        }
        # Replaced as a whole: a process that dies while it writes leaves what it had written before.
        partial = self._out.with_name(f"{self._out.name}.partial")
        partial.write_text(json.dumps(content, indent=1) + "\n")
        partial.replace(self._out)

    def report(self, parts: Sequence[str] = (), *, tiny: bool = False) -> int:
        """Print the figures that decide and what is wrong, last, where a cut output still shows them.

        Args:
            parts: the parts that were run, whose targets are all named, measured or not.
            tiny: whether it was a rehearsal, whose figures decide nothing: the last one of each part is printed.

        Returns:
            The exit code.
        """
        wrong = [line["name"] for line in self.lines if line["part"] in CHECKS and not line["value"] <= 1]
        print(f"{len(self.lines)} results, written to {self._out}")
        figures = self.rehearsed() if tiny else (*self.decisions(), *self.missing(parts))
        print("".join(f"{line}\n" for line in figures), end="")
        print("".join(f"WRONG: {name}\n" for name in wrong), end="")
        print("".join(f"FAILED: {each['part']}: {each['error']}\n" for each in self.failures), end="", flush=True)
        return int(bool(wrong or self.failures))

    def decisions(self) -> Iterator[str]:
        """Yield a line for each target that was measured."""
        for line in self.lines:
            if (target := TARGETS.get((line["part"], line["name"]))) is not None and "left out" not in line["note"]:
                reached = "REACHED" if line["value"] <= target else "MISSED"
                yield f"{reached}: {line['name']}: {line['value']:.4g} {line['unit']}, at most {target:g}"

    def rehearsed(self) -> Iterator[str]:
        """Yield the last line of each part."""
        for part, line in {line["part"]: line for line in self.lines}.items():
            yield f"REHEARSED: {part}: {line['name']}: {line['value']:.4g} {line['unit']}".rstrip()

    def missing(self, parts: Sequence[str]) -> Iterator[str]:
        """Yield a line for each target of these parts that was not measured."""
        measured = {(line["part"], line["name"]) for line in self.lines if "left out" not in line["note"]}
        for part, name in TARGETS:
            if part in parts and (part, name) not in measured:
                yield f"NOT MEASURED: {name}"


def main() -> None:
    options = _options()
    results = Results(options.out)
    if options.here:
        run_part(options.parts[0], options.tiny, results)
        raise SystemExit(bool(results.failures))
    run_parts(options.parts, options.tiny, results)
    raise SystemExit(results.report(options.parts, tiny=options.tiny))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-results.json"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tiny", action="store_true", help="rehearse on a CPU with tiny sizes")
    parser.add_argument("--here", action="store_true", help="run the one part in this process and report nothing")
    return parser.parse_args()


def run_parts(parts: Sequence[str], tiny: bool, results: Results) -> None:
    """Run each part in a process of its own, as long as there is time."""
    end = time.perf_counter() + RUN_SECONDS
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            if (left := end - time.perf_counter()) < LEAST_SECONDS:
                results.fail(part, "no time was left: name it first in --parts")
                continue
            file = Path(folder) / f"{part}.json"
            code = start(part, tiny, file, left)
            if file.exists():
                results.take(file)
            if code not in (0, 1):  # With code 0 or 1 the file itself says how the part ended.
                results.fail(part, f"its process ended with code {code}")


def start(part: str, tiny: bool, file: Path, seconds: float) -> int:
    """Run a part in another process; returns its exit code, 124 if it was ended because it took so many seconds.

    Processes that it started and left behind end with it: they would keep the device's memory from the next part. So
    do those that have a session of their own, as a server has, once ``adopt_orphans`` was called.
    """
    before = _children()
    command = [sys.executable, "-m", "benchmarks.gpu.run", "--here", "--parts", part, "--out", str(file)]
    process = subprocess.Popen([*command, *(["--tiny"] if tiny else [])], start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        _end_children(before)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _children() -> set[int]:
    """Return the numbers of this process's children, adopted ones included."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(stat.parent.name))
    return found


def _end_children(kept: set[int]) -> None:
    """End all other children, and theirs, which become children with that; wait until the device's memory is free."""
    while left := _children() - kept:
        for number in left:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(number, signal.SIGKILL)
                os.waitpid(number, 0)


def run_part(part: str, tiny: bool, results: Results) -> None:
    """Run the sections of a part in this process; an exception in one of them is a result too."""
    machine = _machine(tiny)
    results.device = "cpu, interpreted" if tiny else torch.cuda.get_device_name()
    results.write()
    torch.manual_seed(0)
    for section in PARTS[part]:
        try:
            for line in section(machine):
                print(_text(line), flush=True)
                results.add(line)
        except Exception as error:
            log = traceback.format_exc()
            print(log, flush=True)
            results.fail(part, f"{type(error).__name__}: {error}", log)


def _machine(tiny: bool) -> Machine:
    if not tiny:
        return Machine(torch.device("cuda"), torch.bfloat16, tiny=False)
    if not triton.knobs.runtime.interpret:
        raise SystemExit("--tiny runs the kernels in Triton's interpreter: set TRITON_INTERPRET=1.")
    launch.DEVICE_TYPES = frozenset(("cuda", "cpu"))
    return Machine(torch.device("cpu"), torch.float32, tiny=True)


def _text(line: Line) -> str:
    share = "" if line.share is None or math.isinf(line.share) else f"{line.share:7.1%} of ceiling"
    return f"{line.part:12} {line.name:60} {line.value:12.4g} {line.unit:13} {share} {line.note}".rstrip()


if __name__ == "__main__":
    adopt_orphans()
    main()
