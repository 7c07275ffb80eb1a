"""Orders of rows and columns in matrices of GGUF files, and functions that restore the order of published tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..checkpoint.families.family_table import BY_NAME
from ..checkpoint.families.recurrent import DeltaLayer
from ..checkpoint.model_config import ModelConfig

Order = Callable[[Tensor], None]
"""Puts rows in the order of the published tensor, in place."""


def row_orders(config: ModelConfig, *, joined: bool) -> dict[str, Order]:
    """Return the reordering of each tensor whose rows are permuted in GGUF files, by a part of its name.

    Args:
        joined: whether the file stores the matrix ``in_proj_qkvz`` of a delta net in two tensors, which are joined.
    """
    if BY_NAME[config.family].permuted_gguf:
        heads = {".q_proj.": config.num_heads, ".k_proj.": config.num_kv_heads}
        return {part: partial(_deinterleave, num_heads=count) for part, count in heads.items()}
    if config.grouped_qkv:
        count, dim = config.num_kv_heads, config.key_dim_of(0)
        sizes = [config.num_heads * dim, count * dim, count * dim]
        return {f".{config.qkv_modules[0]}.": partial(_group, sizes=sizes, heads=count)}
    if (layer := _delta_layer(config)) is None:
        return {}
    if layer.grouped:
        sizes = [layer.key_width, layer.key_width, layer.width, layer.width]
        return {".in_proj_qkvz.": partial(_group, sizes=sizes, heads=layer.num_key_heads)} if joined else {}
    if layer.num_heads == layer.num_key_heads:
        return {}
    untiled = partial(_untile, groups=layer.num_key_heads, heads=layer.num_heads)
    behind_keys = partial(_untile, groups=layer.num_key_heads, heads=layer.num_heads, first=2 * layer.key_width)
    names = ("in_proj_z.", "in_proj_a.", "in_proj_b.", "A_log", "dt_bias")
    orders: dict[str, Order] = {f".linear_attn.{name}": untiled for name in names}
    return orders | {f".linear_attn.{name}.": behind_keys for name in ("in_proj_qkv", "conv1d")}


def column_orders(config: ModelConfig) -> dict[str, Order]:
    """Return the reordering of each matrix whose columns are permuted, by a part of its name."""
    layer = _delta_layer(config)
    if layer is None or layer.grouped or layer.num_heads == layer.num_key_heads:
        return {}
    return {".linear_attn.out_proj.": partial(_untile, groups=layer.num_key_heads, heads=layer.num_heads)}


def _delta_layer(config: ModelConfig) -> DeltaLayer | None:
    """Return the gated delta nets of a model."""
    found = (layer.recurrent for layer in config.layers)
    return next((each for each in found if isinstance(each, DeltaLayer)), None)


def _group(rows: Tensor, sizes: list[int], heads: int) -> None:
    """Reorder parts of ``sizes`` rows, such as all q, all k and all v, in place by key head, with its part of each."""
    parts = [part.reshape(heads, -1, *rows.shape[1:]) for part in rows.split(sizes)]
    rows.copy_(torch.cat(parts, dim=1).reshape(rows.shape))


def _untile(rows: Tensor, groups: int, heads: int, first: int = 0) -> None:
    """Reorder heads in place from row ``first`` on: from the order (head, group) to the order (group, head)."""
    tiled = rows[first:].reshape(heads // groups, groups, -1)
    rows[first:] = tiled.transpose(0, 1).reshape(rows[first:].shape)


def _deinterleave(rows: Tensor, num_heads: int) -> None:
    """Reorder the rows of each head in place: 0, 2, 4, ... 1, 3, 5, ... (the inverse of llama.cpp's permutation)."""
    pairs = rows.view(num_heads, -1, 2, *rows.shape[1:])
    rows.copy_(pairs.transpose(1, 2).reshape(rows.shape))
