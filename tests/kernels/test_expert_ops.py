"""The ops of a mixture of experts: native kernels against plain torch, and that against products expert by expert."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rootgraft.kernels import expert_reference, ops, pass_graphs, quantised_weights
from rootgraft.kernels.expert_ops import (
    ClampedSwiglu,
    ExpertWeights,
    JoinedExperts,
    RouterParams,
    expert_activation,
    expert_linear,
    route,
    sum_experts,
)

pytestmark = pytest.mark.usefixtures("kernels")

TYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
CLAMP, BOUNDED = ClampedSwiglu(1.702, 0.8), ClampedSwiglu(1.0, 0.8, 0.0, 1.3)
ROUTERS = {
    "softmax": RouterParams(3),
    "renormalised": RouterParams(4, renormalises=True),
    "sigmoid": RouterParams(2, "sigmoid", renormalises=True, scale=2.5, correction=torch.linspace(-1, 1, 24)),
    "groups": RouterParams(
        5, "sigmoid", True, 1.5, torch.linspace(0.5, -0.5, 24), groups=6, top_groups=2, best_of_group=2
    ),
    "best of groups": RouterParams(3, groups=4, top_groups=1),
    "factors": RouterParams(3, renormalises=True, factors=torch.linspace(0.2, 3, 24)),
    "all": RouterParams(24, renormalises=True),
    "sigmoid alone": RouterParams(2, "sigmoid"),
}


def weights_of(
    pack: Callable[[Tensor, Tensor | None], ops.Linear], shape: tuple[int, ...], dtype: torch.dtype, *, biased: bool
) -> ExpertWeights:
    g = torch.Generator().manual_seed(5)
    packed = []
    for _ in range(shape[0]):
        weight = torch.randn(shape[1:], generator=g).mul_(shape[2] ** -0.5).to(dtype)
        packed.append(pack(weight, torch.randn(shape[1], generator=g).to(dtype) if biased else None))
    return ExpertWeights(tuple(packed))


def plain(weight: Tensor, bias: Tensor | None) -> ops.Linear:
    return ops.PackedLinear(weight.shape[1], weight.shape[0], weight.contiguous(), bias, kernels=None)


def picks(tokens: int, top_k: int, experts: int) -> Tensor:
    return (
        torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int()
        if tokens
        else torch.empty(0, top_k, dtype=torch.int32)
    )


@pytest.mark.parametrize("params", ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize("tokens", [0, 1, 200])
def test_routes_are_those_of_plain_torch(params: RouterParams, tokens: int) -> None:
    logits = torch.randn(tokens, 24) * 3
    ours, theirs = route(logits, params), expert_reference.route(logits, params)
    order = [found.experts.argsort(dim=1) for found in (ours, theirs)]
    assert ours.experts.dtype is torch.int32
    assert torch.equal(ours.experts.gather(1, order[0]), theirs.experts.gather(1, order[1]))
    torch.testing.assert_close(ours.weights.gather(1, order[0]), theirs.weights.gather(1, order[1]))


def test_a_route_of_what_is_no_number_names_experts_that_exist() -> None:
    logits = torch.full((3, 24), float("nan"))
    logits[1] = float("-inf")
    for params in ROUTERS.values():
        experts = route(logits, params).experts
        assert ((experts >= 0) & (experts < 24)).all()
        assert all(len(set(row)) == params.top_k for row in experts.tolist())


def test_logits_decide_between_sigmoids_that_are_1() -> None:
    logits = torch.linspace(20, 43, 24)[None].flip(1).roll(5, 1).contiguous()
    assert (logits.sigmoid() == 1).all()
    assert sorted(route(logits, ROUTERS["sigmoid alone"]).experts[0].tolist()) == [5, 6]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 3, 90])
def test_products_are_those_of_each_expert(dtype: torch.dtype, biased: bool, tokens: int) -> None:
    shape = (6, 75, 50)
    packed = weights_of(ops.pack_linear, shape, dtype, biased=biased)
    oracle = weights_of(plain, shape, dtype, biased=biased)
    experts = picks(tokens, 3, 5)  # the sixth has no tokens
    for x in (torch.randn(tokens, 50).to(dtype), torch.randn(tokens, 3, 50).to(dtype)):
        expected = expert_reference.expert_linear(x.float(), _wide(oracle), experts)
        y = expert_linear(x, packed, experts)
        assert y.dtype is dtype
        torch.testing.assert_close(y.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def _wide(weights: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(
        tuple(plain(each.weight.float(), None if each.bias is None else each.bias.float()) for each in weights.experts)
    )


def blocks(
    weight: Tensor, bias: Tensor | None, *, kind: quantised_weights.BlockType, widened: bool = False
) -> ops.Linear:
    size = quantised_weights.BLOCK_SIZES[kind][1]
    raw = torch.randint(0, 256, (weight.shape[0], weight.shape[1] // 32, size), dtype=torch.uint8)
    raw[..., :2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    if kind == "Q4_1":
        raw[..., 2:4] = torch.tensor([-0.05], dtype=torch.float16).view(torch.uint8)
    return quantised_weights.pack_blocks(raw.flatten(1), kind, bias, widened=widened)


QUANTISED = {
    "widened": functools.partial(quantised_weights.pack_channels, dynamic=False),
    "channels": functools.partial(quantised_weights.pack_channels, dynamic=True),
    **{kind: functools.partial(blocks, kind=kind) for kind in ("Q4_0", "Q4_1", "Q8_0")},
    "widened blocks": functools.partial(blocks, kind="Q4_1", widened=True),
}


@pytest.mark.parametrize("pack", QUANTISED.values(), ids=QUANTISED)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens", [1, 40])
def test_quantised_products_have_the_bits_of_the_plain_op(
    pack: Callable[..., ops.Linear], dtype: torch.dtype, tokens: int
) -> None:
    packed = weights_of(pack, (4, 300, 64), dtype, biased=True)
    x, experts = torch.randn(tokens, 64).to(dtype), picks(tokens, 2, 4)
    y = expert_linear(x, packed, experts)
    for token, row in enumerate(experts.tolist()):
        for pick, expert in enumerate(row):
            assert torch.equal(y[token, pick], ops.linear(x[token : token + 1], packed.experts[expert])[0])


@pytest.mark.parametrize("dtype", TYPES)
def test_a_token_has_its_bits_in_any_batch_and_on_any_threads(dtype: torch.dtype) -> None:
    packed = weights_of(ops.pack_linear, (8, 640, 96), dtype, biased=False)
    x, experts = torch.randn(70, 96).to(dtype), picks(70, 2, 8)
    together = expert_linear(x, packed, experts)
    for token in range(0, 70, 7):
        assert torch.equal(expert_linear(x[token : token + 1], packed, experts[token : token + 1])[0], together[token])
    ops.set_threads(2)
    assert torch.equal(expert_linear(x, packed, experts), together)
    assert torch.equal(expert_linear(x[:1], packed, experts[:1]), together[:1])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", CLAMP, BOUNDED], ids=["silu", "gelu", "clamped", "bounded"])
@pytest.mark.parametrize("width", [48, 13])
def test_activations_are_those_of_plain_torch(dtype: torch.dtype, kind: object, width: int) -> None:
    gate_up = (torch.randn(5, 3, 2 * width) * 2).to(dtype)
    for weights in None, torch.rand(5, 3):
        expected = expert_reference.expert_activation(gate_up, kind, weights)
        found = expert_activation(gate_up, kind, weights)
        torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=1e-5)
    of_one = gate_up[:, 0].contiguous()
    assert torch.equal(expert_activation(of_one, kind), expert_activation(of_one[:, None], kind)[:, 0])


def test_weights_of_an_activation_are_those_of_the_inputs() -> None:
    """By linearity: the product of weighted inputs is the weighted product."""
    x, matrix, weights = torch.randn(4, 20), torch.randn(32, 20), torch.rand(4, 3)
    inputs = x[:, None] * weights[..., None]
    expected = expert_reference.expert_activation(inputs @ matrix.T, "silu")
    products = (x @ matrix.T)[:, None].expand(-1, 3, -1).contiguous()
    torch.testing.assert_close(expert_activation(products, "silu", weights), expected)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [64, 35])
@pytest.mark.parametrize("has_gate", [None, False, True], ids=["alone", "shared", "gated"])
def test_sums_are_those_of_plain_torch(dtype: torch.dtype, width: int, has_gate: bool | None) -> None:
    y, weights = torch.randn(9, 4, width).to(dtype), torch.rand(9, 4)
    shared = None if has_gate is None else torch.randn(9, width).to(dtype)
    gate = torch.randn(9, 1) if has_gate else None
    for factors in weights, None:
        expected = expert_reference.sum_experts(y, factors, shared, gate)
        torch.testing.assert_close(sum_experts(y, factors, shared, gate), expected, rtol=TOLERANCE[dtype], atol=1e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens", [1, 40])
def test_gates_in_another_form_than_their_factors_are_the_two_products_side_by_side(
    dtype: torch.dtype, tokens: int
) -> None:
    parts = [
        weights_of(functools.partial(blocks, kind=kind, widened=True), (4, size, 64), dtype, biased=True)
        for kind, size in (("Q4_0", 48), ("Q8_0", 35))
    ]
    x, experts = torch.randn(tokens, 64).to(dtype), picks(tokens, 3, 4)
    y = expert_linear(x, JoinedExperts.of(*parts, picks=3), experts)
    assert torch.equal(y, torch.cat([expert_linear(x, part, experts) for part in parts], dim=-1))


@pytest.mark.parametrize("forms", [1, 2])
def test_a_recorded_pass_routes_anew(forms: int) -> None:
    most, params = 40, RouterParams(2, renormalises=True)
    router = ops.pack_linear(torch.randn(6, 32))
    of_form = [weights_of(ops.pack_linear, (6, 64 // forms, 32), torch.float32, biased=False) for _ in range(forms)]
    gate_up = of_form[0] if forms == 1 else JoinedExperts.of(*of_form, picks=params.top_k)
    down = weights_of(ops.pack_linear, (6, 32, 32), torch.float32, biased=False)

    def mixture(x: Tensor) -> Tensor:
        routing = route(ops.linear(x, router, torch.float32), params)
        y = expert_activation(expert_linear(x, gate_up, routing.experts), "silu")
        return sum_experts(expert_linear(y, down, routing.experts), routing.weights, x)

    own = torch.randn(most, 32)
    hidden, tape = pass_graphs.record(
        lambda: mixture(own[:5]), pass_graphs.Buffers(most)
    )  # the slice is a torch op: not recordable
    assert tape is None
    x = own[:5]
    hidden, tape = pass_graphs.record(lambda: mixture(x), pass_graphs.Buffers(most))
    assert tape is not None
    hidden.resize_(most, 32)
    for tokens in (5, 1, most, 0, 17):
        own[:tokens] = torch.randn(tokens, 32)
        expected = mixture(own[:tokens].clone())
        tape.replay(tokens, 1)
        assert torch.equal(hidden[:tokens], expected)


def test_what_does_not_fit_is_refused() -> None:
    packed = weights_of(ops.pack_linear, (3, 8, 16), torch.float32, biased=False)
    for wrong in (3, -1):
        with pytest.raises(IndexError, match=r"an expert is not in 0 \.\. 2"):
            expert_linear(torch.randn(1, 16), packed, torch.tensor([[wrong]], dtype=torch.int32))
    for x in (torch.randn(1, 15), torch.randn(2, 16), torch.randn(1, 3, 16), torch.randn(1, 16).bfloat16()):
        with pytest.raises(ValueError, match=r"the experts take \[1, 16\] or \[1, 2, 16\]"):
            expert_linear(x, packed, torch.zeros(1, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match="of one shape and format"):
        ExpertWeights((ops.pack_linear(torch.randn(4, 8)), ops.pack_linear(torch.randn(4, 6))))
    with pytest.raises(ValueError, match="at least one"):
        ExpertWeights(())
