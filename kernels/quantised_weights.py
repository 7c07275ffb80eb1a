"""Linear layers with weights of 4 and 8 bits on the CPU, made here and run by ``kernels.ops.linear``.

A weight w [N, K] is integers q with a scale d, and for four bits a minimum m, for each block of 32 along K or for
each row. Rows of x are quantised on the way in, each block of 32, or, where weights have rows, as a whole, to integers
a with a scale s, and

    y[n] = sum over blocks of  d s (sum of q a)  +  m s (sum of a)

where the inner sums are exact. ``dynamic=True`` means, with blocks, integers within L = 127 and s = largest magnitude /
L: llama.cpp's arithmetic. With rows it means "w8a8", where what is usual in a row of x is within 127, and its outliers
are kept in two bytes (``cpu/channel_rows.h``; that outliers are few and must be kept is what LLM.int8() found, Dettmers
et al. 2022). Such rounding changes a few in a hundred most likely tokens. ``dynamic=False`` means the product with the
weight that the integers stand for: with blocks L = 127 * 128, finer than bfloat16, at the price of two products of
bytes for one; with rows x stays as it is, ``y[n] = d (sum of q x)``. A row's result does not depend, bit for bit, on
the other rows or on the number of threads.

There is no torch path: where the native kernels are not, weights are dequantised when they are loaded.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor

from . import ops
from .cpu.build import default_cache, load_library
from .cpu.native_quantised import QuantisedKernels
from .layouts.packed_weights import Format, QuantisedLinear

__all__ = ["BLOCK_BYTES", "BlockType", "Format", "QuantisedLinear", "available", "pack_blocks", "pack_channels", "rows"]

BlockType = Literal["Q4_0", "Q4_1", "Q8_0"]

BLOCK_BYTES: dict[BlockType, int] = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
"""Bytes of a block of 32 values, by its name in GGUF."""

_HALF = 2  # bytes


def available() -> bool:
    """Whether the native kernels are allowed and could be built."""
    return ops.native_kernels() is not None


@functools.cache
def _kernels() -> QuantisedKernels:
    native = ops.native_kernels()
    if native is None:
        raise RuntimeError("quantised weights need the native kernels")
    return QuantisedKernels(load_library(default_cache()), native.arena)


def pack_blocks(raw: Tensor, block_type: BlockType, bias: Tensor | None = None, *, dynamic: bool) -> QuantisedLinear:
    """A weight as GGUF files store it; its integers and scales stay what they are.

    Args:
        raw: [N, K / 32 * bytes of a block] uint8, on the CPU.
        block_type: of all its blocks.
        bias: [N] or None.
        dynamic: quantise rows of x to 8 bits, not to 15.

    Raises:
        ValueError: the shape is not that of whole blocks, or a scale is not finite.
        RuntimeError: there are no native kernels.
    """
    size = BLOCK_BYTES[block_type]
    if raw.dim() != 2 or raw.shape[1] % size or not raw.numel() or raw.dtype is not torch.uint8:
        raise ValueError(f"{raw.dtype} {list(raw.shape)} are not rows of whole {block_type} blocks of {size} bytes")
    blocks = raw.contiguous().view(raw.shape[0], -1, size)
    if block_type == "Q4_0":
        blocks = _with_minimum(blocks)
    form = Format.BYTES if block_type == "Q8_0" else Format.NIBBLES
    return _kernels().pack_blocks(blocks, form, bias, planes=1 if dynamic else 2)


def _with_minimum(blocks: Tensor) -> Tensor:
    """Q4_0 as Q4_1: ``d * (q - 8)`` is ``d * q + m`` with m = -8 d, exact in half precision short of infinity."""
    scale = blocks[:, :, :_HALF]
    minimum = (scale.contiguous().view(torch.float16) * -8).view(torch.uint8)
    return torch.cat((scale, minimum, blocks[:, :, _HALF:]), dim=2)


def pack_channels(weight: Tensor, bias: Tensor | None = None, *, dynamic: bool) -> QuantisedLinear:
    """A weight [N, K] in bfloat16 or float32, rounded to 8 bits with a scale for each row.

    Args:
        dynamic: quantise rows of x too.

    Raises:
        ValueError: the weight is of another type, has an odd K in bfloat16, or one beyond 2^17.
        RuntimeError: there are no native kernels.
    """
    if weight.dim() != 2 or not QuantisedKernels.takes_weight(weight):
        raise ValueError(f"{weight.dtype} {list(weight.shape)} on {weight.device} cannot be quantised by channels")
    return _kernels().pack_channels(weight, Format.CHANNELS if dynamic else Format.WIDENED, bias)


def rows(layer: QuantisedLinear, ids: Tensor) -> Tensor:
    """Rows of the weight as numbers, as an embedding needs them: [T] int64 -> [T, K] fp32.

    Raises:
        IndexError: an id is not in 0 .. N - 1.
    """
    return layer.kernels.rows(layer, ids)
