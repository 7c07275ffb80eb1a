"""A token's result has the same bits alone and in any batch, in one piece and in chunks, on one thread and on two."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels.ragged_batches import RaggedBatch, assert_close, ragged_batch

from rootgraft.kernels import ops

pytestmark = pytest.mark.usefixtures("kernels")

TYPES = [torch.bfloat16, torch.float32]
OPTIONS = [{}, {"window": 37}, {"soft_cap": 20.0}, {"chunk": 150}]


def attend(batch: RaggedBatch, **options) -> torch.Tensor:
    return ops.attention(*batch.args, ops.AttentionParams(scale=0.125, **options))


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    bits = torch.int16 if actual.element_size() == 2 else torch.int32
    return torch.equal(actual.view(bits), expected.view(bits))


def on_two_threads(run):
    return on_threads(2, run)


def on_threads(threads: int, run):
    ops.set_threads(threads)
    try:
        return run()
    finally:
        ops.set_threads(1)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_attention_alone_and_in_a_batch(dtype, options):
    batch = ragged_batch([(1, 700), (60, 600), (1, 1), (33, 33), (5, 300)], dtype=dtype)
    together = attend(batch, **options)
    for row in range(5):
        start, stop = batch.query_start[row : row + 2].tolist()
        assert same(attend(batch.pick(row, 0, stop - start), **options), together[start:stop])


@pytest.mark.parametrize("options", OPTIONS)
@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(1, 399), max_size=4, unique=True), shift=st.integers(0, 300))
def test_attention_in_chunks(options, cuts, shift):
    """Chunked prefill, a prefix hit and a decode step are cuts of one prefill."""
    batch = ragged_batch([(400, 400 + shift)], heads=4, kv_heads=2, head_dim=32)
    whole = attend(batch, **options)
    edges = [0, *sorted(cuts), 400]
    pieces = [attend(batch.pick(0, a, b), **options) for a, b in itertools.pairwise(edges)]
    assert same(torch.cat(pieces), whole)


def test_decode_token_by_token_is_prefill():
    batch = ragged_batch([(300, 300)], heads=6, kv_heads=2, head_dim=48, page_size=5)
    whole = attend(batch)
    assert all(same(attend(batch.pick(0, i, i + 1)), whole[i : i + 1]) for i in range(300))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "rows", [[(1, 2000)], [(1, 900), (2, 1500)], [(1, 200)] * 9, [(300, 900), (1, 50)], [(1, 50), *[(90, 116)] * 5]]
)
def test_attention_on_two_threads(dtype, rows):
    """Few tiles with long contexts are spread over threads by splits, many tiles one by one."""
    batch = ragged_batch(rows, dtype=dtype)
    assert same(on_two_threads(lambda: attend(batch)), attend(batch))


@pytest.mark.parametrize("head_dim", [32, 64, 96, 160])
@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_few_queries_and_many(head_dim: int, group: int) -> None:
    """Queries of a few tokens, which CPUs multiply in shapes of their own, have the bits that they have in a prompt."""
    batch = ragged_batch([(40, 350)], heads=2 * group, kv_heads=2, head_dim=head_dim, page_size=32)
    whole = attend(batch)
    assert_close(whole, batch.expected(scale=0.125))
    for count in range(1, 17 // group + 2):
        for first in (0, 9, 40 - count):
            assert same(attend(batch.pick(0, first, first + count)), whole[first : first + count])


@pytest.mark.parametrize("kv_heads", [3, 8])
def test_kv_heads_together_and_apart(kv_heads):
    """KV heads of few queries take a block together where that leaves enough splits for the threads, else apart."""
    batch = ragged_batch([(1, 2300)], heads=2 * kv_heads, kv_heads=kv_heads, dtype=torch.bfloat16)
    together = attend(batch)
    torch.testing.assert_close(together, batch.expected(scale=0.125).to(torch.bfloat16), atol=2e-2, rtol=2e-2)
    assert same(on_threads(8, lambda: attend(batch)), together)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("rows", "inputs"), [(128, 2080), (145, 3072), (261, 2080), (700, 1024)])
def test_linear_of_many_rows_and_inputs(dtype: torch.dtype, biased: bool, rows: int, inputs: int) -> None:
    """Such products are made in blocks along K, few panels and so many rows at a time as a cache keeps."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    weight = torch.randn(1208, inputs, generator=generator).to(dtype)
    layer = ops.pack_linear(weight, torch.randn(1208, generator=generator).to(dtype) if biased else None)
    few = torch.cat([ops.linear(x[first : first + 7], layer) for first in range(0, rows, 7)])
    largest = torch.cat([ops.largest_linear(x[first : first + 7], layer).column for first in range(0, rows, 7)])
    for threads in (1, 2, 3, 16):
        ops.set_threads(threads)
        assert same(ops.linear(x, layer), few)
        assert torch.equal(ops.largest_linear(x, layer).column, largest)
    ops.set_threads(1)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("inputs", [1056, 2048, 3072])
