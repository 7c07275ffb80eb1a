"""The GPU's low-rank op on products of experts, interpreted, against plain torch: eager and captured segments."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import triton_interpreter
from torch import Tensor

from rootgraft.kernels import lora_reference
from rootgraft.kernels.lora_ops import Factors, Segments, SlotTable, lora_experts, lora_heads, pack_expansion
from rootgraft.kernels.triton import expert_lora
from rootgraft.kernels.triton.lora_config import LONG, SHORT
from rootgraft.lora.segments import StaticSegments, make_segments

pytestmark = pytest.mark.usefixtures("interpreted")

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
WIDTH, SIZES = 48, (24, 72)


def table_of(slots: int, experts: int, dtype: torch.dtype) -> SlotTable:
    """Adapters of several ranks, which leave some experts, and some modules of others, alone."""
    g = torch.Generator().manual_seed(experts)
    table = SlotTable(SIZES, WIDTH, slots * experts, dtype)
    for place in range(slots * experts):
        ranks = ((3, 2), (0, 20), (0, 0), (1, 0))[place % 4]
        if any(ranks):
            parts = [torch.randn(size, rank, generator=g) for size, rank in zip(SIZES, ranks, strict=True)]
            a = (torch.randn(sum(ranks), WIDTH, generator=g) / 7).to(dtype)
            b = torch.cat([pack_expansion(part) for part in parts]).to(dtype)
            factors = Factors(a, torch.rand(sum(ranks), generator=g), ranks, b)
            triton_interpreter.allow(*factors.tensors())
            table.put(place, factors)
    return table


def picks(tokens: int, top_k: int, experts: int) -> Tensor:
    return torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int()


def assert_right(table: SlotTable, num_experts: int, experts: Tensor, slots: list[int], own: bool, segments: Segments):
    shape = (*experts.shape, WIDTH) if own else (len(experts), WIDTH)
    x = torch.randn(shape).to(table.dtype)
    y = torch.randn(*experts.shape, sum(SIZES)).to(table.dtype)
    actual, expected = y.clone(), y.clone()
    lora_experts(actual, x, experts, table, num_experts, segments)
    plain = make_segments(np.array(slots, np.int32), CPU)
    if plain is not None:
        lora_reference.expert_shrink_expand(expected, x, experts, table, num_experts, plain)
    limit = TOLERANCE[table.dtype]
    torch.testing.assert_close(actual, expected, rtol=limit, atol=limit * max(1.0, expected.abs().max().item()))
    without = [token for token, slot in enumerate(slots) if slot < 0]
    assert torch.equal(actual[without], y[without])


@settings(max_examples=15, deadline=None)
@given(
    slots=st.lists(st.integers(-1, 2), min_size=1, max_size=30),
    num_experts=st.integers(1, 9),
    dtype=st.sampled_from(list(TOLERANCE)),
    own=st.booleans(),
    data=st.data(),
)
def test_against_plain_torch(slots, num_experts, dtype, own, data):
    top_k = data.draw(st.integers(1, num_experts), label="top_k")
    segments = make_segments(np.array(slots, np.int32), CPU)
    if segments is not None:
        experts = picks(len(slots), top_k, num_experts)
        assert_right(table_of(3, num_experts, dtype), num_experts, experts, slots, own, segments)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("more", [0, 8])
def test_heads(captured: bool, more: int) -> None:
    """Products of each head, whose inputs and results may lie beside other values."""
    num_heads, slots = 3, [0, 2, -1, 2, 1]
    table, plain = table_of(3, num_heads, torch.float32), make_segments(np.array(slots, np.int32), CPU)
    static = StaticSegments(8, CPU)
    static.fill(np.array(slots, np.int32))
    tokens = 8 if captured else len(slots)
    x, y = (torch.randn(tokens, num_heads * (size + more)) for size in (WIDTH, sum(SIZES)))
    actual, expected = y.clone(), y.clone()
    assert plain is not None
    lora_heads(actual, x, table, num_heads, static.segments(8) if captured else plain)
    lora_reference.head_shrink_expand(expected, x, table, num_heads, plain)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    assert not torch.equal(actual, y)


@pytest.mark.parametrize("slots", [[0, 2, -1, 2, 1], [-1, 1], [-1] * 6, [2] * 12])
def test_segments_of_a_captured_pass(slots):
    """Of fixed shapes: what lies behind the step's own tokens is no segment, and no pick of it is changed."""
    static = StaticSegments(12, CPU)
    static.fill(np.array(slots, np.int32))
    slots = slots + [-1] * (12 - len(slots))
    assert_right(table_of(3, 5, torch.float32), 5, picks(12, 2, 5), slots, False, static.segments(12))


def test_tiles_hold_one_key_each_and_every_pick_once():
    for count, num_keys, size in ((40, 3, SHORT), (700, 3, LONG), (1, 1, SHORT)):
        keys = torch.randint(0, num_keys + 1, (count,)).sort().values.int()  # some without a key
        tiles = expert_lora._tiles(keys, num_keys)
        assert tiles.size == size
        found = [line for line in tiles.lines.tolist() if line[1] < line[2]]
        covered = [place for _, first, end in found for place in range(first, end)]
        assert covered == list(range(int((keys < num_keys).sum())))
        assert all(keys[first] == slot == keys[end - 1] and end - first <= size for slot, first, end in found)
        assert tiles.lines[:, 0].max() < num_keys
