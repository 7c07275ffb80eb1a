"""Times of the products of Llama-3.1-8B by cuBLAS and cublasLt, for one row to hundreds, against reading the weights.

What decides is the time of a layer's four products: where it is above the target with both libraries, a product of our
own for few rows is worth building.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.measure import Ceilings, Line, Machine, seconds

SHAPES = {
    "qkv": (4096, 6144),
    "o": (4096, 4096),
    "gate_up": (4096, 28672),
    "down": (14336, 4096),
    "head": (4096, 128256),
}
TINY_SHAPES = {"qkv": (64, 96), "head": (64, 80)}
ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512)
LIBRARIES = ("cublas", "cublaslt")
_CACHED = 256 << 20  # bytes of distinct weights, more than any cache of a device holds
_OF_MODEL = "head"  # once a model, where the others are once a layer


def run(machine: Machine, ceilings: Ceilings) -> Iterator[Line]:
    """Microseconds of each product, and of all of a layer. The floor is to read the weights, or the arithmetic."""
    shapes = TINY_SHAPES if machine.tiny else SHAPES
    weights = {name: _weights(machine, *shape) for name, shape in shapes.items()}
    for library in LIBRARIES[:1] if machine.tiny else LIBRARIES:
        with _preferring(machine, library):
            for rows in (2,) if machine.tiny else ROWS:
                took = layer_floor = 0.0
                for name, copies in weights.items():
                    first = copies[0]
                    x = machine.randn(rows, first.shape[1])
                    one = seconds(machine, [partial(functional.linear, x, each) for each in copies])
                    floor = ceilings.seconds(read=first.nbytes, flops=2 * rows * first.numel())
                    yield _line(f"{name}, {rows} rows, {library}", one, floor)
                    if name != _OF_MODEL:
                        took, layer_floor = took + one, layer_floor + floor
                yield _line(f"layer, {rows} rows, {library}", took, layer_floor)


def _line(name: str, took: float, floor: float) -> Line:
    return Line("products", name, took * 1e6, "us", floor * 1e6)


def _weights(machine: Machine, width: int, columns: int) -> list[Tensor]:
    first = machine.randn(columns, width)
    count = 1 if machine.tiny else max(1, _CACHED // first.nbytes)
    return [first, *(machine.randn(columns, width) for _ in range(count - 1))]


@contextmanager
def _preferring(machine: Machine, library: str) -> Iterator[None]:
    """Have torch multiply by this library for a while."""
    if machine.device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)
