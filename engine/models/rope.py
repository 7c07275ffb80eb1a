"""Rotary embeddings: frequencies with their scaling, and tables of cosines and sines."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..checkpoint.model_config import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    QueryScaling,
    Rope,
    YarnScaling,
)


def cos_sin_table(rope: Rope, max_positions: int, device: torch.device, *, is_long: bool = False) -> Tensor:
    """Return cosines, then sines, of ``position * frequency``, or of its negative: [max_positions, dim] fp32.

    YaRN and LongRoPE multiply both by their attention factor.

    Args:
        is_long: whether the table is for sequences beyond LongRoPE's original length.
    """
    if device.type == "meta":
        return torch.empty(max_positions, rope.dim, device=device)
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(-positions if rope.rotates_back else positions, inverse_frequencies(rope, is_long=is_long))
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    if isinstance(rope.scaling, YarnScaling | LongRopeScaling):
        table *= rope.scaling.attention_factor
    return table.to(device)


def query_scale_table(scaling: QueryScaling, max_positions: int, device: torch.device) -> Tensor:
    """Return the factor of queries at each position, [max_positions] fp32."""
    if device.type == "meta":
        return torch.empty(max_positions, device=device)
    positions = torch.arange(max_positions, dtype=torch.float32)
    steps = torch.floor((positions + scaling.shift) / scaling.length)
    return (1 + scaling.beta * torch.log1p(steps)).to(device)


def inverse_frequencies(rope: Rope, *, is_long: bool = False) -> Tensor:
    """Return the frequencies, [dim / 2] fp32, in radians per position.

    Frequencies are computed in fp32 throughout, like the code with which these models were trained: a more exact result
    would differ by 1e-3 radians at position 10,000.
    """
    plain = 1.0 / rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    match rope.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case FrequencyFactors(factors):
            return plain / torch.tensor(factors, dtype=torch.float32)
        case LongRopeScaling(short, long):
            powers = rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
            return 1.0 / (torch.tensor(long if is_long else short, dtype=torch.float32) * powers)
        case ProportionalScaling(pairs, factor):
            return torch.where(torch.arange(len(plain)) < pairs, plain / factor, 0.0)
        case Llama3Scaling():
            return _llama3(plain, rope.scaling)
        case YarnScaling():
            return _yarn(plain, rope, rope.scaling)


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


def _yarn(plain: Tensor, rope: Rope, scaling: YarnScaling) -> Tensor:
    """Scale by the number of rotations within the original length, along a linear ramp over the dimensions.

    dimension    0 ...... low | ...... between ...... | high ...... dim / 2
                 as it is       interpolated            divided by factor
    """

    def dimension(rotations: float) -> float:
        turns = scaling.original_length / (rotations * 2 * math.pi)
        return rope.dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / scaling.factor * ramp + plain * (1 - ramp)
