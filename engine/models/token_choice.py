"""The tokens to which a layer of indexed attention attends: chosen by its index, or by that of an earlier layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.index_ops import choose_tokens, chosen_batch, rotate_index, store_index_keys
from ...kernels.ops import PagedBatch
from .forward_inputs import ForwardInputs
from .layers import Projection
from .norms import LayerNorm


@dataclass(frozen=True, slots=True)
class LightningIndexer:
    """The index of a layer: ``kernels.index_ops`` has the formula.

    Attributes:
        queries: projection of the narrow input of attention's queries to the queries of the index's heads.
        keys: projection of hidden states to the index key of a token.
        key_norm: norm of this key.
        weights: projection of hidden states to the weights of the index's heads.
        cos_sin: the rotary table, which is attention's.
        is_interleaved: whether the rotation of the index's heads pairs neighbouring dimensions.
    """

    queries: Projection
    keys: Projection
    key_norm: LayerNorm
    weights: Projection
    cos_sin: Tensor
    is_interleaved: bool

    def store(self, x: Tensor, inputs: ForwardInputs, cache: Tensor) -> None:
        """Write the index keys of T tokens [T, H] to the layer's cache [pages, 1, page, D]."""
        keys = self.key_norm(self.keys(x, inputs.lora))
        turned = rotate_index(keys[:, None], inputs.positions, self.cos_sin, is_interleaved=self.is_interleaved)
        store_index_keys(turned[:, 0], inputs.kv_loc, cache)

    def choose(self, x: Tensor, narrow: Tensor, inputs: ForwardInputs, cache: Tensor, most: int) -> Tensor:
        """Return the choice of T tokens from [T, H] and the narrow input of queries (see ``choose_tokens``)."""
        q = self.queries(narrow, inputs.lora).unflatten(1, (-1, cache.shape[3]))
        turned = rotate_index(q, inputs.positions, self.cos_sin, is_interleaved=self.is_interleaved)
        return choose_tokens(turned, self.weights(x, inputs.lora), cache, inputs, most)


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """Chooses the tokens to which a layer attends, and keeps the choice from ``store`` until the layer attends.

    The choice is kept as bits in further columns after a token's queries, in their dtype. So if a pass keeps only some
    rows of the queries, it keeps the choices of these rows too.

    Attributes:
        most: largest number of tokens to which a token attends.
        index: the layer's own index; None for the choice of the last earlier layer that has one.
    """

    most: int
    index: LightningIndexer | None

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Products of the index."""
        return () if self.index is None else (self.index.queries, self.index.keys, self.index.weights)

    def store(self, q: Tensor, x: Tensor, narrow: Tensor, inputs: ForwardInputs, cache: Tensor) -> Tensor:
        """Store index keys and choose: queries [T, N] -> [T, N], or [T, N + M] if a row is longer than ``most``.

        Args:
            x: [T, H], the layer's input.
            narrow: input of the projection of queries.
            cache: cache of index keys; a layer without an index of its own does not read it.
        """
        sees_all = inputs.max_context <= self.most
        if self.index is None:
            chosen = None if inputs.chosen is None else inputs.chosen.cells
        else:
            self.index.store(x, inputs, cache)
            chosen = None if sees_all else self.index.choose(x, narrow, inputs, cache, self.most)
            if inputs.chosen is not None:
                inputs.chosen.cells = chosen
        return q if chosen is None else torch.cat((q, chosen.view(q.dtype)), dim=1)

    def split(self, q: Tensor, width: int, inputs: PagedBatch, cache: Tensor) -> tuple[Tensor, PagedBatch, Tensor]:
        """Return queries [S, width], and the batch and the cache through which they see only the chosen tokens."""
        if q.shape[1] == width:
            return q, inputs, cache
        chosen = q[:, width:].contiguous().view(torch.int32)
        return q[:, :width].contiguous(), chosen_batch(chosen), cache.view(-1, 1, 1, cache.shape[3])
