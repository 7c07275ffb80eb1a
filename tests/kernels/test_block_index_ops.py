"""The choice of blocks of block-sparse attention, and attention to it, against the published formula."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.kernels.ragged_batches import ragged_batch
from torch import Tensor

from rootgraft.kernels import ops
from rootgraft.kernels.block_index_ops import BlockChoice, block_batch, block_pages, choose_blocks

pytestmark = pytest.mark.usefixtures("kernels")

ROWS = [(1, 300), (30, 70), (1, 1), (9, 9), (5, 90)]
HEADS, KV_HEADS, DIM = 8, 2, 16
CHOICES = [
    BlockChoice(3, 8, 1),
    BlockChoice(4, 16, 2),
    BlockChoice(2, 48, 1),
    BlockChoice(1, 24, 1),
    BlockChoice(3, 12, 0),
    BlockChoice(40, 8, 1),
]


def index_of(rows: list[tuple[int, int]]) -> tuple[Tensor, Tensor, ops.PagedBatch]:
    """Queries of an index, its keys in pages, and the batch of these rows."""
    batch = ragged_batch(rows, heads=KV_HEADS, kv_heads=1, head_dim=24, dtype=torch.float32)
    q, keys, _, paged = batch.args
    return q, keys, paged


def seen_by(token: int, row: int, batch: ops.PagedBatch) -> int:
    """Number of tokens up to this one."""
    return int(batch.context_len[row]) - (int(batch.query_start[row + 1]) - token) + 1


def kept_blocks(scores: Tensor, seen: int, blocks: BlockChoice) -> list[int]:
    """The blocks of a token, by the scores [seen] of the tokens up to it."""
    best = torch.stack([part.max() for part in scores.split(blocks.size)])
    best[max(0, len(best) - blocks.local) :] = torch.inf
    return sorted(best.sort(descending=True, stable=True).indices[: blocks.most].tolist())


@pytest.mark.parametrize("blocks", CHOICES)
def test_attention_sees_the_blocks_of_the_highest_scores_and_no_others(blocks: BlockChoice) -> None:
    """With pages of 16 tokens, of which some blocks are a part, and some several."""
    own = ragged_batch(ROWS, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.float32)
    q, k_cache, v_cache, batch = own.args
    index_q, keys = torch.randn(len(q), KV_HEADS, DIM), v_cache[:, :1].contiguous()
    page_size = keys.shape[2]
    chosen = choose_blocks(index_q, keys, batch, blocks)
    params = ops.AttentionParams(0.3)
    queries = q.view(-1, HEADS // KV_HEADS, DIM)
    k, v = block_pages(k_cache, blocks), block_pages(v_cache, blocks)
    found = ops.attention(queries, k, v, block_batch(chosen, blocks), params).view(len(q), HEADS, DIM)
    rows = torch.repeat_interleave(torch.arange(len(ROWS)), batch.query_start.diff())
    for token, row in enumerate(rows.tolist()):
        seen = seen_by(token, row, batch)
        at = torch.arange(seen)
        page, place = batch.page_table[row].long()[at // page_size], at % page_size
        for head in range(HEADS):
            of = head // (HEADS // KV_HEADS)
            scores = keys[page, 0, place] @ index_q[token, of]
            kept = torch.isin(at // blocks.size, torch.tensor(kept_blocks(scores, seen, blocks)))
            assert int(chosen[token, of, -1]) == int(kept.sum())
            own_k, own_v = k_cache[page, of, place][kept], v_cache[page, of, place][kept]
            expected = (own_k @ q[token, head] * 0.3).softmax(0) @ own_v
            torch.testing.assert_close(found[token, head], expected, rtol=1e-4, atol=1e-5)


def test_of_equal_scores_the_earlier_blocks_are_chosen() -> None:
    q, keys, batch = index_of([(1, 60)])
    blocks = BlockChoice(3, 8, 1)
    chosen = choose_blocks(q * 0, keys, batch, blocks)
    position = torch.tensor([0, 8, 56])
    page = batch.page_table[0].long()[position // keys.shape[2]] * KV_HEADS * 2
    within = position % keys.shape[2] // 8
    for head in range(KV_HEADS):
        assert chosen[0, head].tolist() == [*(page + head * 2 + within).tolist(), 8 + 8 + 4]


def test_a_score_that_is_no_number_is_the_lowest() -> None:
    q, keys, batch = index_of([(1, 60)])
    blocks, whole = BlockChoice(7, 8, 1), BlockChoice(8, 8, 1)
    pages = choose_blocks(q, keys, batch, whole)[0, 0, :8].tolist()
    keys[batch.page_table[0].long()[16 // keys.shape[2]], 0, 16 % keys.shape[2] :][:8] = torch.nan
    assert choose_blocks(q, keys, batch, blocks)[0, 0, :7].tolist() == [*pages[:2], *pages[3:]]


def test_a_choice_is_that_of_the_token_alone() -> None:
    q, keys, batch = index_of(ROWS)
    blocks = CHOICES[0]
    whole = choose_blocks(q, keys, batch, blocks)
    start, end = batch.query_start[1:3].tolist()
    for token in range(start, end):
        alone = replace(
            batch,
            page_table=batch.page_table[1:2].contiguous(),
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            context_len=batch.context_len[1:2] - (end - token) + 1,
        )
        assert torch.equal(choose_blocks(q[token : token + 1], keys, alone, blocks), whole[token : token + 1])


def test_pages_outside_of_the_cache_are_refused() -> None:
    q, keys, batch = index_of([(3, 60)])
    batch.page_table[0, 1] = len(keys)
    with pytest.raises(IndexError, match="outside"):
        choose_blocks(q, keys, batch, CHOICES[0])
    with pytest.raises(IndexError, match="outside"):
        choose_blocks(q, keys, replace(batch, page_table=batch.page_table[:, :1].contiguous()), CHOICES[0])
