"""The GPU's attention, interpreted, against the oracle: ragged batches, edges, windows, caps, padding, splits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels.ragged_batches import RaggedBatch, assert_close, ragged_batch
from support.kernels.triton_interpreter import shuffled_programs

from rootgraft.kernels import ops
from rootgraft.kernels.layouts import kv_forms
from rootgraft.kernels.triton import attention
from rootgraft.kernels.triton.launch import Launch

NOT_STORED = 7e29

pytestmark = pytest.mark.usefixtures("interpreted")


def assert_right(batch: RaggedBatch, **options: object) -> None:
    options = {"scale": 0.15, **options}
    assert attention.takes(*batch.args[:3], batch.page_table)
    assert_close(ops.attention(*batch.args, ops.AttentionParams(**options)), batch.expected(**options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_types_pages_and_heads(dtype, page_size, head_dim):
    rows = [(1, 1), (5, 5), (1, 16), (1, 17), (40, 70), (2, 33)]
    assert_right(ragged_batch(rows, heads=3, kv_heads=1, head_dim=head_dim, page_size=page_size, dtype=dtype))


@pytest.mark.parametrize("kv", kv_forms.ROW_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_8_bits(dtype, kv):
    """All that reads keys: rows of several tokens, of one, split ones; windows, caps and sinks."""
    rows = [(1, 1), (5, 5), (1, 17), (20, 40), (1, 300)]
    batch = ragged_batch(rows, heads=4, kv_heads=2, head_dim=80, dtype=dtype).in_rows(kv)
    assert_right(batch)
    assert_right(batch, window=40, soft_cap=2.0)
    assert_right(batch, chunk=30, sinks=torch.linspace(-1, 4, 4))


def test_rows_of_8_bits_in_pages_of_one_token():
    assert_right(ragged_batch([(1, 20), (4, 9)], heads=2, kv_heads=2, page_size=1).in_rows(torch.int8))


@pytest.mark.parametrize("head_dim", [96, 256])
def test_other_heads(head_dim):
    assert_right(ragged_batch([(1, 40), (9, 30)], heads=4, kv_heads=2, head_dim=head_dim))


@pytest.mark.parametrize("window", [1, 16, 40, 500])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_windows_and_caps(window, soft_cap):
    batch = ragged_batch([(1, 150), (50, 130), (1, 3)], heads=2, kv_heads=1, dtype=torch.float16)
    assert_right(batch, window=window, soft_cap=soft_cap)


@pytest.mark.parametrize("chunk", [1, 16, 40, 131, 500])
@pytest.mark.parametrize("window", [None, 20])
def test_chunks(chunk, window):
    batch = ragged_batch([(1, 150), (60, 140), (1, 3), (1, 132)], heads=2, kv_heads=1, dtype=torch.float16)
    assert_right(batch, chunk=chunk, window=window)


@pytest.mark.parametrize("rows", [[(1, 400)], [(1, 150), (50, 130), (1, 3), (1, 128)]])
@pytest.mark.parametrize("window", [None, 40])
def test_sinks_are_counted_once(rows, window):
    batch = ragged_batch(rows, heads=6, kv_heads=2, dtype=torch.float16)
    assert_right(batch, window=window, sinks=torch.linspace(-1, 4, 6))


@pytest.mark.parametrize("context", [15, 16, 17, 127, 128, 129, 200, 400])
def test_one_row_is_split_among_programs(context):
    assert_right(ragged_batch([(1, context)], heads=2, kv_heads=2, dtype=torch.float16))


def test_more_heads_in_a_group_than_a_tile():
    assert_right(ragged_batch([(1, 30), (3, 9)], heads=20, kv_heads=1, dtype=torch.float16))


def test_a_negative_scale_and_large_scores():
    assert_right(ragged_batch([(3, 40), (1, 20)], heads=1, kv_heads=1, dtype=torch.float32), scale=-0.1)
    assert_right(ragged_batch([(3, 40), (1, 20)], heads=1, kv_heads=1, dtype=torch.float32), scale=30.0)


def test_a_nan_is_shown():
    batch = ragged_batch([(1, 200), (2, 20)], heads=2, kv_heads=2, dtype=torch.float32)
    for row in (0, 1):
        batch.k_cache[batch.page_table[row, 0], 0, 3] = float("nan")
    out = ops.attention(*batch.args, ops.AttentionParams(scale=0.1)).view(3, 2, 64)
    assert out[:, 0].isnan().all()
    assert not out[:, 1].isnan().any()


@pytest.mark.parametrize("max_query", [1, 4])
def test_rows_and_tokens_that_pad_a_batch_are_skipped(max_query):
    """As in a captured graph: more rows, tokens and pages than there are, and a context that is an upper bound."""
    batch = ragged_batch([(1, 40), (max_query, 20)], heads=2, kv_heads=1, dtype=torch.float16)
    starts = torch.cat([batch.query_start, batch.query_start[-1].repeat(3)])
    contexts = torch.cat([batch.context_len, torch.zeros(3, dtype=torch.int32)])
    table = torch.zeros(5, 60, dtype=torch.int32)
    table[:2, : batch.page_table.shape[1]] = batch.page_table
    q = torch.cat([batch.q, torch.full((3, *batch.q.shape[1:]), float("nan"), dtype=torch.float16)])
    padded = ops.PagedBatch(table, starts, contexts, max_query, 900)
    out = ops.attention(q, batch.k_cache, batch.v_cache, padded, ops.AttentionParams(0.15))
    assert_close(out[:-3], batch.expected(scale=0.15))


def test_parts_fill_the_device_once_and_are_worth_a_program():
    assert attention.wanted_parts(programs=8, sms=132) == 66
    assert attention.wanted_parts(programs=4096, sms=132) == 1
    assert attention.most_splits(programs=8, max_context=4096, sms=132) == 32
    assert attention.most_splits(programs=8, max_context=100, sms=132) == 1
    assert attention.most_splits(programs=1, max_context=1 << 17, sms=132) == 64
    assert attention.most_splits(programs=256, max_context=4096, sms=132) == 17
    assert attention.most_splits(programs=4096, max_context=4096, sms=132) == 2
    assert attention.most_splits(programs=8192, max_context=4096, sms=132) == 1


@pytest.mark.parametrize(("others", "window"), [(1, None), (7, 300), (140, None)])
def test_a_long_row_among_short_ones(others, window, monkeypatch):
    """It has more parts than they, whose only part is final and kept nowhere; 141 rows are summed up in two turns."""
    rows = [(1, 1 + i % 9) for i in range(others)]
    rows.insert(others // 2, (1, 1500))
    made = []
    run = Launch.run

    def noting(call):
        weight = call.args[13].fill_(NOT_STORED)
        run(call)
        made.append((weight.view(len(rows), -1, 2)[:, :, 0] != NOT_STORED).sum(1))

    monkeypatch.setattr(Launch, "run", noting)
    monkeypatch.setattr(attention, "num_sms", lambda _: 132)
    assert_right(ragged_batch(rows, heads=2, kv_heads=1, dtype=torch.float16), window=window)
    [parts] = made
    expected = [0] * len(rows)
    expected[others // 2] = 12 if window is None else 3
    assert parts.tolist() == expected


@pytest.mark.parametrize("seed", range(3))
def test_parts_are_merged_by_whichever_comes_last(seed, monkeypatch):
    """In any order of programs the bits are the same, and all counters are 0 for the next launch."""
    rows = [(1, 700), (1, 3), (1, 260), (1, 130)]
    batch = ragged_batch(rows, heads=6, kv_heads=2, dtype=torch.bfloat16)
    monkeypatch.setattr(attention, "num_sms", lambda _: 16)
    params = ops.AttentionParams(scale=0.15)
    expected = ops.attention(*batch.args, params)
    with shuffled_programs(seed):
        assert torch.equal(ops.attention(*batch.args, params), expected)
    assert not attention._arrivals(batch.q.device, 32, 0).any()


def test_what_no_kernel_computes_goes_to_torch():
    ops.use_native(False)
    for batch in (ragged_batch([(1, 9)], page_size=3), ragged_batch([(2, 9)], head_dim=24)):
        assert not attention.takes(*batch.args[:3], batch.page_table)
        assert torch.equal(ops.attention(*batch.args, ops.AttentionParams(scale=0.1)), batch.expected(scale=0.1))
    ops.use_native(True)


@st.composite
def row_shapes(draw) -> tuple[int, int]:
    context = draw(st.one_of(st.integers(1, 50), st.integers(100, 200)))
    return draw(st.one_of(st.just(1), st.integers(1, min(context, 40)))), context


@settings(max_examples=12, deadline=None)
@given(
    rows=st.lists(row_shapes(), min_size=1, max_size=4),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3, 4]),
    head_dim=st.sampled_from([16, 64, 80]),
    page_size=st.sampled_from([1, 16]),
    window=st.none() | st.integers(1, 150),
    soft_cap=st.none() | st.floats(1.0, 50.0),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 1000),
)
def test_random_batches(rows, kv_heads, group, head_dim, page_size, window, soft_cap, dtype, seed):
    batch = ragged_batch(
        rows,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        seed=seed,
    )
    assert_right(batch, window=window, soft_cap=soft_cap)
