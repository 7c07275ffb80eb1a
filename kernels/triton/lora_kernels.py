"""Triton LoRA op for many adapters: shrink, ``s = scale * A x``, then expand, ``y = gain (y + B s) + add``.

A program has one tile, which holds tokens of one adapter, and reads the adapter's factors through the table of slots at
the adapter's own ranks: nothing is padded to the ranks of another adapter, and tokens of the base model are in no tile.
The modules of a projection (q, k and v; gate and up) share one launch of each kernel. ``s`` is fp32, in as many parts
as the inputs are split into; the expansion adds the parts in order, so the result does not depend on the order of
programs.

The number of parts for short tiles is chosen on the device, from the number of tiles with tokens and the rank of each
tile's adapter: a captured pass has room for more tiles and larger ranks than its steps have. Long tiles are never
captured.

Indices come from the host and are not checked on the device.

A row of the table: addresses of A, scale, B, gain and add, then the ranks of three modules, 0 for missing ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layouts.lora_arguments import BLOCK, MOST_MODULES, ROW_FIELDS, Segments, ShrunkInputs, SlotTable, Tiles
from . import lora_config
from .graph_branch import start_beside
from .launch import NARROW_TYPES, TYPES, Launch, cdiv, meta, multiplies_registers, num_sms
from .lora_config import ExpandConfig, ShrinkConfig

_BLOCK = tl.constexpr(BLOCK)
FIELDS = tl.constexpr(ROW_FIELDS)
ELEMENTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_GATHERED = 32  # number of ranks of an embedding that a program copies in one iteration
_MANY_TILES = 1 << 20
_SHORT = tl.constexpr(lora_config.SHORT)
_TILES_AT_ONCE = tl.constexpr(128)  # number of tiles that a program counts in one iteration
_ODD_VOCABULARY = 50_257  # columns of GPT-2's head, no multiple of 64


@triton.jit
def _total_rank(row):
    """Return the sum of the ranks of all modules in a row of the table."""
    return (tl.load(row + 5) + tl.load(row + 6) + tl.load(row + 7)).to(tl.int32)


@triton.jit
def _num_filled(tiles, count):
    """Return the number of tiles that have tokens."""
    filled = 0
    for start in range(0, count, _TILES_AT_ONCE):
        index = start + tl.arange(0, _TILES_AT_ONCE)
        inside = index < count
        first = tl.load(tiles + index * 3 + 1, inside, other=0)
        end = tl.load(tiles + index * 3 + 2, inside, other=0)
        filled += tl.sum((first < end).to(tl.int32), 0)
    return filled


@triton.jit(do_not_specialize=["ranks", "part_size", "rank_blocks", "num_tiles", "wanted", "most"])
def _shrink(
    x, table, tokens, tiles, shrunk, parts, width, ranks, part_size, rank_blocks, num_tiles, wanted, most,
    TILE: tl.constexpr, RANKS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Program (p, t): ranks ``p % rank_blocks * RANKS ...`` of tile t, over part ``p // rank_blocks`` of the inputs.

    x [T, width] and A are of one type; shrunk is [most, S, ranks] fp32. Inputs of a tile are split into ``parts[t]``
    parts, at most ``most``, so that all tiles together have about ``wanted`` programs; of long tiles into ``most``.
    """
    rank_block = tl.program_id(0) % rank_blocks
    split = tl.program_id(0) // rank_blocks
    tile = tiles + tl.program_id(1) * 3
    first, end = tl.load(tile + 1), tl.load(tile + 2)
    row = table + tl.load(tile) * FIELDS
    total = _total_rank(row)
    if (first >= end) | (rank_block * RANKS >= total):
        return
    splits = most
    if TILE == _SHORT:
        programs = _num_filled(tiles, num_tiles) * tl.cdiv(total, RANKS)
        splits = tl.maximum(tl.minimum(wanted // tl.maximum(programs, 1), most), 1)
    if (split == 0) & (rank_block == 0):
        tl.store(parts + tl.program_id(1), splits)
    if split >= splits:
        return
    split_width = tl.cdiv(tl.cdiv(width, INPUTS), splits) * INPUTS
    position = first + tl.arange(0, TILE)
    is_token = position < end
    token = tl.load(tokens + position, is_token, other=0).to(tl.int64)
    rank = rank_block * RANKS + tl.arange(0, RANKS)
    is_rank = rank < total
    a = tl.multiple_of(tl.load(row).to(tl.pointer_type(x.dtype.element_ty)), 16)
    sums = tl.zeros((TILE, RANKS), tl.float32)
    begin = split * split_width
    for start in range(begin, tl.minimum(begin + split_width, width), INPUTS):
        column = start + tl.arange(0, INPUTS)
        inside = column < width
        rows = tl.load(x + token[:, None] * width + column[None, :], is_token[:, None] & inside[None, :], other=0.0)
        factor = tl.load(a + rank[None, :] * width + column[:, None], is_rank[None, :] & inside[:, None], other=0.0)
        sums = tl.dot(rows, factor, sums, input_precision="ieee")
    scale = tl.load(tl.load(row + 1).to(tl.pointer_type(tl.float32)) + rank, is_rank, other=0.0)
    part = shrunk + split.to(tl.int64) * part_size
    tl.store(
        part + position[:, None] * ranks + rank[None, :], sums * scale[None, :], is_token[:, None] & is_rank[None, :]
    )


@triton.jit(do_not_specialize=["vocabulary", "ranks"])
def _gather(
    token_ids, table, tokens, tiles, shrunk, parts, vocabulary, ranks, TILE: tl.constexpr, RANKS: tl.constexpr,
    A: tl.constexpr,
):  # fmt: skip
    """Program t: the product with a one-hot x, a row of A transposed [V, R], for each token of tile t, in one part.

    ``A`` is the element type of A. For an id outside of the vocabulary nothing is read, and the result is 0.
    """
    tile = tiles + tl.program_id(0) * 3
    first, end = tl.load(tile + 1), tl.load(tile + 2)
    row = table + tl.load(tile) * FIELDS
    total = _total_rank(row)
    if first >= end:
        return
    tl.store(parts + tl.program_id(0), 1)
    position = first + tl.arange(0, TILE)
    is_token = position < end
    id_ = tl.load(token_ids + tl.load(tokens + position, is_token, other=0), is_token, other=-1)
    is_id = (id_ >= 0) & (id_ < vocabulary)
    a = tl.load(row).to(tl.pointer_type(A))
    scales = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    for start in range(0, total, RANKS):
        rank = start + tl.arange(0, RANKS)
        is_rank = rank < total
        factor = tl.load(a + id_[:, None] * total + rank[None, :], is_id[:, None] & is_rank[None, :], other=0.0)
        value = factor.to(tl.float32) * tl.load(scales + rank, is_rank, other=0.0)[None, :]
        tl.store(shrunk + position[:, None] * ranks + rank[None, :], value, is_token[:, None] & is_rank[None, :])


@triton.jit
def times(factor, matrix, sums):
    """Return ``sums + factor @ matrix`` with an fp32 factor and a matrix of any type, to about fp32 precision.

    For bf16 the factor is split into two bf16 numbers, 16 bits of mantissa, whose products are exact. fp16 lacks the
    range for that: both operands become fp32, which tensor cores multiply in three products of tf32.
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


@triton.jit
def of_module(is1, is2, value0, value1, value2):
    """Return the value for the module of a program: module 1 or 2 if the flags say so, else module 0."""
    return tl.where(is2, value2, tl.where(is1, value1, value0))


@triton.jit
def _module(row, size0, size1, size2, COLUMNS: tl.constexpr):
    """Return the block of columns of one module that program (c, t) computes.

    Returns:
        The block's number in the module, then the module's columns and rank, then the columns, ranks and cells of B of
        the modules before it.
    """
    rank0, rank1 = tl.load(row + 5).to(tl.int32), tl.load(row + 6).to(tl.int32)
    until0 = tl.cdiv(size0, COLUMNS)
    until1 = until0 + tl.cdiv(size1, COLUMNS)
    is1 = (tl.program_id(0) >= until0) & (tl.program_id(0) < until1)
    is2 = tl.program_id(0) >= until1
    block = tl.program_id(0) - of_module(is1, is2, 0, until0, until1)
    size = of_module(is1, is2, size0, size1, size2)
    rank = of_module(is1, is2, rank0, rank1, tl.load(row + 7).to(tl.int32))
    columns_before = of_module(is1, is2, 0, size0, size0 + size1)
    ranks_before = of_module(is1, is2, 0, rank0, rank0 + rank1)
    cells_before = of_module(is1, is2, 0, rank0 * size0, rank0 * size0 + rank1 * size1)
    return block, size, rank, columns_before, ranks_before, cells_before


@triton.jit
def cells_of(column, size, rank, cells_before, COLUMNS: tl.constexpr, WHOLE: tl.constexpr):
    """Return for each column of a module the beginning of B and the distance of its ranks, as in ``pack_expansion``."""
    packed = column // _BLOCK * _BLOCK
    step = tl.full((COLUMNS,), _BLOCK, tl.int32) if WHOLE else tl.minimum(_BLOCK, size - packed)
    return cells_before + packed * rank + column % _BLOCK, step


@triton.jit
def changed(source, sums, row, at_column, written, inside):
    """Return ``gain (source + sums) + add`` where ``written``; gain and add of the row are each a vector or absent."""
    value = tl.load(source, written, other=0.0).to(tl.float32) + sums
    gain, add = tl.load(row + 3), tl.load(row + 4)
    gains = tl.load(gain.to(tl.pointer_type(tl.float32)) + at_column, inside & (gain != 0), other=1.0)
    adds = tl.load(add.to(tl.pointer_type(tl.float32)) + at_column, inside & (add != 0), other=0.0)
    return (value * gains[None, :] + adds[None, :]).to(source.dtype.element_ty)


@triton.jit
def whole_inputs(
    shrunk, parts, position, is_token, is_rank, ranks, rank, part_size, TILE: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Return ``s[position, rank]`` [TILE, RANKS], the sum of all parts in order, 0 where there is no token or rank.

    Loads of ``PARTS`` parts run in parallel; for parts that a short tile lacks, nothing is read.
    """
    at = shrunk + position[:, None] * ranks + rank[None, :]
    is_there = is_token[:, None] & is_rank[None, :]
    factor = tl.load(at, is_there, other=0.0)
    for part in tl.static_range(1, PARTS):
        is_part = is_there
        if TILE == _SHORT:
            is_part = is_there & (part < parts)
        factor += tl.load(at + part * part_size, is_part, other=0.0)
    return factor


@triton.jit
def expanded(
    b, cells, step, shrunk, parts, position, is_token, inside, ranks, first_rank, rank, part_size, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, RANKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """``B s`` [TILE, COLUMNS]: ``sum over r < rank of s[position, first_rank + r] * B[., r]``, s the sum of all parts.

    ``B[., r]`` of a column is at ``b + cells + r * step``.
    """
    sums = tl.zeros((TILE, COLUMNS), tl.float32)
    for start in range(0, rank, RANKS):
        r = start + tl.arange(0, RANKS)
        is_rank = r < rank
        factor = whole_inputs(
            shrunk, parts, position, is_token, is_rank, ranks, first_rank + r, part_size, TILE, PARTS
        )  # fmt: skip
        matrix = tl.load(b + cells[None, :] + r[:, None] * step[None, :], is_rank[:, None] & inside[None, :], other=0.0)
        sums = times(factor, matrix, sums)
    return sums


@triton.jit(do_not_specialize=["ranks", "part_size"])
def _expand(
    y, table, tokens, tiles, shrunk, parts, ranks, part_size, size0, size1, size2, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, RANKS: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Program (c, t): one block of columns of one module m, for the tokens of tile t.

        y[token, n] = gain[n] * (y[token, n] + sum over r < rank_m of s[token, ranks_before + r] * B_m[j, r]) + add[n]
        n = columns_before + j          s = sum over the first parts[t] of shrunk, [S, ranks]

    where ``_before`` counts the modules 0 .. m - 1. Programs c are numbered module by module: ceil(size / COLUMNS) of
    each, so no block spans two modules. Module m has size_m * rank_m cells of B, packed by ``pack_expansion`` in blocks
    of 64 columns, ``B_m[j, r]`` at

        cells_before + (j // 64 * 64) * rank_m + r * width + j % 64          width = min(64, size_m - j // 64 * 64)

    y is [T, size0 + size1 + size2], sizes 0 for missing modules; shrunk [PARTS, S, ranks] fp32. ``WHOLE``: all sizes
    are multiples of 64, and so is each width. ``B`` is the element type of B.
    """
    tile = tiles + tl.program_id(1) * 3
    first, end = tl.load(tile + 1), tl.load(tile + 2)
    row = table + tl.load(tile) * FIELDS
    block, size, rank, columns_before, ranks_before, cells_before = _module(row, size0, size1, size2, COLUMNS)
    if (first >= end) | (rank == 0):
        return
    if WHOLE:
        columns_before = tl.multiple_of(columns_before, _BLOCK)
        cells_before = tl.multiple_of(cells_before, _BLOCK)
    position = first + tl.arange(0, TILE)
    is_token = position < end
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    cells, step = cells_of(column, size, rank, cells_before, COLUMNS, WHOLE)
    b = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(B)), 16)
    sums = expanded(
        b, cells, step, shrunk, tl.load(parts + tl.program_id(1)), position, is_token, inside, ranks, ranks_before,
        rank, part_size, TILE, COLUMNS, RANKS, PARTS,
    )  # fmt: skip
    token = tl.load(tokens + position, is_token, other=0).to(tl.int64)
    at_column = columns_before + column
    target = y + token[:, None] * (size0 + size1 + size2) + at_column[None, :]
    written = is_token[:, None] & inside[None, :]
    tl.store(target, changed(target, sums, row, at_column, written, inside), written)


def shrink_expand(
    y: Tensor,
    x: Tensor | None,
    token_ids: Tensor | None,
    table: SlotTable,
    segments: Segments,
    *,
    invariant: bool = False,
) -> None:
    """``kernels.lora_reference.lora_shrink_expand`` for segments with tiles; ids out of range read nothing.

    Args:
        invariant: whether sums are not split, so that for tiles of one size the bits of a token depend on it alone.
    """
    assert segments.tiles is not None
    first, sums, parts = _first_launch(x, token_ids, table, segments.tokens, segments.tiles, invariant=invariant)
    first.run()
    _second_launch(y, table, segments.tokens, segments.tiles, sums, parts, invariant=invariant).run()


def shrink_beside(x: Tensor, table: SlotTable, segments: Segments, *, invariant: bool = False) -> ShrunkInputs:
    """Start the first half of ``shrink_expand``; in a captured pass it runs parallel to the next launches."""
    assert segments.tiles is not None
    first, sums, parts = _first_launch(x, None, table, segments.tokens, segments.tiles, invariant=invariant)
    return ShrunkInputs(sums, parts, start_beside(first.run))


def expand(y: Tensor, shrunk: ShrunkInputs, table: SlotTable, segments: Segments, *, invariant: bool = False) -> None:
    """Do the second half of ``shrink_expand`` once the first one has ended."""
    assert segments.tiles is not None
    shrunk.wait()
    launch = _second_launch(y, table, segments.tokens, segments.tiles, shrunk.sums, shrunk.parts, invariant=invariant)
    launch.run()


def shrink_expand_rows(y: Tensor, x: Tensor, table: SlotTable, rows: Tensor, targets: Tensor, tiles: Tiles) -> None:
    """Do `shrink_expand` where position i of the tiles is row ``rows[i]`` of x and ``targets[i]`` of y, [S] int32."""
    first, sums, parts = _first_launch(x, None, table, rows, tiles)
    first.run()
    _second_launch(y, table, targets, tiles, sums, parts).run()


def _first_launch(
    x: Tensor | None,
    token_ids: Tensor | None,
    table: SlotTable,
    tokens: Tensor,
    tiles: Tiles,
    *,
    invariant: bool = False,
) -> tuple[Launch, Tensor, Tensor]:
    """Return the launch of ``scale * A x``, the sums that it writes in parts, and the number of parts of each tile."""
    sms, count, ranks = num_sms(tokens.device), tiles.lines.shape[0], table.total_rank
    config = None
    if x is not None:
        config = lora_config.shrink_config(tiles.size, ranks, table.width, x.element_size())
    most = 1 if invariant or config is None else config.most_splits
    # Nearly all long tiles have tokens, and their parts need much memory.
    if tiles.size == lora_config.LONG:
        most = min(most, lora_config.splits_of_long(count * cdiv(ranks, config.ranks) if config else count, sms))
    sums = tokens.new_empty((most, tokens.shape[0], ranks), dtype=torch.float32)
    parts = tokens.new_empty(count)
    if x is not None and config is not None:
        return _shrink_launch(x, table, tokens, tiles, sums, parts, config, sms), sums, parts
    assert token_ids is not None
    return _gather_launch(token_ids, table, tokens, tiles, sums, parts), sums, parts


def _second_launch(
    y: Tensor, table: SlotTable, tokens: Tensor, tiles: Tiles, sums: Tensor, parts: Tensor, *, invariant: bool = False
) -> Launch:
    """Return the launch that adds ``B`` times the sums to y, for tokens that are rows of y."""
    # For invariant sums all steps use tiles of one width.
    count = _MANY_TILES if invariant else tiles.lines.shape[0]
    config = lora_config.expand_config(tiles.size, count, sum(table.sizes), num_sms(y.device))
    return _expand_launch(y, table, tokens, tiles, sums, parts, config)


def _shrink_launch(
    x: Tensor,
    table: SlotTable,
    tokens: Tensor,
    tiles: Tiles,
    shrunk: Tensor,
    parts: Tensor,
    config: ShrinkConfig,
    sms: int,
) -> Launch:
    most, num_tokens, ranks = shrunk.shape
    rank_blocks, count = cdiv(ranks, config.ranks), tiles.lines.shape[0]
    grid = (rank_blocks * most, count, 1)
    numbers = (table.width, ranks, num_tokens * ranks, rank_blocks, count, lora_config.wanted_programs(sms), most)
    args = (x, table.rows, tokens, tiles.lines, shrunk, parts, *numbers)
    constants = {"TILE": tiles.size, "RANKS": config.ranks, "INPUTS": config.inputs}
    return Launch(_shrink, grid, args, constants, config.num_warps, config.num_stages)


def _gather_launch(
    ids: Tensor, table: SlotTable, tokens: Tensor, tiles: Tiles, shrunk: Tensor, parts: Tensor
) -> Launch:
    constants = {"TILE": tiles.size, "RANKS": _GATHERED, "A": ELEMENTS[table.dtype]}
    args = (ids, table.rows, tokens, tiles.lines, shrunk, parts, table.width, shrunk.shape[2])
    return Launch(_gather, (tiles.lines.shape[0], 1, 1), args, constants)


def _expand_launch(
    y: Tensor, table: SlotTable, tokens: Tensor, tiles: Tiles, shrunk: Tensor, splits: Tensor, config: ExpandConfig
) -> Launch:
    most, num_tokens, ranks = shrunk.shape
    sizes = (*table.sizes, *(0,) * (MOST_MODULES - len(table.sizes)))
    grid = (sum(cdiv(size, config.columns) for size in sizes), tiles.lines.shape[0], 1)
    args = (y, table.rows, tokens, tiles.lines, shrunk, splits, ranks, num_tokens * ranks, *sizes)
    # Where tensor cores take both operands from registers, long tiles would spill up to 640 bytes on four warps. On
    # eight warps, those of float16 and of odd widths would spill 88 bytes with as many ranks at once as on other
    # devices. On an H200 four warps are the fastest.
    is_spread = tiles.size == lora_config.LONG and multiplies_registers(y.device)
    is_whole = all(size % BLOCK == 0 for size in sizes)
    has_few_ranks = is_spread and (table.dtype is torch.float16 or not is_whole)
    constants = {
        "TILE": tiles.size,
        "COLUMNS": config.columns,
        "RANKS": min(config.ranks, 16) if has_few_ranks else config.ranks,
        # One compilation is enough for short tiles, because few numbers are loaded for each of their parts.
        "PARTS": most if tiles.size == lora_config.LONG else lora_config.MOST_SPLITS[tiles.size],
        "WHOLE": is_whole,
        "B": ELEMENTS[table.dtype],
    }
    return Launch(_expand, grid, args, constants, config.num_warps * (2 if is_spread else 1), config.num_stages)


def variants() -> Iterator[tuple[str, Launch]]:
    """Yield every compilation of the op in a model whose widths are multiples of 64, but for its vocabulary."""
    tokens, ids = meta(1, dtype=torch.int32), meta(1, dtype=torch.int64)
    for kind, dtype in TYPES.items():
        table = SlotTable((6144,), 4096, 1, dtype, torch.device("meta"))
        x = meta(1, table.width, dtype=dtype)
        for size in lora_config.TILES:
            tiles = Tiles(meta(1, 3, dtype=torch.int32), size)
            shrunk, count = meta(1, 1, 48, dtype=torch.float32), meta(1, dtype=torch.int32)
            yield f"lora_gather/{kind}-tile{size}", _gather_launch(ids, table, tokens, tiles, shrunk, count)
            for shrink in lora_config.shrink_configs(size, dtype.itemsize):
                name = f"lora_shrink/{kind}-tile{size}-ranks{shrink.ranks}"
                yield name, _shrink_launch(x, table, tokens, tiles, shrunk, count, shrink, 132)
            kinds = [(kind, 6144), ("fp32", 6144)] + [("fp32", _ODD_VOCABULARY)] * (kind in NARROW_TYPES)
            for y_kind, columns in dict.fromkeys(kinds):
                y, columned = meta(1, columns, dtype=TYPES[y_kind]), SlotTable((columns,), 4096, 1, dtype, x.device)
                end = "-odd" if columns == _ODD_VOCABULARY else ""
                shapes = itertools.product(lora_config.expand_configs(size), lora_config.numbers_of_parts(size))
                for expand, parts in shapes:
                    several = meta(parts, 1, 48, dtype=torch.float32)
                    name = f"lora_expand/{kind}-{y_kind}-tile{size}-columns{expand.columns}-parts{parts}{end}"
                    yield name, _expand_launch(y, columned, tokens, tiles, several, count, expand)
