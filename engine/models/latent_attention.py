"""Multi-head latent attention of a layer, in the absorbed form: ``kernels.latent_ops`` has the formula."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...kernels.column_ops import output_gate, take_columns
from ...kernels.expert_ops import ExpertWeights
from ...kernels.latent_ops import LatentParams, head_linear, latent_queries, rope_store_latent
from ...kernels.ops import AttentionParams, PagedBatch, attention
from .forward_inputs import ForwardInputs
from .layers import Projection, QueryGate
from .norms import Norm
from .token_choice import TokenChoice


@dataclass(frozen=True, slots=True)
class HeadProjection:
    """A product with a separate weight for each head.

    Attributes:
        name: key of the product in the adapters' weights.
    """

    name: str
    weights: ExpertWeights


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Self-attention over one cached vector of each token, from normed hidden states to the output projection.

    Attributes:
        query_down: projection to the narrow input of ``query``, or None.
        query_norm: norm of that input.
        query: projection to the heads' queries.
        kv: projection to the latent vector and the key that is rotated.
        rope: rotation, and layout of the stored vector.
        absorb: projection from a head's queries to the space of latent vectors: the transposed first rows of
            ``kv_b_proj``.
        values: projection from weighted sums of latent vectors to the head's value: the other rows of ``kv_b_proj``.
        up_module: the published name of ``kv_b_proj``, which adapters change.
        params: scale of the scores, and number of dimensions of the latent vector.
        choice: choice of the tokens to which a token attends; None for all.
        gate: columns of the gate of the heads' values, which follow the queries; None without a gate.
        gating: projection of the gate, which has one value for each head (Ling 3).
    """

    query_down: Projection | None
    query_norm: Norm | None
    query: Projection
    kv: Projection
    rope: LatentParams
    absorb: HeadProjection
    values: HeadProjection
    up_module: str
    output: Projection
    params: AttentionParams
    choice: TokenChoice | None = None
    gate: QueryGate | None = None
    gating: Projection | None = None

    def store(self, x: Tensor, inputs: ForwardInputs, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Write the vectors of T tokens to this layer's cache [pages, 1, page, L + R]: [T, H] -> queries [T, Hq * D].

        ``v_cache`` is ``k_cache``, or in a layer with an index has the index keys [pages, 1, page, D]; the tokens that
        the index has chosen, or the gate, follow the queries.
        """
        kv, narrow = self.kv(x, inputs.lora), x
        if self.query_down is not None and self.query_norm is not None:
            narrow = self.query_norm(self.query_down(x, inputs.lora))
        q = self.query(narrow, inputs.lora)
        rope_store_latent(q, kv, inputs.positions, inputs.kv_loc, k_cache, self.rope)
        if self.gate is not None and self.gating is not None:
            q = take_columns(self.gate.joined, q, self.gating(x, inputs.lora))
        return q if self.choice is None else self.choice.store(q, x, narrow, inputs, v_cache)

    def __call__(self, q: Tensor, inputs: ForwardInputs, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Causal attention of queries to the cache, followed by the output projection: [S, Hq * D] -> [S, H]."""
        batch: PagedBatch = inputs
        gated, gate = q, self.gate
        if gate is not None:
            q = take_columns(gate.queries, q)
        if self.choice is not None:
            width = self.rope.num_heads * (self.rope.plain_dim + self.rope.rotary_dim)
            q, batch, k_cache = self.choice.split(q, width, inputs, k_cache)
        queries = latent_queries(q, self.absorb.weights)
        if inputs.lora is not None:
            inputs.lora.project_heads(self.absorb.name, q, queries)
        sums = attention(queries, k_cache, k_cache, batch, self.params)
        values = head_linear(sums, self.values.weights)
        if inputs.lora is not None:
            inputs.lora.project_heads(self.values.name, sums, values)
        if gate is not None:
            values = output_gate(values, gated, gate.width, gate.repeat)
        return self.output(values, inputs.lora)

    @property
    def before_kv(self) -> tuple[Projection, ...]:
        """Products that all tokens pass through, whether their hidden states are needed or not."""
        of_queries = (self.query,) if self.query_down is None else (self.query_down, self.query)
        gating = () if self.gating is None else (self.gating,)
        return (self.kv, *of_queries, *gating, *(() if self.choice is None else self.choice.projections))

    @property
    def behind_kv(self) -> tuple[Projection, ...]:
        """Products after the vectors are stored."""
        return (self.output,)

    @property
    def of_heads(self) -> tuple[tuple[int, ExpertWeights], ...]:
        """Products with a weight for each head: the number of heads, and the weights of all."""
        return tuple((len(part.weights), part.weights) for part in (self.absorb, self.values))
