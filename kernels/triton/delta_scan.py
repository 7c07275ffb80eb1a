"""Triton kernels of the gated delta rule: token by token for rows of few tokens, in chunks for others.

A program has a row, a head and a block of the dimensions of the head's values. Their state stays in registers from the
row's first token to its last. In the chunk form (https://arxiv.org/abs/2412.06464, section 3) each token's correction
of the state depends on the corrections of earlier tokens, which is a triangular system for each chunk. It is solved by
elimination within blocks of 16 tokens, and among blocks by a product of few factors, whose numbers stay small. A chunk
ends early at a token after which the state is stored. If each row of a state has its own decay factor, all rows of a
batch are computed token by token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layouts.state_arguments import MOST_STATE, DeltaParams, StateBatch
from .launch import NARROW_TYPES, Launch, is_narrow, is_of, meta
from .scan_rows import (
    chunk_end,
    has_indices,
    load_state,
    meta_batch,
    narrow_times_wide,
    row_launches,
    sigmoid,
    softplus,
    state_cells,
    store_state,
)

CHUNK = 32  # tokens, two blocks of the triangular system
_SOLVED = tl.constexpr(16)  # tokens of such a block
_LENGTH_EPS = tl.constexpr(1e-6)


@triton.jit
def _delta_short(
    x, gates, state, out, query_start, source, target, checkpoints, decay, step_bias, columns, gate_columns, first_step,
    first_rate, scale, rate_factor, lower_bound, HEADS: tl.constexpr, EACH: tl.constexpr, DIM: tl.constexpr,
    SIZE: tl.constexpr, BY_CHANNEL: tl.constexpr, BOUNDED: tl.constexpr, MOST: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (r, h, b): dimensions ``b * BLOCK ...`` of head h, token by token, for row r.

    The program skips rows of more than MOST tokens, except with BY_CHANNEL.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(query_start + row), tl.load(query_start + row + 1)
    if (begin >= end) | ((end - begin > MOST) & (not BY_CHANNEL)):
        return
    size, dim, cell, in_size, in_dim, in_cell = state_cells(head, SIZE, DIM, WIDE, BLOCK)
    kept = load_state(state, tl.load(source + row), cell, in_cell, HEADS * SIZE * DIM)
    rate_of_decay = tl.load(decay + head)
    if BY_CHANNEL:  # noqa: SIM108 (both branches would be compiled)
        bias = tl.load(step_bias + head * SIZE + size, in_size, other=0.0)
    else:
        bias = tl.load(step_bias + head)
    of_keys: tl.constexpr = HEADS // EACH * SIZE
    token = begin
    while token < end:
        at = x + token.to(tl.int64) * columns
        gate = gates + token.to(tl.int64) * gate_columns
        rate = rate_factor * sigmoid(tl.load(gate + first_rate + head).to(tl.float32))
        if BY_CHANNEL:
            steps = tl.load(gate + first_step + head * SIZE + size, in_size, other=0.0).to(tl.float32)
            if BOUNDED:
                logs = lower_bound * sigmoid(-rate_of_decay * (steps + bias))
            else:
                logs = softplus(steps + bias) * rate_of_decay
            kept *= tl.exp(logs)[:, None]
        else:
            kept *= tl.exp(softplus(tl.load(gate + first_step + head).to(tl.float32) + bias) * rate_of_decay)
        query = tl.load(at + (head // EACH) * SIZE + size, in_size, other=0.0).to(tl.float32)
        key = tl.load(at + of_keys + (head // EACH) * SIZE + size, in_size, other=0.0).to(tl.float32)
        value = tl.load(at + 2 * of_keys + head * DIM + dim, in_dim, other=0.0).to(tl.float32)
        query *= tl.rsqrt(tl.sum(query * query, 0) + _LENGTH_EPS) * scale
        key *= tl.rsqrt(tl.sum(key * key, 0) + _LENGTH_EPS)
        error = value - tl.sum(key[:, None] * kept, 0)
        kept += key[:, None] * (rate * error)[None, :]
        result = tl.sum(query[:, None] * kept, 0)
        tl.store(out + (token.to(tl.int64) * HEADS + head) * DIM + dim, result.to(out.dtype.element_ty), in_dim)
        slot = tl.load(checkpoints + token)
        if slot >= 0:
            store_state(state, slot, kept, cell, in_cell, HEADS * SIZE * DIM)
        token += 1
    store_state(state, tl.load(target + row), kept, cell, in_cell, HEADS * SIZE * DIM)


@triton.jit
def _inverse(lower, turned, CHUNK: tl.constexpr):
    """Return the inverse of 1 + ``lower``. ``lower`` is strictly lower triangular, and ``turned`` is its transpose.

    Each block on the diagonal is inverted by row-by-row elimination, and the blocks are combined by a power series,
    which has only two terms for two blocks. A power series of the whole matrix is not used: if keys are similar, it
    would add and subtract numbers far larger than the result.
    """
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    is_block = row // _SOLVED == column // _SOLVED
    solved = tl.where(row == column, 1.0, 0.0)
    turned = tl.where(is_block, turned, 0.0)
    for line in range(1, _SOLVED):
        factors = tl.sum(tl.where(column % _SOLVED == line, turned, 0.0), 1)
        known = tl.sum(factors[:, None] * solved, 0)
        solved = tl.where((row % _SOLVED == line) & is_block, solved - known[None, :], solved)
    between = -tl.dot(solved, tl.where(is_block, 0.0, lower), input_precision="tf32x3")
    # For two blocks the series is 1 + b.
    return solved + tl.dot(between, solved, input_precision="tf32x3")


@triton.jit
def _shorten(x):
    """Return the reciprocal of the length of each row of x."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + _LENGTH_EPS)


