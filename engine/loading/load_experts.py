"""Load the mixture of experts of a layer, each expert's weights packed by themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from torch import Tensor

from ...kernels.collectives import Ranks
from ...kernels.expert_ops import (
    AnyExpertWeights,
    ClampedSwiglu,
    ExpertActivation,
    ExpertWeights,
    JoinedExperts,
    RouterParams,
    takes_together,
)
from ...kernels.ops import AnyLinear, Linear, parts_of
from ..checkpoint.families.mixture import ClampedGate, Mixture
from ..models.experts import ExpertProjection, Experts
from ..models.layers import ClampedMlp, Mlp, PlainMlp, Projection, ScaledMlp
from .tensor_names import EXPERT_SCALES, expert_modules, shared_block, shared_modules
from .weight_forms import WeightReader

STACKED_GATE_UP, STACKED_DOWN = "gate_up_proj", "down_proj"  # names of all experts' weights in transformers 5


def load_experts(
    weights: WeightReader, prefix: str, mixture: Mixture, hidden: int, ranks: Ranks | None = None
) -> Experts:
    """Return the mixture whose tensors begin with ``prefix``. Router and the shared expert's gate stay plain.

    Args:
        ranks: tensor-parallel ranks, whose results are added up. Each holds a part of the intermediate size of every
            expert, which ``mixture`` describes. None for a single rank.

    Raises:
        ModelError: a weight does not fit the form of quantised weights.
    """
    names = mixture.names
    reader = _Reader(weights, prefix, mixture)
    experts = range(mixture.num_experts)
    modules = [expert_modules(prefix, mixture, expert) for expert in experts]
    return Experts(
        router=reader.gate(names.router, mixture.num_experts, biased=mixture.biased),
        params=RouterParams(
            top_k=mixture.top_k,
            scores=mixture.scores,
            renormalises=mixture.renormalises,
            scale=mixture.scale,
            correction=weights.exact(f"{prefix}.{names.correction_name}").flatten() if mixture.corrected else None,
            groups=mixture.groups,
            top_groups=mixture.top_groups,
            best_of_group=mixture.best_of_group,
            factors=weights.exact(f"{prefix}.{EXPERT_SCALES}") if mixture.is_beside_mlp else None,
        ),
        gate_up=ExpertProjection(
            name=f"{prefix}.experts.{STACKED_GATE_UP}",
            modules=tuple(each[:-1] for each in modules),
            sizes=(mixture.size,) * (2 if mixture.gated else 1),
            weights=reader.together(reader.gate_up(expert) for expert in experts),
        ),
        down=ExpertProjection(
            name=f"{prefix}.experts.{STACKED_DOWN}",
            modules=tuple(each[-1:] for each in modules),
            sizes=(mixture.latent_size or hidden,),
            weights=reader.together(reader.down(expert) for expert in experts),
        ),
        activation=_activation(mixture),
        shared=reader.shared(hidden, ranks if mixture.latent_size else None) if mixture.shared_size else None,
        shared_gate=reader.gate(f"{names.shared}_gate", 1, biased=False) if mixture.gated_sharing else None,
        weighs_input=mixture.weighs_input,
        latent=reader.latent(mixture.latent_size, hidden) if mixture.latent_size else None,
        added_over=ranks,
    )


def _activation(mixture: Mixture) -> ExpertActivation | Literal["relu2"]:
    if not mixture.gated:
        return "relu2"
    clamp = mixture.clamp
    return mixture.activation if clamp is None else clamped_swiglu(clamp)


def clamped_swiglu(gate: ClampedGate) -> ClampedSwiglu:
    """Return the kernels' form of a bounded activation."""
    return ClampedSwiglu(gate.alpha, gate.limit, gate.offset, gate.gate_limit)


