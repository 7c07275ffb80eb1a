"""The GPU's kernels of latent attention, interpreted, against plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.kernels import triton_interpreter
from support.kernels.ragged_batches import assert_close, ragged_batch

from rootgraft.kernels import latent_reference, ops
from rootgraft.kernels.expert_ops import ExpertWeights
from rootgraft.kernels.latent_ops import LatentParams, latent_queries, rope_store_latent
from rootgraft.kernels.triton import attention, expert_product, launch, pages, rope, shared_prefixes

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "value_dim", "heads"), [(64, 48, 6), (576, 512, 2), (96, 64, 40)])
def test_keys_that_begin_with_their_values(dim: int, value_dim: int, heads: int, dtype: torch.dtype) -> None:
    batch = ragged_batch([(1, 1), (5, 40), (1, 170), (2, 2)], heads=heads, kv_heads=1, head_dim=dim, dtype=dtype)
    batch = replace(batch, v_cache=batch.k_cache)
    assert attention.takes(*batch.args[:3], batch.page_table, value_dim)
    options = {"scale": dim**-0.5, "value_dim": value_dim}
    assert_close(ops.attention(*batch.args, ops.AttentionParams(**options)), batch.expected(**options))


@pytest.mark.parametrize(("dim", "value_dim", "heads"), [(576, 512, 2), (96, 64, 40)])
def test_the_same_by_the_tiles_of_small_cards(
    dim: int, value_dim: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "OFFLINE_SHARED", 101_376)
    test_keys_that_begin_with_their_values(dim, value_dim, heads, torch.bfloat16)


@pytest.mark.parametrize(("dim", "value_dim"), [(576, 528), (592, 512), (64, 40), (64, 64)])
def test_other_sizes_are_for_plain_torch(dim: int, value_dim: int) -> None:
    batch = ragged_batch([(1, 4)], heads=2, kv_heads=1, head_dim=dim)
    assert not attention.takes(*batch.args[:3], batch.page_table, value_dim)


def test_a_prefix_that_rows_share(monkeypatch: pytest.MonkeyPatch) -> None:
    for gate, value in (("LEAST_SHARERS", 2), ("LEAST_TOKENS", 16), ("LEAST_READS", 0), ("ITEM_KEYS", 48)):
        monkeypatch.setattr(shared_prefixes, gate, value)
    batch = ragged_batch([(1, 300)] * 6, heads=4, kv_heads=1, head_dim=64, dtype=torch.float32)
    batch.page_table[1:, :16] = batch.page_table[0, :16]
    table, start, context = (part.numpy() for part in (batch.page_table, batch.query_start, batch.context_len))
    shared = ops.find_shared_prefixes(table, start[1:] - start[:-1], context, 16, batch.q.device)
    assert shared is not None
    batch = replace(batch, v_cache=batch.k_cache, shared=shared)
    options = {"scale": 0.1, "value_dim": 48}
    assert_close(ops.attention(*batch.args, ops.AttentionParams(**options)), batch.expected(**options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True, None])
def test_what_is_stored_of_a_token(interleaved: bool | None, dtype: torch.dtype) -> None:
    angles = torch.rand(40, 8) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    found = None if interleaved is None else table
    params = LatentParams(19, 24, table.shape[1], found, torch.rand(48).to(dtype), 1e-6, bool(interleaved))
    q, kv = torch.randn(5, 19 * 40).to(dtype), torch.randn(5, 64).to(dtype)
    positions, cells = torch.randint(0, 40, (5,)), torch.tensor([7, 0, 30, -1, 12])
    actual, expected = torch.zeros(2, 1, 16, 64, dtype=dtype), torch.zeros(2, 1, 16, 64, dtype=dtype)
    assert rope.takes_latent(q, kv, actual, params)
    turned, wanted = q.clone(), q.clone()
    rope_store_latent(turned, kv, positions, cells, actual, params)
    latent_reference.rope_store_latent(wanted, kv, positions, cells, expected, params)
    expected[1, 0, 15] = 0  # of the cell -1, which is none
    torch.testing.assert_close(turned, wanted)
    torch.testing.assert_close(actual, expected)


def test_each_head_has_a_weight_of_its_own() -> None:
    matrices = [torch.randn(48, 32) for _ in range(3)]
    triton_interpreter.allow(*matrices)
    weights = ExpertWeights(tuple(ops.PackedLinear(32, 48, each, None, kernels=None) for each in matrices))
    for tokens in (1, 40):
        x = torch.randn(tokens, 3 * 40)
        assert expert_product.takes_heads(x, weights)
        torch.testing.assert_close(latent_queries(x, weights), latent_reference.head_linear(x, weights))


def test_pages_of_keys_alone() -> None:
    cache = torch.randn(2, 6, 1, 4, 48)
    expected = cache.clone()
    expected[:, 2] = expected[:, 1]
    expected[:, 1, :, :2] = expected[:, 3, :, :2]
    pages.copy_pages(cache, None, [1, 3], [2, 1], [4, 2])
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("limit", [101_376, 166_912, 232_448])
def test_tiles_fit_the_shared_memory_of_the_card(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "OFFLINE_SHARED", limit)
    made = {name: each.constants for name, each in attention.variants() if "bf16-latent" in name}
    few = 64 if limit > 166_912 else 32  # what does not spill registers on sm_80
    assert made["attention_extend/bf16-latent"]["BLOCK_M"] == made["attention_shared/bf16-latent"]["PREFIX_M"] == few
    assert made["attention_decode/bf16-latent-128"]["BLOCK_M"] == few
    for name in ("attention_decode/bf16-latent", "attention_shared/bf16-latent"):
        assert made[name]["BLOCK_M"] == 16, "a row's own keys are read for its few heads"
