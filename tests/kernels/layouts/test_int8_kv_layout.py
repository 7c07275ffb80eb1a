"""KV of 8 bits: the layout, the writing of it, and attention over it."""

from __future__ import annotations

import itertools
import platform

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels.cpu_levels import WITHOUT_AMX, load_level
from support.kernels.ragged_batches import (
    assert_close,
    assert_same_bits_as_alone,
    instruction_sets,
    ragged_batch,
    row_shapes,
)

from rootgraft.kernels import memory, ops, reference
from rootgraft.kernels.cpu.native_ops import Kernels
from rootgraft.kernels.layouts import int8_kv_layout, kv_forms

SETTINGS = settings(max_examples=60, deadline=None)
SEEDS = st.integers(0, 2**32 - 1)
HEAD_DIMS = st.sampled_from([16, 48, 64, 80, 128, 256])
PAGE_SIZES = st.sampled_from([16, 32, 128])
TYPES = [torch.bfloat16, torch.float32]


def empty_caches(num_pages: int, kv_heads: int, page_size: int, head_dim: int) -> torch.Tensor:
    """K and V of pages full of what was there before."""
    shape = (2, num_pages, kv_heads, page_size, head_dim + int8_kv_layout.SCALE_BYTES)
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(5), dtype=int8_kv_layout.DTYPE)


@SETTINGS
@given(tokens=st.integers(1, 40), kv_heads=st.integers(1, 3), head_dim=HEAD_DIMS, page_size=PAGE_SIZES, seed=SEEDS)
def test_cells_hold_what_was_written_to_half_a_step(tokens, kv_heads, head_dim, page_size, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, kv_heads, head_dim, generator=generator) * 10 ** torch.randn(tokens, 1, 1)
    page, cell = _places(tokens, 4, page_size, generator)
    half = x.abs().amax(-1, keepdim=True) / 127 * 0.501
    for cache, store, read in zip(
        empty_caches(4, kv_heads, page_size, head_dim),
        (int8_kv_layout.store_keys, int8_kv_layout.store_values),
        (int8_kv_layout.keys, int8_kv_layout.values),
        strict=True,
    ):
        before = read(cache)
        store(cache, page, cell, x)
        after = read(cache)
        assert ((after[page, :, cell] - x).abs() <= half).all()
        others = torch.ones(4, page_size, dtype=torch.bool).index_put((page, cell), torch.tensor(False))
        assert torch.equal(after.transpose(1, 2)[others].nan_to_num(), before.transpose(1, 2)[others].nan_to_num())


def test_nothing_is_kept_as_nothing():
    caches = empty_caches(1, 1, 16, 32)
    zeros, first = torch.zeros(1, 1, 32), torch.tensor([0])
    int8_kv_layout.store_keys(caches[0], first, first, zeros)
    int8_kv_layout.store_values(caches[1], first, first, zeros)
    assert not int8_kv_layout.keys(caches[0])[0, 0, 0].any()
    assert not int8_kv_layout.values(caches[1])[0, 0, 0].any()


@SETTINGS
@given(
    tokens=st.integers(0, 40),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    head_dim=HEAD_DIMS,
    page_size=PAGE_SIZES,
    norms=st.booleans(),
    dtype=st.sampled_from([*TYPES, torch.float16]),
    static=st.booleans(),
    threads=st.sampled_from([1, 2]),
    seed=SEEDS,
)
def test_rope_store_kv(tokens, kv_heads, group, head_dim, page_size, norms, dtype, static, threads, seed):
    ops.set_threads(threads)
    generator = torch.Generator().manual_seed(seed)
    heads = kv_heads * group
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, generator=generator).to(dtype)
    page, cell = _places(tokens, 4, page_size, generator)
    table = torch.randn(50, head_dim, generator=generator)
    norm = torch.randn(head_dim, generator=generator).to(torch.bfloat16) if norms else None
    caches, expected = empty_caches(4, kv_heads, page_size, head_dim), empty_caches(4, kv_heads, page_size, head_dim)
    scales = kv_forms.StaticScales("int8", torch.rand(2, kv_heads, generator=generator) * 0.05 + 0.001)
    rest = ops.RopeParams(heads, kv_heads, table, norm, norm, 1e-6, kv_scales=scales if static else None)
    positions = torch.randint(0, 50, (tokens,), generator=generator)
    q = ops.rope_store_kv(qkv, positions, page * page_size + cell, *caches, rest)
    assert_close(q, reference.rope_store_kv(qkv, positions, page * page_size + cell, *expected, rest))
    assert torch.equal(caches[1], expected[1])
    keys, known = (int8_kv_layout.keys(cache[0]).transpose(1, 2) for cache in (caches, expected))
    step = scales.values[0][:, None] if static else known[page, cell].abs().amax(-1, keepdim=True) / 127
    assert ((keys[page, cell] - known[page, cell]).abs() <= 1.01 * step).all()  # rounded to either neighbour
    written = torch.zeros(4, page_size, dtype=torch.bool).index_put((page, cell), torch.tensor(True))
    assert torch.equal(keys[~written].nan_to_num(), known[~written].nan_to_num())


