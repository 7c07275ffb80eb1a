"""Kernels for ``--batch-invariant``, interpreted: a token's bits do not depend on what else is computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.kernels import triton_interpreter
from support.kernels.ragged_batches import RaggedBatch, assert_close, ragged_batch

from benchmarks.gpu.measure import launches
from rootgraft.kernels import ops
from rootgraft.kernels.lora_ops import Factors, SlotTable, lora_shrink_expand, pack_expansion
from rootgraft.kernels.ops import AttentionParams
from rootgraft.kernels.triton import invariant_linear
from rootgraft.lora.segments import make_segments

CPU = torch.device("cpu")


def in_order(a: NDArray[Any], b: NDArray[Any], dtype: Any = None) -> NDArray[Any]:
    """``a @ b`` whose elements are summed up alike, as on tensor cores: BLAS has other sums for rows at the edge."""
    return (a[:, None, :].astype(dtype) * b.T[None, :, :].astype(dtype)).sum(-1)


@pytest.fixture(autouse=True)
def invariant(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(np, "matmul", in_order)  # of the interpreter's dot
    ops.use_invariant(True)
    yield
    ops.use_invariant(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_a_product_of_one_row_is_that_of_many(dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(70, 96, generator=g).to(dtype), torch.randn(80, 96, generator=g).to(dtype)
    bias = torch.randn(80, generator=g).to(dtype)
    layer = ops.PackedLinear(96, 80, weight, bias, kernels=None)
    assert invariant_linear.takes(x, weight)
    with launches() as launched:
        together = ops.linear(x, layer, out_dtype)
    assert launched == {"_invariant_linear"}
    expected = torch.nn.functional.linear(x.float(), weight.float(), bias.float()).to(together.dtype)
    torch.testing.assert_close(together, expected, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-4)
    for row in (0, 63, 64, 69):
        assert torch.equal(ops.linear(x[row : row + 1].clone(), layer, out_dtype)[0], together[row])


@pytest.mark.parametrize("options", [{}, {"window": 50}, {"chunk": 48}, {"soft_cap": 3.0}])
def test_attention_of_a_token_depends_on_its_row_alone(options: dict[str, Any]) -> None:
    """In a prompt whole or in chunks, one by one, and beside other rows."""
    batch = ragged_batch([(9, 150), (1, 300), (3, 3)], heads=4, kv_heads=2, dtype=torch.float32)
    params = AttentionParams(scale=0.3, **options)

    def attend(part: RaggedBatch) -> torch.Tensor:
        with launches() as launched:
            found = ops.attention(*part.args, params)
        assert launched == {"extend"}
        return found

    together = attend(batch)
    assert_close(together, batch.expected(scale=0.3, **options))
    for row, first, end in ((0, 0, 4), (0, 4, 9), (0, 8, 9), (1, 0, 1), (2, 1, 3)):
        start = int(batch.query_start[row])
        assert torch.equal(attend(batch.pick(row, first, end)), together[start + first : start + end])


def test_no_prefix_is_read_together() -> None:
    table, ones = np.zeros((64, 70), np.int32), np.ones(64, np.int32)
    assert ops.find_shared_prefixes(table, ones, ones * 1100, 16, CPU) is None
    assert not ops.shares_prefixes(64, CPU)
    ops.use_invariant(False)
    assert ops.find_shared_prefixes(table, ones, ones * 1100, 16, CPU) is not None
    assert ops.shares_prefixes(64, CPU)


def test_adapters_add_the_same_to_a_token() -> None:
    g = torch.Generator().manual_seed(2)
    table = SlotTable((64,), 2048, 2, torch.float32)
    for slot in range(2):
        a, b = torch.randn(8, 2048, generator=g) / 45, torch.randn(64, 8, generator=g)
        factors = Factors(a, torch.ones(8), (8,), pack_expansion(b))
        triton_interpreter.allow(*factors.tensors())
        table.put(slot, factors)
    x, y = torch.randn(140, 2048, generator=g), torch.randn(140, 64, generator=g)
    slots = np.array([0] * 130 + [1, -1] * 5, np.int32)

    def added(rows: slice) -> torch.Tensor:
        own, segments = y[rows].clone(), make_segments(slots[rows], CPU)
        assert segments is not None
        lora_shrink_expand(own, x[rows].clone(), table, segments)
        return own

    together = added(slice(None))
    assert not torch.equal(together[:131], y[:131])
    for rows in (slice(0, 1), slice(129, 131), slice(17, 40)):
        assert torch.equal(added(rows), together[rows])
