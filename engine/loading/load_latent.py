"""Load the latent attention of a layer, and indices that choose the tokens to which layers attend.

``kv_b_proj`` is cut into a weight of each head for each of its two uses.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ...kernels.block_index_ops import BlockChoice
from ...kernels.collectives import Ranks
from ...kernels.column_ops import ColumnRuns
from ...kernels.expert_ops import ExpertWeights
from ...kernels.latent_ops import LatentParams
from ...kernels.ops import AttentionParams
from ..checkpoint.model_config import LatentConfig, ModelConfig, TokenIndex
from ..models.block_choice import BlockIndexer, BlockSparseAttention
from ..models.latent_attention import HeadProjection, LatentAttention
from ..models.layers import Attention, Projection, QueryGate
from ..models.norms import LayerNorm, RmsNorm
from ..models.token_choice import LightningIndexer, TokenChoice
from .tensor_names import (
    BLOCK_KEY,
    BLOCK_NORMS,
    BLOCK_QUERY,
    GATE,
    INDEX_KEY,
    INDEX_NORM,
    INDEX_QUERY,
    INDEX_WEIGHTS,
    INDEXER,
    KV_DOWN,
    KV_NORM,
    KV_UP,
    QUERY,
    QUERY_DOWN,
    QUERY_NORM,
    QUERY_UP,
)
from .weight_forms import WeightReader

_NORM_EPS = 1e-6  # Epsilon of the two norms within latent attention; the config's epsilon is for the other norms.


def load_latent(
    weights: WeightReader,
    prefix: str,
    config: ModelConfig,
    latent: LatentConfig,
    table: Tensor | None,
    interleaved: bool,
    ranks: Ranks | None = None,
    *,
    query_scale: Tensor | None = None,
    shares_index: bool = False,
) -> LatentAttention:
    """Return the latent attention whose tensors begin with ``prefix``.

    Args:
        table: cosines and sines of the rotary embedding; None for a layer without one (Kimi Linear).
        interleaved: whether the rotary embedding pairs neighbouring dimensions.
        query_scale: factors of queries by position, or None.
        shares_index: whether the layer attends to the tokens that the index of an earlier layer has chosen. Used only
            in a model with an index.
        ranks: tensor-parallel ranks, whose results are added up; each has as many heads as ``config`` says. None for a
            single rank.

    Raises:
        ModelError: a weight does not fit the form of quantised weights.
    """
    reader = _Reader(weights, prefix)
    queries = config.num_heads * latent.query_dim
    rank, biased = latent.query_rank, config.qkv_bias
    up = f"{prefix}.{KV_UP}"
    absorb, values = reader.heads(up, config.num_heads, latent)
    return LatentAttention(
        query_down=None if rank is None else reader.projection(QUERY_DOWN, rank, biased),
        query_norm=None if rank is None else RmsNorm(f"{prefix}.{QUERY_NORM}", reader.norm(QUERY_NORM), _NORM_EPS, 0.0),
        query=reader.projection(QUERY if rank is None else QUERY_UP, queries, bias=False),
        kv=reader.projection(KV_DOWN, latent.cell_dim, biased),
        rope=LatentParams(
            num_heads=config.num_heads,
            plain_dim=latent.plain_dim,
            rotary_dim=latent.rotary_dim,
            cos_sin=table,
            norm=reader.norm(KV_NORM),
            eps=_NORM_EPS,
            is_interleaved=interleaved,
            query_scale=query_scale,
        ),
        absorb=HeadProjection(f"{up}.queries", absorb),
        values=HeadProjection(f"{up}.values", values),
        up_module=up,
        output=replace(reader.projection("o_proj", config.hidden_size, config.output_bias), added_over=ranks),
        params=AttentionParams(config.attention_scale, value_dim=latent.kv_rank),
        choice=None if latent.index is None else _choice(weights, prefix, latent.index, table, shares=shares_index),
        gate=_gate_columns(config, latent) if config.gated_attention is not None else None,
        gating=reader.projection(GATE, config.num_heads, bias=False) if config.gated_attention is not None else None,
    )


def _gate_columns(config: ModelConfig, latent: LatentConfig) -> QueryGate:
    """Return the columns of queries and of a gate with one value for each head."""
    assert config.gated_attention == "head_module" and latent.index is None
    queries = [(0, 0, config.num_heads * latent.query_dim)]
    joined = ColumnRuns.of([*queries, (1, 0, config.num_heads)])
    return QueryGate(None, joined, ColumnRuns.of(queries), queries[0][2], repeat=latent.value_dim)


def _choice(
    weights: WeightReader, prefix: str, index: TokenIndex, table: Tensor | None, *, shares: bool
) -> TokenChoice:
    """Read the index of a layer; its products choose tokens, so they stay in the model's type."""
    if shares:
        return TokenChoice(index.most, None)
    assert table is not None
    names = {INDEX_QUERY: index.heads * index.dim, INDEX_KEY: index.dim, INDEX_WEIGHTS: index.heads}
    modules = {name: f"{prefix}.{INDEXER}.{name}" for name in (*names, INDEX_NORM)}
    queries, keys, of_heads = (
        Projection((modules[name],), (size,), weights.plain(f"{modules[name]}.weight")) for name, size in names.items()
    )
    weight, bias = (weights.tensor(f"{modules[INDEX_NORM]}.{part}") for part in ("weight", "bias"))
    norm = LayerNorm(f"{modules[INDEX_NORM]}.weight", weight, bias, _NORM_EPS, 0.0)
    return TokenChoice(index.most, LightningIndexer(queries, keys, norm, of_heads, table, index.interleaved))


