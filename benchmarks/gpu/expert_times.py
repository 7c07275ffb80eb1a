"""Times of what a mixture of experts does around its products, in the shape of Qwen3-30B-A3B, against their floors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.measure import Ceilings, Line, Machine, seconds
from rootgraft.kernels import expert_ops
from rootgraft.kernels.expert_ops import ClampedSwiglu, ExpertWeights, RouterParams
from rootgraft.kernels.ops import PackedLinear

EXPERTS, TOP_K, HIDDEN, INNER = 128, 8, 2048, 768
_TINY = 8, 2, 64, 32


def run(machine: Machine, ceilings: Ceilings) -> Iterator[Line]:
    """Microseconds of each op of a layer; the floor is to read its largest tensor once, the weights of its experts."""
    experts, top_k, hidden, inner = _TINY if machine.tiny else (EXPERTS, TOP_K, HIDDEN, INNER)
    weights = _weights(machine, experts, 2 * inner, hidden)
    for tokens in (3,) if machine.tiny else (1, 64, 2048, 8192):
        for name, (call, num_bytes) in _calls(machine, weights, tokens, top_k).items():
            floor = ceilings.seconds(read=num_bytes)
            yield Line("experts", f"{name}, {tokens} tokens", seconds(machine, [call]) * 1e6, "us", floor * 1e6)


def _calls(
    machine: Machine, weights: ExpertWeights, tokens: int, top_k: int
) -> dict[str, tuple[Callable[[], object], int]]:
    """Return the ops of a layer, and the bytes that each has to read."""
    experts, hidden, columns = len(weights), weights.in_features, weights.out_features
    softmax = RouterParams(top_k, renormalises=True)
    grouped = RouterParams(top_k, "sigmoid", renormalises=True, groups=4, top_groups=2, best_of_group=2)
    logits = machine.randn(tokens, experts, dtype=torch.float32)
    routing = expert_ops.route(logits, softmax)
    x, y = machine.randn(tokens, hidden), machine.randn(tokens, top_k, hidden)
    gate_up = machine.randn(tokens, top_k, columns)
    read = min(experts, tokens * top_k) * columns * hidden * x.element_size()
    clamped = ClampedSwiglu(1.702, 7.0)
    return {
        "route, softmax": (lambda: expert_ops.route(logits, softmax), logits.nbytes),
        "route, of the best groups": (lambda: expert_ops.route(logits, grouped), logits.nbytes),
        "product": (lambda: expert_ops.expert_linear(x, weights, routing.experts), read),
        "activation, silu": (lambda: expert_ops.expert_activation(gate_up, "silu"), gate_up.nbytes),
        "activation, clamped": (lambda: expert_ops.expert_activation(gate_up, clamped), gate_up.nbytes),
        "sum": (lambda: expert_ops.sum_experts(y, routing.weights), y.nbytes),
    }


def _weights(machine: Machine, count: int, columns: int, width: int) -> ExpertWeights:
    def plain() -> PackedLinear:
        return PackedLinear(width, columns, machine.randn(columns, width), None, kernels=None)

    return ExpertWeights(tuple(plain() for _ in range(count)))