@triton.jit
def _delta_chunks(
    x, gates, state, out, query_start, source, target, checkpoints, decay, step_bias, columns, gate_columns, first_step,
    first_rate, scale, rate_factor, lower_bound, HEADS: tl.constexpr, EACH: tl.constexpr, DIM: tl.constexpr,
    SIZE: tl.constexpr, BY_CHANNEL: tl.constexpr, BOUNDED: tl.constexpr, MOST: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (r, h, b): dimensions ``b * BLOCK ...`` of head h, in chunks, of a row of more than MOST tokens."""
    row, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(query_start + row), tl.load(query_start + row + 1)
    if end - begin <= MOST:
        return
    size, dim, cell, in_size, in_dim, in_cell = state_cells(head, SIZE, DIM, WIDE, BLOCK)
    kept = load_state(state, tl.load(source + row), cell, in_cell, HEADS * SIZE * DIM)
    bias, rate_of_decay = tl.load(step_bias + head), tl.load(decay + head)
    of_keys: tl.constexpr = HEADS // EACH * SIZE
    index = tl.arange(0, CHUNK)
    is_before, is_after = index[:, None] > index[None, :], index[:, None] < index[None, :]
    token = begin
    while token < end:
        count, slot = chunk_end(checkpoints, token, end, CHUNK)
        inside = index < count
        # Addresses within a chunk are 32 bits from its first token.
        x_chunk, out_chunk = x + token.to(tl.int64) * columns, out + token.to(tl.int64) * HEADS * DIM
        gate = gates + token.to(tl.int64) * gate_columns + index * gate_columns + head
        steps = softplus(tl.load(gate + first_step, inside, other=0.0).to(tl.float32) + bias)
        logs = tl.where(inside, steps * rate_of_decay, 0.0)
        rates = rate_factor * sigmoid(tl.load(gate + first_rate, inside, other=0.0).to(tl.float32))
        rates = tl.where(inside, rates, 0.0)
        total = tl.cumsum(logs, 0)
        last = tl.sum(logs, 0)
        in_chunk = inside[:, None] & in_size[None, :]
        cells = index[:, None] * columns + (head // EACH) * SIZE + size[None, :]
        # Products of keys and queries are computed from the stored numbers, so that they are exact. The normalisation
        # by their lengths is applied to the results.
        keys = tl.load(x_chunk + cells + of_keys, in_chunk, other=0.0)
        of_key = _shorten(keys)
        # Triangles of the products of keys: exponents of the other halves are above 0, and might overflow.
        alike = tl.dot(keys, tl.trans(keys), input_precision="tf32") * of_key[:, None] * of_key[None, :]
        apart = total[:, None] - total[None, :]
        lower = tl.where(is_before, alike * tl.exp(tl.where(is_before, apart, 0.0)) * rates[:, None], 0.0)
        turned = tl.where(is_after, alike * tl.exp(tl.where(is_after, -apart, 0.0)) * rates[None, :], 0.0)
        inverse = _inverse(lower, turned, CHUNK)
        in_wide = inside[:, None] & in_dim[None, :]
        values = index[:, None] * columns + 2 * of_keys + head * DIM + dim[None, :]
        error = tl.load(x_chunk + values, in_wide, other=0.0).to(tl.float32)
        known = narrow_times_wide(keys, kept)
        error -= (tl.exp(total) * of_key)[:, None] * known
        added = tl.dot(inverse, rates[:, None] * error, input_precision="tf32")
        queries = tl.load(x_chunk + cells, in_chunk, other=0.0)
        result = tl.exp(total)[:, None] * narrow_times_wide(queries, kept)
        seen = tl.dot(queries, tl.trans(keys), input_precision="tf32") * of_key[None, :]
        seen = tl.where(is_after, 0.0, seen * tl.exp(tl.where(is_after, 0.0, apart)))
        result += tl.dot(seen, added, input_precision="tf32")
        result *= (_shorten(queries) * scale)[:, None]
        place = (index[:, None] * HEADS + head) * DIM + dim[None, :]
        tl.store(out_chunk + place, result.to(out.dtype.element_ty), in_wide)
        added *= (of_key * tl.exp(last - total))[:, None]
        kept = tl.exp(last) * kept + narrow_times_wide(tl.trans(keys), added)
        if slot >= 0:
            store_state(state, slot, kept, cell, in_cell, HEADS * SIZE * DIM)
        token += count
    store_state(state, tl.load(target + row), kept, cell, in_cell, HEADS * SIZE * DIM)


def takes(x: Tensor, gates: Tensor, state: Tensor, batch: StateBatch, params: DeltaParams) -> bool:
    """Return whether the kernels support this."""
    return (
        is_narrow(x, gates)
        and is_of(torch.float32, state, params.decay, params.step_bias)
        and has_indices(batch)
        and params.key_dim <= MOST_STATE
    )


def delta_scan(
    x: Tensor, gates: Tensor, first: tuple[int, int], state: Tensor, batch: StateBatch, params: DeltaParams
) -> Tensor:
    """``kernels.state_ops.delta_scan``: [T, columns] -> [T, H * P]."""
    out = x.new_empty(len(x), params.width)
    for launch in _launches(x, gates, first, state, batch, params, out):
        launch.run()
    return out


def _launches(
    x: Tensor,
    gates: Tensor,
    first: tuple[int, int],
    state: Tensor,
    batch: StateBatch,
    params: DeltaParams,
    out: Tensor,
) -> Iterator[Launch]:
    index = batch.query_start, batch.source, batch.target, batch.checkpoints
    columns = x.shape[1], gates.shape[1]
    factors = params.key_dim**-0.5, params.rate_factor, params.lower_bound or 0.0
    args = (x, gates, state, out, *index, params.decay, params.step_bias, *columns, *first, *factors)
    constants = {
        "HEADS": params.num_heads,
        "EACH": params.num_heads // params.num_key_heads,
        "DIM": params.head_dim,
        "SIZE": params.key_dim,
        "BY_CHANNEL": params.by_channel,
        "BOUNDED": params.lower_bound is not None,
    }
    chunks = None if params.by_channel else _delta_chunks
    return row_launches((_delta_short, chunks), batch, args, constants, CHUNK)


def variants() -> Iterator[tuple[str, Launch]]:
    """Yield compilations of the op: heads of 128 dimensions."""
    for name, dtype in NARROW_TYPES.items():
        decay, bias = (meta(8, dtype=torch.float32) for _ in range(2))
        params = DeltaParams(8, 128, 4, 128, decay, bias)
        x, gates = meta(64, params.columns, dtype=dtype), meta(64, 32, dtype=dtype)
        state, out = meta(65, 8, 128, 128, dtype=torch.float32), meta(64, params.width, dtype=dtype)
        for launch in _launches(x, gates, (16, 0), state, meta_batch(64), params, out):
            yield f"{launch.kernel.__name__.strip('_')}/{name}-128", launch
        kda = replace(params, num_key_heads=8, step_bias=meta(1024, dtype=torch.float32), by_channel=True)
        x, gates = meta(64, kda.columns, dtype=dtype), meta(64, 1032, dtype=dtype)
        for bound in (None, -5.0):
            for launch in _launches(x, gates, (8, 0), state, meta_batch(64), replace(kda, lower_bound=bound), out):
                what = "channels" if bound is None else "bounded"
                yield f"{launch.kernel.__name__.strip('_')}/{name}-128-{what}", launch
