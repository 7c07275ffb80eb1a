"""The low-rank op of many adapters in two kernels: shrink, ``s = scale * A x``; expand, ``y = gain (y + B s) + add``.

A program owns a tile, tokens of one adapter, and reads the adapter's own factors through the table of slots, at its own
ranks: nothing is padded to those of another, and tokens of the base model are in no tile. The modules of a projection
(q, k and v; gate and up) are one launch of each kernel. ``s`` is fp32, in as many parts as the inputs were split; the
expansion adds the parts in order, so nothing depends on which program ran first.

Indices are not checked on the device: the host made them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layouts.lora_arguments import BLOCK, MOST_MODULES, ROW_FIELDS, Tiles
from .launch import TYPES, Launch, cdiv, meta, num_sms
from .lora_config import (
    TILES,
    ExpandConfig,
    ShrinkConfig,
    expand_config,
    expand_configs,
    numbers_of_splits,
    shrink_config,
    shrink_configs,
)

_BLOCK = tl.constexpr(BLOCK)
_FIELDS = tl.constexpr(ROW_FIELDS)
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_GATHERED = 32  # ranks of an embedding that a program copies in one turn


@triton.jit
def _total_rank(line):
    """The ranks of all modules of a line of the table."""
    return (tl.load(line + 5) + tl.load(line + 6) + tl.load(line + 7)).to(tl.int32)


@triton.jit(do_not_specialize=["ranks", "part_size", "rank_blocks"])
def _shrink(
    x,
    table,
    tokens,
    tiles,
    shrunk,
    width,
    split_width,
    ranks,
    part_size,
    rank_blocks,
    TILE: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Program (p, t): ranks ``p % rank_blocks * RANKS ...`` of tile t, over part ``p // rank_blocks`` of the inputs.

    x [T, width] and A are of one type; shrunk is [parts, S, ranks] fp32.
    """
    rank_block = tl.program_id(0) % rank_blocks
    split = tl.program_id(0) // rank_blocks
    tile = tiles + tl.program_id(1) * 3
    first, end = tl.load(tile + 1), tl.load(tile + 2)
    line = table + tl.load(tile) * _FIELDS
    total = _total_rank(line)
    if (first >= end) | (rank_block * RANKS >= total):
        return
    place = first + tl.arange(0, TILE)
    taken = place < end
    token = tl.load(tokens + place, taken, other=0).to(tl.int64)
    rank = rank_block * RANKS + tl.arange(0, RANKS)
    is_rank = rank < total
    a = tl.multiple_of(tl.load(line).to(tl.pointer_type(x.dtype.element_ty)), 16)
    sums = tl.zeros((TILE, RANKS), tl.float32)
    begin = split * split_width
    for start in range(begin, tl.minimum(begin + split_width, width), INPUTS):
        column = start + tl.arange(0, INPUTS)
        inside = column < width
        rows = tl.load(x + token[:, None] * width + column[None, :], taken[:, None] & inside[None, :], other=0.0)
        factor = tl.load(a + rank[None, :] * width + column[:, None], is_rank[None, :] & inside[:, None], other=0.0)
        sums = tl.dot(rows, factor, sums, input_precision="ieee")
    scale = tl.load(tl.load(line + 1).to(tl.pointer_type(tl.float32)) + rank, is_rank, other=0.0)
    part = shrunk + split.to(tl.int64) * part_size
    tl.store(part + place[:, None] * ranks + rank[None, :], sums * scale[None, :], taken[:, None] & is_rank[None, :])


