"""A mixture of experts as the MLP of a layer: the router, the experts, and the shared expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...kernels.collectives import Ranks
from ...kernels.expert_ops import (
    AnyExpertWeights,
    ExpertActivation,
    ExpertWeights,
    RouterParams,
    expert_activation,
    expert_linear,
    expert_parts,
    route,
    sum_experts,
)
from ...kernels.ops import activation, rms_norm
from ...lora.lora_step import LoraStep
from .forward_inputs import ForwardInputs
from .layers import ClampedMlp, Mlp, PlainMlp, Projection, ScaledMlp
from .norms import Norm, normed


@dataclass(frozen=True, slots=True)
class ExpertProjection:
    """A matrix product that all experts of a layer have, each with its own weight.

    Attributes:
        name: name by which adapters address the product.
        modules: module names of each expert, side by side in its output.
        sizes: number of output columns of each module.
    """

    name: str
    modules: tuple[tuple[str, ...], ...]
    sizes: tuple[int, ...]
    weights: AnyExpertWeights

    def __call__(self, x: Tensor, experts: Tensor, lora: LoraStep | None, num_tokens: Tensor | None = None) -> Tensor:
        """[T, K] or [T, k, K] and experts [T, k] -> [T, k, sum of sizes], plus the adapters' part."""
        y = expert_linear(x, self.weights, experts, num_tokens)
        if lora is not None:
            lora.project_experts(self.name, x, y, experts)
        return y


@dataclass(frozen=True, slots=True)
class Experts:
    """``sum over a token's experts e of weight_e * down_e(act(gate_e(x)) * up_e(x))``, plus the shared expert's result.

    Attributes:
        router: projection to logits [T, E].
        params: how logits become experts and weights.
        gate_up: product of each expert: gate and up as one product, or up alone.
        down: product of each expert.
        shared: the expert that all tokens pass, or None.
        shared_gate: projection to the logit of the shared expert's weight, or None for a weight of 1.
        activation: activation of gate and up, or "relu2" for up alone.
        weighs_input: whether the weights are factors of the experts' inputs (Llama 4), not of their results.
        latent: projections before the experts and after their sum, or None.
        added_over: the ranks that each have some inner columns of each expert, whose results are added up together with
            those of the shared expert (with ``latent`` in separate sums); None if this rank has all columns.
    """

    router: Projection
    params: RouterParams
    gate_up: ExpertProjection
    down: ExpertProjection
    activation: ExpertActivation | Literal["relu2"]
    shared: Mlp | ClampedMlp | ScaledMlp | PlainMlp | None
    shared_gate: Projection | None
    weighs_input: bool
    latent: tuple[Projection, Projection] | None = None
    added_over: Ranks | None = None

    def __call__(
        self, x: Tensor, lora: LoraStep | None, num_tokens: Tensor | None = None, routed: Tensor | None = None
    ) -> Tensor:
        """Return the mixture's result for ``x``: [T, H] -> [T, H].

        Args:
            routed: [T, H], the router's input; None if it is ``x``.
        """
        routing = route(self.router(x if routed is None else routed, lora, torch.float32), self.params)
        of_input, of_result = (routing.weights, None) if self.weighs_input else (None, routing.weights)
        inner = x if self.latent is None else self.latent[0](x, lora)
        y = self._activated(self.gate_up(inner, routing.experts, lora, num_tokens), of_input)
        y = self.down(y, routing.experts, lora, num_tokens)
        shared = None if self.shared is None else self.shared(x, lora)
        gate = None if self.shared_gate is None else self.shared_gate(x, lora, torch.float32)
        if self.latent is None:
            return self._added(sum_experts(y, of_result, shared, gate))
        y = self.latent[1](self._added(sum_experts(y, of_result)), lora)
        return sum_experts(y, None, shared, gate)

    def _added(self, y: Tensor) -> Tensor:
        return y if self.added_over is None else self.added_over.add(y)

    def _activated(self, y: Tensor, weights: Tensor | None) -> Tensor:
        """Apply the activation: [T, k, 2 I], or [T, k, I] without gates -> [T, k, I]."""
        if self.activation == "relu2":
            assert weights is None
            return activation(y, "relu2")
        return expert_activation(y, self.activation, weights)

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Products that all tokens pass through."""
        shared = () if self.shared is None else self.shared.projections
        gate = () if self.shared_gate is None else (self.shared_gate,)
        return (self.router, *(self.latent or ()), *shared, *gate)

    @property
    def active(self) -> tuple[tuple[int, ExpertWeights], ...]:
        """Products of a token's experts: the number of experts of a token, and the weights of all experts."""
        products = self.gate_up, self.down
        return tuple((self.params.top_k, part) for product in products for part in expert_parts(product.weights))


@dataclass(frozen=True, slots=True)
class BesideMlp:
    """A mixture whose result is added to the result of the layer's MLP, each after a norm of its own (Gemma 4).

    Attributes:
        router_norm: [H] fp32, weight of the norm of the router's input.
        eps: epsilon of this norm.
        before: the norm before the experts.
        behind: the norm after the experts.
        behind_mlp: the norm after the MLP.
    """

    experts: Experts
    router_norm: Tensor
    eps: float
    before: Norm
    behind: Norm
    behind_mlp: Norm

    def __call__(self, of_mlp: Tensor, residual: Tensor, inputs: ForwardInputs) -> Tensor:
        """Return the sum of both results: MLP's result [T, H] and residual stream [T, H] fp32 -> [T, H]."""
        own = inputs.own
        routed = rms_norm(residual, self.router_norm, self.eps, 0.0, of_mlp.dtype)
        x = normed(self.before, residual, own)
        y = normed(self.behind, self.experts(x, inputs.lora, inputs.num_tokens, routed), own)
        return sum_experts(normed(self.behind_mlp, of_mlp, own), None, y)
