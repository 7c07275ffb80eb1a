"""Rows whose pages begin alike read them together, and get the bits that they get alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels.ragged_batches import RaggedBatch, assert_close, assert_same_bits_as_alone
from support.machine.thoroughness import repeats

from rootgraft.kernels import ops

pytestmark = pytest.mark.usefixtures("kernels")

Branch = tuple[int, int, int, int]  # parent row, tokens in common with it, tokens more, tokens of the step


@st.composite
def branches(draw) -> Branch:
    common = draw(st.sampled_from([0, 200, 256, 300, 512, 640, 1100]))
    more = draw(st.one_of(st.integers(1, 40), st.integers(200, 600)))
    return draw(st.integers(0, 50)), common, more, draw(st.sampled_from([1, 1, 1, 2, 7, 16, 40]))


def tree_batch(
    rows: list[Branch], page_size: int, dtype: torch.dtype, heads: tuple[int, int], head_dim: int = 32
) -> RaggedBatch:
    """Row i shares the whole pages of the common tokens with an earlier row; the other pages are its own."""
    pages: list[list[int]] = []
    contexts: list[int] = []
    unused = iter(torch.randperm(20_000).tolist())
    for i, (parent, common, more, _) in enumerate(rows):
        shared = pages[parent % i][: min(common, contexts[parent % i]) // page_size] if i else []
        contexts.append(len(shared) * page_size + more)
        pages.append(shared + [next(unused) for _ in range(-(-more // page_size))])
    used = sorted({page for line in pages for page in line})
    number = {page: i for i, page in enumerate(used)}
    table = torch.zeros(len(rows), max(map(len, pages)), dtype=torch.int32)
    for line, own in zip(table, pages, strict=True):
        line[: len(own)] = torch.tensor([number[page] for page in own], dtype=torch.int32)
    queries = [min(query, context) for (*_, query), context in zip(rows, contexts, strict=True)]
    caches = torch.randn(2, len(used), heads[1], page_size, head_dim).to(dtype)
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    q = torch.randn(sum(queries), heads[0], head_dim).to(dtype)
    return RaggedBatch(q, caches[0], caches[1], table, starts, torch.tensor(contexts, dtype=torch.int32))


def assert_right_and_as_alone(batch: RaggedBatch, **options) -> None:
    assert_same_bits_as_alone(batch, scale=0.2, **options)
    assert_close(
        ops.attention(*batch.args, ops.AttentionParams(scale=0.2, **options)), batch.expected(scale=0.2, **options)
    )


@settings(max_examples=repeats(60), deadline=None)
@given(
    rows=st.lists(branches(), min_size=2, max_size=7),
    page_size=st.sampled_from([1, 5, 16, 100, 256]),
    heads=st.sampled_from([(6, 2), (4, 4), (14, 1)]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    window=st.sampled_from([None, None, 100, 700]),
    chunk=st.sampled_from([None, None, 90, 256, 700]),
    soft_cap=st.sampled_from([None, 20.0]),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)
def test_trees_of_rows(rows, page_size, heads, dtype, window, chunk, soft_cap, threads, seed):
    torch.manual_seed(seed)
    ops.set_threads(threads)
    batch = tree_batch(rows, page_size, dtype, heads)
    assert_right_and_as_alone(batch, window=window, chunk=chunk, soft_cap=soft_cap)


@pytest.mark.parametrize("threads", [1, 2])
def test_more_sharers_than_a_tile_holds(threads):
    ops.set_threads(threads)
    torch.manual_seed(0)
    batch = tree_batch([(0, 0, 700, 1)] + [(0, 600, 1 + 9 * i, 1) for i in range(40)], 16, torch.bfloat16, (6, 2))
    assert_right_and_as_alone(batch)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("kv_heads", [1, 3, 4])
def test_splits_one_after_the_other_by_any_number_of_threads(kv_heads, threads):
    """A thread takes all shared splits of some KV heads, and single ones of others."""
    ops.set_threads(threads)
    torch.manual_seed(0)
    trunk, other = (0, 0, 1300, 1), (0, 0, 900, 2)
    rows = [trunk, (0, 1280, 30, 2), (0, 1280, 700, 1), (2, 1900, 40, 3), other, (4, 800, 50, 1), (0, 600, 9, 1)]
    assert_right_and_as_alone(tree_batch(rows, 16, torch.bfloat16, (3 * kv_heads, kv_heads)))


def test_a_context_that_is_shared_to_its_last_token():
    torch.manual_seed(0)
    batch = tree_batch([(0, 0, 512, 1), (0, 256, 256, 1), (0, 512, 1, 1)], 16, torch.bfloat16, (6, 2))
    batch.page_table[1] = batch.page_table[0]
    assert_right_and_as_alone(batch)


def test_equal_pages_after_different_ones_are_no_shared_prefix():
    torch.manual_seed(0)
    batch = tree_batch([(0, 0, 800, 1), (0, 0, 800, 1), (0, 0, 800, 1)], 16, torch.float32, (6, 2))
    batch.page_table[1:, 16:] = batch.page_table[0, 16:]
    batch.page_table[2, :8] = batch.page_table[0, :8]
    assert_right_and_as_alone(batch)


def test_tables_that_change_in_place():
    """What rows share is kept from call to call: but not where anything else is asked."""
    torch.manual_seed(0)
    batch = tree_batch([(0, 0, 800, 1), (0, 0, 800, 1), (0, 0, 800, 1)], 16, torch.float32, (6, 2))
    assert_right_and_as_alone(batch)
    batch.page_table[1, :32] = batch.page_table[0, :32]
    assert_right_and_as_alone(batch)
    batch.context_len[1] = 500
    assert_right_and_as_alone(batch)
    batch.page_table[2, :32] = batch.page_table[0, :32]
    batch.page_table[1, 3] = 0
    assert_right_and_as_alone(batch, window=600)
    assert_right_and_as_alone(batch)


@pytest.mark.parametrize("threads", [1, 2])
def test_other_caches_behind_the_same_tables(threads):
    """A plan is kept for the tables of a step: with other heads or fewer pages they ask for another."""
    ops.set_threads(threads)
    torch.manual_seed(0)
    rows = [(0, 0, 700, 2), (0, 600, 60, 3), (0, 300, 400, 200)]
    batch = tree_batch(rows, 16, torch.bfloat16, (6, 2))
    assert_close(ops.attention(*batch.args, ops.AttentionParams(scale=0.2)), batch.expected(scale=0.2))
    for heads, head_dim in [((4, 4), 32), ((6, 2), 64), ((6, 2), 32)]:
        caches = torch.randn(2, batch.k_cache.shape[0], heads[1], 16, head_dim).bfloat16()
        q = torch.randn(batch.q.shape[0], heads[0], head_dim).bfloat16()
        other = replace(batch, q=q, k_cache=caches[0], v_cache=caches[1])
        assert_close(ops.attention(*other.args, ops.AttentionParams(scale=0.2)), other.expected(scale=0.2))
    fewer = replace(batch, k_cache=batch.k_cache[:-1].contiguous(), v_cache=batch.v_cache[:-1].contiguous())
    with pytest.raises(IndexError, match="lead outside"):
        ops.attention(*fewer.args, ops.AttentionParams(scale=0.2))
    assert_close(ops.attention(*batch.args, ops.AttentionParams(scale=0.2)), batch.expected(scale=0.2))
