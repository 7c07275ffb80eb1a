"""Every op, native where there is a compiler, against the oracle over random shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels.ragged_batches import assert_close, ragged_batch, row_shapes

from rootgraft.kernels import memory, ops, reference
from rootgraft.kernels.sampling_ops import mask_logits

TYPES = st.sampled_from([torch.bfloat16, torch.float32, torch.float16])
SETTINGS = settings(max_examples=60, deadline=None)
SEEDS = st.integers(0, 2**32 - 1)


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@SETTINGS
@given(
    rows=st.lists(row_shapes(), min_size=1, max_size=5),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 7, 60]),
    head_dim=st.sampled_from([16, 24, 64, 80, 128, 256]),
    page_size=st.sampled_from([1, 3, 16, 128]),
    window=st.none() | st.integers(1, 400),
    chunk=st.none() | st.integers(1, 400),
    soft_cap=st.none() | st.floats(1.0, 50.0),
    dtype=TYPES,
    seed=SEEDS,
)
def test_attention(rows, kv_heads, group, head_dim, page_size, window, chunk, soft_cap, dtype, seed):
    if group == 60:
        rows = [(min(query, 3), context) for query, context in rows]
    batch = ragged_batch(
        rows,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        seed=seed,
    )
    options = {"scale": head_dim**-0.5, "window": window, "chunk": chunk, "soft_cap": soft_cap}
    assert_close(ops.attention(*batch.args, ops.AttentionParams(**options)), batch.expected(**options))


def test_attention_with_a_negative_scale():
    batch = ragged_batch([(3, 90)])
    assert_close(ops.attention(*batch.args, ops.AttentionParams(scale=-0.1)), batch.expected(scale=-0.1))


def test_attention_with_large_scores():
    """Scores of hundreds: the softmax is one key's, and nothing overflows."""
    batch = ragged_batch([(3, 300)], dtype=torch.float32)
    assert_close(ops.attention(*batch.args, ops.AttentionParams(scale=30.0)), batch.expected(scale=30.0))


def test_attention_shows_a_nan():
    batch = ragged_batch([(2, 20)])
    batch.k_cache[batch.page_table[0, 0], 0, 3] = float("nan")
    out = ops.attention(*batch.args, ops.AttentionParams(scale=0.1)).view(2, 3, 3, 64)
    assert out[:, 0].isnan().all()
    assert not out[:, 1:].isnan().any()


@SETTINGS
@given(
    tokens=st.integers(0, 40),
    in_features=st.one_of(st.integers(1, 150), st.sampled_from([32, 64, 96, 160])),  # those that AMX takes
    out_features=st.integers(1, 150),
    bias=st.booleans(),
    dtype=TYPES,
    seed=SEEDS,
)
def test_linear(tokens, in_features, out_features, bias, dtype, seed):
    x = randn(seed, tokens, in_features, dtype=dtype)
    weight = randn(seed + 1, out_features, in_features, dtype=dtype)
    offset = randn(seed + 2, out_features, dtype=dtype) if bias else None
    layer = ops.pack_linear(weight, offset)
    assert (layer.in_features, layer.out_features) == (in_features, out_features)
    out, expected = ops.linear(x, layer), reference.linear(x, weight, offset)
    scale = in_features**0.5
    assert_close(out / scale, expected / scale)
    whole = ops.linear(x, layer, out_dtype=torch.float32)
    assert whole.dtype is torch.float32
    wide = (value if value is None else value.float() for value in (weight, offset))
    assert_close(whole / scale, reference.linear(x.float(), *wide) / scale)
    found = ops.largest_linear(x, layer)
    assert torch.equal(found.value, whole.amax(1))
    assert torch.equal(found.column, whole.argmax(1))


@SETTINGS
@given(
    rows=st.integers(0, 20),
    columns=st.integers(1, 300),
    values=st.lists(st.sampled_from([-torch.inf, -1.0, -0.0, 0.0, 2.0, torch.inf, torch.nan]), min_size=1, unique=True),
    native=st.booleans(),
    seed=SEEDS,
)
def test_largest(rows, columns, values, native, seed):
    chosen = torch.randint(len(values), (rows, columns), generator=torch.Generator().manual_seed(seed))
    numbers = torch.tensor(values)[chosen]
    found = ops.largest(numbers) if native else reference.largest(numbers)
    expected = numbers.amax(1)
    assert torch.equal(found.value.nan_to_num(5.0), expected.nan_to_num(5.0))
    assert torch.equal(found.value.isnan(), expected.isnan())
    sound = ~expected.isnan()
    assert found.column[sound].tolist() == numbers.argmax(1)[sound].tolist()


