"""The layers of a decoder (projection, attention, MLP) as objects that call the kernels' ops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.collectives import ALONE, Ranks
from ...kernels.column_ops import ColumnRuns, output_gate, take_columns
from ...kernels.expert_ops import ClampedSwiglu, ExpertWeights, expert_activation
from ...kernels.ops import (
    AnyLinear,
    AttentionParams,
    Largest,
    RopeParams,
    activation,
    attention,
    gated_activation,
    gated_linear,
    largest_linear,
    linear,
    rope_store_kv,
    xielu,
)
from ...lora.lora_step import LoraStep
from ...lora.own.own_weights import OwnStep
from ..checkpoint.model_config import Activation
from .forward_inputs import ForwardInputs
from .norms import Norm, RmsNorm, normed_sum, renormed


@dataclass(frozen=True, slots=True)
class Projection:
    """One matrix product for one or several modules of the published model, side by side in its output.

    Attributes:
        modules: names of the modules in the checkpoint (``model.layers.3.self_attn.q_proj``), by which adapters address
            them.
        sizes: number of output columns of each module, in the same order.
        added_over: the ranks that each have a part of the inputs, whose results are added up; None if this rank has all
            inputs.
    """

    modules: tuple[str, ...]
    sizes: tuple[int, ...]
    packed: AnyLinear
    added_over: Ranks | None = None

    def __call__(self, x: Tensor, lora: LoraStep | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        """Compute [T, K] -> [T, sum of sizes], in the type of x or ``out_dtype``, plus the adapters' part."""
        shrunk = None if lora is None else lora.shrink_beside(self.modules[0], x)
        y = linear(x, self.packed, out_dtype)
        if lora is not None:
            lora.project(self.modules[0], x, y, shrunk)
        return y if self.added_over is None else self.added_over.add(y)

    def gated(self, x: Tensor, kind: Activation, lora: LoraStep | None) -> Tensor:
        """Compute ``act(gate) * up`` from a product of gate and up, adapters included: [T, K] -> [T, size of each]."""
        name = self.modules[0]
        if lora is not None and lora.changes(name):
            shrunk = lora.shrink_beside(name, x)
            return lora.activate(name, x, linear(x, self.packed), kind, shrunk)
        return gated_linear(x, self.packed, kind)

    def fusable(self, lora: LoraStep | None) -> LoraStep | None:
        """Return the adapters if the next op may expand them: they change this product, and nothing else does."""
        return lora if lora is not None and self.added_over is None and lora.changes(self.modules[0]) else None

    def rotated(
        self,
        x: Tensor,
        places: tuple[Tensor, Tensor],
        caches: tuple[Tensor, Tensor],
        rope: RopeParams,
        lora: LoraStep | None,
    ) -> Tensor:
        """Compute ``rope_store_kv`` of a product of q, k and v, adapters included: [T, K] -> queries [T, Hq, D].

        Args:
            places: positions and cells of the tokens.
            caches: keys and values of the layer.
        """
        name, fused = self.modules[0], self.fusable(lora)
        if fused is None:
            return rope_store_kv(self(x, lora), *places, *caches, rope)
        shrunk = fused.shrink_beside(name, x)
        return fused.rope_store_kv(name, x, linear(x, self.packed), places, caches, rope, shrunk)

    def normed_sum(self, x: Tensor, residual: Tensor, norm: Norm, lora: LoraStep | None, own: OwnStep | None) -> Tensor:
        """Compute ``normed_sum`` of the product, adapters included: [T, K] -> [T, H]; updates ``residual`` [T, H]."""
        name, fused = self.modules[0], self.fusable(lora)
        if fused is None or not isinstance(norm, RmsNorm):
            return normed_sum(norm, self(x, lora), residual, own)
        shrunk = fused.shrink_beside(name, x)
        weights = norm.weight, norm.eps, norm.offset
        y = fused.add_rms_norm(name, x, linear(x, self.packed), residual, weights, shrunk)
        return renormed(norm, residual, y, own)

    def largest(self, x: Tensor) -> Largest:
        """Return the largest of each row of the float32 product, without adapters: [S, K] -> [S]."""
        return largest_linear(x, self.packed)


