"""Runs the parts in order, prints a table and writes JSON. See ``run.sh``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import triton

from benchmarks.gpu import ceilings, correctness, end_to_end, kernel_times, lora_correctness, lora_times, sampling_times
from benchmarks.gpu.measure import Line, Machine
from rootgraft.kernels.triton import launch

PARTS = ("correctness", "ceilings", "kernels", "lora", "sampling", "end_to_end")


def main() -> None:
    options = _options()
    machine = _machine(options.tiny)
    began = time.perf_counter()
    found: list[Line] = []
    for line in _lines(machine, options.parts):
        print(_text(line), flush=True)
        found.append(line)
    content = {
        "device": _device_name(machine),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "seconds": round(time.perf_counter() - began, 1),
        "results": [{**dataclasses.asdict(line), "share": line.share} for line in found],
    }
    options.out.write_text(json.dumps(content, indent=1) + "\n")
    wrong = [line.name for line in found if line.part == "correctness" and not line.value <= 1]
    print(f"{content['seconds']} s, written to {options.out}" + "".join(f"\nWRONG: {name}" for name in wrong))
    raise SystemExit(bool(wrong))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-results.json"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--tiny", action="store_true", help="rehearse on a CPU, with sizes that mean nothing")
    return parser.parse_args()


def _machine(tiny: bool) -> Machine:
    if not tiny:
        return Machine(torch.device("cuda"), torch.bfloat16, tiny=False)
    if not triton.knobs.runtime.interpret:
        raise SystemExit("--tiny runs the kernels in Triton's interpreter: set TRITON_INTERPRET=1.")
    launch.DEVICE_TYPES = frozenset(("cuda", "cpu"))
    return Machine(torch.device("cpu"), torch.float32, tiny=True)


def _device_name(machine: Machine) -> str:
    return "cpu, interpreted" if machine.tiny else torch.cuda.get_device_name()


def _lines(machine: Machine, parts: Iterable[str]) -> Iterator[Line]:
    torch.manual_seed(0)
    if "correctness" in parts:
        yield from correctness.run(machine)
        yield from lora_correctness.run(machine)
    if set(parts) == {"correctness"}:
        return
    roof = ceilings.measure(machine)
    yield from ceilings.lines(roof)
    if "kernels" in parts:
        yield from kernel_times.run(machine, roof)
    if "lora" in parts:
        yield from lora_times.run(machine, roof)
    if "sampling" in parts:
        yield from sampling_times.run(machine, roof)
    if "end_to_end" in parts:
        yield from end_to_end.run(machine, roof)


def _text(line: Line) -> str:
    share = "" if line.share is None or math.isinf(line.share) else f"{line.share:7.1%} of ceiling"
    return f"{line.part:12} {line.name:60} {line.value:12.4g} {line.unit:13} {share} {line.note}".rstrip()


if __name__ == "__main__":
    main()