@triton.jit(do_not_specialize=["vocabulary", "ranks"])
def _gather(
    token_ids, table, tokens, tiles, shrunk, vocabulary, ranks, TILE: tl.constexpr, RANKS: tl.constexpr, A: tl.constexpr
):
    """Program t: the product with a one-hot x, which is a row of A transposed [V, R], for each token of tile t.

    A is the type of that matrix. An id outside of the vocabulary reads nothing and gives 0.
    """
    tile = tiles + tl.program_id(0) * 3
    first, end = tl.load(tile + 1), tl.load(tile + 2)
    line = table + tl.load(tile) * _FIELDS
    total = _total_rank(line)
    if first >= end:
        return
    place = first + tl.arange(0, TILE)
    taken = place < end
    id_ = tl.load(token_ids + tl.load(tokens + place, taken, other=0), taken, other=-1)
    is_id = (id_ >= 0) & (id_ < vocabulary)
    a = tl.load(line).to(tl.pointer_type(A))
    scales = tl.load(line + 1).to(tl.pointer_type(tl.float32))
    for start in range(0, total, RANKS):
        rank = start + tl.arange(0, RANKS)
        is_rank = rank < total
        row = tl.load(a + id_[:, None] * total + rank[None, :], is_id[:, None] & is_rank[None, :], other=0.0)
        value = row.to(tl.float32) * tl.load(scales + rank, is_rank, other=0.0)[None, :]
        tl.store(shrunk + place[:, None] * ranks + rank[None, :], value, taken[:, None] & is_rank[None, :])


@triton.jit
def _times(factor, matrix, sums):
    """``sums + factor @ matrix`` with an fp32 factor and a matrix of any type, to about fp32.

    With bf16 the factor is two bf16 numbers, 16 bits of mantissa, whose products are exact. fp16 has not the range for
    that: there both go as fp32, which tensor cores multiply in three products of tf32.
    """
    if matrix.dtype == tl.bfloat16:
        high = factor.to(tl.bfloat16)
        low = (factor - high.to(tl.float32)).to(tl.bfloat16)
        sums = tl.dot(high, matrix, tl.dot(low, matrix, sums))
    elif matrix.dtype == tl.float16:
        sums = tl.dot(factor, matrix.to(tl.float32), sums, input_precision="tf32x3")
    else:
        sums = tl.dot(factor, matrix, sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["ranks", "part_size"])
def _expand(
    y,
    table,
    tokens,
    tiles,
    shrunk,
    ranks,
    part_size,
    size0,
    size1,
    size2,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    B: tl.constexpr,
):
    """Program (c, t): block c of the columns of tile t, counted module by module, so that a block is of one module.

    y is [T, size0 + size1 + size2], sizes 0 for modules that are not there; shrunk [PARTS, S, ranks] fp32. WHOLE: all
    sizes are multiples of 64, so each packed block of B (``pack_expansion``) is. B is the type of that matrix.
    """
    tile = tiles + tl.program_id(1) * 3
    first, end = tl.load(tile + 1), tl.load(tile + 2)
    line = table + tl.load(tile) * _FIELDS
    rank0, rank1 = tl.load(line + 5).to(tl.int32), tl.load(line + 6).to(tl.int32)
    until0 = tl.cdiv(size0, COLUMNS)
    until1 = until0 + tl.cdiv(size1, COLUMNS)
    in1 = (tl.program_id(0) >= until0) & (tl.program_id(0) < until1)
    in2 = tl.program_id(0) >= until1
    block = tl.program_id(0) - tl.where(in2, until1, tl.where(in1, until0, 0))
    size = tl.where(in2, size2, tl.where(in1, size1, size0))
    rank = tl.where(in2, tl.load(line + 7).to(tl.int32), tl.where(in1, rank1, rank0))
    columns_before = tl.where(in2, size0 + size1, tl.where(in1, size0, 0))
    ranks_before = tl.where(in2, rank0 + rank1, tl.where(in1, rank0, 0))
    cells_before = tl.where(in2, rank0 * size0 + rank1 * size1, tl.where(in1, rank0 * size0, 0))
    if (first >= end) | (rank == 0):
        return
    if WHOLE:
        columns_before = tl.multiple_of(columns_before, _BLOCK)
        cells_before = tl.multiple_of(cells_before, _BLOCK)
    place = first + tl.arange(0, TILE)
    taken = place < end
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    # Where in the packed B the first rank of each column lies, and how far it is to the next rank.
    packed = column // _BLOCK * _BLOCK
    step = tl.full((COLUMNS,), _BLOCK, tl.int32) if WHOLE else tl.minimum(_BLOCK, size - packed)
    cells = cells_before + packed * rank + column % _BLOCK
    b = tl.multiple_of(tl.load(line + 2).to(tl.pointer_type(B)), 16)
    sums = tl.zeros((TILE, COLUMNS), tl.float32)
    for start in range(0, rank, RANKS):
        r = start + tl.arange(0, RANKS)
        is_rank = r < rank
        at = shrunk + place[:, None] * ranks + (ranks_before + r)[None, :]
        factor = tl.load(at, taken[:, None] & is_rank[None, :], other=0.0)
        for part in tl.static_range(1, PARTS):
            factor += tl.load(at + part * part_size, taken[:, None] & is_rank[None, :], other=0.0)
        matrix = tl.load(b + cells[None, :] + r[:, None] * step[None, :], is_rank[:, None] & inside[None, :], other=0.0)
        sums = _times(factor, matrix, sums)
    token = tl.load(tokens + place, taken, other=0).to(tl.int64)
    at_column = columns_before + column
    target = y + token[:, None] * (size0 + size1 + size2) + at_column[None, :]
    written = taken[:, None] & inside[None, :]
    value = tl.load(target, written, other=0.0).to(tl.float32) + sums
    gain, add = tl.load(line + 3), tl.load(line + 4)
    gains = tl.load(gain.to(tl.pointer_type(tl.float32)) + at_column, inside & (gain != 0), other=1.0)
    adds = tl.load(add.to(tl.pointer_type(tl.float32)) + at_column, inside & (add != 0), other=0.0)
    tl.store(target, (value * gains[None, :] + adds[None, :]).to(y.dtype.element_ty), written)