@dataclass(frozen=True, slots=True)
class SplitHead(Projection):
    """A head that is split by tokens: each rank has the rows of some tokens, in rank order. Rank 0 gets all logits.

    Attributes:
        ranks: the group.
        vocab_sizes: number of tokens of each rank.
    """

    ranks: Ranks = ALONE
    vocab_sizes: tuple[int, ...] = ()

    def __call__(self, x: Tensor, lora: LoraStep | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        """Compute the logits [S, H] -> [S, V] on rank 0; the other ranks return their own columns."""
        part = Projection.__call__(self, x, lora, out_dtype)
        wide = functional.pad(part, (0, max(self.vocab_sizes) - part.shape[1]))
        found = self.ranks.gather(wide.contiguous())
        if not found:
            return part
        return torch.cat([each[:, :size] for each, size in zip(found, self.vocab_sizes, strict=True)], dim=1)

    def largest(self, x: Tensor) -> Largest:
        """Return on rank 0 the largest of each row over all ranks: [S, H] -> [S]. The first of equal values counts."""
        part = Projection.largest(self, x)
        values, columns = self.ranks.gather(part.value.contiguous()), self.ranks.gather(part.column.contiguous())
        if not values:
            return part
        starts = (sum(self.vocab_sizes[:rank]) for rank in range(len(values)))
        best = Largest(torch.stack(values), torch.stack([each + at for each, at in zip(columns, starts, strict=True)]))
        # If a value is NaN, ``argmax`` returns the rank of the NaN.
        rank = best.value.argmax(0, keepdim=True)
        return Largest(best.value.gather(0, rank)[0], best.column.gather(0, rank)[0])


@dataclass(frozen=True, slots=True)
class QueryGate:
    """Columns of queries and of the gate of attention's results.

    Attributes:
        projected: columns of q, k and v in the fused projection [q and gate of each head, k, v]; None if that has no
            gate.
        joined: rotated queries, followed by the gate from the fused projection or from its own.
        queries: the queries in ``joined``.
        width: number of columns of queries.
        repeat: number of adjacent columns of results with the same gate, which has ``width / repeat`` columns.
        is_softplus: whether results are multiplied by the gate's softplus (Laguna), else by its sigmoid.
    """

    projected: ColumnRuns | None
    joined: ColumnRuns
    queries: ColumnRuns
    width: int
    repeat: int = 1
    is_softplus: bool = False

    @classmethod
    def of_module(cls, num_heads: int, head_dim: int, repeat: int = 1, *, is_softplus: bool = False) -> QueryGate:
        """Return the columns for a gate with a projection of its own."""
        width = num_heads * head_dim
        joined = ColumnRuns.of([(0, 0, width), (1, 0, width // repeat)])
        return cls(None, joined, ColumnRuns.of([(0, 0, width)], heads=num_heads), width, repeat, is_softplus)

    @classmethod
    def of_heads(cls, num_heads: int, kv_size: int, head_dim: int) -> QueryGate:
        """Return the columns for a projection with gates among queries, and ``kv_size`` columns of k and of v."""
        width, heads = num_heads * head_dim, range(num_heads)
        return cls(
            ColumnRuns.of([*((0, 2 * head * head_dim, head_dim) for head in heads), (0, 2 * width, 2 * kv_size)]),
            ColumnRuns.of([(0, 0, width), *((1, (2 * head + 1) * head_dim, head_dim) for head in heads)]),
            ColumnRuns.of([(0, 0, width)], heads=num_heads),
            width,
        )


@dataclass(frozen=True, slots=True)
class Attention:
    """Self-attention of one layer, from normed hidden states to the output projection.

    ``store`` must be called first, then the layer itself with its result.

    Attributes:
        rope: heads, rotary table and norms of the heads.
        params: scale, window and cap of the scores.
        head_norms: names of the norms of query and key heads in the checkpoint, empty without norms.
        gate: columns of the gate of the results, None without a gate. With a gate, ``store`` returns queries and gate
            side by side.
        gating: projection of the gate, if it is not in ``qkv``.
        spread: columns of q, k and v in ``qkv``, if v is k before its norm and rotation, or if columns are grouped by
            KV head; None if q, k and v are side by side.
        narrowed: columns of attention's results that the output projection reads, if value heads have fewer dimensions
            than the KV pool has room for; None for all.
        pairs: columns that ``spread`` takes in front of queries and keys, the same for all tokens (``alibi``); None for
            none.
    """

    qkv: Projection
    output: Projection
    rope: RopeParams
    params: AttentionParams
    head_norms: tuple[str, ...] = ()
    gate: QueryGate | None = None
    gating: Projection | None = None
    spread: ColumnRuns | None = None
    narrowed: ColumnRuns | None = None
    pairs: Tensor | None = None

    def store(self, x: Tensor, inputs: ForwardInputs, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Write K and V of T tokens to this layer's cache [pages, Hkv, page, D]: [T, H] -> queries [T, Hq, D]."""
        if self.gate is None and self.spread is None and (inputs.own is None or not self.head_norms):
            places = inputs.positions, inputs.kv_loc
            return self.qkv.rotated(x, places, (k_cache, v_cache), self.rope, inputs.lora)
        projected = self.qkv(x, inputs.lora)
        if self.spread is not None:
            projected = take_columns(self.spread, projected, self.pairs)
        if self.gate is None:
            return self._store(projected, inputs, k_cache, v_cache)
        if self.gate.projected is None:
            assert self.gating is not None
            q = self._store(projected, inputs, k_cache, v_cache)
            return take_columns(self.gate.joined, q, self.gating(x, inputs.lora))
        q = self._store(take_columns(self.gate.projected, projected), inputs, k_cache, v_cache)
        return take_columns(self.gate.joined, q, projected)

    def _store(self, qkv: Tensor, inputs: ForwardInputs, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        q = rope_store_kv(qkv, inputs.positions, inputs.kv_loc, k_cache, v_cache, self.rope)
        for tokens, rope in self._own_norms(inputs.own):
            places = inputs.positions[tokens], inputs.kv_loc[tokens]
            q[tokens] = rope_store_kv(qkv[tokens], *places, k_cache, v_cache, rope)
        return q

    def _own_norms(self, own: OwnStep | None) -> Iterator[tuple[Tensor, RopeParams]]:
        """Yield the tokens of each adapter with norms of heads, and the norms and rotation of their q and k."""
        for tokens, weights in own.parts if own is not None and self.head_norms else ():
            q, k = (weights.norms.get(name) for name in self.head_norms)
            if q is not None or k is not None:
                q_norm, k_norm = (None if norm is None else norm.weight for norm in (q, k))
                rope = self.rope if q_norm is None else replace(self.rope, q_norm=q_norm)
                yield tokens, rope if k_norm is None else replace(rope, k_norm=k_norm)

    def __call__(self, q: Tensor, inputs: ForwardInputs, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Causal attention of queries to the cache, followed by the output projection: [S, Hq, D] -> [S, H]."""
        return self.output(self.attended(q, inputs, k_cache, v_cache), inputs.lora)

    def attended(self, q: Tensor, inputs: ForwardInputs, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Return the input of the output projection: [S, Hq, D] -> [S, Hq * D]."""
        if self.gate is None:
            y = attention(q, k_cache, v_cache, inputs, self.params)
            return y if self.narrowed is None else take_columns(self.narrowed, y)
        queries = take_columns(self.gate.queries, q)
        y = attention(queries, k_cache, v_cache, inputs, self.params)
        return output_gate(y, q, self.gate.width, self.gate.repeat, is_softplus=self.gate.is_softplus)

    @property
    def before_kv(self) -> tuple[Projection, ...]:
        """Products that all tokens pass through, whether their hidden states are needed or not."""
        return (self.qkv,) if self.gating is None else (self.qkv, self.gating)

    @property
    def behind_kv(self) -> tuple[Projection, ...]:
        """Products after K and V are stored."""
        return (self.output,)

    @property
    def of_heads(self) -> tuple[tuple[int, ExpertWeights], ...]:
        """Products with a weight for each head; this layer has none."""
        return ()


@dataclass(frozen=True, slots=True)
class Mlp:
    """``down(act(gate(x)) * up(x))``, gate and up as one product."""

    gate_up: Projection
    down: Projection
    activation: Activation

    def __call__(self, x: Tensor, lora: LoraStep | None, num_tokens: Tensor | None = None) -> Tensor:
        """[T, H] -> [T, H]."""
        return self.down(self.gated(x, lora), lora)

    def gated(self, x: Tensor, lora: LoraStep | None) -> Tensor:
        """Return the input of ``down``: [T, H] -> [T, I]."""
        return self.gate_up.gated(x, self.activation, lora)

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The products, in the order of the pass."""
        return self.gate_up, self.down

    @property
    def active(self) -> tuple[tuple[int, ExpertWeights], ...]:
        """Products of a token's experts; this MLP has none."""
        return ()


@dataclass(frozen=True, slots=True)
class ClampedMlp:
    """``down(g * sigmoid(alpha * g) * (u + offset))`` of gate g and up u, both clamped (MiniMax M3, Step 3.5)."""

    gate_up: Projection
    down: Projection
    activation: ClampedSwiglu

    def __call__(self, x: Tensor, lora: LoraStep | None, num_tokens: Tensor | None = None) -> Tensor:
        """[T, H] -> [T, H]."""
        return self.down(expert_activation(self.gate_up(x, lora), self.activation), lora)

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The products, in the order of the pass."""
        return self.gate_up, self.down

    @property
    def active(self) -> tuple[tuple[int, ExpertWeights], ...]:
        """Products of a token's experts; this MLP has none."""
        return ()


@dataclass(frozen=True, slots=True)
class ScaledMlp:
    """``f * down(act(g * gate(x)) * up(x))`` with factors f and g (Falcon H1).

    Attributes:
        before: columns of gate and up, the gate multiplied by g; None if g is 1.
        behind: columns of the output, multiplied by f.
    """

    gate_up: Projection
    down: Projection
    activation: Activation
    before: ColumnRuns | None
    behind: ColumnRuns

    @classmethod
    def of(cls, gate_up: Projection, down: Projection, kind: Activation, gate: float, output: float) -> ScaledMlp:
        """Return the MLP with these factors of its gate and of its output."""
        size, hidden = sum(gate_up.sizes) // 2, sum(down.sizes)
        runs = [(0, 0, size), (0, size, size)]
        before = None if gate == 1.0 else ColumnRuns.of(runs, factors=[gate, 1.0])
        return cls(gate_up, down, kind, before, ColumnRuns.of([(0, 0, hidden)], factors=[output]))

    def __call__(self, x: Tensor, lora: LoraStep | None, num_tokens: Tensor | None = None) -> Tensor:
        """[T, H] -> [T, H]."""
        if self.before is None:
            y = self.gate_up.gated(x, self.activation, lora)
        else:
            y = gated_activation(take_columns(self.before, self.gate_up(x, lora)), self.activation)
        return take_columns(self.behind, self.down(y, lora))

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The products, in the order of the pass."""
        return self.gate_up, self.down

    @property
    def active(self) -> tuple[tuple[int, ExpertWeights], ...]:
        """Products of a token's experts; this MLP has none."""
        return ()


class LayerMixer(Protocol):
    """Part of a layer in which the tokens of a row interact: ``Attention``, ``ShortConv``, ``Mamba2`` and others."""

    def store(self, x: Tensor, inputs: ForwardInputs, k_cache: Tensor, v_cache: Tensor, /) -> Tensor:
        """Compute everything that later tokens need of these tokens, in the layer's two caches: [T, H] -> [T, ...]."""

    def __call__(self, q: Tensor, inputs: ForwardInputs, k_cache: Tensor, v_cache: Tensor, /) -> Tensor:
        """Compute the mixer's output from S rows of the result of ``store``: [S, ...] -> [S, H]."""

    @property
    def before_kv(self) -> tuple[Projection, ...]:
        """Products of ``store``."""

    @property
    def behind_kv(self) -> tuple[Projection, ...]:
        """Products of the call."""

    @property
    def of_heads(self) -> tuple[tuple[int, ExpertWeights], ...]:
        """Products with a weight for each head: the number of heads, and the weights of all."""


class LayerMlp(Protocol):
    """The MLP of a layer: ``Mlp``, ``PlainMlp`` and others, or the mixture ``experts.Experts``."""

    def __call__(self, x: Tensor, lora: LoraStep | None, num_tokens: Tensor | None = None, /) -> Tensor:
        """Compute the MLP: [T, H] -> [T, H]; ``num_tokens`` as in ``ForwardInputs``."""

    @property
    def projections(self) -> tuple[Projection, ...]: ...

    @property
    def active(self) -> tuple[tuple[int, ExpertWeights], ...]: ...


@dataclass(frozen=True, slots=True)
class PlainMlp:
    """``down(act(up(x)))``."""

    up: Projection
    down: Projection
    activation: Activation

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The products, in the order of the pass."""
        return self.up, self.down

    @property
    def active(self) -> tuple[tuple[int, ExpertWeights], ...]:
        """Products of a token's experts; this MLP has none."""
        return ()

    def __call__(self, x: Tensor, lora: LoraStep | None, num_tokens: Tensor | None = None) -> Tensor:
        """[T, H] -> [T, H]."""
        return self.down(activation(self.up(x, lora), self.activation), lora)


@dataclass(frozen=True, slots=True)
class XieluMlp:
    """``down(xielu(up(x)))``, with factors [4] fp32 of its own (Apertus)."""

    up: Projection
    down: Projection
    factors: Tensor

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The products, in the order of the pass."""
        return self.up, self.down

    @property
    def active(self) -> tuple[tuple[int, ExpertWeights], ...]:
        """Products of a token's experts; this MLP has none."""
        return ()

    def __call__(self, x: Tensor, lora: LoraStep | None, num_tokens: Tensor | None = None) -> Tensor:
        """[T, H] -> [T, H]."""
        return self.down(xielu(self.up(x, lora), self.factors), lora)
