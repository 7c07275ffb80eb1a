"""Triton kernel of an MLP's activation, with a gate or without."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import NARROW_TYPES, Launch, cdiv, is_narrow, meta

BLOCK = 1024  # columns of a program
KINDS = ("silu", "gelu_tanh", "relu2", "gelu")


@triton.jit
def tanh(x):
    """tanh of fp32 without overflow: e^(-2|x|) is at most 1."""
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def activated(gate, KIND: tl.constexpr):
    """The activation of fp32 numbers."""
    if KIND == "silu":
        # x * sigmoid(x), by e^(-|x|), which does not overflow.
        e = tl.exp2(-1.4426950408889634 * tl.abs(gate))
        active = gate * tl.where(gate < 0, e, 1.0) / (1.0 + e)
    elif KIND == "relu2":
        active = tl.maximum(gate, 0.0)
        active = active * active
    elif KIND == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(0.7071067811865476 * gate))
    else:
        active = 0.5 * gate * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    return active


@triton.jit
def _gated_activation(gate_up, out, width, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """Program (t, b): columns ``b * BLOCK ...`` of token t. Without GATED there is no second half to multiply with."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    stride = 2 * width if GATED else width
    gate = tl.load(gate_up + token * stride + column, inside, other=0.0).to(tl.float32)
    active = activated(gate, KIND)
    if GATED:
        active *= tl.load(gate_up + token * stride + width + column, inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, active.to(out.dtype.element_ty), inside)


def takes(x: Tensor) -> bool:
    """Return whether the kernel supports this: rows, and halves of rows, must begin at aligned addresses."""
    return is_narrow(x) and x.shape[1] % 32 == 0


def gated_activation(gate_up: Tensor, kind: str) -> Tensor:
    """``kernels.ops.gated_activation``: [T, 2 * I] -> [T, I]."""
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _launch(gate_up, out, kind).run()
    return out


def activation(x: Tensor, kind: str) -> Tensor:
    """``kernels.ops.activation``: [T, I] -> [T, I]."""
    out = torch.empty_like(x)
    _launch(x, out, kind).run()
    return out


def _launch(x: Tensor, out: Tensor, kind: str) -> Launch:
    tokens, width = out.shape
    constants = {"KIND": kind, "GATED": x.shape[1] != width, "BLOCK": BLOCK}
    return Launch(_gated_activation, (tokens, cdiv(width, BLOCK), 1), (x, out, width), constants)


def variants() -> Iterator[tuple[str, Launch]]:
    """Yield every compilation of the ops."""
    for name, dtype in NARROW_TYPES.items():
        for kind in KINDS:
            for ending, width in (("", 512), ("-plain", 256)):
                yield f"gated_activation/{name}-{kind}{ending}", _launch(_meta(width, dtype), _meta(256, dtype), kind)


def _meta(width: int, dtype: torch.dtype) -> Tensor:
    return meta(2, width, dtype=dtype)