def load_block_index(
    weights: WeightReader, prefix: str, config: ModelConfig, index: int, attention: Attention, table: Tensor
) -> BlockSparseAttention:
    """Return a layer's attention behind its index, whose products stay in the model's type, as they choose tokens.

    Args:
        prefix: name of the module of the layer's attention.
        table: cosines and sines of attention's rotary embedding.

    Raises:
        ModelError: a weight does not fit the form of quantised weights.
    """
    blocks = config.layers[index].block_index
    assert blocks is not None
    sizes = {BLOCK_QUERY: config.heads_of(index).heads * blocks.dim, BLOCK_KEY: blocks.dim}
    names = {name: f"{prefix}.{INDEXER}.{name}" for name in (*sizes, *BLOCK_NORMS)}
    queries, keys = (
        Projection((names[name],), (size,), weights.plain(f"{names[name]}.weight")) for name, size in sizes.items()
    )
    query_norm, key_norm = (
        RmsNorm(names[name], weights.tensor(f"{names[name]}.weight"), config.norm_eps, config.norm_offset)
        for name in BLOCK_NORMS
    )
    return BlockSparseAttention(
        index=index,
        attention=attention,
        indexer=BlockIndexer(queries, keys, query_norm, key_norm, table),
        blocks=BlockChoice(blocks.most, blocks.size, blocks.local),
    )


class _Reader:
    """Reads the parts of one layer's attention."""

    def __init__(self, weights: WeightReader, prefix: str) -> None:
        self._weights = weights
        self._prefix = prefix

    def norm(self, module: str) -> Tensor:
        return self._weights.tensor(f"{self._prefix}.{module}.weight")

    def projection(self, module: str, size: int, bias: bool) -> Projection:
        name = f"{self._prefix}.{module}"
        vector = self._weights.tensor(f"{name}.bias") if bias else None
        return Projection((name,), (size,), self._weights.packed(f"{name}.weight", bias=vector))

    def heads(self, module: str, count: int, latent: LatentConfig) -> tuple[ExpertWeights, ExpertWeights]:
        """Return each head's first rows, transposed, and its others."""
        name = f"{module}.weight"
        rows = self._weights.tensor(name).view(count, latent.plain_dim + latent.value_dim, latent.kv_rank)
        plain, value = rows.split((latent.plain_dim, latent.value_dim), dim=1)
        parts = (plain.transpose(1, 2).contiguous(), value.contiguous())
        absorb, values = (ExpertWeights(tuple(self._weights.pack(name, each, None) for each in part)) for part in parts)
        return absorb, values