@pytest.mark.parametrize("scales", [None, torch.tensor([[0.05], [0.04]])], ids=["of tokens", "static"])
def test_an_infinity_stays_in_its_cell(scales):
    qkv = torch.randn(2, 3 * 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    qkv[0, 64:] = float("inf")
    caches = torch.zeros(2, 1, 1, 16, 64 + int8_kv_layout.SCALE_BYTES, dtype=int8_kv_layout.DTYPE)
    params = ops.RopeParams(1, 1, kv_scales=None if scales is None else kv_forms.StaticScales("int8", scales))
    ops.rope_store_kv(qkv, torch.arange(2), torch.arange(2), *caches, params)
    for read, cache, first in ((int8_kv_layout.keys, caches[0], 64), (int8_kv_layout.values, caches[1], 128)):
        kept = read(cache)[0, 0]
        assert not kept[0].isfinite().any()
        torch.testing.assert_close(kept[1], qkv[1, first : first + 64].float(), atol=0.03, rtol=0.0)


@SETTINGS
@given(
    rows=st.lists(row_shapes(), min_size=1, max_size=5),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 7, 60]),
    head_dim=HEAD_DIMS,
    page_size=PAGE_SIZES,
    window=st.none() | st.integers(1, 400),
    chunk=st.none() | st.integers(1, 400),
    soft_cap=st.none() | st.floats(1.0, 50.0),
    dtype=st.sampled_from([*TYPES, torch.float16]),
    seed=SEEDS,
)
def test_attention(rows, kv_heads, group, head_dim, page_size, window, chunk, soft_cap, dtype, seed):
    if group == 60:
        rows = [(min(query, 3), context) for query, context in rows]
    shape = {"heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size}
    batch = ragged_batch(rows, **shape, dtype=dtype, seed=seed).in_int8()
    options = {"scale": head_dim**-0.5, "window": window, "chunk": chunk, "soft_cap": soft_cap}
    assert_near(ops.attention(*batch.args, ops.AttentionParams(**options)), batch.expected(**options))


def test_attention_with_a_negative_scale():
    batch = ragged_batch([(3, 90)]).in_int8()
    assert_near(ops.attention(*batch.args, ops.AttentionParams(scale=-0.1)), batch.expected(scale=-0.1))


@pytest.mark.parametrize("size", [0.0, 1e-45, 2e-43, 1e-38])
def test_queries_of_next_to_nothing_see_all_keys_alike(size):
    batch = ragged_batch([(3, 90), (40, 70)], dtype=torch.float32)
    batch.q[:] = size
    batch = batch.in_int8()
    assert_near(ops.attention(*batch.args, ops.AttentionParams(scale=0.125)), batch.expected(scale=0.125))


def test_one_key_is_read_exactly():
    """A single weight is the largest byte, and rounds nothing."""
    batch = ragged_batch([(1, 1)] * 20, dtype=torch.float32).in_int8()
    assert_close(ops.attention(*batch.args, ops.AttentionParams(scale=0.125)), batch.expected(scale=0.125))


@pytest.mark.parametrize("at", [0, 700])
def test_many_small_weights_beside_a_large_one_keep_their_sum(at):
    """One key has half the weight; the others less than half a step of its bytes each."""
    batch = ragged_batch([(4, 1024)], heads=3, kv_heads=1, dtype=torch.float32)
    page, cell = int(batch.page_table[0, at // 16]), at % 16
    batch.q[:] = 1.0
    batch.k_cache[:] = 0.0
    batch.k_cache[page, 0, cell] = float(torch.log(torch.tensor(1000.0))) / 64
    batch.v_cache[:] = 1.0
    batch.v_cache[page, 0, cell] = 0.0
    batch = batch.in_int8()
    exact = batch.expected(scale=1.0)
    assert 0.45 < exact.mean() < 0.55
    torch.testing.assert_close(ops.attention(*batch.args, ops.AttentionParams(scale=1.0)), exact, rtol=0.02, atol=0.0)


def test_masked_cells_do_not_matter_whatever_they_hold(kernels):
    batch = ragged_batch([(1, 33), (40, 100), (1, 17)], page_size=32).in_int8()
    first = ops.attention(*batch.args, ops.AttentionParams(scale=0.125))
    for cache in (batch.k_cache, batch.v_cache):
        scales = cache.flatten(2)[..., 32 * 64 :].view(torch.float32)
        scales[scales.isnan()] = float("inf")
    assert torch.equal(first, ops.attention(*batch.args, ops.AttentionParams(scale=0.125)))


@SETTINGS
@given(
    copies=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, 16)), max_size=6),
    heads=st.integers(1, 3),
    head_dim=HEAD_DIMS,
    threads=st.sampled_from([1, 2]),
)
def test_copies_are_of_whole_pages(copies, heads, head_dim, threads):
    ops.set_threads(threads)
    caches = empty_caches(2 * 5, heads, 16, head_dim).unflatten(1, (2, 5))
    expected = caches.clone()
    for source, target, _ in copies:
        expected[:, :, target] = expected[:, :, source]
    memory.copy_pages(*caches, *([copy[i] for copy in copies] for i in range(3)))
    assert torch.equal(caches, expected)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86 instruction sets")
