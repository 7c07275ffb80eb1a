"""Rotary embeddings: frequencies with their scaling, and tables of cosines and sines."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..checkpoint.model_config import FrequencyFactors, LinearScaling, Llama3Scaling, Rope


def cos_sin_table(rope: Rope, max_positions: int, device: torch.device) -> Tensor:
    """Return cosines, then sines, of ``position * frequency``: [max_positions, dim] fp32."""
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope))
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(device)


def inverse_frequencies(rope: Rope) -> Tensor:
    """Return the frequencies, [dim / 2] fp32, in radians per position.

    Computed in fp32 throughout, like the code that these models were trained with: a more exact result would differ
    by 1e-3 radians at position 10,000.
    """
    plain = 1.0 / rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    match rope.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case FrequencyFactors(factors):
            return plain / torch.tensor(factors, dtype=torch.float32)
        case Llama3Scaling():
            return _llama3(plain, rope.scaling)


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Scale by wavelength.

    wavelength   short ......| original / high_freq |...... between ......| original / low_freq |...... long
                 as it is                            interpolated                                divided by factor
    """
    wavelength = 2 * math.pi / plain
    share = scaling.original_length / wavelength - scaling.low_freq_factor
    smooth = share / (scaling.high_freq_factor - scaling.low_freq_factor)
    between = (1 - smooth) * plain / scaling.factor + smooth * plain
    is_long = wavelength > scaling.original_length / scaling.low_freq_factor
    is_short = wavelength < scaling.original_length / scaling.high_freq_factor
    return torch.where(is_long, plain / scaling.factor, torch.where(is_short, plain, between))
