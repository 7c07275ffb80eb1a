"""Decode FP8 weights with a scale for each block, the format of DeepSeek V3's published checkpoints.

A weight [N, K] is stored as E4M3 numbers and, under its name and ``SCALES``, the factor of each block of 128 by 128.
"""

from __future__ import annotations

from torch import Tensor

BLOCK = 128
SCALES = "_scale_inv"
"""Ending of the factors' name behind the weight's; fp32 [ceil(N / 128), ceil(K / 128)]."""
TYPE = "F8_E4M3"


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a matrix's factors."""
    return tuple(-(-size // BLOCK) for size in shape)


def decode_fp8(values: Tensor, scales: Tensor) -> Tensor:
    """Numbers of some rows of blocks [n, K] and their factors [ceil(n / 128), ceil(K / 128)] -> [n, K] fp32, exact."""
    rows, columns = values.shape
    wide = scales.float().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return values.float() * wide
