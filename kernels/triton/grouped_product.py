"""Triton product with weights of 4 to 8 bits, which are read as they are stored (``layouts.grouped_forms``).

A program has a tile of the result: some rows of x and some columns. For each chunk of inputs it loads the stored
numbers of its columns, converts them exactly to bfloat16 or half precision in registers, multiplies, and scales the
sums. So a weight is read once for all rows of a tile, and the GPU needs no instructions for FP8 or FP4. Sums are added
in a fixed order, and grids depend only on shapes, so calls can be captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layouts.grouped_forms import SUPER_BLOCK, GroupedLinear, GroupedPart, GroupForm, NumberForm, Offsets, Scales
from .launch import Launch, cdiv, is_narrow, is_placed, meta

_INT4 = tl.constexpr(NumberForm.INT4.value)
_INT8 = tl.constexpr(NumberForm.INT8.value)
_E4M3 = tl.constexpr(NumberForm.E4M3.value)
_E2M1 = tl.constexpr(NumberForm.E2M1.value)
_TABLE = tl.constexpr(NumberForm.TABLE.value)
_NO_SCALES = tl.constexpr(Scales.NONE.value)
_E8M0_SCALES = tl.constexpr(Scales.E8M0.value)
_E4M3_SCALES = tl.constexpr(Scales.E4M3.value)
_SCALE_PRODUCTS = tl.constexpr(Scales.PRODUCTS.value)
_MIDDLE = tl.constexpr(Offsets.MIDDLE.value)
_ZERO_POINTS = tl.constexpr(Offsets.ZERO_POINTS.value)
_MINIMA = tl.constexpr(Offsets.MINIMA.value)
_OFFSET_PRODUCTS = tl.constexpr(Offsets.PRODUCTS.value)
_SUPER_BLOCK = tl.constexpr(SUPER_BLOCK)

E4M3_FACTOR = 256.0
"""What an E4M3 is divided by where its bits stand in half precision, whose exponents have another bias."""
_E2M1_FACTOR = 16384.0


class TileConfig(NamedTuple):
    """Shape of a program: rows and columns of its tile, warps, and stages of its pipeline."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


FEW_ROWS = 16
"""The most rows that are computed by the form that reads weights as fast as it can."""

_FEW = TileConfig(FEW_ROWS, 32, 4, 4)
_MANY = TileConfig(64, 128, 8, 2)


@triton.jit
def small_float(codes, IS_FOUR_BITS: tl.constexpr):
    """Convert numbers in E2M1 or E4M3, uint8, to half precision, divided by a constant. The result is exact.

    The shifted bits of a number are a half precision number with another exponent bias, which the constant stands for.
    """
    wide = codes.to(tl.uint16)
    sign = (wide & 8) << 12 if IS_FOUR_BITS else (wide & 128) << 8
    bits = sign | ((wide & 7) << 9 if IS_FOUR_BITS else (wide & 127) << 7)
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def _values(codes, zero, table, NUMBERS: tl.constexpr, OFFSETS: tl.constexpr, MIDDLE: tl.constexpr, TYPE: tl.constexpr):
    """Return the values of stored numbers in the type of x, exact except with a table; ``zero`` broadcasts to them."""
    if NUMBERS == _E4M3:
        values = small_float(codes, False).to(TYPE)
    elif NUMBERS == _E2M1:
        values = small_float(codes, True).to(TYPE)
    elif NUMBERS == _TABLE:
        values = tl.load(table + codes.to(tl.int32)).to(TYPE)
    elif OFFSETS == _ZERO_POINTS:
        values = (codes.to(tl.int16) - zero).to(tl.float32).to(TYPE)
    elif NUMBERS == _INT8:
        values = codes.to(tl.int8, bitcast=True).to(tl.float32).to(TYPE)
    elif OFFSETS == _MIDDLE:
        values = (codes.to(tl.int16) - MIDDLE).to(tl.float32).to(TYPE)
    else:
        values = codes.to(tl.float32).to(TYPE)
    return values


