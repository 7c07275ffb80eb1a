"""Ops of indexed attention (DeepSeek V3.2, GLM-5): a token attends to the tokens that an index scores highest.

For each token, a layer stores one index key of D dimensions in addition to the KV of attention. The index of token t
scores every token s up to itself with H small heads, and attention only sees the ``most`` tokens of the highest scores:

    score(t, s) = sum over heads of weight(t, h) * max(0, q(t, h) . k(s))

The published code also has factors of all scores, an orthogonal transform of q and k, and 8 bits for both. The first
two do not change the order of the scores; the last one is left out, as in the transformers library. On native kernels a
token's choice does not depend on the other tokens of the call. Of equal scores the earlier token is chosen, and NaN is
the lowest score.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from .backend import native_for
from .layouts.attention_arguments import PagedBatch

__all__ = ["choose_tokens", "chosen_batch", "rotate_index", "store_index_keys"]


def rotate_index(x: Tensor, positions: Tensor, cos_sin: Tensor, *, is_interleaved: bool) -> Tensor:
    """Rotate the first R dimensions of the index's heads: [T, H, D], positions [T] -> [T, H, D] in the type of x.

    Args:
        cos_sin: [max_pos, R] fp32, cosines in the first half and sines in the second.
        is_interleaved: whether dimension 2 i is paired with 2 i + 1; otherwise i is paired with i + R / 2.
    """
    return reference.rotate(x.float(), cos_sin[positions], is_interleaved).to(x.dtype)


def store_index_keys(keys: Tensor, kv_loc: Tensor, cache: Tensor) -> None:
    """Write the index keys [T, D] of T tokens to their cells of a cache [num_pages, 1, page_size, D].

    Raises:
        IndexError: a cell is outside of the cache.
    """
    cache[kv_loc // cache.shape[2], 0, kv_loc % cache.shape[2]] = keys


def choose_tokens(q: Tensor, weights: Tensor, cache: Tensor, batch: PagedBatch, most: int) -> Tensor:
    """Choose the tokens to which each token of a ragged batch attends.

    Args:
        q: [T, H, D], the index's rotated queries.
        weights: [T, H], weights of the heads.
        cache: [num_pages, 1, page_size, D], the index keys of all tokens of the batch.
        batch: page table and lengths of the rows.
        most: largest number of tokens that one token may choose.

    Returns:
        [T, most + 1] int32: the cells of the chosen tokens by position, then zeros; the last entry is their number.

    Raises:
        IndexError: the page table is too short for a row, or names a page that is not in the cache.
    """
    if (kernels := native_for(q, weights, cache)) is not None:
        return kernels.latent.choose_tokens(q, weights, cache, batch, most)
    starts, contexts = batch.query_start.tolist(), batch.context_len.tolist()
    chosen = torch.zeros((len(q), most + 1), dtype=torch.int32, device=q.device)
    for row, context in enumerate(contexts):
        at = torch.arange(context, device=q.device)
        cells = batch.page_table[row].long()[at // cache.shape[2]] * cache.shape[2] + at % cache.shape[2]
        keys = cache.flatten(0, 2)[cells].float()
        for token in range(starts[row], starts[row + 1]):
            seen = context - (starts[row + 1] - token) + 1
            scores = weights[token].float() @ (q[token].float() @ keys[:seen].T).relu()
            scores = scores.where(~scores.isnan(), -torch.inf)
            best = scores.sort(descending=True, stable=True).indices[:most].sort().values
            chosen[token, : len(best)], chosen[token, most] = cells[best], len(best)
    return chosen


def chosen_batch(chosen: Tensor) -> PagedBatch:
    """Return the batch for ``attention`` in which tokens see only the cells chosen by ``choose_tokens``.

    Each token becomes a row, and these cells are its pages, in a cache viewed as pages of one token.
    """
    tokens, most = len(chosen), chosen.shape[1] - 1
    return PagedBatch(
        page_table=chosen[:, :most].contiguous(),
        query_start=torch.arange(tokens + 1, dtype=torch.int32, device=chosen.device),
        context_len=chosen[:, most].contiguous(),
        max_query=1,
        max_context=most,
    )
