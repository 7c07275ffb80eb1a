"""Quantised products in plain torch: the oracle of the tests. Sums are fp64, so that only formulas are compared."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_LEAST = 1e-30  # magnitudes below are taken for 0


BYTE, TWO_BYTES = 127, 127 * 128
"""The largest integer of one plane, and of two."""
GROUP, USUAL = 64, 1.25
"""Where weights have a scale for each row, so has x: USUAL times the median of the largest magnitudes of groups is a
byte's largest, unless the largest of all would then be beyond two bytes."""


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


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows to integers of up to two bytes: [T, K] -> integers [T, K] and scales [T, 1], both fp32."""
    groups = functional.pad(x.float().abs(), (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP)).amax(-1)
    top = groups.amax(1, keepdim=True)
    usual = USUAL * groups.sort(1, descending=True).values[:, groups.shape[1] // 2].unsqueeze(1)
    scale = torch.where(usual < top, torch.maximum(usual / BYTE, top / TWO_BYTES), top / BYTE)
    inverse = (1 / scale).where(top > _LEAST, 0)
    return (x.float() * inverse).round(), scale


def linear_rows(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` with x so quantised: [T, K], dequantised [N, K] fp32 -> [T, N] fp64."""
    integers, scales = quantise_rows(x)
    return (integers.double() * scales.double()) @ weight.double().T


def channels(weight: Tensor) -> Tensor:
    """What ``pack_channels`` makes of a weight [N, K], as numbers: [N, K] fp32."""
    integers, scales = quantise(weight, weight.shape[1])
    return (integers * scales).flatten(1)
