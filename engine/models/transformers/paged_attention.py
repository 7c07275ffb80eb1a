"""Paged attention for the attention interface of the transformers library.

Models of the library call ``paged_attention`` for each layer, with queries, keys and values of all tokens of a step in
one row. ``ForwardInputs`` defines which tokens belong together, so models build no masks: there is no mask function of
this name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from ....kernels.ops import AttentionParams, RopeParams, attention, rope_store_kv
from ....lora.lora_step import LoraStep
from ...checkpoint.model_config import KvShape
from ..forward_inputs import ForwardInputs
from ..kv_pool import KvPool
from .attention_calls import AttentionCall

PAGED = "rootgraft_paged"
"""Name of ``paged_attention`` among transformers' implementations of attention."""

_ATTRIBUTE = "rootgraft_layer"


@dataclass(slots=True)
class CurrentStep:
    """Inputs of a forward pass, for code that the model's own modules call.

    Attributes:
        inputs: inputs of the pass, None outside of a pass.
        kv: the pool.
        lora: the adapters in the pass, or in the head after it.
    """

    inputs: ForwardInputs | None = None
    kv: KvPool | None = None
    lora: LoraStep | None = None


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """Attention of one layer.

    Attributes:
        index: index of the layer's caches in the pool.
        stores: whether the layer has keys and values of its own, not those of an earlier layer.
        head_dim: dimensions of a head in the caches; shorter queries, keys and values are padded by zeros, without
            effect.
        dtype: type of queries, and of caches unless they have 8 bits.
    """

    index: int
    stores: bool
    num_heads: int
    value_dim: int
    head_dim: int
    dtype: torch.dtype
    heads: RopeParams
    params: AttentionParams
    step: CurrentStep

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store K and V of T tokens and attend: [1, Hq, T, D], twice [1, Hkv, T, D] -> [1, T, Hq, D of values]."""
        inputs, kv = self.step.inputs, self.step.kv
        assert inputs is not None and kv is not None  # inside a forward pass
        caches = kv.k_layers[self.index], kv.v_layers[self.index]
        if self.stores:
            qkv = torch.cat([self._rows(part) for part in (query, key, value)], dim=1)
            q = rope_store_kv(qkv, inputs.positions, inputs.kv_loc, *caches, self.heads)
        else:
            q = self._rows(query).view(-1, self.num_heads, self.head_dim)
        out = attention(q, *caches, inputs, self.params)
        return out.view(1, -1, self.num_heads, self.head_dim)[..., : self.value_dim].to(value.dtype)

    def _rows(self, heads: Tensor) -> Tensor:
        """[1, H, T, D] -> [T, H * head_dim]."""
        rows = heads[0].transpose(0, 1)
        if rows.shape[2] < self.head_dim:
            rows = functional.pad(rows, (0, self.head_dim - rows.shape[2]))
        return rows.reshape(len(rows), -1).to(self.dtype)


def paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """Compute a layer's attention over its pages, with its recorded ``AttentionCall``. Returns no attention weights."""
    layer: PagedLayer = getattr(module, _ATTRIBUTE)
    return layer(query, key, value), None


def attach_layers(calls: list[AttentionCall], dtype: torch.dtype, step: CurrentStep) -> tuple[KvShape, ...]:
    """Give each module that calls attention its layer of the pool, in the order of the calls.

    Returns:
        Number and dimensions of the heads in each layer's caches; the dimensions are the larger of keys' and values'.
    """
    shapes = tuple(KvShape(call.num_kv_heads, max(call.key_dim, call.value_dim)) for call in calls)
    for index, (call, shape) in enumerate(zip(calls, shapes, strict=True)):
        layer = PagedLayer(
            index=index,
            stores=call.source == index,
            num_heads=call.num_heads,
            value_dim=call.value_dim,
            head_dim=shape.dim,
            dtype=dtype,
            heads=RopeParams(call.num_heads, call.num_kv_heads),
            params=AttentionParams(
                scale=call.scale,
                window=call.window,
                soft_cap=call.soft_cap,
                sinks=None if call.sinks is None else call.sinks.detach().float().contiguous(),
            ),
            step=step,
        )
        setattr(call.module, _ATTRIBUTE, layer)
    return shapes


AttentionInterface.register(PAGED, paged_attention)
