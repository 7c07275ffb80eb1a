"""Norms of a decoder, alone and after the addition to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.ops import add_layer_norm, add_rms_norm, add_scaled, copy_residual, layer_norm, rms_norm


class Norm(Protocol):
    """A norm of hidden states [T, H]."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm in the model's type: [T, H], also fp32 -> [T, H]."""

    def after_add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual += x`` in place, then the norm of it: [T, H], fp32 [T, H] -> [T, H] in the type of x."""


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """``x / rms(x) * (offset + weight)``, weight [H]."""

    weight: Tensor
    eps: float
    offset: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.offset, self.weight.dtype)

    def after_add(self, x: Tensor, residual: Tensor) -> Tensor:
        return add_rms_norm(x, residual, self.weight, self.eps, self.offset)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """``(x - mean) / deviation * (offset + weight) + bias``, weight and bias [H]."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    offset: float

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps, self.offset, self.weight.dtype)

    def after_add(self, x: Tensor, residual: Tensor) -> Tensor:
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps, self.offset)


@dataclass(frozen=True, slots=True)
class NoNorm:
    """The identity, in a place where other families have a norm."""

    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        return copy_residual(x, self.dtype)

    def after_add(self, x: Tensor, residual: Tensor) -> Tensor:
        add_scaled(x, residual, 1.0)
        return copy_residual(residual, x.dtype)


@dataclass(frozen=True, slots=True)
class ScaledSum:
    """A norm before which ``factor * x`` is added to the residual stream."""

    norm: Norm
    factor: float

    def __call__(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def after_add(self, x: Tensor, residual: Tensor) -> Tensor:
        add_scaled(x, residual, self.factor)
        return self.norm(residual)
