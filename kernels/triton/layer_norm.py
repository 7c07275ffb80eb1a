"""Triton kernel of the layer norm."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import NARROW_TYPES, Launch, is_narrow, is_of, meta

# Columns of a program -> warps. A program computes one row.
_CONFIGS = {4096: 8, 16384: 16, 32768: 16}


@triton.jit
def _layer_norm(x, weight, bias, out, width, eps, offset, BIASED: tl.constexpr, BLOCK: tl.constexpr):
    """Program t: row t of out from row t of x."""
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row + column, inside, other=0.0).to(tl.float32)
    value = tl.where(inside, value - tl.sum(value, 0) / width, 0.0)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    value = value * scale * (offset + tl.load(weight + column, inside, other=0.0).to(tl.float32))
    if BIASED:
        value += tl.load(bias + column, inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, value.to(out.dtype.element_ty), inside)


def takes(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> bool:
    """Return whether the kernel supports a norm of x, which is fp32 like the residual stream, in the weight's type."""
    return (
        is_of(torch.float32, x)
        and is_narrow(weight)
        and (bias is None or (is_narrow(bias) and bias.dtype is weight.dtype))
        and out_dtype is weight.dtype
        and x.shape[1] % 16 == 0
        and x.shape[1] <= max(_CONFIGS)
    )


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float, out_dtype: torch.dtype
) -> Tensor:
    """``kernels.ops.layer_norm``: [T, H], [H], [H] -> [T, H]."""
    out = torch.empty_like(x, dtype=out_dtype)
    _launch(x, weight, bias, out, eps, offset).run()
    return out


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, eps: float, offset: float) -> Launch:
    tokens, width = x.shape
    block = min(block for block in _CONFIGS if block >= width)
    args = (x, weight, weight if bias is None else bias, out, width, eps, offset)
    return Launch(_layer_norm, (tokens, 1, 1), args, {"BIASED": bias is not None, "BLOCK": block}, _CONFIGS[block])


def variants() -> Iterator[tuple[str, Launch]]:
    """Yield every compilation of the op: by type and width, with a bias and without."""
    for name, dtype in NARROW_TYPES.items():
        for block in _CONFIGS:
            x, out, weight = meta(2, block, dtype=torch.float32), meta(2, block, dtype=dtype), meta(block, dtype=dtype)
            for kind, bias in (("plain", None), ("biased", weight)):
                yield f"layer_norm/{name}-{block}-{kind}", _launch(x, weight, bias, out, 1e-5, 0.0)
