"""Triton kernels of a causal convolution with a state: its results, and the inputs that later steps need."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from ..layouts.state_arguments import ConvParams, StateBatch
from .launch import NARROW_TYPES, Launch, cdiv, is_narrow, meta, power_of_two
from .scan_rows import has_indices, meta_batch, sigmoid

_BLOCK = 512  # columns of a program
MOST_TAPS = 8


@triton.jit
def _input(x, token, columns, first, width, column, inside, GATED: tl.constexpr):
    """Return the input of some channels at a token: a column of x, or the product of two columns in the type of x."""
    at = token.to(tl.int64) * columns + first + column
    value = tl.load(x + at, inside, other=0.0)
    if GATED:
        right = tl.load(x + at + 2 * width, inside, other=0.0)
        value = (value.to(tl.float32) * right.to(tl.float32)).to(x.dtype.element_ty)
    return value


@triton.jit(do_not_specialize=["rows"])
def _convolve(
    x, state, weight, bias, query_start, source, out, rows, columns, first, width, TAPS: tl.constexpr,
    GATED: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (t, b): channels ``b * BLOCK ...`` of token t; zeros for a token after the last row."""
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    index = tl.arange(0, ROWS)
    ends = tl.load(query_start + 1 + index, index < rows, other=2147483647)
    row = tl.sum((ends <= token).to(tl.int32), 0)
    total = tl.zeros((BLOCK,), tl.float32)
    if row < rows:
        start = tl.load(query_start + row)
        origin = tl.load(source + row).to(tl.int64)
        for tap in tl.static_range(TAPS):
            at = token + tap - (TAPS - 1)
            is_own = at >= start
            # The state holds the inputs of the last tokens before the row's first token, oldest first.
            held = (origin * (TAPS - 1) + at - start + TAPS - 1) * width + column
            before = tl.load(state + held, inside & (at < start) & (origin >= 0), other=0.0)
            value = tl.where(is_own, _input(x, at, columns, first, width, column, inside & is_own, GATED), before)
            total += value.to(tl.float32) * tl.load(weight + tap * width + column, inside, other=0.0).to(tl.float32)
        if BIASED:
            total += tl.load(bias + column, inside, other=0.0).to(tl.float32)
        if GATED:
            gate = tl.load(x + token.to(tl.int64) * columns + first + width + column, inside, other=0.0)
            total *= gate.to(tl.float32)
        else:
            total *= sigmoid(total)
    tl.store(out + token.to(tl.int64) * width + column, total.to(out.dtype.element_ty), inside)


@triton.jit
def _keep(
    x, state, old, slot, begin, token, columns, first, width, column, inside, TAPS: tl.constexpr, GATED: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """Write the state after a token of a row to a slot. ``old`` is the state before the row, [HELD, BLOCK]."""
    place = tl.arange(0, HELD)
    for tap in tl.static_range(TAPS - 1):
        at = token + tap - (TAPS - 2)
        is_own = at >= begin
        before = tl.sum(tl.where((place == at - begin + TAPS - 1)[:, None], old, 0.0), 0)
        own = _input(x, at, columns, first, width, column, inside & is_own, GATED).to(tl.float32)
        value = tl.where(is_own, own, before)
        tl.store(
            state + (slot.to(tl.int64) * (TAPS - 1) + tap) * width + column, value.to(state.dtype.element_ty), inside
        )


@triton.jit
def _save(
    x, state, query_start, source, target, checkpoints, columns, first, width, TAPS: tl.constexpr, GATED: tl.constexpr,
    HELD: tl.constexpr, BLOCK: tl.constexpr, LOOK: tl.constexpr,
):  # fmt: skip
    """Program (r, b): channels ``b * BLOCK ...`` of the states after row r and at its checkpoints.

    The state before the row is read before anything is written, because its slot may be one of the written slots.
    """
    row = tl.program_id(0)
    begin, end = tl.load(query_start + row), tl.load(query_start + row + 1)
    if begin >= end:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    origin = tl.load(source + row).to(tl.int64)
    place = tl.arange(0, HELD)
    held = (origin * (TAPS - 1) + place[:, None]) * width + column[None, :]
    is_held = (place < TAPS - 1)[:, None] & inside[None, :] & (origin >= 0)
    old = tl.load(state + held, is_held, other=0.0).to(tl.float32)
    tl.debug_barrier()
    for some in range(begin, end, LOOK):
        look = some + tl.arange(0, LOOK)
        slots = tl.load(checkpoints + look, look < end, other=-1)
        if tl.max(slots, 0) >= 0:
            for token in range(some, tl.minimum(some + LOOK, end)):
                slot = tl.load(checkpoints + token)
                if slot >= 0:
                    _keep(x, state, old, slot, begin, token, columns, first, width, column, inside, TAPS, GATED, HELD)
    slot = tl.load(target + row)
    _keep(x, state, old, slot, begin, end - 1, columns, first, width, column, inside, TAPS, GATED, HELD)


def takes(x: Tensor, state: Tensor, batch: StateBatch, params: ConvParams) -> bool:
    """Return whether the kernels support this."""
    narrow = (x, state, params.weight) if params.bias is None else (x, state, params.weight, params.bias)
    return (
        is_narrow(*narrow)
        and all(each.dtype is x.dtype for each in narrow)
        and has_indices(batch)
        and 2 <= len(params.weight) <= MOST_TAPS
    )


def causal_conv(x: Tensor, state: Tensor, batch: StateBatch, params: ConvParams, first: int) -> Tensor:
    """``kernels.state_ops.causal_conv``: [T, columns] -> [T, W]."""
    out = x.new_empty(len(x), params.weight.shape[1])
    for launch in _launches(x, state, batch, params, first, out):
        launch.run()
    return out


def _launches(
    x: Tensor, state: Tensor, batch: StateBatch, params: ConvParams, first: int, out: Tensor
) -> tuple[Launch, Launch]:
    taps, width = params.weight.shape
    tokens, rows, columns = len(x), len(batch.source), x.shape[1]
    block = min(_BLOCK, power_of_two(width, 16))
    bias = params.weight if params.bias is None else params.bias
    constants = {"TAPS": taps, "GATED": params.gated, "BLOCK": block}
    index = batch.query_start, batch.source
    convolve = Launch(
        _convolve,
        (tokens, cdiv(width, block), 1),
        (x, state, params.weight, bias, *index, out, rows, columns, first, width),
        {**constants, "BIASED": params.bias is not None, "ROWS": power_of_two(rows, 16)},
    )
    save = Launch(
        _save,
        (rows, cdiv(width, block), 1),
        (x, state, *index, batch.target, batch.checkpoints, columns, first, width),
        {**constants, "HELD": power_of_two(taps - 1), "LOOK": 64},
    )
    return convolve, save


def variants() -> Iterator[tuple[str, Launch]]:
    """Yield compilations of the op, for 64 rows: three taps with gates, and four with a bias."""
    for name, dtype in NARROW_TYPES.items():
        for taps, gated in ((3, True), (4, False)):
            bias = None if gated else meta(1024, dtype=dtype)
            x, state = meta(64, 4096, dtype=dtype), meta(65, taps - 1, 1024, dtype=dtype)
            params = ConvParams(meta(taps, 1024, dtype=dtype), bias, gated)
            made = _launches(x, state, meta_batch(64), params, 0, meta(64, 1024, dtype=dtype))
            for kernel, launch in zip(("causal_conv", "causal_conv_states"), made, strict=True):
                yield f"{kernel}/{name}-{taps}{'-gated' if gated else ''}", launch
