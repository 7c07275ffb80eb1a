"""Block-sparse attention of a layer: its index chooses the blocks of tokens that each KV head sees (MiniMax M3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.block_index_ops import BlockChoice, block_batch, block_pages, choose_blocks
from ...kernels.expert_ops import ExpertWeights
from ...kernels.index_ops import rotate_index, store_index_keys
from ...kernels.ops import attention
from .forward_inputs import ForwardInputs
from .layers import Attention, Projection
from .norms import RmsNorm


@dataclass(frozen=True, slots=True)
class BlockIndexer:
    """The index of a layer: ``kernels.block_index_ops`` has the formula.

    Attributes:
        queries: projection of hidden states to the queries of the index's heads, one for each KV head.
        keys: projection of hidden states to the index key of a token.
        query_norm: norm of each head's query.
        key_norm: norm of the key.
        cos_sin: the rotary table, which is attention's.
    """

    queries: Projection
    keys: Projection
    query_norm: RmsNorm
    key_norm: RmsNorm
    cos_sin: Tensor

    def store(self, x: Tensor, inputs: ForwardInputs, cache: Tensor) -> None:
        """Write the index keys of T tokens [T, H] to the layer's cache [pages, 1, page, D]."""
        keys = self.key_norm(self.keys(x, inputs.lora))[:, None]
        turned = rotate_index(keys, inputs.positions, self.cos_sin, is_interleaved=False)
        store_index_keys(turned[:, 0], inputs.kv_loc, cache)

    def choose(self, x: Tensor, inputs: ForwardInputs, cache: Tensor, blocks: BlockChoice) -> Tensor:
        """Return the choice of T tokens [T, H] (see ``choose_blocks``)."""
        q = self.queries(x, inputs.lora).view(-1, cache.shape[3])
        q = self.query_norm(q).view(len(x), -1, cache.shape[3])
        turned = rotate_index(q, inputs.positions, self.cos_sin, is_interleaved=False)
        return choose_blocks(turned, cache, inputs, blocks)


@dataclass(frozen=True, slots=True)
class BlockSparseAttention:
    """Attention whose tokens see only the blocks that an index chooses, once they have more of them.

    The choice is kept from ``store`` until the layer attends, as bits in further columns after a token's queries, in
    their dtype. So if a pass keeps only some rows of the queries, it keeps the choices of these rows too.

    Attributes:
        index: index of the layer, which is the key of its index keys in ``ForwardInputs.beside``.
        attention: projections, norms and rotation of q, k and v, and the output projection.
        indexer: the layer's index.
        blocks: sizes of the choice.
    """

    index: int
    attention: Attention
    indexer: BlockIndexer
    blocks: BlockChoice

    def store(self, x: Tensor, inputs: ForwardInputs, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Write K, V and index keys of T tokens, and choose: [T, H] -> queries [T, Hq, D], or [T, Hq * D + M].

        The latter are queries and choice, if a row is so long that there is a choice.
        """
        assert inputs.beside is not None
        q = self.attention.store(x, inputs, k_cache, v_cache)
        cache, _ = inputs.beside[self.index]
        self.indexer.store(x, inputs, cache)
        if inputs.max_context <= self.blocks.most_tokens:
            return q
        chosen = self.indexer.choose(x, inputs, cache, self.blocks).flatten(1)
        return torch.cat((q.flatten(1), chosen.view(q.dtype)), dim=1)

    def __call__(self, q: Tensor, inputs: ForwardInputs, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Causal attention of queries to the blocks of their choice, followed by the output projection: -> [S, H]."""
        if q.dim() == 3:
            return self.attention(q, inputs, k_cache, v_cache)
        heads, (_, kv_heads, _, dim) = self.attention.rope.num_heads, k_cache.shape
        queries = q[:, : heads * dim].reshape(-1, heads // kv_heads, dim)
        chosen = q[:, heads * dim :].contiguous().view(torch.int32).unflatten(1, (kv_heads, -1))
        k, v = (block_pages(cache, self.blocks) for cache in (k_cache, v_cache))
        y = attention(queries, k, v, block_batch(chosen, self.blocks), self.attention.params)
        return self.attention.output(y.view(len(q), -1), inputs.lora)

    @property
    def before_kv(self) -> tuple[Projection, ...]:
        """Products before K, V and index keys, and those of the choice."""
        return *self.attention.before_kv, self.indexer.queries, self.indexer.keys

    @property
    def behind_kv(self) -> tuple[Projection, ...]:
        """Products after K and V are stored."""
        return self.attention.behind_kv

    @property
    def of_heads(self) -> tuple[tuple[int, ExpertWeights], ...]:
        """Products with a weight for each head; this layer has none."""
        return ()
