"""Ops of multi-head latent attention, on native kernels, Triton kernels or plain torch.

For each token, the pool holds one vector for all heads: a latent c of L dimensions and a rotated key of R. The key of a
head is ``[U c, rotated key]`` and its value is ``W c``. As ``q . U c = (U^T q) . c``, and as sums of values are
``W (sum of c)``, keys and values of single heads need not be computed (the absorbed form):

    rope_store_latent(q, kv, ...)                       stores [c, rotated key], rotates q
    queries = latent_queries(q, U^T of each head)       [T, H * (D + R)] -> [T, H, L + R]
    sums    = attention(queries, cache, cache, ...)     one KV head, values are the first L dimensions of keys
    out     = head_linear(sums, W of each head)         [T, H * L] -> [T, H * V]

All tensors have q's type. T is the number of tokens, H of heads, D of a head's dimensions that are not rotated.
"""

from __future__ import annotations

from torch import Tensor

from . import latent_reference
from .backend import native_for, on_triton, packing_kernels
from .layouts.attention_arguments import LatentParams
from .layouts.expert_arguments import ExpertWeights
from .layouts.grouped_forms import GroupedLinear

__all__ = ["LatentParams", "head_linear", "latent_queries", "rope_store_latent"]


def rope_store_latent(
    q: Tensor, kv: Tensor, positions: Tensor, kv_loc: Tensor, cache: Tensor, params: LatentParams
) -> None:
    """Rotate and scale q in place, and write each token's normed latent vector and rotated key to its cell.

    Args:
        q: [T, H * (D + R)]; the last R dimensions of each head are rotated.
        kv: [T, L + R].
        positions: [T] int64, rows of ``params.cos_sin`` and ``params.query_scale``. Without ``cos_sin`` nothing is
            rotated.
        kv_loc: [T] int64, the cell of each token; on a CUDA device -1 for none.
        cache: [num_pages, 1, page_size, L + R], written.
        params: parameters of the layer.

    Raises:
        IndexError: a position or a cell is outside of its table; not raised on a CUDA device.
        ValueError: shapes do not fit.
    """
    params.check(q, kv, cache)
    if on_triton(q.device):
        from .triton import rope

        if rope.takes_latent(q, kv, cache, params):
            rope.rope_store_latent(q, kv, positions, kv_loc, cache, params)
            if params.query_scale is not None:
                q.copy_(q.float() * params.query_scale[positions, None])
            return None
    kernels = native_for(q, kv, cache, params.norm)
    if kernels is not None:
        return kernels.latent.rope_store(q, kv, positions, kv_loc, cache, params)
    return latent_reference.rope_store_latent(q, kv, positions, kv_loc, cache, params)


def latent_queries(q: Tensor, weights: ExpertWeights) -> Tensor:
    """Return each head's first D dimensions times the head's weight [L, D], followed by the head's other dimensions.

    Args:
        q: [T, H * (D + R)].
        weights: weights of the heads.

    Returns:
        [T, H, L + R].
    """
    heads = len(weights)
    return _head_linear(q, weights, (len(q), heads, weights.out_features + q.shape[1] // heads - weights.in_features))


def head_linear(x: Tensor, weights: ExpertWeights) -> Tensor:
    """Each head times its own weight [N, K]: [T, H * K] -> [T, H * N]."""
    return _head_linear(x, weights, (len(x), len(weights) * weights.out_features))


def _head_linear(x: Tensor, weights: ExpertWeights, shape: tuple[int, ...]) -> Tensor:
    """Multiply each head by its weight. Dimensions of a head after the weight's inputs are copied after its outputs."""
    if on_triton(x.device):
        from .triton import expert_product as gpu

        if gpu.takes_heads(x, weights):
            return gpu.head_linear(x, weights, shape)
    if not isinstance(weights.first, GroupedLinear) and weights.first.kernels is not None:
        return packing_kernels().experts.head_linear(x, weights, shape)
    return latent_reference.head_linear(x, weights).view(shape)
