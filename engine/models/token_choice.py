"""The tokens that a layer of indexed attention sees: an index's choice, or that of an earlier layer."""

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
        queries: of its heads, from the narrow input of attention's queries.
        keys: to the key of a token, from hidden states.
        key_norm: of this key.
        weights: of the heads, from hidden states.
        cos_sin: the rotary table of attention.
        is_interleaved: that of the index's heads.
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
        """Return the choice of T tokens from [T, H] and the narrow input of queries: ``choose_tokens``."""
        q = self.queries(narrow, inputs.lora).unflatten(1, (-1, cache.shape[3]))
        turned = rotate_index(q, inputs.positions, self.cos_sin, is_interleaved=self.is_interleaved)
        return choose_tokens(turned, self.weights(x, inputs.lora), cache, inputs, most)


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """Which tokens a layer sees, from before its queries are stored until it attends.

    The choice stands beside a token's queries, bit by bit in their type, because a pass keeps the rows of some tokens.

    Attributes:
        most: tokens that one sees.
        index: the layer's own; None for the choice of the last layer before it that has one.
    """

    most: int
    index: LightningIndexer | None

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Products of the index."""
        return () if self.index is None else (self.index.queries, self.index.keys, self.index.weights)

    def store(self, q: Tensor, x: Tensor, narrow: Tensor, inputs: ForwardInputs, cache: Tensor) -> Tensor:
        """Store index keys and choose: queries [T, N] -> [T, N], or [T, N + M] where a row is longer than ``most``.

        Args:
            x: [T, H], the layer's input.
            narrow: the input of the projection of queries.
            cache: of index keys; not read by a layer without an index of its own.
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
        """Return queries [S, width], and the batch and the cache by which they see what was chosen for them."""
        if q.shape[1] == width:
            return q, inputs, cache
        chosen = q[:, width:].contiguous().view(torch.int32)
        return q[:, :width].contiguous(), chosen_batch(chosen), cache.view(-1, 1, 1, cache.shape[3])
