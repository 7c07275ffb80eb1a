"""Decode MXFP4, the block format of gpt-oss' published experts (OCP Microscaling Formats 1.0).

A block has 32 values along the inputs, each of four bits in E2M1: a sign, two bits of exponent, one of mantissa. A byte
holds two values, the first one in its low half. The scale of a block is a power of two; its exponent plus 127 is stored
in a byte.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from ...kernels.grouped_weights import NumberForm, Scales, StoredNumbers
from ...kernels.quantised_weights import BlockType

BLOCK = 32  # values
BLOCKS, SCALES = "_blocks", "_scales"
"""Ends of the names of the two tensors that store the matrices: [E, N, K / 32, 16] and [E, N, K / 32], uint8."""

BLOCK_BYTES: Final = 17
"""Bytes of a block in a GGUF file: one with its exponent, then 16, each with value i in its low half and value i + 16
in its high half."""
KEPT_AS: Final[BlockType] = "E2M1"
"""Type of the blocks that native kernels of a CPU read: like a GGUF file's blocks, but with half of the scale, in half
precision, in place of the exponent."""
_KEPT_BYTES: Final = 18
_LEAST_HALF, _MOST_HALF = 104, 143  # exponents whose halved powers are numbers of half precision

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BIAS = 127


def decode_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """[N, K / 32, 16] and [N, K / 32] uint8 -> [N, K] fp32, exact, as it is in bfloat16."""
    nibbles = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(2)
    return scaled_values(nibbles, scales[..., None]).flatten(1)


def scaled_values(nibbles: Tensor, scales: Tensor) -> Tensor:
    """Values of four bits each and stored exponents that broadcast to them, uint8 -> fp32, exact."""
    values = torch.tensor((*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)), device=nibbles.device)
    return torch.ldexp(values[nibbles.int()], scales.int() - BIAS)


MOST_EXPONENT: Final = 252
"""Largest stored exponent with which all values of a block are finite in fp32 and bfloat16; 255 means NaN."""


def are_numbers(exponents: Tensor) -> bool:
    """Return whether stored exponents, uint8, are of finite numbers alone."""
    return not bool((exponents > MOST_EXPONENT).any())


def fit_half(exponents: Tensor) -> bool:
    """Return whether half of each scale is a number of half precision: stored exponents, uint8."""
    return bool(((exponents >= _LEAST_HALF) & (exponents <= _MOST_HALF)).all())


def rows_fit_half(rows: Tensor) -> bool:
    """Return whether all scales ``fit_half`` of rows of a GGUF file's blocks, [n, K / 32 * 17] uint8."""
    return fit_half(rows.view(-1, BLOCK_BYTES)[:, 0])


def kept_bytes(num_bytes: int) -> int:
    """Return the bytes of a GGUF file's blocks with scales in half precision."""
    return num_bytes // BLOCK_BYTES * _KEPT_BYTES


def with_half_scales(rows: Tensor) -> Tensor:
    """Rows of a GGUF file's blocks that ``fit_half``, [n, K / 32 * 17] uint8, as ``KEPT_AS``: [n, K / 32 * 18]."""
    blocks = rows.view(len(rows), -1, BLOCK_BYTES)
    return torch.cat((_half_scales(blocks[..., :1]), blocks[..., 1:]), dim=-1).flatten(1)


def kept_rows(blocks: Tensor, scales: Tensor) -> Tensor:
    """[N, K / 32, 16] and [N, K / 32] uint8 that ``fit_half`` -> [N, K / 32 * 18] uint8 as ``KEPT_AS``."""
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(2)
    halves = codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4
    return torch.cat((_half_scales(scales[..., None]), halves), dim=-1).flatten(1)


def _half_scales(exponents: Tensor) -> Tensor:
    """[..., 1] -> [..., 2]: the bytes of half of each scale."""
    return torch.ldexp(torch.full(exponents.shape, 0.5), exponents.int() - BIAS).half().view(torch.uint8)


def stored_meaning(exponents: Tensor) -> StoredNumbers:
    """Describe a matrix in MXFP4 for GPU kernels: its scales and number format, without the numbers themselves.

    Args:
        exponents: [N, K / 32] uint8, for which ``are_numbers`` is true.
    """
    return StoredNumbers((0, 0), NumberForm.E2M1, (), exponents, Scales.E8M0)


def stored_numbers(blocks: Tensor, scales: Tensor) -> StoredNumbers:
    """Return a matrix for kernels of a GPU: [N, K / 32, 16] and [N, K / 32] uint8."""
    meaning = stored_meaning(scales)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)
    return replace(meaning, shape=(codes.shape[0], codes.shape[1]), pieces=[codes])
