"""NVFP4: numbers of E2M1, a scale in E4M3 for each sixteen inputs, and one more in fp32, the factor, for the matrix.

A block in a GGUF file has 64 numbers: four scales, then 32 bytes with two numbers each. The factor of the matrix
``NAME.weight`` is in the tensor ``NAME.scale``.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ...kernels.grouped_weights import NumberForm, Scales, StoredNumbers
from ...kernels.quantised_weights import BLOCK_SIZES, BlockType
from . import mxfp4

GROUP: Final = 16
"""Number of consecutive numbers that share a scale."""
BLOCK_BYTES: Final = 36
"""Bytes of a block of 64 numbers in a GGUF file."""
KEPT_AS: Final[BlockType] = "NVFP4"
"""Type of the blocks that native kernels of a CPU read."""
_SCALE_BYTES: Final = 4  # Bytes of a block's scale.
_HALF: Final = 16  # bytes of 32 numbers
_NOT_A_NUMBER: Final = 0x7F  # NaN in E4M3, without its sign.


def decode_blocks(raw: Tensor, factor: float = 1.0) -> Tensor:
    """Decode blocks of a GGUF file: [N, 36] uint8 -> [N, 64] fp32."""
    scales = block_scales(raw).view(torch.float8_e4m3fn).float() * factor
    return e2m1(block_codes(raw)) * scales.repeat_interleave(GROUP, dim=-1)


def block_codes(raw: Tensor) -> Tensor:
    """The numbers' bits, one in each byte: [..., 36] -> [..., 64]. Of eight bytes low halves come before high ones."""
    groups = raw[..., _SCALE_BYTES:].unflatten(-1, (_SCALE_BYTES, GROUP // 2))
    return torch.cat((groups & 15, groups >> 4), dim=-1).flatten(-2)


def block_scales(raw: Tensor) -> Tensor:
    """Return the scales' bits: [..., 36] -> [..., 4] uint8. A scale with a sign, which never occurs, is invalid."""
    return raw[..., :_SCALE_BYTES].clamp(max=_NOT_A_NUMBER)


def are_numbers(scales: Tensor) -> bool:
    """Return whether the bits of all scales are valid numbers."""
    return not bool((scales & _NOT_A_NUMBER == _NOT_A_NUMBER).any())


def e2m1(codes: Tensor) -> Tensor:
    """Numbers of E2M1: [n, K] uint8 -> fp32."""
    return mxfp4.scaled_values(codes, torch.full((1, 1), mxfp4.BIAS))


def takes_kept(width: int) -> bool:
    """Return whether a row of this many numbers consists of whole blocks of ``KEPT_AS``."""
    return width % BLOCK_SIZES[KEPT_AS][0] == 0


def kept_bytes(num_values: int) -> int:
    """Return the bytes that this many numbers take in blocks of ``KEPT_AS``."""
    values, size = BLOCK_SIZES[KEPT_AS]
    return num_values // values * size


def kept_rows(codes: Tensor, scales: Tensor, factor: float) -> Tensor:
    """Return rows in blocks of type ``KEPT_AS``, [n, bytes] uint8.

    Args:
        codes: [n, K] uint8, the bits of a number in E2M1 in each byte.
        scales: [n, K / 16] uint8, bits of E4M3.
        factor: factor of the matrix.
    """
    values, _ = BLOCK_SIZES[KEPT_AS]
    supers = codes.shape[1] // values
    halves = codes.unflatten(1, (supers, -1, 2, _HALF))
    numbers = (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(2)
    half_factor = torch.full((len(codes), supers, 1), factor / 2).view(torch.uint8)  # numbers are doubled there
    return torch.cat((half_factor, scales.unflatten(1, (supers, -1)), numbers), dim=2).flatten(1)


def kept_block_rows(rows: Tensor, factor: float) -> Tensor:
    """Convert rows in blocks of a GGUF file, [n, K / 64 * 36] uint8, to rows in blocks of ``KEPT_AS``, [n, bytes].

    Raises:
        ValueError: a scale is not a number.
    """
    blocks = rows.view(len(rows), -1, BLOCK_BYTES)
    scales = block_scales(blocks).flatten(1)
    if not are_numbers(scales):
        raise ValueError("a block has a scale that is not a number")
    return kept_rows(block_codes(blocks).flatten(1), scales, factor)


def stored_meaning(scales: Tensor, factor: float) -> StoredNumbers:
    """Describe a matrix in NVFP4 for GPU kernels: its scales and number format, without the numbers themselves.

    Args:
        scales: [N, K / 16] uint8, bits of E4M3.
    """
    factors = torch.full((len(scales),), factor)
    return StoredNumbers((0, 0), NumberForm.E2M1, (), scales, Scales.E4M3, factors=factors)
