"""Sampling parameters of the rows of a draw, as columns on the device of the logits."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DrawParams(NamedTuple):
    """Of n rows, [n, 1] each.

    Attributes:
        temperature: float32, above 0.
        top_k: int64, 0 is off.
        top_p: float64, 1 is off.
        min_p: float32, 0 is off.
        u: float64 in [0, 1), the random number of the draw.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    u: Tensor

    def rows(self, index: Tensor | slice) -> DrawParams:
        """Those of some rows."""
        return DrawParams(*(column[index] for column in self))
