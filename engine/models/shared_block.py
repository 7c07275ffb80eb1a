"""Attention and an MLP with shared weights in front of a layer's state space (Zamba 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.column_ops import ColumnRuns, take_columns
from ...kernels.expert_ops import ExpertWeights, sum_experts
from ...kernels.ops import gated_activation
from ...lora.lora_step import LoraStep
from ..checkpoint.model_config import Activation
from .forward_inputs import ForwardInputs
from .layers import Attention, Mlp, Projection
from .mamba2 import Mamba2
from .norms import Norm, normed


@dataclass(frozen=True, slots=True)
class OwnProducts:
    """Products that a layer adds to a shared projection: ``wide_i(narrow_i(x))`` for each module i of it.

    Attributes:
        narrow: the modules' products to narrow results, side by side.
        wide: each module's product from its narrow result.
        columns: the columns of each narrow result.
        joins: how the results of each further module are put beside those before it.
    """

    narrow: Projection
    wide: tuple[Projection, ...]
    columns: tuple[ColumnRuns, ...]
    joins: tuple[ColumnRuns, ...]

    @classmethod
    def of(cls, narrow: Projection, wide: tuple[Projection, ...]) -> OwnProducts:
        """Return the products of these modules."""
        sizes = [sum(each.sizes) for each in wide]
        starts = [sum(narrow.sizes[:index]) for index in range(len(wide))]
        columns = [ColumnRuns.of([(0, start, size)]) for start, size in zip(starts, narrow.sizes, strict=True)]
        joins = [ColumnRuns.of([(0, 0, sum(sizes[:index])), (1, 0, sizes[index])]) for index in range(1, len(sizes))]
        return cls(narrow, wide, tuple(columns), tuple(joins))

    def __call__(self, x: Tensor, lora: LoraStep | None) -> Tensor:
        """Compute the results of all modules, side by side: [T, K] -> [T, sum of their sizes]."""
        between = self.narrow(x, lora)
        first, *others = (
            wide(take_columns(columns, between), lora) for wide, columns in zip(self.wide, self.columns, strict=True)
        )
        for join, other in zip(self.joins, others, strict=True):
            first = take_columns(join, first, other)
        return first

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The products, in the order of the pass."""
        return self.narrow, *self.wide


@dataclass(frozen=True, slots=True)
class SharedProjection(Projection):
    """A projection whose weight several layers share; ``own`` is what this one adds to its results, or None."""

    own: OwnProducts | None = None

    def __call__(self, x: Tensor, lora: LoraStep | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        """Compute as ``Projection`` does, and add the layer's own part."""
        y = Projection.__call__(self, x, lora, out_dtype)
        return y if self.own is None else sum_experts(y, None, self.own(x, lora))

    def gated(self, x: Tensor, kind: Activation, lora: LoraStep | None) -> Tensor:
        """Compute ``act(gate) * up`` from a product of gate and up, adapters included: [T, K] -> [T, size of each]."""
        return gated_activation(self(x, lora), kind)

    def fusable(self, lora: LoraStep | None) -> LoraStep | None:
        """Return the adapters if the next op may expand them, which it may not where the layer adds its own part."""
        return Projection.fusable(self, lora) if self.own is None else None

    @property
    def parts(self) -> tuple[Projection, ...]:
        """The projection itself, and the products of its own part."""
        return (self,) if self.own is None else (self, *self.own.projections)


@dataclass(frozen=True, slots=True)
class SharedBlockMixer:
    """A Zamba 2 layer: ``state(norm(h + linear(mlp(norm(attention(norm([h, e])))))))``.

    h is the residual stream, which the layer gets without a norm, and e are the token embeddings. ``store`` must be
    called first, then the layer itself with its result. The cache arguments are attention's KV; the caches of the state
    space are in ``ForwardInputs.beside``.

    Attributes:
        index: index of the layer, which is the key of its states in ``ForwardInputs.beside``.
        joined: columns of h and of e, side by side.
        joined_norm: the norm in front of attention, of both.
        linear: the projection of the MLP's results, which is the layer's own.
        state_norm: the norm in front of the state space.
    """

    index: int
    joined: ColumnRuns
    joined_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: Mlp
    linear: Projection
    state_norm: Norm
    state: Mamba2

    def store(self, x: Tensor, inputs: ForwardInputs, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Write K, V and states of T tokens: [T, H] -> the results of the scan [T, heads * head_dim]."""
        assert inputs.beside is not None and inputs.embedded is not None
        lora, own = inputs.lora, inputs.own
        of_both = normed(self.joined_norm, take_columns(self.joined, x, inputs.embedded), own)
        q = self.attention.store(of_both, inputs, k_cache, v_cache)
        y = normed(self.mlp_norm, self.attention(q, inputs, k_cache, v_cache), own)
        y = self.linear(self.mlp(y, lora), lora)
        of_state = normed(self.state_norm, sum_experts(x, None, y), own)
        return self.state.store(of_state, inputs, *inputs.beside[self.index])

    def __call__(self, y: Tensor, inputs: ForwardInputs, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Apply the state space's output projection: [S, heads * head_dim] -> [S, H]."""
        return self.state(y, inputs, k_cache, v_cache)

    @property
    def before_kv(self) -> tuple[Projection, ...]:
        """Products before the states."""
        before = (*self.attention.before_kv, *self.attention.behind_kv, *self.mlp.projections, self.linear)
        with_own = (each.parts if isinstance(each, SharedProjection) else (each,) for each in before)
        return *(part for parts in with_own for part in parts), *self.state.before_kv

    @property
    def behind_kv(self) -> tuple[Projection, ...]:
        """Products after the states."""
        return self.state.behind_kv

    @property
    def of_heads(self) -> tuple[tuple[int, ExpertWeights], ...]:
        """Products with a weight for each head; this layer has none."""
        return ()
