"""Decode MXFP4, the block format of gpt-oss' published experts (OCP Microscaling Formats 1.0).

A block is 32 values along the inputs, of four bits each, E2M1: a sign, two bits of exponent, one of mantissa. A byte
has two, the first in its low half. A block's scale is a power of two, whose exponent is stored plus 127.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.grouped_weights import NumberForm, Scales, StoredNumbers

BLOCK = 32  # values
BLOCKS, SCALES = "_blocks", "_scales"
"""Endings of the two tensors in which one is stored: [E, N, K / 32, 16] and [E, N, K / 32], uint8."""

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


_LARGEST = 255  # an exponent that stands for no number


def are_numbers(exponents: Tensor) -> bool:
    """Return whether stored exponents, uint8, all stand for numbers."""
    return not bool((exponents == _LARGEST).any())


def stored_meaning(exponents: Tensor) -> StoredNumbers:
    """Return what a matrix in MXFP4 means for kernels of a GPU, without its numbers.

    Args:
        exponents: [N, K / 32] uint8, which ``are_numbers``.
    """
    return StoredNumbers((0, 0), NumberForm.E2M1, (), exponents, Scales.E8M0)


def stored_numbers(blocks: Tensor, scales: Tensor) -> StoredNumbers:
    """Return a matrix for kernels of a GPU: [N, K / 32, 16] and [N, K / 32] uint8."""
    meaning = stored_meaning(scales)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)
    return replace(meaning, shape=(codes.shape[0], codes.shape[1]), pieces=[codes])
