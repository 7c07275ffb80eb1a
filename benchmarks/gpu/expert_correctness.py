"""Products of experts, and adapters on them, on the device against plain torch there, in many shapes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.correctness import TOLERANCE, error_of
from benchmarks.gpu.measure import Line, Machine, launches
from rootgraft.kernels import expert_reference, lora_reference
from rootgraft.kernels.expert_ops import (
    ClampedSwiglu,
    ExpertActivation,
    ExpertWeights,
    RouterParams,
    expert_activation,
    expert_linear,
    route,
    sum_experts,
)
from rootgraft.kernels.lora_ops import Factors, SlotTable, lora_experts
from rootgraft.kernels.ops import PackedLinear
from rootgraft.lora.segments import make_segments

_SIZES, _RANKS = (24, 72), ((3, 2), (0, 20), (0, 0), (1, 0))
Draw = random.Random


def run(machine: Machine) -> Iterator[Line]:
    """Largest errors over all shapes, as a share of what is tolerated."""
    for dtype in [torch.float32] if machine.tiny else [torch.bfloat16, torch.float16]:
        name = str(dtype).removeprefix("torch.")
        yield _line(machine, dtype, f"experts {name}", _product_error, {"_group", "_product"})
        yield _line(machine, dtype, f"routing {name}", _routing_error, {"_route"})
        yield _line(machine, dtype, f"sum of experts {name}", _sum_error, {"_sum_experts", "_expert_activation"})
        yield _line(machine, dtype, f"lora on experts {name}", _lora_error, {"_shrink", "_expand"})


def _line(
    machine: Machine,
    dtype: torch.dtype,
    name: str,
    error: Callable[[Machine, torch.dtype, Draw], float],
    kernels: set[str],
) -> Line:
    draw = Draw(0)
    with launches() as launched:
        errors = [error(machine, dtype, draw) for _ in range(2 if machine.tiny else 60)]
    wrong = sum(each > 1 for each in errors)
    note = f"{wrong} of {len(errors)} shapes are wrong" if wrong else ""
    if missing := kernels - launched:
        return Line("correctness", name, float("inf"), "of tolerance", note=f"never launched: {sorted(missing)}")
    return Line("correctness", name, max(errors), "of tolerance", note=note)


def _picks(machine: Machine, tokens: int, top_k: int, experts: int) -> Tensor:
    return torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int().to(machine.device)


def _product_error(machine: Machine, dtype: torch.dtype, draw: Draw) -> float:
    count, columns, width = draw.randint(2, 9), draw.randint(1, 150), 16 * draw.randint(1, 12)
    tokens, top_k = draw.choice((1, 3, 17, 40, 300)), draw.randint(1, count)
    biased, own = draw.random() < 0.5, draw.random() < 0.5
    linears = []
    for _ in range(count):
        weight = (machine.randn(columns, width, dtype=torch.float32) * width**-0.5).to(dtype)
        bias = machine.randn(columns, dtype=dtype) if biased else None
        linears.append(PackedLinear(width, columns, weight, bias, kernels=None))
    weights = ExpertWeights(tuple(linears))
    x = machine.randn(*((tokens, top_k, width) if own else (tokens, width)), dtype=dtype)
    experts = _picks(machine, tokens, top_k, count)
    wide = ExpertWeights(
        tuple(PackedLinear(width, columns, each.weight.double(), None, kernels=None) for each in linears)
    )
    expected = expert_reference.expert_linear(x.double(), wide, experts)
    if biased:
        expected += torch.stack([each.bias.double() for each in linears if each.bias is not None])[experts.long()]
    return error_of(expert_linear(x, weights, experts), expected) / TOLERANCE[dtype]


def _routing_error(machine: Machine, _dtype: torch.dtype, draw: Draw) -> float:
    """Infinite where a token gets other experts. No two logits of a token are equal, whose order is not torch's."""
    groups, size, tokens = (
        draw.randint(1, 8),
        draw.randint(2, 40),
        draw.choice((1, 3) if machine.tiny else (1, 17, 300)),
    )
    top_groups = draw.randint(1, groups)
    params = RouterParams(
        draw.randint(1, min(10, top_groups * size)),
        draw.choice(("softmax", "sigmoid")),
        draw.random() < 0.5,
        2.5,
        groups=groups,
        top_groups=top_groups,
        best_of_group=draw.randint(1, 2),
    )
    count = groups * size
    logits = torch.stack([torch.randperm(count) * (8 / count) - 4 for _ in range(tokens)]).to(machine.device)
    found, expected = route(logits, params), expert_reference.route(logits, params)
    if not torch.equal(found.experts, expected.experts):
        return float("inf")
    return error_of(found.weights, expected.weights.double()) / TOLERANCE[torch.float32]


def _sum_error(machine: Machine, dtype: torch.dtype, draw: Draw) -> float:
    """Return the errors of the activation before the second product, and of the sum after it."""
    tokens, top_k = draw.choice((1, 3) if machine.tiny else (1, 17, 300)), draw.randint(1, 8)
    width = 16 * draw.randint(1, 100)
    kind: ExpertActivation = draw.choice(("silu", "gelu_tanh", ClampedSwiglu(1.702, 7.0)))
    gate_up = machine.randn(tokens, top_k, 2 * width, dtype=dtype)
    weights = torch.rand(tokens, top_k, device=machine.device)
    shared, gate = machine.randn(tokens, width, dtype=dtype), machine.randn(tokens, 1, dtype=torch.float32)
    active = expert_activation(gate_up, kind, weights)
    total = sum_experts(active, weights, shared, gate)
    pairs = (
        (active, expert_reference.expert_activation(gate_up, kind, weights)),
        (total, expert_reference.sum_experts(active, weights, shared, gate)),
    )
    return max(error_of(ours, theirs.double()) for ours, theirs in pairs) / TOLERANCE[dtype]


def _lora_error(machine: Machine, dtype: torch.dtype, draw: Draw) -> float:
    num_experts, width, slots = draw.randint(1, 9), 48, 3
    table = SlotTable(_SIZES, width, slots * num_experts, dtype, machine.device)
    for place in range(slots * num_experts):
        ranks = _RANKS[place % 4]
        if any(ranks):
            cells = sum(rank * size for rank, size in zip(ranks, _SIZES, strict=True))
            scale = torch.rand(sum(ranks), device=machine.device) / sum(ranks)
            table.put(
                place,
                Factors(machine.randn(sum(ranks), width, dtype=dtype), scale, ranks, machine.randn(cells, dtype=dtype)),
            )
    of_tokens = np.array([draw.randint(-1, slots - 1) for _ in range(draw.choice((1, 5, 30, 200)))] + [0], np.int32)
    segments = make_segments(of_tokens, machine.device)
    assert segments is not None
    top_k = draw.randint(1, num_experts)
    experts = _picks(machine, len(of_tokens), top_k, num_experts)
    own = draw.random() < 0.5
    x = machine.randn(*((*experts.shape, width) if own else (len(of_tokens), width)), dtype=dtype)
    y = machine.randn(*experts.shape, sum(_SIZES), dtype=dtype)
    expected = y.clone()
    lora_experts(y, x, experts, table, num_experts, segments)
    lora_reference.expert_shrink_expand(expected, x, experts, table, num_experts, segments)
    return error_of(y, expected.double()) / (2 * TOLERANCE[dtype])
