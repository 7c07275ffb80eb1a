"""Columns of q, k and v in their product, of the gate of attention's results, and of the results that are read."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.column_ops import ColumnRuns
from ..checkpoint.model_config import ALIBI_DIMS, ModelConfig
from ..errors import ModelError
from ..models.alibi import alibi_slopes, pair_constants, position_table
from ..models.layers import QueryGate
from .shards import Shard
from .tensor_names import qkv_modules


def spread_columns(config: ModelConfig, index: int) -> ColumnRuns | None:
    """Return the columns of a layer's q, k and v in their product; None if they simply follow one another."""
    if config.layers[index].shares_values:
        q, kv = qkv_modules(config, index).values()
        return ColumnRuns.of([(0, 0, q + kv), (0, q, kv)])
    if config.value_dim is not None:
        return _widened_heads(config, index, config.value_dim)
    if not config.grouped_qkv:
        return None
    heads, dim = config.heads_of(index)
    queries = config.num_heads_of(index) // heads * dim
    starts = range(0, heads * (queries + 2 * dim), queries + 2 * dim)
    parts = ((0, queries), (queries, dim), (queries + dim, dim))
    return ColumnRuns.of([(0, start + at, count) for at, count in parts for start in starts])


def _widened_heads(config: ModelConfig, index: int, of_values: int) -> ColumnRuns:
    """Return the columns of q, k and v, in which each head is as wide as a cell of the KV pool.

    With ALiBi the columns of each query head and of each key head follow ``position_pairs``, a second matrix. The
    further columns of a value repeat those of the head, so that they change no scale of a rounded value. Nothing reads
    what attention makes of them, see ``narrowed_columns``.
    """
    kv_heads, width = config.heads_of(index)
    dim, num_heads = config.key_dim_of(index), config.num_heads_of(index)
    group = num_heads // kv_heads
    if config.grouped_qkv:
        starts = [head * ((group + 1) * dim + of_values) for head in range(kv_heads)]
        queries = [start + each * dim for start in starts for each in range(group)]
        keys = [start + group * dim for start in starts]
        values = [start + dim for start in keys]
    else:
        before, ends = num_heads * dim, (num_heads + kv_heads) * dim
        queries, keys = list(range(0, before, dim)), list(range(before, ends, dim))
        values = list(range(ends, ends + kv_heads * of_values, of_values))
    runs: list[tuple[int, int, int]] = []
    for head, first in enumerate([*queries, *keys]):
        if config.alibi is not None:
            runs.append((1, min(head, num_heads) * ALIBI_DIMS, ALIBI_DIMS))
        runs.append((0, first, dim))
    plain = len(runs)
    runs += [(0, first, min(of_values, width - at)) for first in values for at in range(0, width, of_values)]
    if config.value_scale == 1.0:
        return ColumnRuns.of(runs)
    return ColumnRuns.of(runs, factors=[1.0] * plain + [config.value_scale] * (len(runs) - plain))


def position_pairs(config: ModelConfig, shard: Shard | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Return the columns of queries and keys that make ALiBi's bias of the scores; None without ALiBi.

    Args:
        config: the model as this rank computes it.
        shard: the rank's part of the model; None for a single rank.

    Raises:
        ModelError: products with positions would overflow in this type.
    """
    if config.alibi is None:
        return None
    if dtype is torch.float16:
        raise ModelError("ALiBi is supported in bfloat16 and float32, not in float16. Try: --dtype float32")
    first, whole = (0, config) if shard is None else (shard.ranks.rank * config.num_heads, shard.whole)
    slopes = alibi_slopes(whole.num_heads, config.alibi)[first : first + config.num_heads]
    return pair_constants(slopes, config.attention_scale, dtype, device)


def position_rotation(config: ModelConfig, max_positions: int, device: torch.device) -> Tensor | None:
    """Return the table that rotates those columns like a rotary embedding; None without ALiBi."""
    return None if config.alibi is None else position_table(max_positions, device)


def narrowed_columns(config: ModelConfig, index: int) -> ColumnRuns | None:
    """Return the columns of a layer's attention's results that are the value heads'; None for all."""
    dim = config.value_dim
    if dim is None or dim == config.head_dim:
        return None
    return ColumnRuns.of([(0, head * config.head_dim, dim) for head in range(config.num_heads_of(index))])


def query_gate(config: ModelConfig, index: int) -> QueryGate | None:
    """Return the columns of the gate of a layer's attention's results, None without a gate."""
    num_heads, dim, is_softplus = config.num_heads_of(index), config.head_dim, config.softplus_gate
    match config.gated_attention:
        case "heads":
            return QueryGate.of_heads(num_heads, config.kv_size, dim)
        case "module":
            return QueryGate.of_module(num_heads, dim, is_softplus=is_softplus)
        case "head_module":
            return QueryGate.of_module(num_heads, dim, repeat=dim, is_softplus=is_softplus)
    return None
