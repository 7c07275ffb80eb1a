"""Ops of a mixture of experts, on native kernels, Triton kernels or plain torch.

For each of T tokens with hidden size H, a router chooses k of E experts. The result of the layer is the weighted sum of
the experts' results:

    routing = route(logits, params)                             [T, E] -> experts and weights [T, k]
    y       = expert_linear(x, gate_up, routing.experts)        [T, H] -> [T, k, 2 * I]
    y       = expert_activation(y, kind)                               -> [T, k, I]
    y       = expert_linear(y, down, routing.experts)                  -> [T, k, H]
    out     = sum_experts(y, routing.weights, shared, gate)            -> [T, H]

or, if the weights apply to the experts' inputs (Llama 4), ``expert_activation(y, kind, routing.weights)`` and a plain
sum.

``expert_linear`` groups tokens by expert, so that an expert's weight is read once for all of its tokens, and is not
read if it has none. On the native path a token's bits depend neither on other tokens nor on threads. On a CUDA device
no call reads a value back.
"""

from __future__ import annotations

from torch import Tensor

from . import expert_reference, ops
from .backend import native_for, on_triton, packing_kernels
from .column_ops import take_columns
from .layouts.expert_arguments import (
    AnyExpertWeights,
    ClampedSwiglu,
    ExpertActivation,
    ExpertWeights,
    JoinedExperts,
    RouterParams,
    Routing,
    Scores,
    expert_parts,
    takes_together,
)

__all__ = [
    "AnyExpertWeights",
    "ClampedSwiglu",
    "ExpertActivation",
    "ExpertWeights",
    "JoinedExperts",
    "RouterParams",
    "Routing",
    "Scores",
    "expert_activation",
    "expert_linear",
    "expert_parts",
    "route",
    "sum_experts",
    "takes_together",
]


def route(logits: Tensor, params: RouterParams) -> Routing:
    """Choose the experts of each token, and their weights: [T, E] fp32, contiguous.

    Of equal scores the kernels take the first expert. For NaN logits the chosen experts are arbitrary but valid.
    """
    if on_triton(logits.device):
        from .triton import expert_routing as gpu

        if gpu.takes_router(logits, params):
            return gpu.route(logits, params)
    kernels = native_for(logits)
    return expert_reference.route(logits, params) if kernels is None else kernels.experts.route(logits, params)


def expert_linear(x: Tensor, weights: AnyExpertWeights, experts: Tensor, num_tokens: Tensor | None = None) -> Tensor:
    """``x @ weight[expert].T + bias[expert]`` for each of a token's experts, in the weights' type; sums are fp32.

    Args:
        x: [T, K], the same for all experts of a token, or [T, k, K].
        weights: weights of the experts.
        experts: [T, k] int32.
        num_tokens: [1] int32 on a CUDA device, the number of tokens of the step. Further tokens pad a captured step:
            their results are undefined, and the weights of their experts are not read. None if all tokens count.

    Returns:
        [T, k, N] in the type of x.

    Raises:
        IndexError: an expert does not exist (native kernels).
        ValueError: x does not fit.
    """
    if isinstance(weights, JoinedExperts):
        both = (expert_linear(x, part, experts, num_tokens) for part in expert_parts(weights))
        return take_columns(weights.columns, *both)
    if on_triton(x.device):
        from .triton import expert_product as gpu

        if gpu.takes(x, weights, experts):
            return gpu.expert_linear(x, weights, experts, num_tokens)
    if not isinstance(weights.first, ops.GroupedLinear) and weights.first.kernels is not None:
        return packing_kernels().experts.linear(x, weights, experts)
    return expert_reference.expert_linear(x, weights, experts)


def expert_activation(gate_up: Tensor, kind: ExpertActivation, weights: Tensor | None = None) -> Tensor:
    """``act(first half) * second half``, or ``ClampedSwiglu``, in fp32: [T, k, 2 * I] -> [T, k, I].

    Args:
        gate_up: [T, k, 2 * I]; or [T, 2 * I] of an MLP that all tokens pass, whose result is [T, I].
        weights: [T, k] fp32, factors of ``gate_up``, or None. If the product before has no bias, this equals scaling
            the product's input.
    """
    if on_triton(gate_up.device):
        from .triton import expert_routing as gpu

        if gpu.takes_activation(gate_up, weights):
            return gpu.expert_activation(gate_up, kind, weights)
    kernels = native_for(gate_up)
    if kernels is not None:
        return kernels.experts.activation(gate_up, kind, weights)
    return expert_reference.expert_activation(gate_up, kind, weights)


def sum_experts(y: Tensor, weights: Tensor | None, shared: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
    """``sum of weight * y + sigmoid(gate) * shared`` in fp32, rounded once.

    Args:
        y: [T, k, H]; or [T, H] with one result for each token.
        weights: [T, k] fp32; None for 1.
        shared: [T, H] of the type of y, results of the expert that all tokens use, or None.
        gate: [T, 1] fp32, logits of the shared expert's weight; None for a weight of 1.

    Returns:
        [T, H] in the type of y.
    """
    if on_triton(y.device):
        from .triton import expert_routing as gpu

        if gpu.takes_sum(y, weights, shared, gate):
            return gpu.sum_experts(y, weights, shared, gate)
    kernels = native_for(y) if shared is None else native_for(y, shared)
    if kernels is not None:
        return kernels.experts.sum(y, weights, shared, gate)
    return expert_reference.sum_experts(y, weights, shared, gate)
