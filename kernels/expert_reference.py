"""The ops of ``kernels.expert_ops`` in plain torch: the tests' oracle, and the path of devices without kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .grouped_weights import GroupedLinear, grouped_linear
from .layouts.expert_arguments import ClampedSwiglu, ExpertActivation, ExpertWeights, RouterParams, Routing
from .reference import activate


def route(logits: Tensor, params: RouterParams) -> Routing:
    """[T, E] fp32 -> experts and weights [T, k]."""
    scores = logits.sigmoid() if params.scores == "sigmoid" else logits.softmax(-1)
    choice = scores if params.correction is None else scores + params.correction
    if params.chooses_by_logits:
        choice = logits
    if params.top_groups < params.groups:
        groups = choice.unflatten(1, (params.groups, -1))
        best = groups.topk(params.best_of_group, dim=-1).values.sum(-1).topk(params.top_groups, dim=-1).indices
        allowed = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, True)
        choice = groups.masked_fill(~allowed[..., None], float("-inf")).flatten(1)
    experts = choice.topk(params.top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if params.renormalises:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    if params.factors is not None:
        weights = weights * params.factors[experts]
    return Routing(experts.int(), weights * params.scale)


def expert_linear(x: Tensor, weights: ExpertWeights, experts: Tensor) -> Tensor:
    """[T, K] or [T, k, K], weights [E, N, K], [T, k] -> [T, k, N]: a product for each expert with tokens."""
    own = x if x.dim() == 3 else x[:, None].expand(-1, experts.shape[1], -1)
    out = x.new_empty(*experts.shape, weights.out_features)
    for expert in experts.unique().tolist():
        linear = weights.experts[expert]
        token, pick = torch.where(experts == expert)
        if isinstance(linear, GroupedLinear):
            out[token, pick] = grouped_linear(own[token, pick], linear, x.dtype)
        else:
            out[token, pick] = functional.linear(own[token, pick], linear.weight, linear.bias)
    return out


def expert_activation(gate_up: Tensor, kind: ExpertActivation, weights: Tensor | None = None) -> Tensor:
    """[T, k, 2 * I], [T, k] -> [T, k, I], or [T, 2 * I] -> [T, I]."""
    wide = gate_up.float() if weights is None else gate_up.float() * weights[..., None]
    gate, up = wide.chunk(2, dim=-1)
    if isinstance(kind, ClampedSwiglu):
        alpha, most, limit, offset = kind.numbers
        gate, up = gate.clamp(max=most), up.clamp(-limit, limit)
        return (gate * torch.sigmoid(alpha * gate) * (up + offset)).to(gate_up.dtype)
    return (activate(gate, kind) * up).to(gate_up.dtype)


def sum_experts(y: Tensor, weights: Tensor | None, shared: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
    """[T, k, H] or [T, H], [T, k], [T, H], [T, 1] -> [T, H]."""
    y = y if y.dim() == 3 else y[:, None]
    total = (y.float() if weights is None else y.float() * weights[..., None]).sum(1)
    if shared is not None:
        total = total + (shared.float() if gate is None else gate.sigmoid() * shared.float())
    return total.to(y.dtype)
