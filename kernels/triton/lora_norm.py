"""Second half of the LoRA op of an output projection, joined with the sum and norm behind it.

It is used in steps of few tokens, as in decode. A program computes one token: it reads the token's column block of B
whole, in plain fp32 products, so it needs no tile. A separate expansion would read and write the projection's result,
and the norm would wait for that.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layouts.lora_arguments import BLOCK, Segments, ShrunkInputs, SlotTable, Tiles
from . import lora_config, norm
from .launch import NARROW_TYPES, Launch, meta
from .lora_kernels import ELEMENTS, FIELDS, cells_of

# Columns of a program -> warps, and ranks of one iteration. A program computes one row.
_CONFIGS = {1024: (4, 8), 2048: (8, 8), 4096: (8, 4), 8192: (16, 4)}


@triton.jit(do_not_specialize=["ranks", "part_size"])
def _expand_add_norm(
    y, residual, weight, out, table, places, shrunk, parts, width, ranks, part_size, eps, offset, BLOCK: tl.constexpr,
    RANKS: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Program t: add the adapter's part to row t of y, that to row t of residual, and norm this into row t of out.

    y, residual and out are [T, width], places [T, 3]; other arguments are those of ``lora_kernels._expand``. The sum of
    y and the adapter's part is rounded to the type of y, as if it were written.
    """
    token = tl.program_id(0).to(tl.int64)
    place = places + token * 3
    slot, position, tile = tl.load(place), tl.load(place + 1).to(tl.int64), tl.load(place + 2)
    at = token * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(y + at + column, inside, other=0.0).to(tl.float32)
    row = table + tl.maximum(slot, 0) * FIELDS
    rank = tl.load(row + 5, slot >= 0, other=0).to(tl.int32)
    if rank > 0:
        count = tl.load(parts + tile)
        b = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(B)), 16)
        cells, step = cells_of(column, width, rank, 0, BLOCK, WHOLE)
        part = tl.arange(0, PARTS)
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, rank, RANKS):
            r = start + tl.arange(0, RANKS)
            is_rank = r < rank
            source = shrunk + part[:, None] * part_size + position * ranks + r[None, :]
            factor = tl.sum(tl.load(source, (part < count)[:, None] & is_rank[None, :], other=0.0), 0)
            pointers = b + cells[None, :] + r[:, None] * step[None, :]
            matrix = tl.load(pointers, is_rank[:, None] & inside[None, :], other=0.0).to(tl.float32)
            sums += tl.sum(factor[:, None] * matrix, 0)
        gain, add = tl.load(row + 3), tl.load(row + 4)
        gains = tl.load(gain.to(tl.pointer_type(tl.float32)) + column, inside & (gain != 0), other=1.0)
        adds = tl.load(add.to(tl.pointer_type(tl.float32)) + column, inside & (add != 0), other=0.0)
        value = ((value + sums) * gains + adds).to(y.dtype.element_ty).to(tl.float32)
    value += tl.load(residual + at + column, inside, other=0.0)
    tl.store(residual + at + column, value, inside)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    factors = offset + tl.load(weight + column, inside, other=0.0).to(tl.float32)
    tl.store(out + at + column, (value * scale * factors).to(out.dtype.element_ty), inside)


def takes(y: Tensor, residual: Tensor, weight: Tensor, table: SlotTable, tiles: Tiles) -> bool:
    """Return whether the kernel supports this: few tokens, one module, rows of up to 8,192 in the factors' type."""
    return (
        tiles.places is not None
        and len(tiles.places) >= len(y)
        and table.sizes == y.shape[1:]
        and y.shape[1] <= max(_CONFIGS)
        and y.dtype is table.dtype
        and norm.takes_sum(y, residual, weight)
    )


def expand_add_norm(
    y: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    shrunk: ShrunkInputs,
    table: SlotTable,
    segments: Segments,
) -> Tensor:
    """Return ``kernels.ops.add_rms_norm`` of y [T, H] plus the adapters' part; y is not changed."""
    assert segments.tiles is not None and segments.tiles.places is not None
    out = torch.empty_like(y)
    shrunk.wait()
    _launch(y, residual, weight, out, eps, offset, table, segments.tiles.places, shrunk.sums, shrunk.parts).run()
    return out


def _launch(
    y: Tensor,
    residual: Tensor,
    weight: Tensor,
    out: Tensor,
    eps: float,
    offset: float,
    table: SlotTable,
    places: Tensor,
    sums: Tensor,
    parts: Tensor,
) -> Launch:
    _, num_positions, ranks = sums.shape
    num_tokens, width = out.shape
    block = min(block for block in _CONFIGS if block >= width)
    num_warps, at_once = _CONFIGS[block]
    constants = {
        "BLOCK": block,
        "RANKS": at_once,
        "PARTS": lora_config.MOST_SPLITS[lora_config.SHORT],
        "WHOLE": width % BLOCK == 0,
        "B": ELEMENTS[table.dtype],
    }
    numbers = (width, ranks, num_positions * ranks, eps, offset)
    args = (y, residual, weight, out, table.rows, places, sums, parts, *numbers)
    return Launch(_expand_add_norm, (num_tokens, 1, 1), args, constants, num_warps)


def variants() -> Iterator[tuple[str, Launch]]:
    """Yield every compilation for widths that are multiples of 64."""
    numbers, places = meta(1, dtype=torch.int32), meta(1, 3, dtype=torch.int32)
    sums = meta(lora_config.MOST_SPLITS[lora_config.SHORT], 1, 48, dtype=torch.float32)
    for name, dtype in NARROW_TYPES.items():
        for block in _CONFIGS:
            table = SlotTable((block,), 4096, 1, dtype, numbers.device)
            y, residual = meta(2, block, dtype=dtype), meta(2, block, dtype=torch.float32)
            launch = _launch(y, residual, y[0], y, 1e-5, 0.0, table, places, sums, numbers)
            yield f"lora_expand_add_norm/{name}-{block}", launch
