"""Check that the numbers of a checkpoint are finite."""

from __future__ import annotations

import torch
from torch import Tensor


def is_within(values: Tensor, most: float) -> bool:
    """Return whether the magnitudes of numbers are at most so much, and none is NaN, in one pass over them."""
    return bool(are_within(values, most))


def are_within(values: Tensor, most: float) -> Tensor:
    """Return what ``is_within`` does as a boolean on the device of the numbers, so that the host need not wait."""
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    least, greatest = values.aminmax()
    return (least >= -most) & (greatest <= most)
