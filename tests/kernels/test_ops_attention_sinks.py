"""Attention sinks: a score of each head without a value, counted once, however the keys are cut."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.kernels.ragged_batches import assert_close, assert_same_bits_as_alone, ragged_batch

from rootgraft.kernels import ops

pytestmark = pytest.mark.usefixtures("kernels")

TYPES = [torch.bfloat16, torch.float32]
ROWS = [(1, 700), (60, 600), (1, 1), (33, 33), (5, 300)]
SINKS = torch.linspace(-2, 6, 9)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_against_plain_torch(dtype: torch.dtype, window: int | None, soft_cap: float | None) -> None:
    batch = ragged_batch(ROWS, dtype=dtype)
    options = {"scale": 0.125, "window": window, "soft_cap": soft_cap, "sinks": SINKS}
    assert_close(ops.attention(*batch.args, ops.AttentionParams(**options)), batch.expected(**options))
    assert_same_bits_as_alone(batch, **options)


def test_plain_torch_counts_a_sink_as_a_key_of_value_zero() -> None:
    batch = ragged_batch([(1, 1)], heads=2, kv_heads=1, dtype=torch.float32)
    alone = batch.expected(scale=0.125).view(2, 64)
    sinks = torch.tensor([0.5, -1.0])
    score = 0.125 * (batch.q[0] * batch.k_cache[batch.page_table[0, 0], 0, 0]).sum(-1)
    share = torch.exp(score) / (torch.exp(score) + torch.exp(sinks))
    torch.testing.assert_close(batch.expected(scale=0.125, sinks=sinks).view(2, 64), alone * share[:, None])


def test_on_8_bit_kv() -> None:
    batch = ragged_batch(ROWS).in_int8()
    options = {"scale": 0.125, "sinks": SINKS}
    actual, expected = ops.attention(*batch.args, ops.AttentionParams(**options)), batch.expected(**options)
    torch.testing.assert_close(actual.float(), expected.float(), atol=3e-2, rtol=3e-2)
    assert not torch.allclose(expected.float(), batch.expected(scale=0.125).float(), atol=3e-2)


def test_chunks_have_the_bits_of_the_whole() -> None:
    batch = ragged_batch([(400, 520)], heads=9, kv_heads=3, head_dim=32)
    params = ops.AttentionParams(0.125, sinks=SINKS)
    whole = ops.attention(*batch.args, params)
    edges = [0, 1, 130, 256, 399, 400]
    pieces = [ops.attention(*batch.pick(0, a, b).args, params) for a, b in itertools.pairwise(edges)]
    assert torch.equal(torch.cat(pieces), whole)


def test_sinks_far_from_all_scores() -> None:
    batch = ragged_batch([(3, 40)], dtype=torch.float32)
    low, high = (ops.AttentionParams(0.125, sinks=torch.full((9,), value)) for value in (-1e4, 1e4))
    torch.testing.assert_close(ops.attention(*batch.args, low), batch.expected(scale=0.125), atol=1e-5, rtol=1e-5)
    assert ops.attention(*batch.args, high).abs().max() < 1e-30


def test_sinks_of_another_number_of_heads_are_refused() -> None:
    batch = ragged_batch([(1, 4)])
    for wrong in (torch.zeros(8), torch.zeros(9, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"sinks must be a contiguous torch\.float32"):
            ops.attention(*batch.args, ops.AttentionParams(0.125, sinks=wrong))
