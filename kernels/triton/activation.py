"""Triton kernel of an MLP's gated activation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import NARROW_TYPES, Launch, cdiv, is_narrow, meta

BLOCK = 1024  # columns of a program
KINDS = ("silu", "gelu_tanh")


@triton.jit
def tanh(x):
    """tanh of fp32 without overflow: e^(-2|x|) is at most 1."""
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _gated_activation(gate_up, out, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Program (t, b): columns ``b * BLOCK ...`` of token t."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + token * 2 * width + column, inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (token * 2 + 1) * width + column, inside, other=0.0).to(tl.float32)
    if KIND == "silu":
        # x * sigmoid(x), by e^(-|x|), which does not overflow.
        e = tl.exp2(-1.4426950408889634 * tl.abs(gate))
        active = gate * tl.where(gate < 0, e, 1.0) / (1.0 + e)
    else:
        active = 0.5 * gate * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    tl.store(out + token * width + column, (active * up).to(out.dtype.element_ty), inside)


def takes(gate_up: Tensor) -> bool:
    """Return whether the kernel supports this: rows must begin at aligned addresses."""
    return is_narrow(gate_up) and gate_up.shape[1] % 32 == 0


def gated_activation(gate_up: Tensor, kind: str) -> Tensor:
    """``kernels.ops.gated_activation``: [T, 2 * I] -> [T, I]."""
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _launch(gate_up, out, kind).run()
    return out


def _launch(gate_up: Tensor, out: Tensor, kind: str) -> Launch:
    tokens, width = out.shape
    constants = {"KIND": kind, "BLOCK": BLOCK}
    return Launch(_gated_activation, (tokens, cdiv(width, BLOCK), 1), (gate_up, out, width), constants)


def variants() -> Iterator[tuple[str, Launch]]:
    """Yield every compilation of ``gated_activation``."""
    for name, dtype in NARROW_TYPES.items():
        for kind in KINDS:
            yield f"gated_activation/{name}-{kind}", _launch(_meta(512, dtype), _meta(256, dtype), kind)


def _meta(width: int, dtype: torch.dtype) -> Tensor:
    return meta(2, width, dtype=dtype)
