"""A row of no numbers, of infinities, of huge or of tiny ones leaves the bits of every other row as they are."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from support.kernels.ragged_batches import RaggedBatch, ragged_batch
from torch import Tensor

from rootgraft.kernels import expert_ops, ops, quantised_weights, sampling_ops
from rootgraft.kernels.layouts.draw_params import DrawParams
from rootgraft.kernels.lora_ops import Factors, Segments, SlotTable, lora_shrink_expand, pack_expansion
from rootgraft.kernels.quantised_weights import BLOCK_SIZES, BlockType
from rootgraft.kernels.state_ops import (
    ConvParams,
    DeltaParams,
    GatedNormParams,
    SelectiveParams,
    SsmParams,
    StateBatch,
    causal_conv,
    delta_scan,
    gated_norm,
    selective_scan,
    ssm_scan,
)
from rootgraft.lora.segments import make_segments

pytestmark = pytest.mark.usefixtures("kernels")

TYPES = [torch.bfloat16, torch.float32]
HOSTILE = (torch.nan, torch.inf, -torch.inf, 3e38, 1e-40)
ROWS = (2, 3, 8, 16, 17, 33, 70)  # about the edges of tiles


def assert_others_keep_bits(op: Callable[[Tensor], Tensor], x: Tensor) -> None:
    whole = op(x)
    for value in HOSTILE:
        for row in {0, len(x) // 2, len(x) - 1}:
            spoiled = x.clone()
            spoiled[row] = value
            found, others = op(spoiled), torch.arange(len(x)) != row
            assert torch.equal(found[others], whole[others])
            assert math.isfinite(value) or not found[row].isfinite().any()


def layers_of(dtype: torch.dtype) -> dict[str, ops.Linear]:
    """A weight [40, 512] in every form."""
    weight = torch.randn(40, 512).to(dtype)
    layers: dict[str, ops.Linear] = {"plain": ops.pack_linear(weight)}
    for dynamic in (False, True):
        layers[f"channels {dynamic}"] = quantised_weights.pack_channels(weight, dynamic=dynamic)
    for name in get_args(BlockType):
        values, size = BLOCK_SIZES[name]
        raw = torch.randint(256, (40, 512 // values, size), dtype=torch.uint8)
        for place in (0, 2, size - 4, size - 2):  # half precision of all formats: no exponent of all ones
            raw[..., place + 1] = 40
        packed = quantised_weights.pack_blocks(raw.flatten(1), name, widened=True)
        layers[name] = packed
        layers[f"{name} both"] = quantised_weights.with_widened(packed, dtype, few_rows=4)
        for dynamic in (False, True):
            if quantised_weights.is_widened_only(name, dynamic=dynamic):
                continue
            layers[f"{name} {dynamic}"] = quantised_weights.pack_blocks(raw.flatten(1), name, dynamic=dynamic)
    return layers


@pytest.mark.parametrize("dtype", TYPES)
def test_products(dtype: torch.dtype) -> None:
    ops.set_threads(2)
    for layer in layers_of(dtype).values():
        for rows in ROWS:
            assert_others_keep_bits(functools.partial(ops.linear, layer=layer), torch.randn(rows, 512).to(dtype))


@pytest.mark.parametrize("dtype", TYPES)
def test_experts(dtype: torch.dtype) -> None:
    plain = [torch.randn(32, 64).to(dtype) for _ in range(4)]
    for experts in (
        map(ops.pack_linear, plain),
        [quantised_weights.pack_channels(each, dynamic=True) for each in plain],
    ):
        weights = expert_ops.ExpertWeights(tuple(experts))
        for rows in ROWS:
            picks = torch.randint(4, (rows, 2), dtype=torch.int32)
            op = functools.partial(expert_ops.expert_linear, weights=weights, experts=picks)
            assert_others_keep_bits(op, torch.randn(rows, 64).to(dtype))


@pytest.mark.parametrize("dtype", TYPES)
def test_adapters(dtype: torch.dtype) -> None:
    """Of two slots, the tokens of which lie in turns."""
    table = SlotTable((70,), 38, 2, dtype)
    for slot, rank in ((0, 3), (1, 17)):
        b = pack_expansion(torch.randn(70, rank)).to(dtype)
        table.put(slot, Factors(torch.randn(rank, 38).to(dtype), torch.ones(rank), (rank,), b))
    for rows in ROWS:
        segments = make_segments(np.arange(rows, dtype=np.int32) % 2, torch.device("cpu"))
        assert segments is not None

        def adapt(x: Tensor, rows: int = rows, segments: Segments = segments) -> Tensor:
            y = torch.zeros(rows, 70, dtype=dtype)
            lora_shrink_expand(y, x, table, segments)
            return y

        assert_others_keep_bits(adapt, torch.randn(rows, 38).to(dtype))


@pytest.mark.parametrize("dtype", TYPES)
def test_states(dtype: torch.dtype) -> None:
    """Of rows with one token each."""
    rows, weight = 9, torch.randn(64).to(dtype)
    index = (
        torch.arange(rows + 1).int(),
        torch.arange(rows).int(),
        torch.arange(rows).int(),
        torch.full((rows,), -1).int(),
    )
    batch, conv = StateBatch(*index), ConvParams(torch.randn(4, 64).to(dtype), None, gated=False)
    inputs, states = torch.randn(rows, 3, 64).to(dtype), torch.randn(rows, 4, 24, 16)
    scan = SsmParams(4, 16, 2, 24, -torch.rand(4), torch.randn(4), torch.randn(4))
    steps = torch.randn(rows, 4).to(dtype)
    assert_others_keep_bits(lambda x: causal_conv(x, inputs.clone(), batch, conv), torch.randn(rows, 64).to(dtype))
    assert_others_keep_bits(
        lambda x: ssm_scan(x, steps, 0, states.clone(), batch, scan), torch.randn(rows, scan.columns).to(dtype)
    )
    selective = SelectiveParams(-torch.rand(24, 64), torch.randn(64), torch.randn(64))
    of_channels, both = torch.randn(rows, 1, 24, 64), torch.randn(rows, 48).to(dtype)
    assert_others_keep_bits(
        lambda x: selective_scan(x, x, both, of_channels.clone(), batch, selective), torch.randn(rows, 64).to(dtype)
    )
    delta, of_delta = DeltaParams(4, 16, 2, 48, -torch.rand(4), torch.randn(4)), torch.randn(rows, 4, 48, 16)
    gates = torch.randn(rows, 9).to(dtype)
    assert_others_keep_bits(
        lambda x: delta_scan(x, gates, (5, 1), of_delta.clone(), batch, delta),
        torch.randn(rows, delta.columns).to(dtype),
    )
    for is_first in (False, True):
        norm = GatedNormParams(weight, 1e-5, 2, is_first)
        assert_others_keep_bits(lambda x, norm=norm: gated_norm(x, x, norm), torch.randn(rows, 64).to(dtype))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_routed_experts_exist_and_differ(kind: expert_ops.Scores) -> None:
    params = expert_ops.RouterParams(3, kind, True, 1.0, torch.randn(12), groups=4, top_groups=2, best_of_group=2)
    logits = torch.randn(9, 12)
    clean = expert_ops.route(logits, params)
    for value in HOSTILE:
        logits[4] = value
        experts = expert_ops.route(logits, params).experts
        assert torch.equal(experts[:4], clean.experts[:4]) and torch.equal(experts[5:], clean.experts[5:])
        assert (experts >= 0).all() and (experts < 12).all() and (experts.sort(1).values.diff(dim=1) > 0).all()


@pytest.mark.parametrize("rows", [[(1, 300), (1, 17), (1, 600)], [(40, 300), (1, 64), (70, 130)]])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("int8", [False, True])
def test_attention(int8: bool, dtype: torch.dtype, rows: list[tuple[int, int]]) -> None:
    """Of queries, and of a row's last key and value."""
    batch = ragged_batch(rows, heads=8, kv_heads=2, dtype=dtype)
    params = ops.AttentionParams(0.1)

    def attend(batch: RaggedBatch) -> Tensor:
        return ops.attention(*(batch.in_int8() if int8 else batch).args, params)

    whole = attend(batch)
    for row, (_, context) in enumerate(rows):
        start, end = batch.query_start[row : row + 2].tolist()
        page, cell = divmod(context - 1, batch.k_cache.shape[2])
        others = torch.ones(len(whole), dtype=torch.bool)
        others[start:end] = False
        for value in HOSTILE:
            q, k_cache, v_cache = (each.clone() for each in (batch.q, batch.k_cache, batch.v_cache))
            q[start:end] = value
            for cache in (k_cache, v_cache):
                cache[batch.page_table[row, page], :, cell] = value
            for spoiled in (replace(batch, q=q), replace(batch, k_cache=k_cache), replace(batch, v_cache=v_cache)):
                assert torch.equal(attend(spoiled)[others], whole[others])


@pytest.mark.parametrize("columns", [1, 17, 3000])
@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (1e-20, 1.0), (1.0, 1.0), (1.0, 0.9), (1e30, 0.9)])
def test_draws(columns: int, temperature: float, top_p: float) -> None:
    logits = torch.randn(5, columns)
    values = (temperature, torch.float32), (0, torch.int64), (top_p, torch.float64), (0.0, torch.float32)
    settings = [torch.full((5, 1), value, dtype=dtype) for value, dtype in values]
    noise = torch.rand(5, 96 - (-columns // 2048), dtype=torch.float64) + 1e-9
    params = DrawParams(*settings, torch.rand(5, 1, dtype=torch.float64), noise)
    drawn = sampling_ops.draw_tokens(logits, params)
    for value in HOSTILE:
        logits[2] = value
        found = sampling_ops.draw_tokens(logits, params)
        assert torch.equal(found[[0, 1, 3, 4]], drawn[[0, 1, 3, 4]])
        assert 0 <= found[2] < columns if value in (3e38, 1e-40) else found[2] == -1
