"""Triton product of tokens with the weights of their experts.

The first kernel groups the picks [T, k], the experts of each token, by expert. A program of the second kernel has some
columns of one expert's weight, whose address is in the table, and multiplies all rows that the expert gets by them,
tile after tile. Programs of experts without rows end at once, and the weights of these experts are not read. Grids
depend only on the numbers of tokens and experts, so calls can be captured. Sums are added in a fixed order, so the
result does not depend on the order in which programs run.

Experts come from the router and are not checked on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layouts.expert_arguments import ExpertWeights
from ..layouts.grouped_forms import GroupedLinear, GroupedPart, GroupForm, NumberForm, Offsets, Scales
from ..layouts.packed_weights import PackedLinear
from .grouped_product import form_constants, grouped_sums, meta_part
from .launch import NARROW_TYPES, Launch, cdiv, is_narrow, is_placed, meta

SCANNED_PICKS = 1024  # number of picks that a program reads in one iteration
MOST_SCANS = 8  # number of iterations of a program beyond which picks are grouped by blocks
_FIELDS = tl.constexpr(3)  # fields of a row of the table: addresses of weight, scales and bias
_GROUPED_FIELDS = tl.constexpr(9)  # the same for grouped weights: addresses of a part's tensors, and bias
_ELEMENTS = {
    torch.uint8: tl.uint8,
    torch.int8: tl.int8,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}
_MOST_SLOTS = 8  # programs for the same columns of an expert, which share its tiles of rows


class ProductConfig(NamedTuple):
    """Shape of a program: rows, columns and inputs of its tiles, warps, and stages of its pipeline."""

    rows: int
    columns: int
    inputs: int
    num_warps: int
    num_stages: int


_FEW = ProductConfig(16, 64, 128, 4, 3)  # decode: a few rows for each expert, the weights are streamed
_MANY = ProductConfig(64, 128, 64, 8, 3)


@triton.jit(do_not_specialize=["count", "picks"])
def _group(experts, order, starts, tokens, count, picks, LIMITED: tl.constexpr, SCANNED: tl.constexpr):
    """Program e: write the picks of expert e, in ascending order, to ``order[starts[e]:starts[e + 1]]``.

    experts [count] int32; order [count] int32; starts [E + 1] int32, whose element 0 is written by program 0; tokens
    [1] int32: number of tokens. Each token has ``picks`` picks. With LIMITED, picks of tokens beyond that number, which
    pad a captured step, are left out.
    """
    expert = tl.program_id(0)
    if LIMITED:
        count = min(count, tl.load(tokens) * picks)
    before = 0
    own = 0
    for first in range(0, count, SCANNED):
        index = first + tl.arange(0, SCANNED)
        found = tl.load(experts + index, index < count, other=2147483647)
        before += tl.sum((found < expert).to(tl.int32), 0)
        own += tl.sum((found == expert).to(tl.int32), 0)
    if expert == 0:
        tl.store(starts, 0)
    tl.store(starts + expert + 1, before + own)
    if own == 0:
        return
    place = before
    for first in range(0, count, SCANNED):
        index = first + tl.arange(0, SCANNED)
        found = tl.load(experts + index, index < count, other=2147483647)
        is_own = (found == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(is_own, 0) - 1, index, is_own > 0)
        place += tl.sum(is_own, 0)


@triton.jit(do_not_specialize=["count", "picks", "blocks"])
def _count_block(experts, counts, tokens, count, picks, blocks, LIMITED: tl.constexpr, SCANNED: tl.constexpr):
    """Program (e, b): count the picks of block b that belong to expert e, to ``counts[e * blocks + b]``."""
    if LIMITED:
        count = min(count, tl.load(tokens) * picks)
    index = tl.program_id(1) * SCANNED + tl.arange(0, SCANNED)
    found = tl.load(experts + index, index < count, other=2147483647)
    own = tl.sum((found == tl.program_id(0)).to(tl.int32), 0)
    tl.store(counts + tl.program_id(0) * blocks + tl.program_id(1), own)


@triton.jit(do_not_specialize=["count", "picks", "blocks"])
def _place_block(
    experts, order, starts, ends, tokens, count, picks, blocks, LIMITED: tl.constexpr, SCANNED: tl.constexpr
):  # fmt: skip
    """Program (e, b): write the picks of expert e in block b to their places in ``order``, in the order of ``_group``.

    ends [E * blocks] are the cumulative sums of ``_count_block``'s counts.
    """
    if LIMITED:
        count = min(count, tl.load(tokens) * picks)
    expert = tl.program_id(0)
    block = tl.program_id(1)
    end = tl.load(ends + expert * blocks + block)
    index = block * SCANNED + tl.arange(0, SCANNED)
    found = tl.load(experts + index, index < count, other=2147483647)
    is_own = (found == expert).to(tl.int32)
    tl.store(order + end - tl.sum(is_own, 0) + tl.cumsum(is_own, 0) - 1, index, is_own > 0)
    if block == blocks - 1:
        tl.store(starts + expert + 1, end)
        if expert == 0:
            tl.store(starts, 0)


@triton.jit(do_not_specialize=["picks"])
def _product(
    x, table, order, starts, out, width, columns, picks, x_stride, out_stride, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, INPUTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Program (c, e, s): columns ``c * COLUMNS ...`` of expert e, for its tiles s, s + SLOTS, ... of rows.

        out[pick, n] = sum over i of x[pick // picks, i] * W_e[n, i] + bias_e[n]

    for pick = order[j], starts[e] <= j < starts[e + 1]. x is [T, x_stride] with picks = k, or [T * k, x_stride] with
    picks = 1. Of each row of out [T * k, out_stride] the first ``columns`` columns are written.
    """
    expert = tl.program_id(1)
    begin, end = tl.load(starts + expert), tl.load(starts + expert + 1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < columns
    entry = table + expert * _FIELDS
    weight = tl.multiple_of(tl.load(entry).to(tl.pointer_type(x.dtype.element_ty)), 16)
    bias = tl.load(entry + 2)
    biases = tl.load(bias.to(tl.pointer_type(x.dtype.element_ty)) + column, is_column & (bias != 0), other=0.0)
    for first in range(begin + tl.program_id(2) * ROWS, end, SLOTS * ROWS):
        place = first + tl.arange(0, ROWS)
        is_row = place < end
        pick = tl.load(order + place, is_row, other=0).to(tl.int64)
        source = x + (pick // picks)[:, None] * x_stride
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, width, INPUTS):
            i = start + tl.arange(0, INPUTS)
            inside = i < width
            rows = tl.load(source + i[None, :], is_row[:, None] & inside[None, :], other=0.0)
            at = weight + column[None, :].to(tl.int64) * width + i[:, None]
            matrix = tl.load(at, inside[:, None] & is_column[None, :], other=0.0)
            sums = tl.dot(rows, matrix, sums, input_precision="ieee")
        value = (sums + biases.to(tl.float32)[None, :]).to(out.dtype.element_ty)
        tl.store(out + pick[:, None] * out_stride + column[None, :], value, is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["picks"])
def _grouped_expert_product(
    x, table, order, starts, out, width, columns, picks, x_stride, out_stride, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SLOTS: tl.constexpr, NUMBERS: tl.constexpr, SCALES: tl.constexpr, OFFSETS: tl.constexpr,
    GROUP: tl.constexpr, CHUNK: tl.constexpr, HIGH: tl.constexpr, MIDDLE: tl.constexpr, FACTOR: tl.constexpr,
    SCALE_TYPE: tl.constexpr, OFFSET_TYPE: tl.constexpr, COARSE_TYPE: tl.constexpr, HAS_FACTORS: tl.constexpr,
):  # fmt: skip
    """``_product`` with weights of 4 to 8 bits: each program computes the same part of the result.

    The form and the constants determine the types of a weight's tensors.
    """
    expert = tl.program_id(1)
    begin, end = tl.load(starts + expert), tl.load(starts + expert + 1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < columns
    entry = table + expert * _GROUPED_FIELDS
    weight = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.uint8)), 16)
    high = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(tl.uint8)), 16)
    scales = tl.multiple_of(tl.load(entry + 2).to(tl.pointer_type(SCALE_TYPE)), 16)
    super_scales = tl.multiple_of(tl.load(entry + 3).to(tl.pointer_type(COARSE_TYPE)), 16)
    offsets = tl.multiple_of(tl.load(entry + 4).to(tl.pointer_type(OFFSET_TYPE)), 16)
    super_offsets = tl.multiple_of(tl.load(entry + 5).to(tl.pointer_type(COARSE_TYPE)), 16)
    factors = tl.load(entry + 6).to(tl.pointer_type(tl.float32))
    lookup = tl.load(entry + 7).to(tl.pointer_type(tl.float32))
    bias = tl.load(entry + 8)
    biases = tl.load(bias.to(tl.pointer_type(x.dtype.element_ty)) + column, is_column & (bias != 0), other=0.0)
    factor = tl.full((COLUMNS,), FACTOR, tl.float32)
    if HAS_FACTORS:
        factor *= tl.load(factors + column, is_column & (begin < end), other=0.0)
    for first in range(begin + tl.program_id(2) * ROWS, end, SLOTS * ROWS):
        place = first + tl.arange(0, ROWS)
        is_row = place < end
        pick = tl.load(order + place, is_row, other=0).to(tl.int64)
        source = x + (pick // picks) * x_stride
        sums = grouped_sums(
            source, is_row, column, is_column, weight, high, scales, super_scales, offsets, super_offsets, lookup,
            width, columns, ROWS, COLUMNS, NUMBERS, SCALES, OFFSETS, GROUP, CHUNK, HIGH, MIDDLE,
        )  # fmt: skip
        value = (sums * factor[None, :] + biases.to(tl.float32)[None, :]).to(out.dtype.element_ty)
        tl.store(out + pick[:, None] * out_stride + column[None, :], value, is_row[:, None] & is_column[None, :])


def takes(x: Tensor, weights: ExpertWeights, experts: Tensor) -> bool:
    """Return whether the kernels support this: unquantised weights with rows at aligned addresses, or grouped ones."""
    first = weights.first
    if isinstance(first, GroupedLinear):
        return first.dtype is x.dtype and is_narrow(x) and is_placed(experts)
    return takes_heads(x, weights) and is_placed(experts)


def takes_heads(x: Tensor, weights: ExpertWeights) -> bool:
    """Return whether the kernels support the product of each head with its matrix: unquantised, aligned addresses."""
    first = weights.first
    return (
        isinstance(first, PackedLinear)
        and first.kernels is None
        and first.weight.dtype is x.dtype
        and is_narrow(x)
        and weights.in_features % 16 == 0
    )


def expert_linear(x: Tensor, weights: ExpertWeights, experts: Tensor, num_tokens: Tensor | None = None) -> Tensor:
    """``kernels.expert_ops.expert_linear``: [T, K] or [T, k, K] -> [T, k, N]."""
    out = x.new_empty(*experts.shape, weights.out_features)
    order, starts = _grouped(experts, len(weights), num_tokens)
    _expert_launch(x, weights, order, starts, out).run()
    return out


def head_linear(x: Tensor, weights: ExpertWeights, shape: tuple[int, ...]) -> Tensor:
    """``kernels.latent_ops``: [T, H * (K + more)] -> [T, H * (N + more)] as a tensor of this shape."""
    tokens, heads = len(x), len(weights)
    out = x.new_empty(shape)
    own, result = x.view(tokens, heads, -1), out.view(tokens, heads, -1)
    order = torch.arange(tokens * heads, dtype=torch.int32, device=x.device).view(tokens, heads).t().contiguous()
    starts = torch.arange(heads + 1, dtype=torch.int32, device=x.device) * tokens
    config = _MANY if tokens >= _MANY.rows // 2 else _FEW
    _product_launch(own, weights.table, order, starts, result, config, weights.in_features, weights.out_features).run()
    result[..., weights.out_features :] = own[..., weights.in_features :]
    return out


def _grouped(experts: Tensor, num_experts: int, num_tokens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the picks by expert, [T * k], and the begin of each expert's picks, [E + 1] (see ``_group``).

    Many picks are counted block by block, because a program that reads all of them would take longer than the product.
    """
    order = experts.new_empty(experts.numel())
    starts = experts.new_empty(num_experts + 1)
    blocks = cdiv(experts.numel(), SCANNED_PICKS)
    if blocks <= MOST_SCANS:
        _group_launch(experts, order, starts, num_tokens).run()
        return order, starts
    counts = experts.new_empty(num_experts * blocks)
    _block_launch(_count_block, experts, (counts,), num_experts, num_tokens).run()
    ends = counts.cumsum(0, dtype=torch.int32)
    _block_launch(_place_block, experts, (order, starts, ends), num_experts, num_tokens).run()
    return order, starts


def _block_launch(
    kernel: Any, experts: Tensor, outputs: tuple[Tensor, ...], num_experts: int, num_tokens: Tensor | None
) -> Launch:
    blocks = cdiv(experts.numel(), SCANNED_PICKS)
    tokens = experts if num_tokens is None else num_tokens  # a placeholder if there is no limit
    args = (experts, *outputs, tokens, experts.numel(), experts.shape[1], blocks)
    return Launch(kernel, (num_experts, blocks, 1), args, {"LIMITED": num_tokens is not None, "SCANNED": SCANNED_PICKS})


def _expert_launch(x: Tensor, weights: ExpertWeights, order: Tensor, starts: Tensor, out: Tensor) -> Launch:
    config = _MANY if order.numel() >= _MANY.rows * len(weights) // 2 else _FEW
    first = weights.first
    if isinstance(first, GroupedLinear):
        (part,) = first.parts
        assert isinstance(part, GroupedPart)
        return _grouped_launch(x, weights.table, part, order, starts, out, config)
    return _product_launch(x, weights.table, order, starts, out, config, weights.in_features, weights.out_features)


def _group_launch(experts: Tensor, order: Tensor, starts: Tensor, num_tokens: Tensor | None) -> Launch:
    grid = (starts.shape[0] - 1, 1, 1)
    tokens = experts if num_tokens is None else num_tokens  # a placeholder if there is no limit
    args = (experts, order, starts, tokens, experts.numel(), experts.shape[1])
    return Launch(_group, grid, args, {"LIMITED": num_tokens is not None, "SCANNED": SCANNED_PICKS})


def _product_launch(
    x: Tensor,
    table: Tensor,
    order: Tensor,
    starts: Tensor,
    out: Tensor,
    config: ProductConfig,
    width: int,
    columns: int,
) -> Launch:
    tokens, picks, _ = out.shape
    # A token has an expert at most once.
    slots = min(_MOST_SLOTS, cdiv(tokens, config.rows))
    grid = (cdiv(columns, config.columns), table.shape[0], slots)
    of_token = picks if x.dim() == 2 else 1
    args = (x, table, order, starts, out, width, columns, of_token, x.shape[-1], out.shape[-1])
    constants = {"ROWS": config.rows, "COLUMNS": config.columns, "INPUTS": config.inputs, "SLOTS": max(1, slots)}
    return Launch(_product, grid, args, constants, config.num_warps, config.num_stages)


def _grouped_launch(
    x: Tensor, table: Tensor, part: GroupedPart, order: Tensor, starts: Tensor, out: Tensor, config: ProductConfig
) -> Launch:
    tokens, picks, columns = out.shape
    slots = max(1, min(_MOST_SLOTS, cdiv(tokens, config.rows)))
    grid = (cdiv(columns, config.columns), table.shape[0], slots)
    args = (x, table, order, starts, out, x.shape[-1], columns, picks if x.dim() == 2 else 1, x.shape[-1], columns)

    def element(tensor: Tensor | None) -> object:
        return tl.uint8 if tensor is None else _ELEMENTS[tensor.dtype]

    constants = {
        "ROWS": config.rows,
        "COLUMNS": config.columns,
        "SLOTS": slots,
        **form_constants(part.form),
        "SCALE_TYPE": element(part.scales),
        "OFFSET_TYPE": element(part.offsets),
        "COARSE_TYPE": element(part.super_scales),
        "HAS_FACTORS": part.factors is not None,
    }
    # At most two stages: the decoded tile is in shared memory beside the stored one.
    return Launch(_grouped_expert_product, grid, args, constants, config.num_warps, min(2, config.num_stages))


_GROUPED_FORMS = {
    "int4-128-zeros": GroupForm(NumberForm.INT4, Scales.FLOATS, Offsets.ZERO_POINTS, 128, 128),
    "fp8-128": GroupForm(NumberForm.E4M3, Scales.FLOATS, Offsets.MIDDLE, 128, 128),
    "mxfp4": GroupForm(NumberForm.E2M1, Scales.E8M0, Offsets.MIDDLE, 32, 32),
}


def variants() -> Iterator[tuple[str, Launch]]:
    """Yield every compilation of ``expert_linear``, but for the numbers of slots between one and the most."""
    experts, order, starts = (meta(*shape, dtype=torch.int32) for shape in ((2, 2), (4,), (17,)))
    yield "expert_group", _group_launch(experts, order, starts, None)
    limit = meta(1, dtype=torch.int32)
    yield "expert_group/limited", _group_launch(experts, order, starts, limit)
    for end, most in (("", None), ("/limited", limit)):
        yield f"expert_count{end}", _block_launch(_count_block, experts, (order,), 16, most)
        yield f"expert_place{end}", _block_launch(_place_block, experts, (order, starts, order), 16, most)
    table = meta(16, 3, dtype=torch.int64)
    for kind, dtype in NARROW_TYPES.items():
        for name, config in (("few", _FEW), ("many", _MANY)):
            for tokens, slots in ((2, "one"), (_MOST_SLOTS * config.rows, "most")):
                x, out = meta(tokens, 2048, dtype=dtype), meta(tokens, 8, 1536, dtype=dtype)
                launch = _product_launch(x, table, order, starts, out, config, 2048, 1536)
                yield f"expert_product/{kind}-{name}-slots-{slots}", launch
    for name, form in _GROUPED_FORMS.items():
        part = meta_part(form, 1536, 2048)
        for size, config in (("few", _FEW), ("many", _MANY)):
            x, out = meta(config.rows, 2048, dtype=torch.bfloat16), meta(config.rows, 8, 1536, dtype=torch.bfloat16)
            yield f"grouped_expert_product/{name}-{size}", _grouped_launch(x, table, part, order, starts, out, config)