@triton.jit
def _terms(
    start, scales, super_scales, offsets, super_offsets, count, column, is_column, SCALES: tl.constexpr,
    OFFSETS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return scale, zero point and minimum of columns for the group of an input: [COLUMNS] fp32, int16, fp32."""
    at = (start // GROUP if GROUP else 0) * count + column
    block = start // _SUPER_BLOCK * count + column
    scale = tl.full(column.shape, 1.0, tl.float32)
    zero = tl.zeros(column.shape, tl.int16)
    minimum = tl.zeros(column.shape, tl.float32)
    if SCALES != _NO_SCALES:
        found = tl.load(scales + at, is_column, other=0)
        if SCALES == _E8M0_SCALES:
            bits = found.to(tl.uint32) << 23
            scale = tl.where(bits == 0, 0x400000, bits).to(tl.float32, bitcast=True)
        elif SCALES == _E4M3_SCALES:
            scale = small_float(found, False).to(tl.float32)
        elif SCALES == _SCALE_PRODUCTS:
            scale = found.to(tl.float32) * tl.load(super_scales + block, is_column, other=0.0).to(tl.float32)
        else:
            scale = found.to(tl.float32)
    if OFFSETS == _ZERO_POINTS:
        zero = tl.load(offsets + at, is_column, other=0).to(tl.int16)
    elif OFFSETS == _MINIMA:
        minimum = tl.load(offsets + at, is_column, other=0.0).to(tl.float32)
    elif OFFSETS == _OFFSET_PRODUCTS:
        coarse = tl.load(super_offsets + block, is_column, other=0.0).to(tl.float32)
        minimum = -tl.load(offsets + at, is_column, other=0).to(tl.float32) * coarse
    return scale, zero, minimum


@triton.jit
def _scaled(sums, products, total, scale, minimum, SCALES: tl.constexpr, HAS_MINIMA: tl.constexpr):
    """Add the products of a group times its scale, and its minimum times the sum of its inputs."""
    sums = products if SCALES == _NO_SCALES else sums + products * scale[None, :]
    if HAS_MINIMA:
        sums += total[:, None] * minimum[None, :]
    return sums


@triton.jit
def grouped_sums(
    source, is_row, column, is_column, weight, high, scales, super_scales, offsets, super_offsets, table, width, count,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, NUMBERS: tl.constexpr, SCALES: tl.constexpr, OFFSETS: tl.constexpr,
    GROUP: tl.constexpr, CHUNK: tl.constexpr, HIGH: tl.constexpr, MIDDLE: tl.constexpr,
):  # fmt: skip
    """Return ``x @ w`` without factors, for rows at addresses ``source`` [ROWS]: [ROWS, COLUMNS] fp32."""
    HAS_MINIMA: tl.constexpr = OFFSETS >= _MINIMA
    IS_BYTES: tl.constexpr = (NUMBERS == _INT8) | (NUMBERS == _E4M3)
    SIZE: tl.constexpr = CHUNK if IS_BYTES else CHUNK // 2
    i = tl.arange(0, SIZE)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, width, CHUNK):
        line = column.to(tl.int64) + start // CHUNK * count
        codes = tl.load(weight + line[None, :] * SIZE + i[:, None], is_column[None, :], other=0)
        rows = tl.load(source[:, None] + (start + i)[None, :], is_row[:, None], other=0.0)
        scale, zero, minimum = _terms(
            start, scales, super_scales, offsets, super_offsets, count, column, is_column, SCALES, OFFSETS, GROUP
        )
        total = tl.sum(rows.to(tl.float32), 1)
        begun = sums if SCALES == _NO_SCALES else tl.zeros((ROWS, COLUMNS), tl.float32)
        if IS_BYTES:
            values = _values(codes, zero[None, :], table, NUMBERS, OFFSETS, MIDDLE, rows.dtype)
            products = tl.dot(rows, values, begun, input_precision="ieee")
        else:
            low, above = codes & 15, codes >> 4
            if HIGH:
                EACH: tl.constexpr = 4 // HIGH
                MASK: tl.constexpr = (1 << HIGH) - 1
                at = high + line[None, :] * (CHUNK * HIGH // 8) + (i // EACH)[:, None]
                bits = tl.load(at, is_column[None, :], other=0).to(tl.int32)
                shift = ((i % EACH) * (2 * HIGH))[:, None]
                low = (low.to(tl.int32) | (((bits >> shift) & MASK) << 4)).to(tl.uint8)
                above = (above.to(tl.int32) | (((bits >> (shift + HIGH)) & MASK) << 4)).to(tl.uint8)
            values = _values(low, zero[None, :], table, NUMBERS, OFFSETS, MIDDLE, rows.dtype)
            products = tl.dot(rows, values, begun, input_precision="ieee")
            rows = tl.load(source[:, None] + (start + SIZE + i)[None, :], is_row[:, None], other=0.0)
            # Each half is a separate group.
            if GROUP == SIZE:
                sums = _scaled(sums, products, total, scale, minimum, SCALES, HAS_MINIMA)
                products = tl.zeros((ROWS, COLUMNS), tl.float32)
                total = tl.zeros((ROWS,), tl.float32)
                scale, zero, minimum = _terms(
                    start + SIZE, scales, super_scales, offsets, super_offsets, count, column, is_column, SCALES,
                    OFFSETS, GROUP,
                )  # fmt: skip
            values = _values(above, zero[None, :], table, NUMBERS, OFFSETS, MIDDLE, rows.dtype)
            products = tl.dot(rows, values, products, input_precision="ieee")
            total += tl.sum(rows.to(tl.float32), 1)
        sums = _scaled(sums, products, total, scale, minimum, SCALES, HAS_MINIMA)
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def _grouped_product(
    x, weight, high, scales, super_scales, offsets, super_offsets, factors, table, bias, out, num_rows, width, count,
    out_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, NUMBERS: tl.constexpr, SCALES: tl.constexpr,
    OFFSETS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, HIGH: tl.constexpr, MIDDLE: tl.constexpr,
    FACTOR: tl.constexpr, HAS_FACTORS: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Program (r, c): rows ``r * ROWS ...`` of x [num_rows, width] times columns ``c * COLUMNS ...`` of the weight.

    The weight has ``count`` columns; they are written to each row of out, whose rows are ``out_stride`` apart.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < num_rows, column < count
    source = x + tl.where(is_row, row, 0).to(tl.int64) * width
    sums = grouped_sums(
        source, is_row, column, is_column, weight, high, scales, super_scales, offsets, super_offsets, table, width,
        count, ROWS, COLUMNS, NUMBERS, SCALES, OFFSETS, GROUP, CHUNK, HIGH, MIDDLE,
    )  # fmt: skip
    if HAS_FACTORS:
        sums *= (tl.load(factors + column, is_column, other=0.0) * FACTOR)[None, :]
    else:
        sums *= FACTOR
    if BIASED:
        sums += tl.load(bias + column, is_column, other=0.0).to(tl.float32)[None, :]
    target = out + row[:, None].to(tl.int64) * out_stride + column[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), is_row[:, None] & is_column[None, :])


def takes(x: Tensor, layer: GroupedLinear) -> bool:
    """Return whether the kernel supports a product."""
    parts = [each for each in layer.parts if isinstance(each, GroupedPart)]
    placed = all(is_placed(*(tensor for tensor in part.tensors if tensor is not None)) for part in parts)
    return x.dtype is layer.dtype and is_narrow(x) and placed


def grouped_linear(x: Tensor, layer: GroupedLinear, out_dtype: torch.dtype) -> Tensor:
    """``kernels.ops.linear``: [T, K] -> [T, N] of ``out_dtype``."""
    out = x.new_empty(len(x), layer.out_features, dtype=out_dtype)
    first = 0
    for part in layer.parts:
        if isinstance(part, Tensor):
            end = first + len(part)
            bias = None if layer.bias is None else layer.bias[first:end]
            out[:, first:end] = _plain_linear(x, part, bias, out_dtype)
        else:
            end = first + part.rows
            bias = None if layer.bias is None else layer.bias[first:end]
            _launch(x, part, bias, out[:, first:end]).run()
        first = end
    return out


def _plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    if out_dtype is x.dtype:
        return torch.nn.functional.linear(x, weight, bias)
    out = torch.mm(x, weight.t(), out_dtype=out_dtype) if x.is_cuda else x.float() @ weight.float().t()
    return out if bias is None else out.add_(bias)


def form_constants(form: GroupForm) -> dict[str, int | float]:
    """Return the compile-time constants of a kernel for a form."""
    numbers, scales = form.numbers, form.scales
    factor = {NumberForm.E4M3: E4M3_FACTOR, NumberForm.E2M1: _E2M1_FACTOR}.get(numbers, 1.0)
    return {
        "NUMBERS": numbers.value,
        "SCALES": scales.value,
        "OFFSETS": form.offsets.value,
        "GROUP": form.group,
        "CHUNK": form.chunk,
        "HIGH": numbers.high_bits,
        "MIDDLE": numbers.middle,
        "FACTOR": factor * (E4M3_FACTOR if scales is Scales.E4M3 else 1.0),
    }


def _launch(x: Tensor, part: GroupedPart, bias: Tensor | None, out: Tensor) -> Launch:
    if part.permutation is not None:
        x = x.index_select(1, part.permutation)
    config = _FEW if len(x) <= FEW_ROWS else _MANY
    grid = (cdiv(len(x), config.rows), cdiv(part.rows, config.columns), 1)
    # The weight is the placeholder for tensors that the form lacks.
    tensors = [part.weight if tensor is None else tensor for tensor in part.tensors]
    args = (x, *tensors, part.weight if bias is None else bias, out, len(x), x.shape[1], part.rows, out.stride(0))
    constants = {
        "ROWS": config.rows,
        "COLUMNS": config.columns,
        **form_constants(part.form),
        "HAS_FACTORS": part.factors is not None,
        "BIASED": bias is not None,
    }
    return Launch(_grouped_product, grid, args, constants, config.num_warps, config.num_stages)


_FORMS = {
    "int4-128": GroupForm(NumberForm.INT4, Scales.FLOATS, Offsets.MIDDLE, 128, 128),
    "int4-128-zeros": GroupForm(NumberForm.INT4, Scales.FLOATS, Offsets.ZERO_POINTS, 128, 128),
    "int4-32-minima": GroupForm(NumberForm.INT4, Scales.FLOATS, Offsets.MINIMA, 32, 32),
    "int8-rows": GroupForm(NumberForm.INT8, Scales.NONE, Offsets.MIDDLE, 0, 128),
    "fp8-128": GroupForm(NumberForm.E4M3, Scales.FLOATS, Offsets.MIDDLE, 128, 128),
    "mxfp4": GroupForm(NumberForm.E2M1, Scales.E8M0, Offsets.MIDDLE, 32, 32),
    "nvfp4": GroupForm(NumberForm.E2M1, Scales.E4M3, Offsets.MIDDLE, 16, 32),
    "table-64": GroupForm(NumberForm.TABLE, Scales.FLOATS, Offsets.MIDDLE, 64, 64),
    "q5_k": GroupForm(NumberForm.INT5, Scales.PRODUCTS, Offsets.PRODUCTS, 32, 32),
    "q6_k": GroupForm(NumberForm.INT6, Scales.PRODUCTS, Offsets.MIDDLE, 16, 32),
}
"""Forms of checkpoints that people have, whose needs are looked at for each card; the others need no more."""


def meta_part(form: GroupForm, rows: int, width: int) -> GroupedPart:
    """Return a part without memory, for which a kernel is compiled."""
    groups = width // (form.group or width)
    scale_type = {Scales.FLOATS: torch.float16, Scales.PRODUCTS: torch.int8}.get(form.scales, torch.uint8)
    offset_type = torch.float16 if form.offsets is Offsets.MINIMA else torch.uint8
    high, is_product = form.numbers.high_bits, form.scales is Scales.PRODUCTS
    is_offset = form.offsets is not Offsets.MIDDLE
    size = form.chunk if form.numbers.bits == 8 else form.chunk // 2
    coarse = meta(width // SUPER_BLOCK, rows, dtype=torch.float16)
    return GroupedPart(
        form,
        meta(width // form.chunk, rows, size, dtype=torch.uint8),
        meta(width // form.chunk, rows, form.chunk * high // 8, dtype=torch.uint8) if high else None,
        None if form.scales is Scales.NONE else meta(groups, rows, dtype=scale_type),
        coarse if is_product else None,
        meta(groups, rows, dtype=offset_type) if is_offset else None,
        coarse if form.offsets is Offsets.PRODUCTS else None,
        meta(rows, dtype=torch.float32) if form.scales in (Scales.NONE, Scales.E4M3) else None,
        meta(16, dtype=torch.float32) if form.numbers is NumberForm.TABLE else None,
    )


def variants() -> Iterator[tuple[str, Launch]]:
    """Yield the compilations of each form, for few rows and for many."""
    for name, form in _FORMS.items():
        part = meta_part(form, 4096, 4096)
        for size, count in (("few", 1), ("many", 512)):
            x, out = meta(count, 4096, dtype=torch.bfloat16), meta(count, 4096, dtype=torch.bfloat16)
            yield f"grouped_product/{name}-{size}", _launch(x, part, None, out)
