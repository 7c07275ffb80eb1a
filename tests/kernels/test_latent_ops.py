"""The ops of latent attention: native kernels against plain torch, and that against separate keys and values."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.kernels.ragged_batches import RaggedBatch, assert_close, assert_same_bits_as_alone, ragged_batch
from torch import Tensor

from rootgraft.kernels import latent_reference, lora_reference, memory, ops, quantised_weights, reference
from rootgraft.kernels.expert_ops import ExpertWeights
from rootgraft.kernels.latent_ops import LatentParams, head_linear, latent_queries, rope_store_latent
from rootgraft.kernels.lora_ops import Factors, SlotTable, lora_heads, pack_expansion
from rootgraft.lora.segments import make_segments

pytestmark = pytest.mark.usefixtures("kernels")

TYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
ROWS = [(1, 700), (30, 300), (1, 1), (33, 33), (5, 90)]
# Dimensions of keys and of values, and heads: DeepSeek V2-Lite, a small one, more heads than a tile of queries.
SHAPES = [(576, 512, 16), (64, 48, 6), (80, 16, 1), (112, 64, 128)]


def latent_batch(shape: tuple[int, int, int], dtype: torch.dtype, rows: list[tuple[int, int]] = ROWS) -> RaggedBatch:
    dim, _, heads = shape
    batch = ragged_batch(rows, heads=heads, kv_heads=1, head_dim=dim, dtype=dtype)
    return replace(batch, v_cache=batch.k_cache)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_are_the_first_dimensions_of_keys(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    batch = latent_batch(shape, dtype)
    options = {"scale": shape[0] ** -0.5, "value_dim": shape[1]}
    out = ops.attention(*batch.args, ops.AttentionParams(**options))
    assert out.shape == (len(batch.q), shape[1] * shape[2])
    assert_close(out, batch.expected(**options))
    separate = replace(batch, v_cache=batch.k_cache.clone()).expected(scale=options["scale"])
    assert_close(out, separate.view(len(out), shape[2], -1)[..., : shape[1]].flatten(1))
    assert_same_bits_as_alone(batch, **options)


def test_rows_that_share_pages_get_the_bits_that_they_get_alone() -> None:
    batch = latent_batch(SHAPES[0], torch.bfloat16, [(1, 700), (2, 700), (1, 650)])
    batch.page_table[1:, :36] = batch.page_table[0, :36]
    assert_same_bits_as_alone(batch, scale=0.05, value_dim=512)


def test_chunks_have_the_bits_of_the_whole() -> None:
    batch = latent_batch(SHAPES[0], torch.float32, [(200, 320)])
    params = ops.AttentionParams(0.05, value_dim=512)
    edges = [0, 1, 130, 199, 200]
    pieces = [ops.attention(*batch.pick(0, a, b).args, params) for a, b in itertools.pairwise(edges)]
    assert torch.equal(torch.cat(pieces), ops.attention(*batch.args, params))


def params_of(dtype: torch.dtype, *, interleaved: bool, heads: int = 3) -> LatentParams:
    angles = torch.rand(40, 8) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    return LatentParams(heads, 24, table.shape[1], table, torch.rand(48).to(dtype), 1e-6, interleaved)


@pytest.mark.parametrize("dtype", [*TYPES, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_what_is_stored_of_a_token(interleaved: bool, dtype: torch.dtype) -> None:
    params, tokens = params_of(dtype, interleaved=interleaved), 30
    q, kv = torch.randn(tokens, 3 * 40).to(dtype), torch.randn(tokens, 64).to(dtype)
    positions, cells = torch.randint(0, 40, (tokens,)), torch.randperm(5 * 16)[:tokens]
    caches = torch.zeros(2, 5, 1, 16, 64, dtype=dtype)
    turned = q.clone()
    rope_store_latent(turned, kv, positions, cells, caches[0], params)
    expected = q.clone()
    latent_reference.rope_store_latent(expected, kv, positions, cells, caches[1], params)
    torch.testing.assert_close(turned, expected)
    torch.testing.assert_close(caches[0], caches[1])
    assert torch.equal(turned.view(tokens, 3, 40)[..., :24], q.view(tokens, 3, 40)[..., :24])
    key = reference.rotate(kv[:, None, 48:].float(), params.cos_sin[positions], interleaved)[:, 0]
    torch.testing.assert_close(caches[0].view(-1, 64)[cells, 48:], key.to(dtype))


@pytest.mark.parametrize("dtype", TYPES)
def test_without_a_table_nothing_is_rotated(dtype: torch.dtype) -> None:
    params = replace(params_of(dtype, interleaved=False), cos_sin=None)
    q, kv, cells = torch.randn(7, 120).to(dtype), torch.randn(7, 64).to(dtype), torch.arange(7) * 3
    caches = torch.zeros(2, 2, 1, 16, 64, dtype=dtype)
    before = q.clone()
    rope_store_latent(q, kv, torch.full((7,), 1 << 40), cells, caches[0], params)
    latent_reference.rope_store_latent(before.clone(), kv, cells, cells, caches[1], params)
    assert torch.equal(q, before) and torch.equal(caches[0].view(-1, 64)[cells, 48:], kv[:, 48:])
    torch.testing.assert_close(caches[0], caches[1])


@pytest.mark.parametrize(("position", "cell"), [(40, 0), (-1, 0), (0, 80), (0, -1)])
def test_what_lies_outside_is_refused_before_anything_is_written(position: int, cell: int) -> None:
    params = params_of(torch.float32, interleaved=True)
    q, kv, cache = torch.randn(2, 120), torch.randn(2, 64), torch.zeros(5, 1, 16, 64)
    before = q.clone()
    if ops.native_kernels() is None:
        pytest.skip("plain torch checks indices as it meets them")
    with pytest.raises(IndexError, match="out of range"):
        rope_store_latent(q, kv, torch.tensor([0, position]), torch.tensor([1, cell]), cache, params)
    assert torch.equal(q, before) and not cache.any()


def test_shapes_that_do_not_fit_are_refused() -> None:
    params = params_of(torch.float32, interleaved=True)
    index = torch.zeros(2, dtype=torch.int64)
    for q, kv, dim in ((119, 64, 64), (120, 63, 64), (120, 64, 80)):
        with pytest.raises(ValueError, match="do not fit 3 heads of 24 \\+ 16 dimensions"):
            rope_store_latent(torch.zeros(2, q), torch.zeros(2, kv), index, index, torch.zeros(5, 1, 16, dim), params)


def heads_of(shape: tuple[int, int, int], dtype: torch.dtype, *, packed: bool = True) -> ExpertWeights:
    g = torch.Generator().manual_seed(5)
    weights = [torch.randn(shape[1:], generator=g).mul_(shape[2] ** -0.5).to(dtype) for _ in range(shape[0])]
    plain = (ops.PackedLinear(shape[2], shape[1], weight.float(), None, kernels=None) for weight in weights)
    return ExpertWeights(tuple(map(ops.pack_linear, weights)) if packed else tuple(plain))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens", [0, 1, 70])
def test_each_head_has_a_weight_of_its_own(tokens: int, dtype: torch.dtype) -> None:
    x = torch.randn(tokens, 3 * 40).to(dtype)
    queries = latent_queries(x, heads_of((3, 48, 24), dtype))
    assert queries.shape == (tokens, 3, 64)
    expected = latent_reference.head_linear(x.float(), heads_of((3, 48, 24), dtype, packed=False))
    torch.testing.assert_close(queries.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(queries[..., 48:], x.view(tokens, 3, 40)[..., 24:])
    values = head_linear(queries[..., :48].flatten(1), heads_of((3, 20, 48), dtype))
    expected = latent_reference.head_linear(
        queries[..., :48].flatten(1).float(), heads_of((3, 20, 48), dtype, packed=False)
    )
    torch.testing.assert_close(values.float(), expected.flatten(1), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for row in range(tokens):
        assert torch.equal(latent_queries(x[row : row + 1], heads_of((3, 48, 24), dtype)), queries[row : row + 1])


def test_heads_in_8_bits() -> None:
    if not quantised_weights.available():
        pytest.skip("no native kernels")
    x = torch.randn(5, 3 * 40)
    plain = heads_of((3, 48, 24), torch.float32, packed=False)
    packed = (quantised_weights.pack_channels(each.weight, dynamic=False) for each in plain.experts)
    queries = latent_queries(x, ExpertWeights(tuple(packed)))
    torch.testing.assert_close(queries, latent_reference.head_linear(x, plain), rtol=5e-2, atol=5e-2)


def table_of(sizes: tuple[int, int], dtype: torch.dtype) -> SlotTable:
    """Two adapters, which leave some of three heads alone."""
    columns, width = sizes
    table = SlotTable((columns,), width, 2 * 3, dtype)
    for place, rank in enumerate((3, 0, 5, 0, 2, 1)):
        if rank:
            b = pack_expansion(torch.randn(columns, rank).to(dtype))
            table.put(place, Factors(torch.randn(rank, width).to(dtype), torch.rand(rank), (rank,), b))
    return table


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("more", [0, 16])
def test_adapters_of_heads(more: int, dtype: torch.dtype) -> None:
    table, slots = table_of((48, 24), dtype), [1, -1, 0, 0, 1, -1]
    segments = make_segments(np.array(slots, np.int32), torch.device("cpu"))
    assert segments is not None
    x, y = torch.randn(6, 3 * (24 + more)).to(dtype), torch.randn(6, 3, 48 + more).to(dtype)
    actual, expected = y.clone(), y.clone()
    lora_heads(actual, x, table, 3, segments)
    lora_reference.head_shrink_expand(expected, x, table, 3, segments)
    torch.testing.assert_close(actual, expected, rtol=2 * TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])
    changed = (actual != y).view(6, 3, -1).any(-1)
    assert changed.tolist() == [
        [(slot == 0 and head != 1) or (slot == 1 and head != 0) for head in range(3)] for slot in slots
    ]
    assert torch.equal(actual[..., 48:], y[..., 48:])
    with pytest.raises(ValueError, match="do not fit 3 heads"):
        lora_heads(y[..., 1:], x, table, 3, segments)


def test_pages_of_one_cache_are_copied_in_order() -> None:
    cache: Tensor = torch.randn(2, 6, 1, 4, 48)
    expected = cache.clone()
    reference.copy_pages(expected, None, [1, 3], [2, 1], [4, 2])
    memory.copy_pages(cache, None, [1, 3], [2, 1], [4, 2])
    assert torch.equal(cache, expected)
