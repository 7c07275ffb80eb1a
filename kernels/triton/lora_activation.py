"""Second half of the LoRA op of an MLP's gate and up, joined with its activation: ``act(gate + B s) * (up + B s)``.

It is used for short tiles, as in decode. The launch has programs for the tokens of tiles, and further programs for
tokens of the base model, which are in no tile. The product of gate and up is read once and not written again: a
separate expansion would read and write all of it, and the activation would wait for that.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layouts.lora_arguments import BLOCK, Segments, ShrunkInputs, SlotTable, Tiles
from . import activation, lora_config
from .activation import activated
from .launch import NARROW_TYPES, Launch, cdiv, meta
from .lora_kernels import ELEMENTS, FIELDS, cells_of, changed, expanded

_TOKENS_AT_ONCE = tl.constexpr(128)  # number of adapted tokens that a program compares with its own in one iteration
_COLUMNS, _RANKS, _NUM_WARPS, _NUM_STAGES = 64, 32, 4, 2


@triton.jit
def _in_tiles(token, tokens, tiles, num_tiles, TILE: tl.constexpr):
    """Return whether each token [TILE] is in one of the tiles, which together contain the first part of ``tokens``."""
    count = 0
    for start in range(0, num_tiles, _TOKENS_AT_ONCE):
        index = start + tl.arange(0, _TOKENS_AT_ONCE)
        count = tl.maximum(count, tl.max(tl.load(tiles + index * 3 + 2, index < num_tiles, other=0), 0))
    found = tl.zeros((TILE,), tl.int32)
    for start in range(0, count, _TOKENS_AT_ONCE):
        position = start + tl.arange(0, _TOKENS_AT_ONCE)
        other = tl.load(tokens + position, position < count, other=-1)
        found = tl.maximum(found, tl.max((token[:, None] == other[None, :]).to(tl.int32), 1))
    return found > 0


@triton.jit(do_not_specialize=["ranks", "part_size", "num_tiles", "num_tokens"])
def _expand_gated(
    y, out, table, tokens, tiles, shrunk, parts, ranks, part_size, num_tiles, num_tokens, width, KIND: tl.constexpr,
    TILE: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """Program (c, t): a block of columns of out for the tokens of tile t; tiles after the last are TILE of all tokens.

    Programs of the latter tiles compute only tokens that are in no tile. y is [T, 2 * width], gate and up; out is [T,
    width]. Other arguments are those of ``lora_kernels._expand``. An adapter's change of y is rounded to the type of y,
    as if it were written.
    """
    number = tl.program_id(1)
    row = table
    position = tl.arange(0, TILE)
    token = tl.arange(0, TILE)
    is_token = token < 0
    rank0 = 0
    rank1 = 0
    count = 0
    if number < num_tiles:
        tile = tiles + number * 3
        first, end = tl.load(tile + 1), tl.load(tile + 2)
        row = table + tl.load(tile) * FIELDS
        position = first + tl.arange(0, TILE)
        is_token = position < end
        token = tl.load(tokens + position, is_token, other=0)
        rank0 = tl.load(row + 5, first < end, other=0).to(tl.int32)
        rank1 = tl.load(row + 6, first < end, other=0).to(tl.int32)
        count = tl.load(parts + number, first < end, other=0)
    else:
        token = (number - num_tiles) * TILE + tl.arange(0, TILE)
        is_token = (token < num_tokens) & ~_in_tiles(token, tokens, tiles, num_tiles, TILE)
    if tl.max(is_token.to(tl.int32), 0) > 0:
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < width
        written = is_token[:, None] & inside[None, :]
        b = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(B)), 16)
        source = y + token.to(tl.int64)[:, None] * (2 * width) + column[None, :]
        cells, step = cells_of(column, width, rank0, 0, COLUMNS, WHOLE)
        sums = expanded(
            b, cells, step, shrunk, count, position, is_token, inside, ranks, 0, rank0, part_size, TILE, COLUMNS, RANKS,
            PARTS,
        )  # fmt: skip
        gate = changed(source, sums, row, column, written, inside & (rank0 > 0)).to(tl.float32)
        cells, step = cells_of(column, width, rank1, rank0 * width, COLUMNS, WHOLE)
        sums = expanded(
            b, cells, step, shrunk, count, position, is_token, inside, ranks, rank0, rank1, part_size, TILE, COLUMNS,
            RANKS, PARTS,
        )  # fmt: skip
        up = changed(source + width, sums, row, width + column, written, inside & (rank1 > 0)).to(tl.float32)
        target = out + token.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(target, (activated(gate, KIND) * up).to(out.dtype.element_ty), written)


def takes(y: Tensor, table: SlotTable, tiles: Tiles) -> bool:
    """Return whether the kernel supports this: short tiles, and gate and up of one size, in the factors' type."""
    return (
        tiles.size == lora_config.SHORT
        and len(table.sizes) == 2
        and table.sizes[0] == table.sizes[1]
        and y.shape[1] == sum(table.sizes)
        and y.dtype is table.dtype
        and activation.takes(y)
    )


def expand_gated(y: Tensor, kind: str, shrunk: ShrunkInputs, table: SlotTable, segments: Segments) -> Tensor:
    """Return the activation of y [T, 2 * I] plus the adapters' part, [T, I]; y is not changed."""
    assert segments.tiles is not None
    out = y.new_empty(y.shape[0], table.sizes[0])
    shrunk.wait()
    _launch(y, out, kind, table, segments.tokens, segments.tiles, shrunk.sums, shrunk.parts).run()
    return out


def _launch(
    y: Tensor, out: Tensor, kind: str, table: SlotTable, tokens: Tensor, tiles: Tiles, sums: Tensor, parts: Tensor
) -> Launch:
    _, num_positions, ranks = sums.shape
    num_tokens, width = out.shape
    count = tiles.lines.shape[0]
    numbers = (ranks, num_positions * ranks, count, num_tokens, width)
    constants = {
        "KIND": kind,
        "TILE": tiles.size,
        "COLUMNS": _COLUMNS,
        "RANKS": _RANKS,
        "PARTS": lora_config.MOST_SPLITS[tiles.size],
        "WHOLE": width % BLOCK == 0,
        "B": ELEMENTS[table.dtype],
    }
    grid = (cdiv(width, _COLUMNS), count + cdiv(num_tokens, tiles.size), 1)
    args = (y, out, table.rows, tokens, tiles.lines, sums, parts, *numbers)
    return Launch(_expand_gated, grid, args, constants, _NUM_WARPS, _NUM_STAGES)


def variants() -> Iterator[tuple[str, Launch]]:
    """Yield the compilations for widths that are multiples of 64."""
    numbers, tiles = meta(1, dtype=torch.int32), Tiles(meta(1, 3, dtype=torch.int32), lora_config.SHORT)
    for name, dtype in NARROW_TYPES.items():
        table = SlotTable((14336, 14336), 4096, 1, dtype, numbers.device)
        y, out = meta(1, 28672, dtype=dtype), meta(1, 14336, dtype=dtype)
        sums = meta(lora_config.MOST_SPLITS[tiles.size], 1, 48, dtype=torch.float32)
        for kind in activation.KINDS:
            yield f"lora_expand_gated/{name}-{kind}", _launch(y, out, kind, table, numbers, tiles, sums, numbers)
