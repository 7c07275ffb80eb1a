"""Triton product of tokens and a weight; its bits do not depend on the number of tokens (``--batch-invariant``).

cuBLAS uses different algorithms for different numbers of rows. Here every program has a tile of the same size and adds
inputs in a fixed order, so a row has the same bits whichever other rows are in the product. This is slower, above all
for few rows.

The same kernel with another tile size is used for products of few rows without ``--batch-invariant``: it loads long
lines of the weight in parallel. ``product_choice`` measures for which shapes it is faster than cuBLAS.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import NARROW_TYPES, Launch, cdiv, is_of, meta


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows, columns and inputs of a tile, and the stages of its pipeline."""

    rows: int
    columns: int
    inputs: int
    num_stages: int


_ANY = Tile(64, 64, 64, 3)
_FEW = Tile(16, 32, 256, 3)  # not measured


@triton.jit(do_not_specialize=["rows"])
def _invariant_linear(
    x, weight, bias, out, rows, columns, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INPUTS: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    """Program (c, r): rows ``r * ROWS ...`` and columns ``c * COLUMNS ...`` of ``x @ weight.T + bias``.

    x [rows, width] and weight [columns, width] of one type; out [rows, columns] of that type or fp32.
    """
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < rows, column < columns
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, width, INPUTS):
        i = start + tl.arange(0, INPUTS)
        inside = i < width
        own = tl.load(x + row[:, None] * width + i[None, :], is_row[:, None] & inside[None, :], other=0.0)
        matrix = tl.load(weight + column[None, :] * width + i[:, None], inside[:, None] & is_column[None, :], other=0.0)
        sums = tl.dot(own, matrix, sums, input_precision="ieee")
    if BIASED:
        sums += tl.load(bias + column, is_column, other=0.0).to(tl.float32)[None, :]
    target = out + row[:, None] * columns + column[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), is_row[:, None] & is_column[None, :])


def takes(x: Tensor, weight: Tensor) -> bool:
    """Return whether the kernel supports these tensors: contiguous, of one type."""
    return is_of(x.dtype, x, weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """``kernels.ops.linear``: x [T, K] and a weight [N, K] -> [T, N]."""
    out = x.new_empty(len(x), len(weight), dtype=out_dtype)
    _launch(x, weight, bias, out).run()
    return out


def few_row_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``linear`` in the type of x with tiles of few rows."""
    out = x.new_empty(len(x), len(weight))
    _launch(x, weight, bias, out, _FEW).run()
    return out


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: Tile = _ANY) -> Launch:
    rows, columns = out.shape
    grid = (cdiv(columns, tile.columns), cdiv(rows, tile.rows), 1)
    constants = {"ROWS": tile.rows, "COLUMNS": tile.columns, "INPUTS": tile.inputs, "BIASED": bias is not None}
    args = (x, weight, weight if bias is None else bias, out, rows, columns, x.shape[1])
    return Launch(_invariant_linear, grid, args, constants, num_warps=4, num_stages=tile.num_stages)


def variants() -> Iterator[tuple[str, Launch]]:
    """Yield the compilations for widths that are multiples of 16."""
    for kind, dtype in NARROW_TYPES.items():
        x, weight = meta(32, 4096, dtype=dtype), meta(6144, 4096, dtype=dtype)
        for name, bias in (("plain", None), ("biased", meta(6144, dtype=dtype))):
            out = meta(32, 6144, dtype=dtype)
            yield f"invariant_linear/{kind}-{name}", _launch(x, weight, bias, out)
            yield f"invariant_linear/{kind}-{name}-few", _launch(x, weight, bias, out, _FEW)
        yield f"invariant_linear/{kind}-fp32", _launch(x, weight, None, meta(32, 6144, dtype=torch.float32))