@pytest.mark.parametrize("rows", [128, 145, 330, 700])
def test_gated_linear_of_many_rows_and_inputs(dtype: torch.dtype, inputs: int, rows: int) -> None:
    """Such products are made in blocks along K; rows a multiple of 2 KiB apart are laid out anew for them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    layer = ops.pack_linear(torch.randn(2 * 176, inputs, generator=generator).to(dtype))
    few = torch.cat([ops.gated_linear(x[first : first + 7], layer, "silu") for first in range(0, rows, 7)])
    for threads in (1, 2, 3, 16):
        ops.set_threads(threads)
        assert same(ops.gated_linear(x, layer, "silu"), few)
    ops.set_threads(1)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 16), (576, 200), (1536, 576)])
def test_linear(dtype, in_features, out_features):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(130, in_features, generator=generator).to(dtype)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    layer = ops.pack_linear(weight, torch.randn(out_features, generator=generator).to(dtype))
    whole = ops.linear(x, layer)
    for count in (1, 2, 3, 5, 7, 8, 13, 31, 64, 100):
        assert same(ops.linear(x[:count], layer), whole[:count])
        assert same(ops.linear(x[130 - count :], layer), whole[130 - count :])
    assert same(ops.linear(x, layer, torch.float32).to(dtype), whole)
    for threads in (2, 3, 16):
        ops.set_threads(threads)
        assert same(ops.linear(x, layer), whole)
        assert same(ops.linear(x[:1], layer), whole[:1])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("in_features", "width"), [(64, 16), (576, 208), (70, 96), (1216, 176)])
def test_gated_linear(dtype, in_features, width):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, in_features, generator=generator).to(dtype)
    layer = ops.pack_linear(torch.randn(2 * width, in_features, generator=generator).to(dtype))
    whole = ops.gated_linear(x, layer, "silu")
    assert same(whole, ops.gated_activation(ops.linear(x, layer), "silu"))
    for count in (1, 2, 7, 8, 17, 31, 64, 300):
        assert same(ops.gated_linear(x[:count], layer, "silu"), whole[:count])
        assert same(ops.gated_linear(x[600 - count :], layer, "silu"), whole[600 - count :])
    for threads in (2, 3, 16):
        ops.set_threads(threads)
        assert same(ops.gated_linear(x, layer, "silu"), whole)
        assert same(ops.gated_linear(x[:1], layer, "silu"), whole[:1])


@pytest.mark.parametrize("dtype", TYPES)
def test_row_by_row_ops(dtype):
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, 100, 700, generator=generator)
    x = x.to(dtype)
    weight = torch.randn(700, generator=generator).to(dtype)
    runs = (
        lambda part: ops.rms_norm(x[part], weight, 1e-5),
        lambda part: ops.add_rms_norm(x[part], residual[part].clone(), weight, 1e-5, 1.0),
        lambda part: ops.gated_activation(x[part], "silu"),
        lambda part: ops.gated_activation(x[part], "gelu_tanh"),
        lambda part: ops.activation(x[part], "relu2"),
        lambda part: ops.layer_norm(x[part], weight, weight, 1e-5),
        lambda part: ops.add_layer_norm(x[part], residual[part].clone(), weight, None, 1e-5, 1.0),
        lambda part: ops.copy_residual(residual[part], dtype),
    )
    for run in runs:
        whole = run(slice(None))
        assert same(on_two_threads(lambda run=run: run(slice(None))), whole)
        assert all(same(run(slice(i, i + 1)), whole[i : i + 1]) for i in range(100))


@pytest.mark.parametrize("dtype", TYPES)
def test_rope_store_kv(dtype):
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(100, 10 * 64, generator=generator).to(dtype)
    table, norm = torch.randn(100, 32, generator=generator), torch.randn(64, generator=generator).to(dtype)
    where = torch.arange(100)

    def run(part: slice, caches: torch.Tensor) -> torch.Tensor:
        params = ops.RopeParams(6, 2, table, norm, norm, 1e-6)
        return ops.rope_store_kv(qkv[part], where[part], where[part], *caches, params)

    whole_caches, caches = torch.zeros(2, 2, 7, 2, 16, 64, dtype=dtype)
    whole = on_two_threads(lambda: run(slice(None), whole_caches))
    parts = [run(slice(i, i + 1), caches) for i in range(100)]
    assert same(torch.cat(parts), whole)
    assert same(caches, whole_caches)
