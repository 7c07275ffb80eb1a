"""Second half of the LoRA op of q, k and v, joined with their rotation and the writing of K and V.

It is used in steps of few tokens, as in decode, where a separate expansion would read and write the projection's
result, and the rotation would wait for that. The launch has programs for the tokens of tiles, and further programs for
tokens of the base model, which are in no tile. A program computes one head of 16 tokens, so that B is read once for a
tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layouts import kv_forms
from ..layouts.attention_arguments import RopeParams
from ..layouts.lora_arguments import BLOCK, Segments, ShrunkInputs, SlotTable, Tiles
from . import lora_config, rope
from .launch import Launch, cdiv, meta
from .lora_kernels import ELEMENTS, FIELDS, cells_of, changed, of_module, times, whole_inputs
from .rope import pairs, store_heads, turned_heads

_RANKS, _NUM_STAGES = 32, 2
# Dimensions of a program's head -> warps. Products of float16 are of three parts each, so that with fewer warps they
# spill registers; for heads of more than 128 dimensions they spill with 8 and 16 warps, so these expansions stay
# launches of their own.
_WARPS = {64: 4, 128: 4, 256: 8}
_WARPS_OF_FLOAT16 = {64: 4, 128: 8}


@triton.jit
def _expanded_pairs(
    b, cells, step, other_cells, other_step, shrunk, parts, position, is_token, inside, is_turned, ranks, first_rank,
    rank, part_size, TILE: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Return ``lora_kernels.expanded`` for the columns of a head, and for their partners in the rotation."""
    sums = tl.zeros((TILE, COLUMNS), tl.float32)
    others = tl.zeros((TILE, COLUMNS), tl.float32)
    for start in range(0, rank, RANKS):
        r = start + tl.arange(0, RANKS)
        is_rank = r < rank
        factor = whole_inputs(
            shrunk, parts, position, is_token, is_rank, ranks, first_rank + r, part_size, TILE, PARTS
        )  # fmt: skip
        own = is_rank[:, None] & inside[None, :]
        matrix = tl.load(b + cells[None, :] + r[:, None] * step[None, :], own, other=0.0)
        sums = times(factor, matrix, sums)
        turned = is_rank[:, None] & is_turned[None, :]
        matrix = tl.load(b + other_cells[None, :] + r[:, None] * other_step[None, :], turned, other=0.0)
        others = times(factor, matrix, others)
    return sums, others


