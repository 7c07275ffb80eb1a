"""Triton kernel of the RMS norm, alone or fused with the addition to the residual stream."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import NARROW_TYPES, Launch, is_narrow, is_of, is_placed, meta

# Columns of a program -> warps. A program computes one row.
_CONFIGS = {1024: 4, 4096: 8, 8192: 16, 16384: 16}


@triton.jit
def _rms_norm(x, residual, weight, out, width, eps, offset, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """Program t: row t of out from row t of x, or of residual after x was added to it."""
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row + column, inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row + column, inside, other=0.0)
        tl.store(residual + row + column, value, inside)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    gain = offset + tl.load(weight + column, inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, (value * scale * gain).to(out.dtype.element_ty), inside)


def takes(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> bool:
    """Return whether the kernel supports a norm of x, which may be fp32, in the weight's type."""
    return (
        is_placed(x)
        and is_narrow(weight)
        and x.dtype in (weight.dtype, torch.float32)
        and out_dtype is weight.dtype
        and _has_block(x)
    )


def takes_sum(x: Tensor, residual: Tensor, weight: Tensor) -> bool:
    """Return whether the kernel supports the norm of x plus an fp32 residual, in the type of x and weight."""
    return is_narrow(x, weight) and x.dtype is weight.dtype and is_of(torch.float32, residual) and _has_block(x)


def _has_block(x: Tensor) -> bool:
    return x.shape[1] % 16 == 0 and x.shape[1] <= max(_CONFIGS)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, out_dtype: torch.dtype) -> Tensor:
    """``kernels.ops.rms_norm``: [T, H], [H] -> [T, H]."""
    out = torch.empty_like(x, dtype=out_dtype)
    _launch(x, None, weight, out, eps, offset).run()
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """``kernels.ops.add_rms_norm``: [T, H], [T, H] changed in place, [H] -> [T, H]."""
    out = torch.empty_like(x)
    _launch(x, residual, weight, out, eps, offset).run()
    return out


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, eps: float, offset: float) -> Launch:
    tokens, width = x.shape
    block = min(block for block in _CONFIGS if block >= width)
    args = (x, x if residual is None else residual, weight, out, width, eps, offset)
    constants = {"ADD": residual is not None, "BLOCK": block}
    return Launch(_rms_norm, (tokens, 1, 1), args, constants, _CONFIGS[block])


def variants() -> Iterator[tuple[str, Launch]]:
    """Yield every compilation of the ops: by type and width; of the residual, of a result, after a sum."""
    for name, dtype in NARROW_TYPES.items():
        for block in _CONFIGS:
            x, wide, weight = (meta(2, block, dtype=kind) for kind in (dtype, torch.float32, dtype))
            for kind, value, residual in (("add", x, wide), ("wide", wide, None), ("plain", x, None)):
                yield f"rms_norm/{name}-{block}-{kind}", _launch(value, residual, weight[0], x, 1e-5, 0.0)
