"""Times of the products of Llama-3.1-8B by each way, for one row to hundreds, against reading the weights.

What decides is the time of a layer's four products, each by the fastest way: what a server takes that measures them at
its start (``kernels.triton.product_choice``).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from benchmarks.gpu.measure import Ceilings, Line, Machine, seconds
from rootgraft.kernels.triton.product_choice import MOST_ROWS, WAYS, Way

SHAPES = {
    "qkv": (4096, 6144),
    "o": (4096, 4096),
    "gate_up": (4096, 28672),
    "down": (14336, 4096),
    "head": (4096, 128256),
}
TINY_SHAPES = {"qkv": (64, 96), "head": (64, 80)}
ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512)
FASTEST = "the fastest of each"
CACHED = 256 << 20  # bytes of distinct weights, more than any cache of a device holds
_OF_MODEL = "head"  # once a model, where the others are once a layer


def run(machine: Machine, ceilings: Ceilings) -> Iterator[Line]:
    """Microseconds of each product, and of all of a layer. The floor is to read the weights, or the arithmetic."""
    shapes = TINY_SHAPES if machine.tiny else SHAPES
    weights = {name: _weights(machine, *shape) for name, shape in shapes.items()}
    for rows in (2,) if machine.tiny else ROWS:
        layer: dict[str, float] = {}
        layer_floor = 0.0
        for name, copies in weights.items():
            first = copies[0]
            x = machine.randn(rows, first.shape[1])
            floor = ceilings.seconds(read=first.nbytes, flops=2 * rows * first.numel())
            took = {
                way: seconds(machine, [partial(multiply, x, each, None) for each in copies])
                for way, multiply in _ways(machine, rows).items()
            }
            for way, each in took.items():
                yield _line(f"{name}, {rows} rows, {way}", each, floor)
            if name != _OF_MODEL:
                for way, each in {**took, FASTEST: min(took.values())}.items():
                    layer[way] = layer.get(way, 0.0) + each
                layer_floor += floor
        for way, total in layer.items():
            yield _line(f"layer, {rows} rows, {way}", total, layer_floor)


def _ways(machine: Machine, rows: int) -> dict[str, Way]:
    """The ways that are measured at a server's start; of many rows those of libraries alone."""
    left_out = {"cublaslt"} if machine.device.type != "cuda" else {"few rows"} if rows > MOST_ROWS else set()
    return {name: way for name, way in WAYS.items() if name not in left_out}


def _line(name: str, took: float, floor: float) -> Line:
    return Line("products", name, took * 1e6, "us", floor * 1e6)


def _weights(machine: Machine, width: int, columns: int) -> list[Tensor]:
    first = machine.randn(columns, width)
    count = 1 if machine.tiny else max(1, CACHED // first.nbytes)
    return [first, *(machine.randn(columns, width) for _ in range(count - 1))]