def shrink_expand(
    y: Tensor, x: Tensor, table: Tensor, ranks: int, sizes: tuple[int, ...], tokens: Tensor, tiles: Tiles
) -> None:
    """``kernels.lora_ops.lora_shrink_expand``: y [T, N] is changed in place, for x [T, K] in the type of the factors.

    Args:
        table: [slots, ROW_FIELDS] int64 on the device, ``table_row`` of each slot.
        ranks: at least the most that a slot has, of all modules together.
        sizes: columns of each module.
        tokens: [S] int32 on the device, the adapted tokens.
        tiles: of these.
    """
    for launch in _product(y, x, table, ranks, sizes, tokens, tiles):
        launch.run()


def embed(
    y: Tensor,
    token_ids: Tensor,
    table: Tensor,
    ranks: int,
    sizes: tuple[int, ...],
    tokens: Tensor,
    tiles: Tiles,
    vocabulary: int,
    dtype: torch.dtype,
) -> None:
    """Add the adapters' embeddings (``lora_embed``) to y [T, H] in place; token ids [T] int64, factors of ``dtype``."""
    for launch in _embedding(y, token_ids, table, ranks, sizes, tokens, tiles, vocabulary, dtype):
        launch.run()


def _product(
    y: Tensor, x: Tensor, table: Tensor, ranks: int, sizes: tuple[int, ...], tokens: Tensor, tiles: Tiles
) -> tuple[Launch, Launch]:
    width, sms, count = x.shape[1], num_sms(x.device), tiles.lines.shape[0]
    shrink = shrink_config(tiles.size, count, ranks, width, x.element_size(), sms)
    expand = expand_config(tiles.size, count, sum(sizes), sms)
    shrunk = x.new_empty((shrink.splits, tokens.shape[0], ranks), dtype=torch.float32)
    return (
        _shrink_launch(x, table, tokens, tiles, shrunk, shrink),
        _expand_launch(y, table, tokens, tiles, shrunk, sizes, x.dtype, expand),
    )


def _embedding(
    y: Tensor,
    token_ids: Tensor,
    table: Tensor,
    ranks: int,
    sizes: tuple[int, ...],
    tokens: Tensor,
    tiles: Tiles,
    vocabulary: int,
    dtype: torch.dtype,
) -> tuple[Launch, Launch]:
    shrunk = y.new_empty((1, tokens.shape[0], ranks), dtype=torch.float32)
    expand = expand_config(tiles.size, tiles.lines.shape[0], sum(sizes), num_sms(y.device))
    return (
        _gather_launch(token_ids, table, tokens, tiles, shrunk, vocabulary, dtype),
        _expand_launch(y, table, tokens, tiles, shrunk, sizes, dtype, expand),
    )


