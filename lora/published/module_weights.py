"""``ModuleWeights``: an adapter's factors in one module of the base model, as published."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ModuleWeights:
    """Low-rank pair of one module with N outputs and K inputs: ``scale * B (A x)``, with biases and DoRA magnitude.

    For the embedding K is the size of the vocabulary and x a one-hot vector.

    Attributes:
        a: [r, K], the factor A.
        b: [N, r], the factor B.
        bias: [N], added to ``B (A x)`` before it is scaled, or None.
        magnitude: [N], DoRA's magnitude, or None.
        own_bias: [N], replaces the module's bias in the base model; None to keep the base model's.
        rank_scales: [r] fp32, a scale for each rank in addition to ``scale``, or None for ones.
    """

    scale: float
    a: Tensor
    b: Tensor
    bias: Tensor | None
    magnitude: Tensor | None
    own_bias: Tensor | None = None
    rank_scales: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def scales(self) -> Tensor:
        """Scale of each rank, [r] fp32."""
        return torch.full((self.rank,), self.scale) if self.rank_scales is None else self.scale * self.rank_scales
