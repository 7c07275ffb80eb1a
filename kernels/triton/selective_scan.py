"""Triton kernel of the selective scan of single channels (Mamba), token by token.

A program has a row and a block of channels, whose states stay in registers from the row's first token to its last. With
each token, each number of a state shrinks by its own factor, so there is no chunk form like that of Mamba-2.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layouts.state_arguments import MOST_STATE, SelectiveParams, StateBatch
from .launch import NARROW_TYPES, Launch, is_narrow, is_of, meta
from .scan_rows import has_indices, load_state, meta_batch, row_launches, softplus, state_cells, store_state


@triton.jit
def _selective(
    x, steps, both, state, out, query_start, source, target, checkpoints, decay, step_bias, skip,
    HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, MOST: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (r, 0, b): channels ``b * BLOCK ...`` of a row, token by token."""
    row = tl.program_id(0)
    begin, end = tl.load(query_start + row), tl.load(query_start + row + 1)
    if begin >= end:
        return
    size, dim, cell, in_size, in_dim, in_cell = state_cells(0, SIZE, DIM, WIDE, BLOCK)
    kept = load_state(state, tl.load(source + row), cell, in_cell, SIZE * DIM)
    rate = tl.load(decay + cell, in_cell, other=0.0)
    bias, direct = tl.load(step_bias + dim, in_dim, other=0.0), tl.load(skip + dim, in_dim, other=0.0)
    token = begin
    while token < end:
        at = token.to(tl.int64) * DIM + dim
        step = softplus(tl.load(steps + at, in_dim, other=0.0).to(tl.float32) + bias)
        wide = tl.load(x + at, in_dim, other=0.0).to(tl.float32)
        of_token = both + token.to(tl.int64) * 2 * SIZE + size
        into = tl.load(of_token, in_size, other=0.0).to(tl.float32)
        out_of = tl.load(of_token + SIZE, in_size, other=0.0).to(tl.float32)
        kept = tl.exp(step[None, :] * rate) * kept + into[:, None] * (step * wide)[None, :]
        result = tl.sum(out_of[:, None] * kept, 0) + direct * wide
        tl.store(out + at, result.to(out.dtype.element_ty), in_dim)
        slot = tl.load(checkpoints + token)
        if slot >= 0:
            store_state(state, slot, kept, cell, in_cell, SIZE * DIM)
        token += 1
    store_state(state, tl.load(target + row), kept, cell, in_cell, SIZE * DIM)


def takes(x: Tensor, steps: Tensor, both: Tensor, state: Tensor, batch: StateBatch, params: SelectiveParams) -> bool:
    """Return whether the kernel supports this."""
    return (
        is_narrow(x, steps, both)
        and is_of(torch.float32, state, params.decay, params.step_bias, params.skip)
        and has_indices(batch)
        and params.state_size <= MOST_STATE
    )


def selective_scan(
    x: Tensor, steps: Tensor, both: Tensor, state: Tensor, batch: StateBatch, params: SelectiveParams
) -> Tensor:
    """``kernels.state_ops.selective_scan``: [T, W] -> [T, W]."""
    out = torch.empty_like(x)
    for launch in _launches(x, steps, both, state, batch, params, out):
        launch.run()
    return out


def _launches(
    x: Tensor, steps: Tensor, both: Tensor, state: Tensor, batch: StateBatch, params: SelectiveParams, out: Tensor
) -> Iterator[Launch]:
    index = batch.query_start, batch.source, batch.target, batch.checkpoints
    args = (x, steps, both, state, out, *index, params.decay, params.step_bias, params.skip)
    constants = {"HEADS": 1, "DIM": params.width, "SIZE": params.state_size}
    return row_launches((_selective, None), batch, args, constants, 0)


def variants() -> Iterator[tuple[str, Launch]]:
    """Yield compilations of the op: the channels of Mamba 2.8B, and of Jamba's."""
    for name, dtype in NARROW_TYPES.items():
        for width in (5120, 8192):
            factors = meta(16, width, dtype=torch.float32), *(meta(width, dtype=torch.float32) for _ in range(2))
            params = SelectiveParams(*factors)
            x, steps, out = (meta(64, width, dtype=dtype) for _ in range(3))
            both, state = meta(64, 32, dtype=dtype), meta(65, 1, 16, width, dtype=torch.float32)
            for launch in _launches(x, steps, both, state, meta_batch(64), params, out):
                yield f"selective/{name}-{width}", launch