def _shrink_launch(
    x: Tensor, table: Tensor, tokens: Tensor, tiles: Tiles, shrunk: Tensor, config: ShrinkConfig
) -> Launch:
    splits, num_tokens, ranks = shrunk.shape
    rank_blocks = cdiv(ranks, config.ranks)
    width = x.shape[1]
    numbers = (width, config.split_width(width), ranks, num_tokens * ranks, rank_blocks)
    constants = {"TILE": tiles.size, "RANKS": config.ranks, "INPUTS": config.inputs}
    return Launch(
        _shrink,
        (rank_blocks * splits, tiles.lines.shape[0], 1),
        (x, table, tokens, tiles.lines, shrunk, *numbers),
        constants,
        config.num_warps,
        config.num_stages,
    )


def _gather_launch(
    token_ids: Tensor,
    table: Tensor,
    tokens: Tensor,
    tiles: Tiles,
    shrunk: Tensor,
    vocabulary: int,
    dtype: torch.dtype,
) -> Launch:
    constants = {"TILE": tiles.size, "RANKS": _GATHERED, "A": _TYPES[dtype]}
    args = (token_ids, table, tokens, tiles.lines, shrunk, vocabulary, shrunk.shape[2])
    return Launch(_gather, (tiles.lines.shape[0], 1, 1), args, constants)


def _expand_launch(
    y: Tensor,
    table: Tensor,
    tokens: Tensor,
    tiles: Tiles,
    shrunk: Tensor,
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    config: ExpandConfig,
) -> Launch:
    parts, num_tokens, ranks = shrunk.shape
    blocks = sum(cdiv(size, config.columns) for size in sizes)
    constants = {
        "TILE": tiles.size,
        "COLUMNS": config.columns,
        "RANKS": config.ranks,
        "PARTS": parts,
        "WHOLE": all(size % BLOCK == 0 for size in sizes),
        "B": _TYPES[dtype],
    }
    return Launch(
        _expand,
        (blocks, tiles.lines.shape[0], 1),
        (y, table, tokens, tiles.lines, shrunk, ranks, num_tokens * ranks, *sizes, *(0,) * (MOST_MODULES - len(sizes))),
        constants,
        config.num_warps,
        config.num_stages,
    )


def variants() -> Iterator[tuple[str, Launch]]:
    """Every compilation that the op can ask for in a model whose widths are multiples of 64."""
    table, tokens = meta(1, ROW_FIELDS, dtype=torch.int64), meta(1, dtype=torch.int32)
    for kind, dtype in TYPES.items():
        x = meta(1, 4096, dtype=dtype)
        for size in TILES:
            tiles = Tiles(meta(1, 3, dtype=torch.int32), size)
            ids = meta(1, dtype=torch.int64)
            shrunk = meta(1, 1, 48, dtype=torch.float32)
            yield f"lora_gather/{kind}-tile{size}", _gather_launch(ids, table, tokens, tiles, shrunk, 64, dtype)
            for shrink in shrink_configs(size, dtype.itemsize):
                name = f"lora_shrink/{kind}-tile{size}-ranks{shrink.ranks}"
                yield name, _shrink_launch(x, table, tokens, tiles, shrunk, shrink)
            for expand, parts in itertools.product(expand_configs(size), numbers_of_splits(size)):
                several = meta(parts, 1, 48, dtype=torch.float32)
                for y_kind in dict.fromkeys((kind, "fp32")):
                    y = meta(1, 6144, dtype=TYPES[y_kind])
                    name = f"lora_expand/{kind}-{y_kind}-tile{size}-columns{expand.columns}-parts{parts}"
                    yield name, _expand_launch(y, table, tokens, tiles, several, (6144,), dtype, expand)
