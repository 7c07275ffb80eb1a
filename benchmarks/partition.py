"""How evenly products are shared among threads, on paper: run ``python -m benchmarks.partition``.

For each model the linear layers and the head are cut by ``kernels/cpu/src/simd/partition.h`` itself, which is compiled
here, and the parts are given to threads as ``parallel.cpp`` does: each takes those of its own share, then what is left
of others'. A part takes as long as it has rows times panels of 16 columns. The figure is the share of the threads'
time that is work: 1 where all end together. Nothing is said about memory, caches and the cost of handing over.
"""

from __future__ import annotations

import argparse
import heapq
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rootgraft.kernels.cpu.build import SOURCES, find_compiler

_SOURCE = Path(__file__).with_name("partition.cpp")
FEW_ROWS, MANY_ROWS = 6, 256  # rows of a tile, and for a thread to take all columns: of bfloat16 with AVX-512
_MOST_SHARES = 64


class Shape(NamedTuple):
    """A decoder's sizes."""

    name: str
    hidden: int
    inner: int
    queries: int
    values: int
    layers: int
    vocabulary: int

    def products(self) -> dict[str, tuple[int, int, int]]:
        """Return inputs, columns and number of the products of a step."""
        return {
            "q, k, v": (self.hidden, self.queries + 2 * self.values, self.layers),
            "o": (self.queries, self.hidden, self.layers),
            "gate, up": (self.hidden, 2 * self.inner, self.layers),
            "down": (self.inner, self.hidden, self.layers),
            "head": (self.hidden, self.vocabulary, 1),
        }


SHAPES = (
    Shape("135M", 576, 1536, 576, 192, 30, 49_152),
    Shape("1.5B", 1536, 8960, 1536, 256, 28, 151_936),
    Shape("8B", 4096, 14_336, 4096, 1024, 32, 128_256),
)
THREADS = (2, 8, 16, 32, 64)
ROWS = (1, 32, 512)


def busy_share(costs: Sequence[int], threads: int) -> float:
    """Return the share of the threads' time that is work, if parts of such costs are taken share by share."""
    shares = min(threads, _MOST_SHARES, len(costs))
    edges = [(len(costs) * share + shares - 1) // shares for share in range(shares + 1)]
    left = [list(range(edges[share], edges[share + 1]))[::-1] for share in range(shares)]
    free, end = [(0, thread) for thread in range(threads)], 0
    while any(left):
        now, thread = heapq.heappop(free)
        share = next(share for i in range(shares) if left[share := (thread + i) % shares])
        now += costs[left[share].pop()]
        end = max(end, now)
        heapq.heappush(free, (now, thread))
    return sum(costs) / (threads * end)


def compiled(folder: Path) -> Path:
    """Compile the program that cuts products, into a folder."""
    program = folder / "partition"
    flags = ["-O1", "-std=c++17", "-march=native", f"-I{SOURCES}"]
    subprocess.run([find_compiler(), *flags, str(_SOURCE), "-o", str(program)], check=True)
    return program


def cut(program: Path, threads: int, rows: int, columns: int, inputs: int) -> list[int]:
    """Return the rows times panels of each part of a product of so many inputs, by vector instructions."""
    command = [str(program), *map(str, (threads, rows, columns, 1, FEW_ROWS, MANY_ROWS, inputs // 2))]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [int(rows) * int(panels) for rows, panels in map(str.split, lines)]


def whole_step(program: Path, shape: Shape, threads: int, rows: int) -> float:
    """Return the busy share over all products of a step; of a prompt the head computes one row."""
    work = time = 0.0
    for name, (inputs, columns, number) in shape.products().items():
        costs = cut(program, threads, 1 if name == "head" and rows > ROWS[1] else rows, columns, inputs)
        cost = number * inputs * sum(costs)
        work += cost
        time += cost / busy_share(costs, threads)
    return work / time


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        program = compiled(Path(folder))
        print("| model | rows | " + " | ".join(f"{threads} threads" for threads in THREADS) + " |")
        print("|---" * (2 + len(THREADS)) + "|")
        for shape in SHAPES:
            for rows in ROWS:
                cells = [f"{whole_step(program, shape, threads, rows):.2f}" for threads in THREADS]
                print(f"| {shape.name} | {rows} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