@SETTINGS
@given(
    rows=st.integers(1, 8),
    columns=st.integers(1, 300),
    words=st.lists(st.sampled_from([0, -1, 1, -(1 << 31), 0x5A5A1234]), min_size=1, unique=True),
    threads=st.integers(1, 3),
    seed=SEEDS,
)
def test_mask_logits(rows, columns, words, threads, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, columns, generator=generator)
    lines = torch.randperm(rows, generator=generator)[: rows // 2 + 1]
    chosen = torch.randint(len(words), (len(lines), -(-columns // 32)), generator=generator)
    masks = torch.tensor(words, dtype=torch.int32)[chosen]
    expected = logits.clone()
    for line, mask in zip(lines.tolist(), masks.tolist(), strict=True):
        for column in range(columns):
            if not mask[column // 32] >> (column % 32) & 1:
                expected[line, column] = -torch.inf
    ops.set_threads(threads)
    mask_logits(logits, lines, masks)
    assert torch.equal(logits, expected)


def test_a_mask_of_a_line_that_is_not_there(kernels):
    logits, words = torch.zeros(2, 40), torch.zeros(1, 2, dtype=torch.int32)
    for line in (-1, 2):
        with pytest.raises(IndexError, match="outside of 2 lines"):
            mask_logits(logits, torch.tensor([line]), words)
    assert not logits.any()
    with pytest.raises(ValueError, match="words must be"):
        mask_logits(logits, torch.tensor([0]), words[:, :1])


def test_linear_takes_strided_inputs(kernels):
    weight, x = randn(0, 32, 64), randn(1, 6, 128)
    layer = ops.pack_linear(weight.t().contiguous().t())
    assert_close(ops.linear(x[::2, :64], layer), reference.linear(x[::2, :64], weight, None))


@SETTINGS
@given(
    tokens=st.integers(0, 9),
    width=st.integers(1, 300),
    offset=st.sampled_from([0.0, 1.0]),
    dtype=TYPES,
    weight_dtype=TYPES,
    seed=SEEDS,
)
def test_norms(tokens, width, offset, dtype, weight_dtype, seed):
    x, residual = randn(seed, tokens, width, dtype=dtype), randn(seed + 2, tokens, width)
    weight = randn(seed + 1, width, dtype=weight_dtype)
    assert_close(ops.rms_norm(x, weight, 1e-5, offset), reference.rms_norm(x, weight, 1e-5, offset))
    narrow = ops.rms_norm(residual, weight, 1e-5, offset, dtype)
    assert_close(narrow, reference.rms_norm(residual, weight, 1e-5, offset, dtype))
    other = residual.clone()
    out = ops.add_rms_norm(x, residual, weight, 1e-5, offset)
    assert_close(out, reference.add_rms_norm(x, other, weight, 1e-5, offset))
    assert torch.equal(residual, other)


@SETTINGS
@given(
    tokens=st.integers(0, 9),
    width=st.integers(1, 300),
    offset=st.sampled_from([0.0, 1.0]),
    biased=st.booleans(),
    factor=st.sampled_from([1.0, 0.22]),
    dtype=TYPES,
    seed=SEEDS,
)
def test_layer_norms_and_scaled_sums(tokens, width, offset, biased, factor, dtype, seed):
    x, residual = 3 + randn(seed, tokens, width, dtype=dtype), randn(seed + 2, tokens, width)
    weight = randn(seed + 1, width, dtype=dtype)
    bias = randn(seed + 3, width, dtype=dtype) if biased else None
    assert_close(ops.layer_norm(x, weight, bias, 1e-2, offset), reference.layer_norm(x, weight, bias, 1e-2, offset))
    assert_close(
        ops.layer_norm(residual, weight, bias, 1e-2, offset, dtype),
        reference.layer_norm(residual, weight, bias, 1e-2, offset, dtype),
    )
    other = residual.clone()
    out = ops.add_layer_norm(x, residual, weight, bias, 1e-2, offset)
    assert_close(out, reference.add_layer_norm(x, other, weight, bias, 1e-2, offset))
    assert torch.equal(residual, other)
    for kept in (1.0, 0.3):
        ops.add_scaled(x, residual, factor, kept)
        reference.add_scaled(x, other, factor, kept)
        assert_close(residual, other)
    copied = ops.copy_residual(residual, dtype)
    assert torch.equal(copied, residual.to(dtype)) and copied is not residual


@SETTINGS
@given(
    tokens=st.integers(0, 9),
    width=st.integers(1, 100),
    kind=st.sampled_from(["silu", "gelu_tanh", "relu2", "gelu"]),
    spread=st.sampled_from([1.0, 30.0, 1000.0]),
    dtype=TYPES,
    seed=SEEDS,
)
def test_gated_activation(tokens, width, kind, spread, dtype, seed):
    x = randn(seed, tokens, 2 * width, dtype=dtype) * torch.tensor([spread, 1.0], dtype=dtype).repeat_interleave(width)
    if kind == "relu2":
        x = x.clamp(max=20.0)
    assert_close(ops.gated_activation(x, kind), reference.gated_activation(x, kind))
    assert_close(ops.activation(x, kind), reference.activation(x, kind))


@SETTINGS
@given(
    tokens=st.integers(0, 9),
    width=st.integers(1, 100),
    spread=st.sampled_from([1e-7, 1e-3, 1.0, 30.0]),
    dtype=TYPES,
    seed=SEEDS,
)
def test_xielu(tokens, width, spread, dtype, seed):
    x, factors = randn(seed, tokens, width, dtype=dtype) * spread, torch.tensor([0.8, 1.3, 0.5, -1e-6])
    assert_close(ops.xielu(x, factors), reference.xielu(x, factors))
    x.fill_(torch.nan)
    assert ops.xielu(x, factors).isnan().all()


@SETTINGS
@given(
    tokens=st.integers(0, 80),
    in_features=st.one_of(st.integers(1, 150), st.sampled_from([32, 64, 96, 576])),  # those that AMX takes
    width=st.one_of(st.integers(1, 150), st.sampled_from([16, 48, 64, 112])),  # those that are made in one op
    kind=st.sampled_from(["silu", "gelu_tanh", "relu2", "gelu"]),
    bias=st.booleans(),
    dtype=TYPES,
    seed=SEEDS,
)
def test_gated_linear_is_two_ops(tokens, in_features, width, kind, bias, dtype, seed):
    x = randn(seed, tokens, in_features, dtype=dtype)
    weight = randn(seed + 1, 2 * width, in_features, dtype=dtype)
    layer = ops.pack_linear(weight, randn(seed + 2, 2 * width, dtype=dtype) if bias else None)
    out = ops.gated_linear(x, layer, kind)
    assert torch.equal(out, ops.gated_activation(ops.linear(x, layer), kind))
    assert out.dtype is dtype


def test_gated_linear_shows_a_nan():
    x, weight = randn(0, 40, 64, dtype=torch.bfloat16), randn(1, 96, 64, dtype=torch.bfloat16)
    x[7, 3] = torch.nan
    out = ops.gated_linear(x, ops.pack_linear(weight), "silu")
    assert out[7].isnan().all()
    assert not out[:7].isnan().any() and not out[8:].isnan().any()


@SETTINGS
@given(
    tokens=st.integers(0, 9),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([16, 24, 64, 80, 256]),
    rotary=st.sampled_from([None, 1.0, 0.5, 0.25]),
    page_size=st.sampled_from([1, 5, 16]),
    norms=st.sampled_from([(False, False), (True, True), (True, False), (False, True)]),
    dtype=TYPES,
    norm_dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    kind=st.sampled_from(
        [*(("head", last) for last in (False, True)), *((n, False) for n in ("projection", "centred", "biased"))]
    ),
    interleaved=st.booleans(),
    scaled=st.booleans(),
    v_norm=st.booleans(),
    seed=SEEDS,
)
def test_rope_store_kv(
    tokens, kv_heads, group, head_dim, rotary, page_size, norms, dtype, norm_dtype, kind, interleaved, scaled, v_norm,
    seed,
):  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    heads = kv_heads * group
    qkv = randn(seed, tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    caches = randn(seed + 1, 2, 20, kv_heads, page_size, head_dim, dtype=dtype)
    expected_caches = caches.clone()
    positions = torch.randint(0, 50, (tokens,), generator=generator)
    loc = torch.randperm(20 * page_size, generator=generator)[:tokens]
    table = None if rotary is None else randn(seed + 2, 50, int(head_dim * rotary) // 2 * 2)
    counts = {"head": (1, 1), "projection": (heads, kv_heads), "centred": (heads, kv_heads), "biased": (2, 2)}[kind[0]]
    shapes = [(count, head_dim) if kind[0] in ("centred", "biased") else (count * head_dim,) for count in counts]
    q_norm, k_norm = (
        randn(seed + 3, *shape, dtype=norm_dtype) if norm else None for norm, shape in zip(norms, shapes, strict=True)
    )
    scale = randn(seed + 4, 50, dtype=torch.float32) if scaled else None
    params = ops.RopeParams(heads, kv_heads, table, q_norm, k_norm, 1e-6, 1.0, *kind, interleaved, scale, v_norm)
    q = ops.rope_store_kv(qkv, positions, loc, *caches, params)
    expected = reference.rope_store_kv(qkv, positions, loc, *expected_caches, params)
    assert q.shape == (tokens, heads, head_dim)
    assert_close(q, expected)
    assert_close(caches, expected_caches)
    assert v_norm or torch.equal(caches[1], expected_caches[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_without_kv_heads_stores_nothing(dtype: torch.dtype) -> None:
    """Its queries have the bits that they have beside keys and values."""
    qkv, norm, table = randn(0, 5, 6 * 32, dtype=dtype), randn(1, 32, dtype=dtype), randn(2, 50, 16)
    positions, loc = torch.arange(5) + 3, torch.arange(5)
    params = ops.RopeParams(4, 1, table, norm, norm, 1e-6)
    caches, others = (randn(seed, 2, 4, heads, 4, 32, dtype=dtype) for seed, heads in ((3, 1), (4, 2)))
    beside, before = ops.rope_store_kv(qkv, positions, loc, *caches, params), others.clone()
    alone = replace(params, num_kv_heads=0, k_norm=None)
    assert torch.equal(ops.rope_store_kv(qkv[:, : 4 * 32].contiguous(), positions, loc, *others, alone), beside)
    assert torch.equal(others, before)


@SETTINGS
@given(
    layers=st.integers(1, 4),
    heads=st.integers(1, 3),
    page_size=st.integers(1, 16),
    head_dim=st.sampled_from([3, 16, 64]),
    copies=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 16)), max_size=6),
    dtype=TYPES,
    threads=st.integers(1, 3),
)
def test_copy_pages_goes_in_list_order(layers, heads, page_size, head_dim, copies, dtype, threads):
    cache = randn(0, 2, layers, 5, heads, page_size, head_dim, dtype=dtype)
    copies = [(source, target, min(count, page_size)) for source, target, count in copies]
    expected = cache.clone()
    for source, target, count in copies:
        expected[:, :, target, :, :count] = expected[:, :, source, :, :count].clone()
    ops.set_threads(threads)
    memory.copy_pages(cache[0], cache[1], *([copy[i] for copy in copies] for i in range(3)))
    assert torch.equal(cache, expected)


@pytest.mark.parametrize(("source", "target", "count"), [(5, 0, 1), (0, -1, 1), (0, 1, 5), (0, 1, -1)])
def test_copy_pages_refuses_what_is_outside(source, target, count):
    cache = torch.zeros(2, 1, 5, 1, 4, 8)
    with pytest.raises(IndexError, match="is not in 0"):
        memory.copy_pages(cache[0], cache[1], [source], [target], [count])


def test_torch_serves_when_native_is_off():
    batch, weight, x = ragged_batch([(2, 20)]), randn(0, 20, 16), randn(1, 3, 16)
    ops.use_native(False)
    try:
        assert "turned off" in ops.native_status()
        assert ops.pack_linear(weight).kernels is None
        assert_close(ops.linear(x, ops.pack_linear(weight)), reference.linear(x, weight, None))
        assert torch.equal(ops.attention(*batch.args, ops.AttentionParams(scale=0.1)), batch.expected(scale=0.1))
    finally:
        ops.use_native(True)


def test_a_layer_keeps_the_kernels_it_was_packed_for(kernels):
    weight, x = randn(0, 20, 16), randn(1, 3, 16)
    layer = ops.pack_linear(weight)
    ops.use_native(False)
    try:
        assert_close(ops.linear(x, layer), reference.linear(x, weight, None))
    finally:
        ops.use_native(True)


def test_pack_linear_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="must be"):
        ops.pack_linear(torch.zeros(4, 5), torch.zeros(5))
    with pytest.raises(ValueError, match="must be"):
        ops.pack_linear(torch.zeros(4))
