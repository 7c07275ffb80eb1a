"""Products with packed weights: correct against dequantised ones, and their times in the shapes of an 8B model.

What decides, at one row: all products of a step together, with a head in bfloat16, in at most 2.7 ms in 4 bits and 3.3
ms in FP8 on an H200, of which 0.7 ms are for the other kernels; where they take longer than widened ones,
``--quantization widened`` is the better choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.gpu.correctness import TOLERANCE, error_of
from benchmarks.gpu.measure import Ceilings, Line, Machine, launches, seconds
from rootgraft.kernels import ops
from rootgraft.kernels.grouped_weights import (
    GroupedLinear,
    NumberForm,
    Offsets,
    Scales,
    StoredNumbers,
    dequantise,
    pack_grouped,
)

SHAPES: Final = {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
HEAD: Final = (128256, 4096)
_TINY: Final = {"qkv": (40, 256)}
_LAYERS: Final = 32
_ROWS: Final = (1, 4, 8, 16, 32, 64, 128, 256, 512)
_STEP_ROWS: Final = (1, 32, 128)
_FORMS: Final = (
    "int4 g128",
    "int4 g128 zeros",
    "int4 g32",
    "int8 rows",
    "fp8 rows",
    "fp8 128",
    "mxfp4",
    "q4_k",
    "q6_k",
)
_TIMED: Final = ("int4 g128", "int4 g128 zeros", "int8 rows", "fp8 128", "mxfp4", "q4_k")
CACHED: Final = 256 << 20  # bytes of distinct weights, more than any cache of a device holds


def stored(form: str, rows: int, width: int) -> StoredNumbers:
    """A matrix of random bits in a form."""
    kind, _, rest = form.partition(" ")
    shape = rows, width
    numbers = {
        "int8": NumberForm.INT8, "fp8": NumberForm.E4M3, "mxfp4": NumberForm.E2M1, "q6_k": NumberForm.INT6
    }.get(kind, NumberForm.INT4)  # fmt: skip
    codes = torch.randint(0, 1 << numbers.bits, shape, dtype=torch.uint8)
    if numbers is NumberForm.E4M3:
        codes &= 0xBF  # no NaN
    if kind == "mxfp4":
        return StoredNumbers(shape, numbers, [codes], torch.randint(116, 122, (rows, width // 32)).byte(), Scales.E8M0)
    if kind.startswith("q"):
        return _super_blocks(shape, numbers, codes)
    group = {"g128": 128, "g32": 32, "128": 128}.get(rest.split(" ")[0], width)
    scales = torch.rand(rows, width // group).half() * (2e-3 if numbers.bits == 8 else 2e-2)
    if not rest.endswith("zeros"):
        return StoredNumbers(shape, numbers, [codes], scales)
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8)
    return StoredNumbers(shape, numbers, [codes], scales, offsets=zeros, offset_kind=Offsets.ZERO_POINTS)


def _super_blocks(shape: tuple[int, int], numbers: NumberForm, codes: Tensor) -> StoredNumbers:
    rows, width = shape
    coarse = torch.rand(rows, width // 256).half() * 1e-3
    if numbers is NumberForm.INT6:
        scales = torch.randint(-32, 32, (rows, width // 16), dtype=torch.int8)
        return StoredNumbers(shape, numbers, [codes], scales, Scales.PRODUCTS, super_scales=coarse)
    scales, minima = (torch.randint(0, 64, (rows, width // 32), dtype=torch.uint8) for _ in range(2))
    return StoredNumbers(
        shape,
        numbers,
        [codes],
        scales,
        Scales.PRODUCTS,
        super_scales=coarse,
        offsets=minima,
        offset_kind=Offsets.PRODUCTS,
        super_offsets=coarse,
    )


def _packed(machine: Machine, form: str, shape: tuple[int, int]) -> GroupedLinear:
    layer = pack_grouped([stored(form, *shape)], machine.device, machine.dtype)
    assert layer is not None
    return layer


def check(machine: Machine) -> Iterator[Line]:
    """Largest error of each form over few and many rows, as a share of what is tolerated."""
    shape = (40, 256) if machine.tiny else (1000, 2048)
    for form in _FORMS:
        layer = _packed(machine, form, shape)
        wide = dequantise(layer).double()
        with launches() as launched:
            errors = [_error(machine, layer, wide, rows) for rows in ((1, 17) if machine.tiny else (1, 16, 17, 300))]
        note = "" if "_grouped_product" in launched else "never launched: _grouped_product"
        yield Line("correctness", f"packed {form}", float("inf") if note else max(errors), "of tolerance", note=note)


def _error(machine: Machine, layer: GroupedLinear, wide: Tensor, rows: int) -> float:
    x = machine.randn(rows, layer.in_features)
    return error_of(ops.linear(x, layer), x.double() @ wide.T) / TOLERANCE[machine.dtype]


def run(machine: Machine, ceilings: Ceilings) -> Iterator[Line]:
    """Microseconds of each product, and milliseconds of all products of a step."""
    shapes = _TINY if machine.tiny else SHAPES
    head = _plain_seconds(machine, (64, 256) if machine.tiny else HEAD)
    for form in _TIMED:
        step = dict.fromkeys(_STEP_ROWS, 0.0)
        for name, shape in shapes.items():
            for rows, took, floor in _times(machine, ceilings, form, shape):
                step[rows] = step.get(rows, 0.0) + took
                yield Line("quantised", f"{form} {name}, {rows} rows", took * 1e6, "us", floor * 1e6)
        for rows in _STEP_ROWS:
            total = (step[rows] * _LAYERS + head) * 1e3
            yield Line(
                "quantised", f"{form}, all products of a step of {rows} rows", total, "ms", note="bf16 head, 1 row"
            )
    for name, shape in shapes.items():
        yield Line("quantised", f"widened {name}, 1 row", _plain_seconds(machine, shape) * 1e6, "us")


def _times(
    machine: Machine, ceilings: Ceilings, form: str, shape: tuple[int, int]
) -> Iterator[tuple[int, float, float]]:
    """Rows, seconds and the least seconds of products with distinct weights."""
    first = _packed(machine, form, shape)
    count = 1 if machine.tiny else max(1, min(16, CACHED // first.nbytes))
    layers = [first, *(_copied(first) for _ in range(count - 1))]
    for rows in _STEP_ROWS if machine.tiny else _ROWS:
        x = machine.randn(rows, shape[1])
        took = seconds(machine, [partial(ops.linear, x, layer) for layer in layers])
        yield rows, took, ceilings.seconds(read=first.nbytes, flops=2 * rows * shape[0] * shape[1])


def _copied(layer: GroupedLinear) -> GroupedLinear:
    """The same weight in other memory."""
    (part,) = layer.parts
    assert not isinstance(part, Tensor)
    names = ("weight", "high", "scales", "super_scales", "offsets", "super_offsets", "factors", "table", "permutation")
    tensors = {name: getattr(part, name) for name in names}
    copies: dict[str, Any] = {name: None if tensor is None else tensor.clone() for name, tensor in tensors.items()}
    return GroupedLinear(layer.in_features, layer.out_features, layer.dtype, (type(part)(part.form, **copies),), None)


def _plain_seconds(machine: Machine, shape: tuple[int, int]) -> float:
    layer, x = ops.pack_linear(machine.randn(*shape)), machine.randn(1, shape[1])
    return seconds(machine, [lambda: ops.linear(x, layer)])
