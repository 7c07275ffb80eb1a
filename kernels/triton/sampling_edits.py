"""Triton kernel of edits of single logits, from a list on the device: ``kernels.layouts.logit_edits``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, cdiv, meta

_BLOCK = 1024  # edits of a program
_KINDS = 3


@triton.jit
def _edit(logits, edits, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Program b: edits ``b * BLOCK ...`` of a kind: 0 of biases, 1 of penalties, 2 of bans."""
    begin = tl.full((), 1, tl.int32)
    if KIND > 0:
        begin = tl.load(edits + KIND - 1)
    end = tl.load(edits + KIND)
    line = begin + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = line < end
    at = edits + line * 4
    cell = logits + tl.load(at, inside, other=0).to(tl.int64) * width + tl.load(at + 1, inside, other=0)
    value = tl.load(cell, inside, other=0.0)
    first = tl.load(at + 2, inside, other=0).to(tl.float32, bitcast=True)
    if KIND == 0:
        value += first
    elif KIND == 1:
        value = tl.where(value > 0, tl.div_rn(value, tl.where(inside, first, 1.0)), value * first)
        value -= tl.load(at + 3, inside, other=0).to(tl.float32, bitcast=True)
    else:
        value = tl.full((BLOCK,), float("-inf"), tl.float32)
    tl.store(cell, value, inside)


def edit_logits(logits: Tensor, edits: Tensor) -> None:
    """``kernels.sampling_ops.edit_logits``: logits [S, V] fp32 are changed in place."""
    for launch in _launches(logits, edits):
        launch.run()


def _launches(logits: Tensor, edits: Tensor) -> Iterator[Launch]:
    grid = (cdiv(len(edits) - 1, _BLOCK), 1, 1)
    for kind in range(_KINDS):
        yield Launch(_edit, grid, (logits, edits, logits.shape[1]), {"KIND": kind, "BLOCK": _BLOCK})


def variants() -> Iterator[tuple[str, Launch]]:
    """Yield the compilations for vocabularies that are a multiple of 16."""
    logits, edits = meta(32, 128_256, dtype=torch.float32), meta(4097, 4, dtype=torch.int32)
    for kind, launch in zip(("bias", "penalty", "ban"), _launches(logits, edits), strict=True):
        yield f"sampling_edits/{kind}", launch
