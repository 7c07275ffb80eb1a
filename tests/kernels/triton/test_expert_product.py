"""The GPU's product of tokens with their experts' weights, interpreted, against plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import triton_interpreter
from torch import Tensor

from rootgraft.kernels import expert_reference
from rootgraft.kernels.expert_ops import (
    ExpertWeights,
    expert_linear,
)
from rootgraft.kernels.ops import PackedLinear
from rootgraft.kernels.triton import expert_product as gpu

pytestmark = pytest.mark.usefixtures("interpreted")

TYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def weights_of(count: int, columns: int, width: int, dtype: torch.dtype, *, biased: bool) -> ExpertWeights:
    g = torch.Generator().manual_seed(3)

    def plain() -> PackedLinear:
        weight = torch.randn(columns, width, generator=g).mul_(width**-0.5).to(dtype)
        bias = torch.randn(columns, generator=g).to(dtype) if biased else None
        triton_interpreter.allow(weight, *(() if bias is None else (bias,)))
        return PackedLinear(width, columns, weight, bias, kernels=None)

    return ExpertWeights(tuple(plain() for _ in range(count)))


def picks(tokens: int, top_k: int, experts: int) -> Tensor:
    rows = [torch.randperm(experts)[:top_k] for _ in range(tokens)]
    return torch.stack(rows).int() if rows else torch.empty(0, top_k, dtype=torch.int32)


def close(actual: Tensor, expected: Tensor) -> bool:
    tolerance = TOLERANCE[actual.dtype]
    return torch.allclose(actual.float(), expected.float(), rtol=tolerance, atol=tolerance * 3)


@settings(max_examples=15)
@given(
    count=st.integers(2, 9),
    columns=st.integers(1, 150),
    width=st.integers(1, 12).map(lambda n: 16 * n),
    tokens=st.integers(0, 40),
    dtype=st.sampled_from(TYPES),
    biased=st.booleans(),
    own=st.booleans(),
    data=st.data(),
)
def test_against_plain_torch(count, columns, width, tokens, dtype, biased, own, data):
    top_k = data.draw(st.integers(1, count), label="top_k")
    weights = weights_of(count, columns, width, dtype, biased=biased)
    x = torch.randn(*((tokens, top_k, width) if own else (tokens, width))).to(dtype)
    experts = picks(tokens, top_k, count)
    assert gpu.takes(x, weights, experts)
    assert close(expert_linear(x, weights, experts), expert_reference.expert_linear(x, weights, experts))


@pytest.mark.parametrize("dtype", TYPES)
def test_many_tokens_take_turns(dtype):
    """More tiles of rows than programs for the same columns, and one expert that has most of the tokens."""
    weights = weights_of(3, 70, 64, dtype, biased=False)
    x = torch.randn(1100, 64).to(dtype)
    experts = torch.where(torch.rand(1100, 1) < 0.9, 1, 2).int()
    assert close(expert_linear(x, weights, experts), expert_reference.expert_linear(x, weights, experts))


def test_weights_of_experts_without_tokens_are_not_read():
    weights = weights_of(4, 32, 32, torch.bfloat16, biased=True)
    weights.table[[0, 3]] = 0  # the interpreter refuses to read there
    x, experts = torch.randn(5, 32).bfloat16(), torch.tensor([[1, 2]] * 5, dtype=torch.int32)
    assert close(expert_linear(x, weights, experts), expert_reference.expert_linear(x, weights, experts))


@settings(max_examples=25)
@given(
    tokens=st.integers(1, 40), padding=st.integers(0, 30), count=st.integers(2, 9), top_k=st.integers(1, 3),
    own=st.booleans(),
)  # fmt: skip
def test_the_experts_of_padding_are_not_read(tokens: int, padding: int, count: int, top_k: int, own: bool) -> None:
    """A captured step of more tokens than it has: the first have their results, the others go to no expert."""
    top_k = min(top_k, count)
    weights = weights_of(count, 24, 32, torch.float32, biased=True)
    x = torch.randn(tokens + padding, *((top_k,) if own else ()), 32)
    experts = picks(tokens + padding, top_k, count)
    step = torch.tensor([0, tokens], dtype=torch.int32)
    order, starts = torch.full((experts.numel(),), -1, dtype=torch.int32), torch.empty(count + 1, dtype=torch.int32)
    gpu._group_launch(experts, order, starts, step[-1:]).run()
    assert starts[-1] == tokens * top_k and set(order[: tokens * top_k].tolist()) == set(range(tokens * top_k))
    assert (order[tokens * top_k :] == -1).all()
    actual = expert_linear(x, weights, experts, step[-1:])
    assert close(actual[:tokens], expert_linear(x[:tokens].contiguous(), weights, experts[:tokens].contiguous()))


@settings(max_examples=15)
@given(tokens=st.integers(1, 60), padding=st.integers(0, 30), count=st.integers(2, 9), top_k=st.integers(1, 3))
def test_picks_are_grouped_by_blocks_as_by_one_program(tokens: int, padding: int, count: int, top_k: int) -> None:
    top_k = min(top_k, count)
    experts = picks(tokens + padding, top_k, count)
    step = torch.tensor([0, tokens], dtype=torch.int32) if padding else None
    limit = None if step is None else step[-1:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "SCANNED_PICKS", 16)
        whole = gpu._grouped(experts, count, limit)
        patch.setattr(gpu, "MOST_SCANS", 0)
        blocks = gpu._grouped(experts, count, limit)
    assert (whole[1] == blocks[1]).all()
    end = tokens * top_k
    assert (whole[0][:end] == blocks[0][:end]).all()