class _Reader:
    """Reads the parts of one mixture in the form in which the checkpoint stores them (``names.storage``)."""

    def __init__(self, weights: WeightReader, prefix: str, mixture: Mixture) -> None:
        self._weights = weights
        self._prefix = prefix
        self._mixture = mixture

    def gate(self, module: str, size: int, *, biased: bool) -> Projection:
        """Read a small product, such as the router. It stays plain: rounding could change which experts are chosen."""
        name = f"{self._prefix}.{module}"
        bias = self._weights.tensor(f"{name}.bias") if biased else None
        return Projection((name,), (size,), self._weights.plain(f"{name}.weight", bias))

    def shared(self, hidden: int, added_over: Ranks | None) -> Mlp | ClampedMlp | ScaledMlp | PlainMlp:
        prefix = shared_block(self._prefix, self._mixture)
        up = self._fused(prefix, shared_modules(self._mixture))
        down = replace(self._fused(prefix, {self._mixture.names.shared_modules[-1]: hidden}), added_over=added_over)
        if not self._mixture.gated:
            return PlainMlp(up, down, "relu2")
        if (clamp := self._mixture.shared_clamp) is not None:
            return ClampedMlp(up, down, clamped_swiglu(clamp))
        scale = self._mixture.shared_scale
        return Mlp(up, down, "silu") if scale == 1.0 else ScaledMlp.of(up, down, "silu", 1.0, scale)

    def latent(self, size: int, hidden: int) -> tuple[Projection, Projection]:
        """Return the projections to the experts' own, smaller width and back: [H -> size], [size -> H]."""
        before, behind = self._mixture.names.latent
        return self._fused(self._prefix, {before: size}), self._fused(self._prefix, {behind: hidden})

    def _fused(self, prefix: str, modules: dict[str, int]) -> Projection:
        names = tuple(f"{prefix}.{module}" for module in modules)
        return Projection(names, tuple(modules.values()), self._weights.packed(*(f"{name}.weight" for name in names)))

    def together(self, experts: Iterable[AnyLinear]) -> AnyExpertWeights:
        """Return the weights of all experts, widened if their forms differ or inputs are out of order.

        Gate and up may have two different forms, as long as these are the same for all experts.
        """
        found = tuple(experts)
        products = _by_product(found)
        if not all(map(takes_together, products)):
            return ExpertWeights(tuple(self._weights.widened(each) for each in found))
        first, *others = map(ExpertWeights, products)
        if not others:
            return first
        (second,) = others
        return JoinedExperts.of(first, second, picks=self._mixture.top_k)

    def gate_up(self, expert: int) -> AnyLinear:
        """Gate and up of an expert, [2 I, H], or up alone, [I, H]."""
        names = self._mixture.names
        match "modules" if names.is_split else names.storage:
            case "modules":
                return self._packed(*expert_modules(self._prefix, self._mixture, expert)[:-1])
            case "stacked":
                return self._stacked(names.gate, expert)
            case "interleaved":
                return self._transposed(names.gate, expert, turns=2)
            case "transposed":
                return self._transposed(names.gate, expert, turns=1)

    def down(self, expert: int) -> AnyLinear:
        """Down of an expert, [H, I]."""
        names = self._mixture.names
        match "modules" if names.is_split else names.storage:
            case "modules":
                return self._packed(expert_modules(self._prefix, self._mixture, expert)[-1])
            case "stacked":
                return self._stacked(names.down, expert)
            case "interleaved" | "transposed":
                return self._transposed(names.down, expert, turns=1)

    def _packed(self, *modules: str) -> AnyLinear:
        """Matrices of modules side by side, and their biases, if any."""
        biased = self._mixture.biased
        bias = self._weights.tensor(*(f"{module}.bias" for module in modules)) if biased else None
        return self._weights.packed(*(f"{module}.weight" for module in modules), bias=bias)

    def _stacked(self, module: str, expert: int) -> Linear:
        name = f"{self._prefix}.{module}.weight"
        return self._weights.pack(name, self._weights.part(name, expert), None)

    def _transposed(self, tensor: str, expert: int, turns: int) -> Linear:
        """Read a matrix stored as [K, N], with columns of ``turns`` modules in turn, and its bias [N], if any."""
        name = f"{self._prefix}.{tensor}"
        bias = _by_module(self._weights.part(f"{name}_bias", expert), turns) if self._mixture.biased else None
        grouped = self._weights.grouped_part(name, expert, turns, bias)
        if grouped is not None:
            return grouped
        stored = self._weights.stored_part(name, expert, turns, bias)
        if stored is not None:
            return stored
        weight = _by_module(self._weights.part(name, expert).T, turns)
        return self._weights.pack(name, weight, bias)


def _by_product(experts: tuple[AnyLinear, ...]) -> tuple[tuple[Linear, ...], ...]:
    """Group the experts' parts by product: one or two for each expert. If numbers differ, all parts are one group."""
    parts = [parts_of(each) for each in experts]
    if len(set(map(len, parts))) > 1:
        return (tuple(part for each in parts for part in each),)
    return tuple(zip(*parts, strict=True))


def _by_module(rows: Tensor, turns: int) -> Tensor:
    """Rows of several modules by turns -> all of the first module, all of the second: contiguous."""
    return rows.view(-1, turns, *rows.shape[1:]).transpose(0, 1).flatten(0, 1).contiguous()
