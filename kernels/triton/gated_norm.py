"""Triton kernel of an RMS norm of groups of columns, with a gate before or after it."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from ..layouts.state_arguments import Gate, GatedNormParams
from .launch import NARROW_TYPES, Launch, cdiv, is_narrow, meta, power_of_two
from .scan_rows import sigmoid

_CELLS = 2048  # numbers per program, in whole groups
_MOST_GROUP = 16384


@triton.jit
def _gated_norm(
    x, gate, weight, out, tokens, columns, first, eps, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    IS_NORM_FIRST: tl.constexpr, IS_SIGMOID: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program p: groups ``p * LINES ...`` of all tokens, each of GROUP columns."""
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    token, column = (line // GROUPS)[:, None], tl.arange(0, BLOCK)[None, :]
    at = (line % GROUPS)[:, None] * GROUP + column
    inside = (token < tokens) & (column < GROUP)
    value = tl.load(x + token * GROUPS * GROUP + at, inside, other=0.0).to(tl.float32)
    given = tl.load(gate + token * columns + first + at, inside, other=0.0).to(tl.float32)
    is_open = sigmoid(given)
    if not IS_SIGMOID:
        is_open *= given
    if not IS_NORM_FIRST:
        value *= is_open
    scale = tl.rsqrt(tl.sum(value * value, 1) / GROUP + eps)
    value = value * scale[:, None] * tl.load(weight + at, inside, other=0.0).to(tl.float32)
    if IS_NORM_FIRST:
        value *= is_open
    tl.store(out + token * GROUPS * GROUP + at, value.to(out.dtype.element_ty), inside)


def takes(x: Tensor, gate: Tensor, params: GatedNormParams) -> bool:
    """Return whether the kernel supports this."""
    return is_narrow(x, gate, params.weight) and x.shape[1] // params.num_groups <= _MOST_GROUP


def gated_norm(x: Tensor, gate: Tensor, params: GatedNormParams, first: int) -> Tensor:
    """``kernels.state_ops.gated_norm``: [T, W] -> [T, W]."""
    out = x.new_empty(x.shape)
    _launch(x, gate, params, first, out).run()
    return out


def _launch(x: Tensor, gate: Tensor, params: GatedNormParams, first: int, out: Tensor) -> Launch:
    tokens, groups = len(x), params.num_groups
    group = x.shape[1] // groups
    block = power_of_two(group, 16)
    lines = max(1, _CELLS // block)
    kind = {"IS_NORM_FIRST": params.is_norm_first, "IS_SIGMOID": params.activation == "sigmoid"}
    constants = {"GROUPS": groups, "GROUP": group, **kind}
    return Launch(
        _gated_norm,
        (cdiv(tokens * groups, lines), 1, 1),
        (x, gate, params.weight, out, tokens, gate.shape[1], first, params.eps),
        {**constants, "LINES": lines, "BLOCK": block},
        num_warps=8 if block > _CELLS else 4,
    )


def variants() -> Iterator[tuple[str, Launch]]:
    """Yield compilations of the op: heads of 128 columns with the norm first, groups of 1,024 with the gate first."""
    for name, dtype in NARROW_TYPES.items():
        heads: tuple[tuple[int, int, bool, Gate], ...]
        heads = ((32, 128, True, "silu"), (32, 128, True, "sigmoid"), (8, 1024, False, "silu"))
        for groups, group, is_norm_first, kind in heads:
            x, gate = meta(8, groups * group, dtype=dtype), meta(8, 3 * groups * group, dtype=dtype)
            params = GatedNormParams(meta(groups * group, dtype=dtype), 1e-5, groups, is_norm_first, kind)
            yield f"gated_norm/{name}-{group}-{kind}", _launch(x, gate, params, 0, x)
