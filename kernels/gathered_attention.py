"""Attention of long new parts of prompts on a GPU: gathers pages to contiguous K and V for torch's fused kernels.

``scaled_dot_product_attention`` (cuDNN, FlashAttention) overlaps the softmax with its products, which the Triton kernel
does not, but it cannot read pages. With many new tokens, copying the row's pages takes little time compared with the
products. Rows are chosen on the host from the lengths of a step that is run op by op; in a captured step none is
chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .layouts import kv_forms
from .layouts.attention_arguments import AttentionParams, LongRow, LongRows, PagedBatch
from .layouts.staging import to_device
from .triton.shared_prefixes import Ints, find_shared_prefixes

LEAST_NEW = 512
"""Number of new tokens of a row from which its pages are gathered. Without the copy, torch took 0.57 of the Triton
kernel's time for a prompt of 2,048 tokens on an H200, and 0.60 for one of 8,192."""
MOST_KEYS = 16_384
"""Longest context that is gathered: it takes 64 MiB for 8 KV heads of 128 dimensions in 16 bits."""
_MOST_DIM = 128
_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

PagedAttention = Callable[[Tensor, Tensor, Tensor, PagedBatch, AttentionParams], Tensor]


@cache
def lower_right_mask() -> Callable[[int, int], Any]:
    """Import torch's lower-right masks, and return the function that makes one from (new tokens, context).

    They import torch's compiler and sympy, which takes as long as importing torch itself. A GPU's worker imports them
    when it starts, so that no step waits for them; other processes do not.
    """
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right


def find_long_rows(
    page_table: Ints, query_len: Ints, context_len: Ints, page_size: int, device: torch.device
) -> LongRows | None:
    """Choose the rows of a step to gather, from the host's copy of its arrays, as in ``find_shared_prefixes``.

    Returns:
        These rows, and the batch of the other rows on the device; None if no row is long.
    """
    is_long = (query_len >= LEAST_NEW) & (context_len <= MOST_KEYS)
    if not is_long.any():
        return None
    ends = np.cumsum(query_len)
    rows = tuple(
        LongRow(row, int(ends[row] - query_len[row]), int(ends[row]), int(context_len[row]))
        for row in np.flatnonzero(is_long).tolist()
    )
    if is_long.all():
        return LongRows(rows)
    lengths, contexts, pages = query_len[~is_long], context_len[~is_long], page_table[~is_long]
    shared = find_shared_prefixes(pages, lengths, contexts, page_size)
    others = PagedBatch(
        page_table=to_device(pages, device),
        query_start=to_device(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32), device),
        context_len=to_device(contexts, device),
        max_query=int(lengths.max()),
        max_context=int(contexts.max()),
        shared=shared and shared.to(device),
    )
    return LongRows(rows, others, to_device(np.flatnonzero(np.repeat(~is_long, query_len)), device))


def takes(k_cache: Tensor, batch: PagedBatch, params: AttentionParams) -> bool:
    """Return whether torch can compute a layer's attention: all keys, plain scores, and supported heads."""
    dim = k_cache.shape[3]
    is_plain = params.soft_cap is None and params.sinks is None and params.value_dim is None
    sees_all = all(limit is None or limit >= batch.max_context for limit in (params.window, params.chunk))
    # For fp32 on a GPU, torch would store all scores in memory, as its fused kernels there only support 16 bits.
    is_fused = not kv_forms.has_scales(k_cache.dtype) and (k_cache.dtype.itemsize == 2 or not k_cache.is_cuda)
    return is_plain and sees_all and is_fused and dim <= _MOST_DIM and dim % 8 == 0


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    params: AttentionParams,
    long: LongRows,
    attend_others: PagedAttention,
) -> Tensor:
    """``kernels.ops.attention``: the rows of ``long`` over gathered pages, and the others by ``attend_others``."""
    out = torch.empty_like(q)
    for row in long.rows:
        out[row.first : row.end] = _attend(q[row.first : row.end], k_cache, v_cache, batch.page_table, row, params)
    if long.others is not None and long.tokens is not None:
        found = attend_others(q[long.tokens], k_cache, v_cache, long.others, params)
        out[long.tokens] = found.view(-1, *q.shape[1:])
    return out.flatten(1)


def _attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, row: LongRow, params: AttentionParams
) -> Tensor:
    """Attention of a row's new tokens q [n, Hq, D], the last ones of its context: -> [n, Hq, D]."""
    pages = page_table[row.number, : -(-row.context // k_cache.shape[2])]
    k, v = (_gather(cache, pages, row.context) for cache in (k_cache, v_cache))
    is_whole = len(q) == row.context
    mask = None if is_whole else lower_right_mask()(len(q), row.context)
    with sdpa_kernel(_BACKENDS, set_priority=True):
        found = scaled_dot_product_attention(
            q.transpose(0, 1)[None], k, v, attn_mask=mask, is_causal=is_whole, scale=params.scale, enable_gqa=True
        )
    return found[0].transpose(0, 1)


def _gather(cache: Tensor, pages: Tensor, context: int) -> Tensor:
    """Copy the first tokens of some pages: [pages, Hkv, page_size, D] -> [1, Hkv, context, D]."""
    return cache.transpose(0, 1).index_select(1, pages).flatten(1, 2)[None, :, :context]
