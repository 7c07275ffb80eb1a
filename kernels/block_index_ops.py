"""Ops of block-sparse attention (MiniMax M3): a token attends to the blocks of tokens that an index scores highest.

For each token, a layer stores one index key of D dimensions in addition to its K and V. The index of token t has one
head for each KV head. It scores every block of tokens up to t by its best token:

    score(t, h, b) = max over tokens s <= t of block b of q(t, h) . k(s)

The queries that read KV head h see the tokens of ``most`` blocks, up to t itself: those of the last ``local`` blocks,
t's own included, and of the others with the highest scores. Of equal scores the earlier block is chosen, and NaN is the
lowest score. On native kernels a token's choice does not depend on the other tokens of the call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .backend import native_for
from .layouts.attention_arguments import PagedBatch

__all__ = ["BlockChoice", "block_batch", "block_pages", "choose_blocks"]


@dataclass(frozen=True, slots=True)
class BlockChoice:
    """Which blocks a token sees.

    Attributes:
        most: number of blocks that a token sees, if it has as many.
        size: number of tokens of a block; blocks begin at multiples of it.
        local: number of blocks up to a token's own that it sees whatever their scores; at most ``most``.
    """

    most: int
    size: int
    local: int

    @property
    def most_tokens(self) -> int:
        """Largest context in which the index chooses all tokens."""
        return self.most * self.size


def choose_blocks(q: Tensor, cache: Tensor, batch: PagedBatch, blocks: BlockChoice) -> Tensor:
    """Choose the blocks to which each token of a ragged batch attends, for each KV head.

    Args:
        q: [T, H, D], the index's rotated queries, a head for each KV head.
        cache: [num_pages, 1, page_size, D], the index keys of all tokens of the batch.
        batch: page table and lengths of the rows.

    Returns:
        [T, H, most * U + 1] int32: the pages of the chosen blocks in a cache that is viewed by ``block_pages``, U for
        each block, by position, then zeros; the last entry is the number of tokens that are seen.

    Raises:
        IndexError: the page table is too short for a row, or names a page that is not in the cache.
    """
    page_size, size = cache.shape[2], blocks.size
    page = _page(page_size, blocks)
    counts = batch.query_start.diff()
    row = torch.repeat_interleave(torch.arange(len(counts), device=q.device), counts)
    token = torch.arange(len(q), device=q.device)
    seen = (batch.context_len[row] - (batch.query_start[row + 1] - token) + 1)[:, None, None]
    best = _block_scores(q, cache, batch, blocks)
    number, own = torch.arange(best.shape[2], device=q.device), (seen - 1) // size
    best = best.masked_fill((number <= own) & (number > own - blocks.local), torch.inf)
    order = best.sort(dim=2, descending=True, stable=True).indices[..., : blocks.most]
    order = order.masked_fill(order > own, len(number)).sort(2).values  # Blocks after the token are not chosen.
    is_chosen = order < len(number)
    # The pages of each block: those of the last one behind the token repeat the token's.
    starts = order[..., None] * size + torch.arange(0, size, page, device=q.device)
    starts = starts.clamp(max=(seen - 1)[..., None])
    pages = batch.page_table[row[:, None, None, None], starts // page_size].long()
    head = torch.arange(q.shape[1], device=q.device)[:, None, None]
    pages = (pages * q.shape[1] + head) * (page_size // page) + starts % page_size // page
    found = pages.masked_fill(~is_chosen[..., None], 0).flatten(2)
    chosen = torch.zeros((*q.shape[:2], blocks.most * (size // page) + 1), dtype=torch.int32, device=q.device)
    chosen[..., : found.shape[2]] = found.int()
    chosen[..., -1] = ((seen - order * size).clamp(max=size) * is_chosen).sum(2).int()
    return chosen


def block_pages(cache: Tensor, blocks: BlockChoice) -> Tensor:
    """View K or V of a layer as pages of one head and one block: [P, H, page, D] -> [P * H * n, 1, page / n, D].

    The pages of ``choose_blocks`` are those of this view.
    """
    return cache.view(-1, 1, _page(cache.shape[2], blocks), cache.shape[3])


def block_batch(chosen: Tensor, blocks: BlockChoice) -> PagedBatch:
    """Return the batch for ``attention`` in which a token's queries see the blocks chosen by ``choose_blocks``.

    Each token is a row for each KV head: its queries are [T * H, queries of a KV head, D].
    """
    rows = chosen.flatten(0, 1)
    return PagedBatch(
        page_table=rows[:, :-1].contiguous(),
        query_start=torch.arange(len(rows) + 1, dtype=torch.int32, device=chosen.device),
        context_len=rows[:, -1].contiguous(),
        max_query=1,
        max_context=blocks.most_tokens,
    )


def _page(page_size: int, blocks: BlockChoice) -> int:
    """Return the number of tokens that are together in a page and in a block."""
    return math.gcd(page_size, blocks.size)


def _block_scores(q: Tensor, cache: Tensor, batch: PagedBatch, blocks: BlockChoice) -> Tensor:
    """Return the best score of the tokens of each block up to a token, [T, H, blocks] fp32; -inf if it sees none."""
    starts, contexts = batch.query_start.tolist(), batch.context_len.tolist()
    count = -(-max(contexts) // blocks.size)
    if (kernels := native_for(q, cache)) is not None:
        return kernels.latent.block_scores(q, cache, batch, blocks.size, count)
    best = torch.full((*q.shape[:2], count), -torch.inf, device=q.device)
    for row, context in enumerate(contexts):
        pages = batch.page_table[row, : -(-context // cache.shape[2])].long()
        if len(pages) * cache.shape[2] < context or not bool(((pages >= 0) & (pages < len(cache))).all()):
            raise IndexError(f"the page table leads outside {len(cache)} pages, or is too short for {context} tokens")
        keys = cache[pages].flatten(0, 2)[:context].float()
        for token in range(starts[row], starts[row + 1]):
            seen = context - (starts[row + 1] - token) + 1
            scores = q[token].float() @ keys[:seen].T
            scores.masked_fill_(scores.isnan(), -torch.inf)
            for number, part in enumerate(scores.split(blocks.size, dim=1)):
                best[token, :, number] = part.amax(1)
    return best
