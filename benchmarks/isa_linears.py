"""Linears of a small Llama with lesser instruction sets, against oneDNN and MKL with the same.

    python -m benchmarks.isa_linears [--levels avx2 avx512] [--rows 1 4 16] [--threads 2] [--output FILE]

For each level of the portable libraries (``kernels/cpu/portable_build.py``) a process of its own loads the library of
that level, and the peers get no more instructions than it has. All products of a forward pass, or of the LM head, are
made with distinct weights for each layer: by ours from packed bf16, by oneDNN from weights that it has laid out, in
bf16 and in fp32, and by MKL from packed fp32. They take turns within the process. Times are medians, in milliseconds;
``ratio`` is the best peer's time by ours.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.kernels_cpu import SHAPES
from rootgraft.kernels import ops
from rootgraft.kernels.backend import LIBRARY
from rootgraft.kernels.cpu.build import default_cache, find_or_compile, open_library
from rootgraft.kernels.cpu.native_library import NativeLibrary
from rootgraft.kernels.cpu.native_ops import Kernels
from rootgraft.kernels.cpu.portable_build import LEVELS

ONEDNN = {"avx2": "AVX2", "avx512": "AVX512_CORE", "avx512-vnni": "AVX512_CORE_VNNI", "avx512-vbmi": "AVX512_CORE_VNNI"}
"""Levels without products of bf16, and oneDNN's name of the most that they have."""
MKL = {"avx2": "AVX2"}
ROWS = (1, 4, 16, 32, 128, 512)
HEAD_ROWS = (1, 4, 16, 32)  # rows of a step that draw
MANY_ROWS = 64  # from which the weights of a few layers are enough
FEW_LAYERS = 6
PAUSE = 0.25  # seconds after which a peer's threads no longer spin
COLUMNS = ("level", "weights", "layers", "rows", "ours", "oneDNN bf16", "oneDNN fp32", "MKL fp32", "ratio")

Products = Callable[[], object]
Row = dict[str, str | float | None]


def ours(weights: Sequence[Tensor], inputs: dict[int, Tensor]) -> Products:
    layers = [ops.pack_linear(weight.bfloat16()) for weight in weights]
    bf16 = {width: x.bfloat16() for width, x in inputs.items()}
    return lambda: [ops.linear(bf16[layer.in_features], layer) for layer in layers]


def onednn(weights: Sequence[Tensor], inputs: dict[int, Tensor], dtype: torch.dtype) -> Products:
    rows = next(iter(inputs.values())).shape[0]
    laid_out = [
        (weight.shape[1], torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), rows)) for weight in weights
    ]
    typed = {width: x.to(dtype) for width, x in inputs.items()}
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda: [multiply(typed[width], weight, None, "none", [], "") for width, weight in laid_out]


def mkl(weights: Sequence[Tensor], inputs: dict[int, Tensor]) -> Products:
    rows = next(iter(inputs.values())).shape[0]
    packed = [(weight.shape[1], torch.ops.mkl._mkl_reorder_linear_weight(weight, rows), weight) for weight in weights]
    multiply = torch.ops.mkl._mkl_linear
    return lambda: [multiply(inputs[width], each, weight, None, rows) for width, each, weight in packed]


def take_turns(variants: dict[str, Products], seconds: float) -> dict[str, float]:
    """Return the median milliseconds of each, of as many turns as fit the time, three at least."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        run()
    end = time.perf_counter() + seconds
    turns = 0
    while turns < 3 or time.perf_counter() < end:
        turns += 1
        for name, run in variants.items():
            time.sleep(PAUSE)
            run()
            begin = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: statistics.median(each) for name, each in times.items()}


def bench(level: str, name: str, rows: int, seconds: float) -> Row:
    """Measure the layers' or the head's products of so many rows."""
    shapes = {key: shape for key, shape in SHAPES.items() if (key == "head") == (name == "head")}
    layers = 1 if name == "head" else 30 if rows < MANY_ROWS else FEW_LAYERS
    weights = [torch.randn(columns, width) / width**0.5 for _ in range(layers) for width, columns, _ in shapes.values()]
    inputs = {width: torch.randn(rows, width) for width, _, _ in shapes.values()}
    variants = {"ours": ours(weights, inputs)}
    makers: dict[str, Callable[[], Products]] = {
        "oneDNN bf16": lambda: onednn(weights, inputs, torch.bfloat16),
        "oneDNN fp32": lambda: onednn(weights, inputs, torch.float32),
        "MKL fp32": lambda: mkl(weights, inputs),
    }
    for peer, make in makers.items():
        with contextlib.suppress(RuntimeError):  # it has no such products with these instructions
            products = make()
            products()
            variants[peer] = products
    times = take_turns(variants, seconds)
    best = min(value for peer, value in times.items() if peer != "ours")
    measured = {peer: round(times[peer], 3) if peer in times else None for peer in ("ours", *makers)}
    return {"level": level, "weights": name, "layers": layers, "rows": rows, **measured, "ratio": best / times["ours"]}


def bench_level(options: argparse.Namespace) -> None:
    """Measure one level in this process, and print a line of JSON for each number of rows."""
    (level,) = options.levels
    library = open_library(find_or_compile(default_cache(), LEVELS[level].target))
    LIBRARY.native = Kernels(NativeLibrary(library))
    LIBRARY.native.library.num_threads = options.threads
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        for name, counts in (("layers", options.rows), ("head", [rows for rows in options.rows if rows in HEAD_ROWS])):
            for rows in counts:
                row = bench(level, name, rows, options.seconds)
                print(json.dumps([round(value, 3) if isinstance(value, float) else value for value in row.values()]))
                sys.stdout.flush()


def run_level(level: str, options: argparse.Namespace) -> list[list[object]]:
    """Measure a level in a process of its own, whose libraries are told at their start what they may use."""
    environment = os.environ | {
        "ONEDNN_MAX_CPU_ISA": ONEDNN[level],
        "MKL_ENABLE_INSTRUCTIONS": MKL.get(level, "AVX512"),
    }
    command = [sys.executable, "-m", "benchmarks.isa_linears", "--in-this-process", "--levels", level]
    command += ["--rows", *map(str, options.rows), "--threads", str(options.threads), "--seconds", str(options.seconds)]
    rows = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            rows.append(json.loads(line))
            print(" ".join(f"{cell!s:>11}" for cell in rows[-1]), flush=True)
    if process.returncode:
        raise SystemExit(f"level {level} ended with exit code {process.returncode}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", nargs="+", choices=ONEDNN, default=["avx2", "avx512"])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=2.0, help="for each number of rows")
    parser.add_argument("--output", type=Path, help="file of JSON for the results")
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_this_process:
        bench_level(options)
        return
    print(" ".join(f"{name:>11}" for name in COLUMNS))
    rows = [row for level in options.levels for row in run_level(level, options)]
    if options.output:
        lines = ",\n".join(json.dumps(row) for row in rows)
        head = json.dumps({"threads": options.threads, "columns": COLUMNS})
        options.output.write_text(f'{head[:-1]}, "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
