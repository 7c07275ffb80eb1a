"""Triton kernel that applies packed token masks to logits, writing only forbidden tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, cdiv, meta

BLOCK = 1024  # columns of a program


@triton.jit(do_not_specialize=["num_words"])
def _mask(logits, lines, words, width, num_words, BLOCK: tl.constexpr):
    """Program (g, b): columns ``b * BLOCK ...`` of line ``lines[g]``, where that is none below 0."""
    mask = tl.program_id(0)
    line = tl.load(lines + mask)
    if line < 0:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    word = tl.load(words + mask * num_words + column // 32, inside, other=0)
    is_banned = ((word >> (column % 32)) & 1) == 0
    tl.store(logits + line * width + column, float("-inf"), inside & is_banned)


def mask_logits(logits: Tensor, lines: Tensor, words: Tensor) -> None:
    """``kernels.sampling_ops.mask_logits``: logits [S, V] fp32 are changed in place."""
    _launch(logits, lines, words).run()


def _launch(logits: Tensor, lines: Tensor, words: Tensor) -> Launch:
    width = logits.shape[1]
    grid = (lines.shape[0], cdiv(width, BLOCK), 1)
    return Launch(_mask, grid, (logits, lines, words, width, words.shape[1]), {"BLOCK": BLOCK})


def variants() -> Iterator[tuple[str, Launch]]:
    """Yield the compilations for vocabularies that are a multiple of 16, and others."""
    for name, width in (("aligned", 128_256), ("odd", 50_257)):
        words = meta(8, cdiv(width, 32), dtype=torch.int32)
        lines = meta(8, dtype=torch.int64)
        yield f"sampling_mask/{name}", _launch(meta(32, width, dtype=torch.float32), lines, words)
