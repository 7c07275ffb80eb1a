"""Load the index of a layer that chooses the blocks of tokens to which its attention attends (MiniMax M3)."""

from __future__ import annotations

from torch import Tensor

from ...kernels.block_index_ops import BlockChoice
from ..checkpoint.model_config import ModelConfig
from ..models.block_choice import BlockIndexer, BlockSparseAttention
from ..models.layers import Attention, Projection
from ..models.norms import RmsNorm
from .tensor_names import BLOCK_KEY, BLOCK_NORMS, BLOCK_QUERY, INDEXER
from .weight_forms import WeightReader


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
