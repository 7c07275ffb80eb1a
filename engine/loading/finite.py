"""Check that the numbers of a checkpoint are finite."""

from __future__ import annotations

from torch import Tensor


def is_within(values: Tensor, most: float) -> bool:
    """Return whether the magnitudes of numbers are at most so much, and none is NaN, in one pass over them."""
    if not values.numel():
        return True
    least, greatest = values.aminmax()
    return bool((least >= -most) & (greatest <= most))
