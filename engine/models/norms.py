"""Norms of a decoder, alone and after the addition to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.ops import add_layer_norm, add_rms_norm, add_scaled, copy_residual, layer_norm, rms_norm
from ...lora.own.own_weights import OwnStep
from ...lora.published.saved_modules import NormWeights


class Norm(Protocol):
    """A norm of hidden states [T, H]."""

    @property
    def name(self) -> str:
        """Name of the norm in the checkpoint, by which adapters address it; empty if the norm has no weight."""

    def with_weights(self, own: NormWeights) -> Norm:
        """Return the norm with an adapter's weights in place of its own."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm in the model's type: [T, H], also fp32 -> [T, H]."""

    def after_add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Compute ``residual += x`` in place, then its norm: [T, H], fp32 [T, H] -> [T, H] in the type of x."""


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """``x / rms(x) * (offset + weight)``, weight [H]."""

    name: str
    weight: Tensor
    eps: float
    offset: float

    def with_weights(self, own: NormWeights) -> RmsNorm:
        return self if own.weight is None else replace(self, weight=own.weight)

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.offset, self.weight.dtype)

    def after_add(self, x: Tensor, residual: Tensor) -> Tensor:
        return add_rms_norm(x, residual, self.weight, self.eps, self.offset)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """``(x - mean) / deviation * (offset + weight) + bias``, weight and bias [H]."""

    name: str
    weight: Tensor
    bias: Tensor | None
    eps: float
    offset: float

    def with_weights(self, own: NormWeights) -> LayerNorm:
        weight = self.weight if own.weight is None else own.weight
        return replace(self, weight=weight, bias=self.bias if own.bias is None else own.bias)

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps, self.offset, self.weight.dtype)

    def after_add(self, x: Tensor, residual: Tensor) -> Tensor:
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps, self.offset)


@dataclass(frozen=True, slots=True)
class NoNorm:
    """The identity, for places where other families have a norm."""

    dtype: torch.dtype

    @property
    def name(self) -> str:
        return ""

    def with_weights(self, own: NormWeights) -> NoNorm:
        return self

    def __call__(self, x: Tensor) -> Tensor:
        return copy_residual(x, self.dtype)

    def after_add(self, x: Tensor, residual: Tensor) -> Tensor:
        add_scaled(x, residual, 1.0)
        return copy_residual(residual, x.dtype)


@dataclass(frozen=True, slots=True)
class ScaledSum:
    """A norm before which the residual stream becomes ``kept * residual + factor * x``."""

    norm: Norm
    factor: float
    kept: float = 1.0

    @property
    def name(self) -> str:
        return self.norm.name

    def with_weights(self, own: NormWeights) -> Norm:
        return self.norm.with_weights(own)

    def __call__(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def after_add(self, x: Tensor, residual: Tensor) -> Tensor:
        add_scaled(x, residual, self.factor, self.kept)
        return self.norm(residual)


def normed(norm: Norm, x: Tensor, own: OwnStep | None) -> Tensor:
    """Return the norm of ``x`` [T, H], with an adapter's own weights for its tokens if it has some."""
    return renormed(norm, x, norm(x), own)


def normed_sum(norm: Norm, x: Tensor, residual: Tensor, own: OwnStep | None) -> Tensor:
    """Return ``norm.after_add(x, residual)``, with an adapter's own weights for its tokens if it has some."""
    return renormed(norm, residual, norm.after_add(x, residual), own)


def renormed(norm: Norm, source: Tensor, y: Tensor, own: OwnStep | None) -> Tensor:
    """Return the norm ``y`` of ``source`` [T, H], where an adapter's own weights replace the norm's for its tokens."""
    for tokens, weights in () if own is None else own.norms(norm.name):
        y[tokens] = norm.with_weights(weights)(source[tokens]).to(y.dtype)
    return y
