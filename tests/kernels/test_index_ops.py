"""The choice of tokens of indexed attention: native kernels against plain torch, and the published formula."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.kernels.ragged_batches import ragged_batch
from torch import Tensor

from rootgraft.kernels import ops
from rootgraft.kernels.index_ops import choose_tokens, chosen_batch

pytestmark = pytest.mark.usefixtures("kernels")

ROWS = [(1, 300), (30, 70), (1, 1), (9, 9), (5, 90)]
MOST = 21


def index_of(
    rows: list[tuple[int, int]], dtype: torch.dtype, heads: int = 6, dim: int = 24
) -> tuple[Tensor, Tensor, Tensor, ops.PagedBatch]:
    """Queries, weights of heads, cached keys and the batch of these rows."""
    batch = ragged_batch(rows, heads=heads, kv_heads=1, head_dim=dim, dtype=dtype)
    q, keys, _, paged = batch.args
    return q, torch.randn(len(q), heads).to(dtype), keys, paged


def seen_by(token: int, row: int, batch: ops.PagedBatch, page_size: int) -> Tensor:
    """The cells of the tokens up to one, in their order."""
    count = int(batch.context_len[row]) - (int(batch.query_start[row + 1]) - token) + 1
    at = torch.arange(count)
    return batch.page_table[row].long()[at // page_size] * page_size + at % page_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_highest_scores_are_chosen_in_the_order_of_their_positions(dtype: torch.dtype) -> None:
    q, weights, keys, batch = index_of(ROWS, dtype)
    chosen = choose_tokens(q, weights, keys, batch, MOST)
    assert chosen.shape == (len(q), MOST + 1) and chosen.dtype is torch.int32
    rows = torch.repeat_interleave(torch.arange(len(ROWS)), batch.query_start.diff())
    for token, row in enumerate(rows.tolist()):
        cells = seen_by(token, row, batch, keys.shape[2])
        scores = (q[token].double() @ keys.flatten(0, 2)[cells].double().T).relu().T @ weights[token].double()
        count = min(MOST, len(cells))
        is_chosen = torch.isin(cells, chosen[token, :count].long())
        assert chosen[token, MOST] == count
        assert chosen[token, :count].tolist() == cells[is_chosen].tolist()
        if count < len(cells):  # of scores that are equal, or nearly, either may be chosen
            assert scores[is_chosen].min() >= scores[~is_chosen].max() - 1e-5 * scores.abs().max()
        assert not chosen[token, count:MOST].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_equal_scores_the_earlier_token_is_chosen(dtype: torch.dtype) -> None:
    q, weights, keys, batch = index_of([(2, 60)], dtype)
    weights.zero_()
    chosen = choose_tokens(q, weights, keys, batch, MOST)
    for token in range(2):
        assert chosen[token, :MOST].tolist() == seen_by(token, 0, batch, keys.shape[2])[:MOST].tolist()


def test_a_score_that_is_no_number_is_the_lowest() -> None:
    q, weights, keys, batch = index_of([(1, 60)], torch.float32)
    cells = seen_by(0, 0, batch, keys.shape[2])
    keys.flatten(0, 2)[cells[5]] = torch.nan
    assert int(cells[5]) not in choose_tokens(q, weights, keys, batch, 59)[0, :59].tolist()
    ops.use_native(False)
    try:
        assert int(cells[5]) not in choose_tokens(q, weights, keys, batch, 59)[0, :59].tolist()
    finally:
        ops.use_native(True)


def test_a_choice_does_not_depend_on_other_tokens() -> None:
    q, weights, keys, batch = index_of(ROWS, torch.bfloat16)
    whole = choose_tokens(q, weights, keys, batch, MOST)
    start, end = batch.query_start[1:3].tolist()
    lengths = torch.tensor([0, 1], dtype=torch.int32)
    for token in range(start, end):
        context = batch.context_len[1:2] - (end - token) + 1
        alone = replace(
            batch, page_table=batch.page_table[1:2].contiguous(), query_start=lengths, context_len=context.int()
        )
        pick = slice(token, token + 1)
        assert torch.equal(choose_tokens(q[pick], weights[pick], keys, alone, MOST), whole[pick])


@pytest.mark.skipif(ops.native_kernels() is None, reason="no C++ compiler")
def test_attention_to_chosen_tokens_is_attention_over_pages_where_all_are_chosen() -> None:
    """A token that may choose more than it has sees the same keys in the same order."""
    for dtype in (torch.float32, torch.bfloat16):
        batch = ragged_batch([(40, 90), (1, 300)], heads=16, kv_heads=1, head_dim=80, dtype=dtype)
        q, cache, _, paged = batch.args
        chosen = choose_tokens(q[:, :2].contiguous(), q[:, :2, 0].contiguous(), cache, paged, 300)
        params = ops.AttentionParams(0.1, value_dim=64)
        cells = cache.view(-1, 1, 1, 80)
        found = ops.attention(q, cells, cells, chosen_batch(chosen), params)
        # In other bits: several queries of a row are computed together over pages, and one by one here.
        near = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(found, ops.attention(q, cache, cache, paged, params), **near)


def test_pages_outside_of_the_cache_are_refused() -> None:
    q, weights, keys, batch = index_of([(3, 60)], torch.float32)
    batch.page_table[0, 1] = len(keys)
    with pytest.raises(IndexError):
        choose_tokens(q, weights, keys, batch, MOST)
