"""The GPU's routing of tokens to experts, activation of experts and sum over them, interpreted, against plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rootgraft.kernels import expert_ops, expert_reference
from rootgraft.kernels.expert_ops import ClampedSwiglu, RouterParams
from rootgraft.kernels.triton import expert_routing as gpu

pytestmark = pytest.mark.usefixtures("interpreted")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def close(actual: Tensor, expected: Tensor) -> bool:
    tolerance = TOLERANCE[actual.dtype]
    return torch.allclose(actual.float(), expected.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


def distinct(tokens: int, count: int) -> Tensor:
    """Logits of which no two of a token are equal, nor nearly: the order of equal ones is not torch's."""
    return torch.stack([torch.randperm(count).float() * (8 / count) - 4 for _ in range(tokens)])


@settings(max_examples=40)
@given(
    tokens=st.integers(1, 3), groups=st.integers(1, 5), of_group=st.integers(2, 9),
    scores=st.sampled_from(["softmax", "sigmoid"]),
    renormalises=st.booleans(), corrected=st.booleans(), factored=st.booleans(), data=st.data(),
)  # fmt: skip
def test_a_token_gets_the_experts_of_plain_torch(
    tokens: int, groups: int, of_group: int, scores: str, renormalises: bool, corrected: bool, factored: bool,
    data: st.DataObject,
) -> None:  # fmt: skip
    count, top_groups = groups * of_group, data.draw(st.integers(1, groups), label="top_groups")
    top_k = data.draw(st.integers(1, min(8, top_groups * of_group)), label="top_k")
    best = data.draw(st.integers(1, min(2, of_group)), label="best_of_group")
    correction = torch.randn(count) if corrected else None
    factors = torch.randn(count) if factored else None
    params = RouterParams(top_k, scores, renormalises, 1.5, correction, factors, groups, top_groups, best)  # type: ignore[arg-type]
    logits = distinct(tokens, count)
    assert gpu.takes_router(logits, params)
    actual, expected = expert_ops.route(logits, params), expert_reference.route(logits, params)
    assert actual.experts.dtype is torch.int32
    assert (actual.experts == expected.experts).all()
    assert close(actual.weights, expected.weights)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_equal_and_no_numbers_give_distinct_experts(scores: str) -> None:
    """The first ones of equal scores; what is no number is chosen last, and never an expert that there is not."""
    logits = torch.zeros(3, 6)
    logits[1, 2] = torch.nan
    logits[2] = torch.nan
    params = RouterParams(4, scores)  # type: ignore[arg-type]
    experts = expert_ops.route(logits, params).experts
    assert experts[0].tolist() == [0, 1, 2, 3]
    for row in experts:
        assert len(set(row.tolist())) == 4 and all(0 <= each < 6 for each in row)
    if scores == "sigmoid":
        assert experts[1].tolist() == [0, 1, 3, 4]


def test_more_than_the_kernel_holds_is_left_to_torch() -> None:
    assert not gpu.takes_router(torch.zeros(1, 1025), RouterParams(2))
    assert not gpu.takes_router(torch.zeros(1, 64), RouterParams(33))
    assert not gpu.takes_router(torch.zeros(1, 64, dtype=torch.bfloat16), RouterParams(2))


@settings(max_examples=15)
@given(
    tokens=st.integers(0, 3), picks=st.integers(1, 4), width=st.integers(1, 70).map(lambda n: 16 * n),
    dtype=st.sampled_from(list(TOLERANCE)), weighted=st.booleans(), beside=st.sampled_from(["none", "shared", "gated"]),
)  # fmt: skip
def test_the_sum_is_that_of_plain_torch(
    tokens: int, picks: int, width: int, dtype: torch.dtype, weighted: bool, beside: str
) -> None:
    y = torch.randn(tokens, picks, width).to(dtype)
    weights = torch.rand(tokens, picks) if weighted else None
    shared = None if beside == "none" else torch.randn(tokens, width).to(dtype)
    gate = torch.randn(tokens, 1) if beside == "gated" else None
    assert gpu.takes_sum(y, weights, shared, gate)
    for own, factors in ((y, weights), (y[:, 0].contiguous(), None)):
        actual = expert_ops.sum_experts(own, factors, shared, gate)
        assert close(actual, expert_reference.sum_experts(own, factors, shared, gate))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", ClampedSwiglu(1.702, 2.0), ClampedSwiglu(1.0, 0.8, 0.0, 1.3)])
def test_the_activation_is_that_of_plain_torch(kind: str, weighted: bool, dtype: torch.dtype) -> None:
    gate_up = (3 * torch.randn(3, 2, 96)).to(dtype)
    weights = torch.rand(3, 2) if weighted else None
    assert gpu.takes_activation(gate_up, weights)
    actual = expert_ops.expert_activation(gate_up, kind, weights)  # type: ignore[arg-type]
    assert close(actual, expert_reference.expert_activation(gate_up, kind, weights))  # type: ignore[arg-type]
    of_one = gate_up[:, 0].contiguous()
    assert close(expert_ops.expert_activation(of_one, kind), expert_reference.expert_activation(of_one, kind))  # type: ignore[arg-type]
