"""The ops of latent attention in plain torch, computed in fp32: the tests' oracle, and the path without a kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from .layouts.attention_arguments import LatentParams
from .layouts.expert_arguments import ExpertWeights
from .layouts.grouped_forms import GroupedLinear


def rope_store_latent(
    q: Tensor, kv: Tensor, positions: Tensor, kv_loc: Tensor, cache: Tensor, params: LatentParams
) -> None:
    """Rotate the last dimensions of q's heads and scale q in place; write [norm(latent), rotated key] to the cells."""
    latent, key = kv.split((params.latent_dim, params.rotary_dim), dim=1)
    if params.cos_sin is not None:
        rows = params.cos_sin[positions]
        heads = q.unflatten(1, (params.num_heads, -1))[..., params.plain_dim :]
        heads.copy_(reference.rotate(heads.float(), rows, params.is_interleaved))
        key = reference.rotate(key[:, None].float(), rows, params.is_interleaved)[:, 0]
    if params.query_scale is not None:
        q.copy_(q.float() * params.query_scale[positions, None])
    normed = reference.rms_norm(latent, params.norm, params.eps)
    page, cell = kv_loc // cache.shape[2], kv_loc % cache.shape[2]
    cache[page, 0, cell] = torch.cat((normed, key.to(kv.dtype)), dim=1)


def head_linear(x: Tensor, weights: ExpertWeights) -> Tensor:
    """[T, H * (K + more)], weights [H, N, K] -> [T, H, N + more]; the other dimensions are copied."""
    heads = x.unflatten(1, (len(weights), -1))
    plain = [each.weight for each in weights.experts if not isinstance(each, GroupedLinear)]
    matrices = torch.stack(plain).float()
    products = torch.einsum("thk,hnk->thn", heads[..., : weights.in_features].float(), matrices)
    rest = heads[..., weights.in_features :]
    return torch.cat((products.to(x.dtype), rest), dim=2)