@triton.jit(
    do_not_specialize=["heads", "kv_heads", "page_bits", "ranks", "part_size", "num_tiles", "num_tokens"],
)
def _expand_rope_store(
    qkv, positions, cos_sin, query_scale, kv_loc, q_norm, k_norm, q, k_cache, v_cache, kv_scales, heads, kv_heads,
    page_bits, dim, half, eps, offset, table, tokens, tiles, places, shrunk, parts, ranks, part_size, num_tiles,
    num_tokens, NORMS: tl.constexpr, LAST: tl.constexpr, INTERLEAVED: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_D: tl.constexpr, KV: tl.constexpr, STATIC: tl.constexpr, TILE: tl.constexpr, RANKS: tl.constexpr,
    PARTS: tl.constexpr, WHOLE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Program (h, t): head h of q, k and v for the tokens of tile t; tiles after the last are TILE of all tokens.

    Programs of the latter tiles compute only tokens that are in no tile. Up to ``offset`` arguments are those of
    ``rope._rope_store_kv``, then those of ``lora_kernels._expand``; places are [T, 3]. An adapter's change of qkv is
    rounded to its type, as if it were written.
    """
    head = tl.program_id(0)
    number = tl.program_id(1)
    row = table
    position = tl.arange(0, TILE)
    token = tl.arange(0, TILE)
    is_token = token < 0
    rank0 = 0
    rank1 = 0
    rank2 = 0
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
        rank2 = tl.load(row + 7, first < end, other=0).to(tl.int32)
        count = tl.load(parts + number, first < end, other=0)
    else:
        token = (number - num_tiles) * TILE + tl.arange(0, TILE)
        is_token = token < num_tokens
        is_token = is_token & (tl.load(places + token * 3, is_token, other=0) < 0)
    if tl.max(is_token.to(tl.int32), 0) > 0:
        is_q = head < heads
        is_v = head >= heads + kv_heads
        is_k = (head >= heads) & (head < heads + kv_heads)
        rank = of_module(is_k, is_v, rank0, rank1, rank2)
        first_rank = of_module(is_k, is_v, 0, rank0, rank0 + rank1)
        q_cells = rank0 * heads * dim
        cells_before = of_module(is_k, is_v, 0, q_cells, q_cells + rank1 * kv_heads * dim)
        size = tl.where(is_q, heads, kv_heads) * dim
        begin = (head - of_module(is_k, is_v, 0, heads, heads + kv_heads)) * dim
        d = tl.arange(0, BLOCK_D)
        is_first, partner, angle = pairs(d, half, INTERLEAVED)
        inside = d < dim
        is_turned = (d < 2 * half) & (head < heads + kv_heads)
        b = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(B)), 16)
        cells, step = cells_of(begin + d, size, rank, cells_before, BLOCK_D, WHOLE)
        other_cells, other_step = cells_of(begin + partner, size, rank, cells_before, BLOCK_D, WHOLE)
        sums, others = _expanded_pairs(
            b, cells, step, other_cells, other_step, shrunk, count, position, is_token, inside, is_turned, ranks,
            first_rank, rank, part_size, TILE, BLOCK_D, RANKS, PARTS,
        )  # fmt: skip
        at = token.to(tl.int64)
        source = qkv + at[:, None] * ((heads + 2 * kv_heads) * dim) + head * dim
        changes = rank > 0
        written = is_token[:, None] & inside[None, :]
        rotates = is_token[:, None] & is_turned[None, :]
        x = changed(source + d[None, :], sums, row, head * dim + d, written, inside & changes).to(tl.float32)
        y = changed(source + partner[None, :], others, row, head * dim + partner, rotates, is_turned & changes)
        place = tl.load(positions + at, is_token, other=0)
        angles = cos_sin + place[:, None] * (2 * half) + angle[None, :]
        cos = tl.load(angles, rotates, other=1.0)
        sin = tl.load(angles + half, rotates, other=0.0)
        query_factor = 1.0
        if SCALED:
            query_factor = tl.load(query_scale + place, is_token, other=1.0)[:, None]
        all_heads = tl.full((TILE,), 0, tl.int32) + head
        is_query = is_token & is_q
        is_value = is_token & is_v
        x = turned_heads(
            x, y.to(tl.float32), cos, sin, query_factor, q_norm, k_norm, d, partner, is_first, is_query, is_value,
            rotates, written, dim, half, eps, offset, NORMS, LAST, SCALED,
        )  # fmt: skip
        store_heads(
            x.to(q.dtype.element_ty), q, k_cache, v_cache, kv_scales, at, all_heads,
            tl.load(kv_loc + at, is_token, other=-1), is_query, is_value, is_token, written, heads, kv_heads,
            page_bits, dim, d, KV, STATIC,
        )  # fmt: skip


def takes(qkv: Tensor, k_cache: Tensor, v_cache: Tensor, params: RopeParams, table: SlotTable, tiles: Tiles) -> bool:
    """Return whether the kernel supports this: few tokens, and q, k and v as modules in the factors' type.

    Norms must be those of single heads of q and k, or absent. Heads have at most 256 dimensions, in float16 128.
    """
    dim = kv_forms.head_dim(k_cache)
    return (
        tiles.places is not None
        and len(tiles.places) >= len(qkv)
        and params.num_kv_heads > 0
        and table.sizes == (params.num_heads * dim, *(params.num_kv_heads * dim,) * 2)
        and qkv.shape[1] == sum(table.sizes)
        and qkv.dtype is table.dtype
        and params.norm == "head"
        and not params.has_v_norm
        and rope.takes(qkv, k_cache, v_cache, params)
        and dim <= max(_warps(table.dtype))
    )


def expand_rope_store(
    qkv: Tensor,
    positions: Tensor,
    kv_loc: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    params: RopeParams,
    shrunk: ShrunkInputs,
    table: SlotTable,
    segments: Segments,
) -> Tensor:
    """Return ``kernels.ops.rope_store_kv`` of qkv plus the adapters' part, [T, Hq, D]; qkv is not changed."""
    assert segments.tiles is not None
    q = qkv.new_empty(qkv.shape[0], params.num_heads, kv_forms.head_dim(k_cache))
    plain = rope.launch_of(qkv, positions, kv_loc, k_cache, v_cache, q, params)
    shrunk.wait()
    _launch(plain, q, table, segments.tokens, segments.tiles, shrunk.sums, shrunk.parts).run()
    return q


def _launch(
    plain: Launch, q: Tensor, table: SlotTable, tokens: Tensor, tiles: Tiles, sums: Tensor, parts: Tensor
) -> Launch:
    """Return the launch in place of ``plain``, that of the rotation, whose arguments come first."""
    assert tiles.places is not None
    num_tokens, _, dim = q.shape
    _, num_positions, ranks = sums.shape
    count = tiles.lines.shape[0]
    constants = {name: value for name, value in plain.constants.items() if name != "BLOCK_H"} | {
        "TILE": tiles.size,
        "RANKS": _RANKS,
        "PARTS": lora_config.MOST_SPLITS[tiles.size],
        "WHOLE": all(size % BLOCK == 0 for size in table.sizes),
        "B": ELEMENTS[table.dtype],
    }
    numbers = (ranks, num_positions * ranks, count, num_tokens)
    args = (*plain.args, table.rows, tokens, tiles.lines, tiles.places, sums, parts, *numbers)
    grid = (sum(table.sizes) // dim, count + cdiv(num_tokens, tiles.size), 1)
    warps = _warps(table.dtype)[constants["BLOCK_D"]]
    return Launch(_expand_rope_store, grid, args, constants, warps, _NUM_STAGES)


def _warps(dtype: torch.dtype) -> Mapping[int, int]:
    return _WARPS_OF_FLOAT16 if dtype is torch.float16 else _WARPS


def variants() -> Iterator[tuple[str, Launch]]:
    """Yield a compilation for each variant of the rotation, for modules whose sizes are multiples of 64."""
    numbers = meta(1, dtype=torch.int32)
    tiles = Tiles(meta(1, 3, dtype=torch.int32), lora_config.SHORT, meta(1, 3, dtype=torch.int32))
    sums = meta(lora_config.MOST_SPLITS[tiles.size], 1, 48, dtype=torch.float32)
    for name, plain in rope.variants():
        kernel, _, choice = name.partition("/")
        qkv, q = plain.args[0], plain.args[7]
        if kernel == "rope_store_kv" and q.shape[2] in _warps(qkv.dtype):
            size = q.shape[1] * q.shape[2]
            sizes = (size, *((qkv.shape[1] - size) // 2,) * 2)
            table = SlotTable(sizes, 4096, 1, qkv.dtype, numbers.device)
            yield f"lora_expand_rope_store/{choice}", _launch(plain, q, table, numbers, tiles, sums, numbers)
