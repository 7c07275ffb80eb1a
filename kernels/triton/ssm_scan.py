"""Triton kernels of the selective scan of a state space (Mamba-2): token by token for short rows, in chunks for others.

A program has a row, a head and a block of the head's dimensions. Their state stays in registers from the row's first
token to its last. In the chunk form (https://arxiv.org/abs/2405.21060, section 6) the effect of a chunk's tokens on
each other is one product, as in attention, and the effect of all earlier tokens comes from the state. A chunk ends
early at a token after which the state is stored.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layouts.state_arguments import MOST_STATE, SsmParams, StateBatch
from .launch import NARROW_TYPES, Launch, is_narrow, is_of, meta
from .scan_rows import (
    chunk_end,
    has_indices,
    load_state,
    meta_batch,
    narrow_times_wide,
    row_launches,
    softplus,
    state_cells,
    store_state,
    wide_times_narrow,
)

CHUNK = 32  # tokens
_CHUNK_WARPS = 8  # with four, programs spill registers on GPUs whose tensor cores take both operands from registers


@triton.jit
def _ssm_short(
    x, steps, state, out, query_start, source, target, checkpoints, decay, step_bias, skip, columns, step_columns,
    first, HEADS: tl.constexpr, EACH: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, MOST: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (r, h, b): dimensions ``b * BLOCK ...`` of head h, token by token, of a row of at most MOST tokens."""
    row, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(query_start + row), tl.load(query_start + row + 1)
    if (begin >= end) | (end - begin > MOST):
        return
    size, dim, cell, in_size, in_dim, in_cell = state_cells(head, SIZE, DIM, WIDE, BLOCK)
    kept = load_state(state, tl.load(source + row), cell, in_cell, HEADS * SIZE * DIM)
    bias, rate, direct = tl.load(step_bias + head), tl.load(decay + head), tl.load(skip + head)
    of_group = HEADS * DIM + (head // EACH) * SIZE
    token = begin
    while token < end:
        at = x + token.to(tl.int64) * columns
        step = softplus(tl.load(steps + token.to(tl.int64) * step_columns + first + head).to(tl.float32) + bias)
        wide = tl.load(at + head * DIM + dim, in_dim, other=0.0).to(tl.float32)
        into = tl.load(at + of_group + size, in_size, other=0.0).to(tl.float32)
        out_of = tl.load(at + of_group + (HEADS // EACH) * SIZE + size, in_size, other=0.0).to(tl.float32)
        kept = tl.exp(step * rate) * kept + (step * into)[:, None] * wide[None, :]
        result = tl.sum(out_of[:, None] * kept, 0) + direct * wide
        tl.store(out + (token.to(tl.int64) * HEADS + head) * DIM + dim, result.to(out.dtype.element_ty), in_dim)
        slot = tl.load(checkpoints + token)
        if slot >= 0:
            store_state(state, slot, kept, cell, in_cell, HEADS * SIZE * DIM)
        token += 1
    store_state(state, tl.load(target + row), kept, cell, in_cell, HEADS * SIZE * DIM)


@triton.jit
def _ssm_chunks(
    x, steps, state, out, query_start, source, target, checkpoints, decay, step_bias, skip, columns, step_columns,
    first, HEADS: tl.constexpr, EACH: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, MOST: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (r, h, b): dimensions ``b * BLOCK ...`` of head h, in chunks, of a row of more than MOST tokens."""
    row, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(query_start + row), tl.load(query_start + row + 1)
    if end - begin <= MOST:
        return
    size, dim, cell, in_size, in_dim, in_cell = state_cells(head, SIZE, DIM, WIDE, BLOCK)
    kept = load_state(state, tl.load(source + row), cell, in_cell, HEADS * SIZE * DIM)
    bias, rate, direct = tl.load(step_bias + head), tl.load(decay + head), tl.load(skip + head)
    of_group = HEADS * DIM + (head // EACH) * SIZE
    index = tl.arange(0, CHUNK)
    is_before = index[:, None] >= index[None, :]
    token = begin
    while token < end:
        count, slot = chunk_end(checkpoints, token, end, CHUNK)
        inside = index < count
        # Addresses within a chunk are 32 bits from its first token.
        x_chunk, out_chunk = x + token.to(tl.int64) * columns, out + token.to(tl.int64) * HEADS * DIM
        steps_chunk = steps + token.to(tl.int64) * step_columns + first + head
        given = tl.load(steps_chunk + index * step_columns, inside, other=0.0).to(tl.float32)
        step = tl.where(inside, softplus(given + bias), 0.0)
        total = tl.cumsum(step * rate, 0)
        last = tl.sum(step * rate, 0)
        in_chunk, cells = inside[:, None] & in_size[None, :], index[:, None] * columns + of_group + size[None, :]
        into = tl.load(x_chunk + cells, in_chunk, other=0.0)
        out_of = tl.load(x_chunk + cells + (HEADS // EACH) * SIZE, in_chunk, other=0.0)
        in_wide = inside[:, None] & in_dim[None, :]
        wide = tl.load(x_chunk + index[:, None] * columns + head * DIM + dim[None, :], in_wide, other=0.0)
        shrink = tl.exp(tl.where(is_before, total[:, None] - total[None, :], 0.0))
        scores = tl.dot(out_of, tl.trans(into), input_precision="tf32")
        scores = tl.where(is_before, scores * shrink * step[None, :], 0.0)
        result = narrow_times_wide(out_of, kept) * tl.exp(total)[:, None]
        result += wide_times_narrow(scores, wide) + direct * wide.to(tl.float32)
        place = (index[:, None] * HEADS + head) * DIM + dim[None, :]
        tl.store(out_chunk + place, result.to(out.dtype.element_ty), in_wide)
        added = wide.to(tl.float32) * (step * tl.exp(last - total))[:, None]
        kept = tl.exp(last) * kept + narrow_times_wide(tl.trans(into), added)
        if slot >= 0:
            store_state(state, slot, kept, cell, in_cell, HEADS * SIZE * DIM)
        token += count
    store_state(state, tl.load(target + row), kept, cell, in_cell, HEADS * SIZE * DIM)


def takes(x: Tensor, steps: Tensor, state: Tensor, batch: StateBatch, params: SsmParams) -> bool:
    """Return whether the kernels support this."""
    return (
        is_narrow(x, steps)
        and is_of(torch.float32, state, params.decay, params.step_bias, params.skip)
        and has_indices(batch)
        and params.state_size <= MOST_STATE
    )


def ssm_scan(x: Tensor, steps: Tensor, first: int, state: Tensor, batch: StateBatch, params: SsmParams) -> Tensor:
    """``kernels.state_ops.ssm_scan``: [T, columns] -> [T, H * P]."""
    out = x.new_empty(len(x), params.width)
    for launch in _launches(x, steps, first, state, batch, params, out):
        launch.run()
    return out


def _launches(
    x: Tensor, steps: Tensor, first: int, state: Tensor, batch: StateBatch, params: SsmParams, out: Tensor
) -> Iterator[Launch]:
    index = batch.query_start, batch.source, batch.target, batch.checkpoints
    factors = params.decay, params.step_bias, params.skip
    args = (x, steps, state, out, *index, *factors, x.shape[1], steps.shape[1], first)
    constants = {
        "HEADS": params.num_heads,
        "EACH": params.num_heads // params.num_groups,
        "DIM": params.head_dim,
        "SIZE": params.state_size,
    }
    kernels = _ssm_short, _ssm_chunks
    return row_launches(kernels, batch, args, constants, CHUNK, _CHUNK_WARPS)


def variants() -> Iterator[tuple[str, Launch]]:
    """Yield compilations of the op: heads of 64 dimensions, states of 128 and 16."""
    for name, dtype in NARROW_TYPES.items():
        for size in (128, 16):
            params = SsmParams(8, 64, 2, size, *(meta(8, dtype=torch.float32) for _ in range(3)))
            x, steps = meta(64, params.columns, dtype=dtype), meta(64, 4096, dtype=dtype)
            state, out = meta(65, 8, size, 64, dtype=torch.float32), meta(64, params.width, dtype=dtype)
            for launch in _launches(x, steps, 16, state, meta_batch(64), params, out):
                yield f"{launch.kernel.__name__.strip('_')}/{name}-64-{size}", launch