@instruction_sets("avx2", "x86-64", "avx512", WITHOUT_AMX)
def test_lesser_instruction_sets(arch):
    """What other machines would compile, run on this one."""
    kernels = Kernels(load_level(arch))
    for options in ({}, {"window": 20}, {"soft_cap": 5.0}):
        batch = ragged_batch([(1, 300), (40, 90), (7, 7)]).in_int8()
        params = ops.AttentionParams(0.125, **options)
        out = kernels.attention(*batch.args, params)
        assert_near(out, batch.expected(scale=0.125, **options))
        assert torch.equal(kernels.attention(*batch.pick(1, 8, 9).args, params)[0], out[9])
    qkv = torch.randn(4, 5 * 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    where, rest = torch.tensor([0, 3, 17, 30]), ops.RopeParams(3, 1)
    caches, expected = empty_caches(2, 1, 16, 64), empty_caches(2, 1, 16, 64)
    kernels.rope_store_kv(qkv, where, where, *caches, rest)
    reference.rope_store_kv(qkv, where, where, *expected, rest)
    assert torch.equal(caches, expected)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal within what rounding queries and weights to 8 bits can do: at the worst, and by and large."""
    assert actual.dtype is expected.dtype
    apart = (actual.float() - expected.float()).abs()
    # Of 22,000 random batches the worst maximum was 0.084; means of few numbers scatter more than those of many.
    assert apart.max() < 0.1
    assert apart.mean() < 0.006 + 0.04 / apart.numel() ** 0.5


def _places(tokens: int, pages: int, page_size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages and cells, each once."""
    loc = torch.randperm(pages * page_size, generator=generator)[:tokens]
    return loc // page_size, loc % page_size


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("options", [{}, {"window": 37}, {"soft_cap": 20.0}])
def test_alone_and_in_a_batch_the_same_bits(kernels, dtype, options):
    batch = ragged_batch([(1, 700), (60, 600), (1, 1), (33, 33), (5, 300)], dtype=dtype).in_int8()
    assert_same_bits_as_alone(batch, scale=0.125, **options)


@settings(max_examples=25, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 399), max_size=4, unique=True),
    shift=st.integers(0, 300),
    window=st.sampled_from([None, 50]),
    head_dim=st.sampled_from([32, 64, 128]),
)
def test_in_chunks_the_same_bits(kernels, cuts, shift, window, head_dim):
    """Few queries are multiplied by vectors, many by AMX where the machine has it and heads fill its registers."""
    batch = ragged_batch([(400, 400 + shift)], heads=4, kv_heads=2, head_dim=head_dim).in_int8()
    whole = ops.attention(*batch.args, ops.AttentionParams(scale=0.125, window=window))
    edges = [0, *sorted(cuts), 400]
    pieces = [
        ops.attention(*batch.pick(0, begin, end).args, ops.AttentionParams(scale=0.125, window=window))
        for begin, end in itertools.pairwise(edges)
    ]
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("rows", [[(1, 2000)], [(1, 900), (2, 1500)], [(1, 200)] * 9, [(300, 900), (1, 50)]])
def test_on_two_threads_the_same_bits(kernels, rows):
    batch = ragged_batch(rows).in_int8()
    alone = ops.attention(*batch.args, ops.AttentionParams(scale=0.125))
    ops.set_threads(2)
    assert torch.equal(ops.attention(*batch.args, ops.AttentionParams(scale=0.125)), alone)


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_that_share_a_prefix_get_the_same_bits(kernels, threads):
    ops.set_threads(threads)
    batch = ragged_batch([(1, 700 + 9 * i) for i in range(12)], heads=6, kv_heads=2).in_int8()
    batch.page_table[1:, :40] = batch.page_table[0, :40]
    assert_same_bits_as_alone(batch, scale=0.125)
