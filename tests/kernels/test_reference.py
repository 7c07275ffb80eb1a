"""The oracle of this room against oracles from elsewhere."""

from __future__ import annotations

import pytest
import torch
from support.kernels.ragged_batches import ragged_batch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from rootgraft.kernels import reference
from rootgraft.kernels.layouts.attention_arguments import RopeParams

FP32 = {"atol": 1e-5, "rtol": 1e-5}


def sdpa_of_row(batch, row: int, window: int | None, chunk: int | None = None) -> Tensor:
    """A row through torch's own attention, on keys gathered cell by cell."""
    start, stop = batch.query_start[row : row + 2].tolist()
    context, page_size = int(batch.context_len[row]), batch.k_cache.shape[2]
    cells = [(int(batch.page_table[row, i // page_size]), i % page_size) for i in range(context)]
    k, v = (
        torch.stack([cache[page, :, cell] for page, cell in cells], dim=1) for cache in (batch.k_cache, batch.v_cache)
    )
    position = torch.arange(context - (stop - start), context)[:, None]
    mask = torch.arange(context) <= position
    if window is not None:
        mask &= torch.arange(context) > position - window
    if chunk is not None:
        mask &= torch.arange(context) // chunk == position // chunk
    q = batch.q[start:stop].transpose(0, 1)
    out = functional.scaled_dot_product_attention(q[None], k[None], v[None], mask, scale=0.2, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("page_size", [1, 16])
def test_attention_is_torchs(window, page_size):
    batch = ragged_batch([(1, 30), (7, 7), (5, 61)], heads=6, kv_heads=2, page_size=page_size, dtype=torch.float32)
    out = batch.expected(scale=0.2, window=window)
    expected = torch.cat([sdpa_of_row(batch, row, window) for row in range(3)])
    torch.testing.assert_close(out, expected, **FP32)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("chunk", [1, 8, 61, 100])
def test_chunked_attention_is_torchs(chunk, window):
    """Chunks begin at multiples of their size, whatever a row's first query is."""
    batch = ragged_batch([(1, 30), (7, 7), (20, 61)], heads=6, kv_heads=2, dtype=torch.float32)
    out = batch.expected(scale=0.2, window=window, chunk=chunk)
    expected = torch.cat([sdpa_of_row(batch, row, window, chunk) for row in range(3)])
    torch.testing.assert_close(out, expected, **FP32)


def test_attention_of_many_queries_is_cut_without_seams():
    batch = ragged_batch([(600, 650)], heads=2, kv_heads=1, head_dim=16, dtype=torch.float32)
    torch.testing.assert_close(batch.expected(scale=0.2), sdpa_of_row(batch, 0, None), **FP32)


def test_soft_cap_bounds_the_scores():
    """With values that are their key's one-hot index, the output is the softmax itself."""
    batch = ragged_batch([(1, 16)], heads=1, kv_heads=1, head_dim=16, dtype=torch.float32)
    page = int(batch.page_table[0, 0])
    batch.v_cache[page, 0] = torch.eye(16)
    scores = 3.0 * torch.tanh(batch.k_cache[page, 0] @ batch.q[0, 0] * 2.0 / 3.0)
    torch.testing.assert_close(batch.expected(scale=2.0, soft_cap=3.0)[0], scores.softmax(0), **FP32)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_is_torchs(offset):
    x, weight = torch.randn(5, 70), torch.randn(70)
    expected = functional.rms_norm(x, (70,), weight + offset, 1e-5)
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-5, offset), expected, **FP32)
    residual = torch.randn(5, 70)
    total = residual + x
    expected = functional.rms_norm(total, (70,), weight + offset, 1e-5)
    torch.testing.assert_close(reference.add_rms_norm(x, residual, weight, 1e-5, offset), expected, **FP32)
    assert torch.equal(residual, total)


def test_linear_is_torchs():
    x, weight, bias = torch.randn(5, 30), torch.randn(20, 30), torch.randn(20)
    torch.testing.assert_close(reference.linear(x, weight, bias), functional.linear(x, weight, bias), **FP32)


def test_gated_activation_is_torchs():
    x = torch.randn(5, 60) * 4
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(reference.gated_activation(x, "silu"), functional.silu(gate) * up, **FP32)
    expected = functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(reference.gated_activation(x, "gelu_tanh"), expected, **FP32)


@pytest.mark.parametrize("rotary_dim", [32, 16])
def test_rope_is_transformers(rotary_dim):
    config = LlamaConfig(hidden_size=rotary_dim * 4, num_attention_heads=4, head_dim=rotary_dim)
    positions = torch.tensor([3, 0, 17, 400])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    half = rotary_dim // 2
    table = torch.zeros(401, rotary_dim)
    table[positions] = torch.cat((cos[0, :, :half], sin[0, :, :half]), -1)
    qkv = torch.randn(4, (4 + 2 * 2) * 32)
    cache = torch.zeros(2, 3, 2, 4, 32)
    loc = torch.tensor([11, 0, 6, 7])
    q = reference.rope_store_kv(qkv, positions, loc, cache[0], cache[1], RopeParams(4, 2, table))

    heads = qkv.view(4, 8, 32).transpose(0, 1)[None]
    turned, _ = apply_rotary_pos_emb(heads[..., :rotary_dim], heads[..., :rotary_dim], cos, sin)
    expected = torch.cat((turned, heads[..., rotary_dim:]), -1)[0].transpose(0, 1)
    torch.testing.assert_close(q, expected[:, :4], **FP32)
    for token, cell in enumerate(loc.tolist()):
        torch.testing.assert_close(cache[0, cell // 4, :, cell % 4], expected[token, 4:6], **FP32)
        assert torch.equal(cache[1, cell // 4, :, cell % 4], qkv.view(4, 8, 32)[token, 6:])
    assert int((cache != 0).any(-1).sum()) == 2 * 2 * 4


def test_head_norms_come_before_the_rotation():
    qkv, table = torch.randn(3, 4 * 16), torch.randn(8, 16)
    q_norm, k_norm = torch.randn(16), torch.randn(16)
    cache = torch.zeros(2, 1, 1, 8, 16)
    positions = torch.tensor([1, 2, 3])
    params = RopeParams(2, 1, table, q_norm, k_norm, 1e-6, 1.0)
    q = reference.rope_store_kv(qkv, positions, positions, cache[0], cache[1], params)
    heads = qkv.view(3, 4, 16)
    for got, head, norm in ((q, heads[:, :2], q_norm), (cache[0, 0, 0, 1:4, None], heads[:, 2:3], k_norm)):
        normed = functional.rms_norm(head, (16,), norm + 1.0, 1e-6)
        torch.testing.assert_close(got, reference.rotate(normed, table[positions]), **FP32)
