"""Quantised products in plain torch: the oracle of the tests. Sums are fp64, so that only formulas are compared."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_LEAST = 1e-30  # magnitudes below are taken for 0


BYTE, TWO_BYTES = 127, 127 * 128
"""The largest integer of one plane, and of two."""
GROUP = 64
"""Values of x with one scale, where weights have one for each row."""


def quantise(x: Tensor, size: int, largest: int = BYTE) -> tuple[Tensor, Tensor]:
    """Rows to integers in blocks: [T, K] -> integers [T, B, size] and scales [T, B, 1], both fp32.

    The last of the B blocks is filled up with zeros.
    """
    padded = functional.pad(x.float(), (0, -x.shape[1] % size))
    blocks = padded.unflatten(1, (-1, size))
    most = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(most, largest) / most  # not largest / most: torch would multiply with a reciprocal
    return (blocks * inverse.where(most > _LEAST, 0)).round(), most / largest


def linear(x: Tensor, weight: Tensor, size: int, largest: int = BYTE) -> Tensor:
    """``x @ weight.T`` with x quantised in blocks: [T, K], dequantised [N, K] fp32 -> [T, N] fp64."""
    integers, scales = quantise(x, size, largest)
    return (integers.double() * scales.double()).flatten(1)[:, : x.shape[1]] @ weight.double().T


def channels(weight: Tensor) -> Tensor:
    """What ``pack_channels`` makes of a weight [N, K], as numbers: [N, K] fp32."""
    integers, scales = quantise(weight, weight.shape[1])
    return (integers * scales).flatten(1)
