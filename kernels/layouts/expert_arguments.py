"""Arguments of the ops of a mixture of experts: how a layer routes, where a step's tokens go, the experts' weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .column_runs import ColumnRuns
from .grouped_forms import GroupedLinear, GroupedPart
from .packed_weights import Linear, PackedLinear, QuantisedLinear

Scores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """The activation ``g * sigmoid(alpha * g) * (u + offset)`` of a bounded gate g and a bounded u.

    Attributes:
        limit: bound of u, which is in ``-limit .. limit``, and of g unless ``gate_limit`` is set.
        offset: 1 in gpt-oss, 0 for a bounded SwiGLU.
        gate_limit: the largest g, if it is not ``limit``.
    """

    alpha: float
    limit: float
    offset: float = 1.0
    gate_limit: float | None = None

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        """The parameters in the order in which kernels take them: alpha, largest gate, bound of u, offset."""
        return self.alpha, self.limit if self.gate_limit is None else self.gate_limit, self.limit, self.offset


ExpertActivation = Literal["silu", "gelu_tanh"] | ClampedSwiglu


@dataclass(frozen=True, slots=True)
class RouterParams:
    """How a layer derives the top-k experts and their weights from router logits.

    Experts are chosen by their scores plus a correction, among the experts of the best groups. The weight of an expert
    is its score without the correction.

    Attributes:
        top_k: number of experts of a token.
        scores: function that turns logits into scores: over all experts together, or for each expert alone. (A softmax
            over the chosen logits alone, as in Granite and gpt-oss, is "softmax" with ``renormalises``.)
        renormalises: whether weights are divided by their sum.
        scale: factor of the weights.
        correction: [E] fp32, added to the scores by which experts are chosen, or None.
        factors: [E] fp32, factor of the weights of each expert, or None.
        groups: number of groups of experts; each has equally many adjacent experts.
        top_groups: number of groups from which a token may choose experts.
        best_of_group: number of a group's largest scores whose sum is the score of the group.
    """

    top_k: int
    scores: Scores = "softmax"
    renormalises: bool = False
    scale: float = 1.0
    correction: Tensor | None = None
    factors: Tensor | None = None
    groups: int = 1
    top_groups: int = 1
    best_of_group: int = 1

    @property
    def chooses_by_logits(self) -> bool:
        """Whether experts are chosen by their logits, which are distinct where a sigmoid in fp32 is 1 for several."""
        return self.scores == "sigmoid" and self.correction is None and self.top_groups == self.groups


class Routing(NamedTuple):
    """The k experts of each of T tokens.

    Attributes:
        experts: [T, k] int32, distinct within a token.
        weights: [T, k] fp32.
    """

    experts: Tensor
    weights: Tensor


class ExpertWeights:
    """The weights of E experts for one product, each packed separately.

    Args:
        experts: weights of the experts, all with the same sizes, format and kernels.

    Attributes:
        table: int64 on the weights' device, addresses of each expert's tensors, 0 for a missing tensor. [E, 3]: weight,
            scales and bias. For grouped weights [E, 9]: ``GroupedPart.tensors`` and bias.

    Raises:
        ValueError: there are no experts, or their weights differ in size, format or kernels.
    """

    def __init__(self, experts: tuple[Linear, ...]) -> None:
        if not experts or any(_kind(each) != _kind(experts[0]) for each in experts):
            raise ValueError("the weights of experts must be of one shape and format, and at least one")
        self.experts = experts
        self.in_features = experts[0].in_features
        self.out_features = experts[0].out_features
        addresses = [[0 if part is None else part.data_ptr() for part in _parts(each)] for each in experts]
        first = experts[0]
        device = first.device if isinstance(first, GroupedLinear) else first.weight.device
        self.table = torch.tensor(addresses, dtype=torch.int64, device=device)

    @property
    def first(self) -> Linear:
        """The first expert's weight, of the same format as all others."""
        return self.experts[0]

    def __len__(self) -> int:
        return len(self.experts)


@dataclass(frozen=True, slots=True)
class JoinedExperts:
    """The weights of E experts for two products of the same x on a CPU, whose weights have different forms.

    The outputs of the two products are put side by side.

    Attributes:
        columns: order of the columns for all experts of a token: for each expert the columns of the first product, then
            the columns of the second.
    """

    first: ExpertWeights
    second: ExpertWeights
    columns: ColumnRuns

    @classmethod
    def of(cls, first: ExpertWeights, second: ExpertWeights, picks: int) -> JoinedExperts:
        """Join two weights with equal numbers of experts and inputs. A token has ``picks`` experts."""
        assert (first.in_features, len(first)) == (second.in_features, len(second))
        sizes = first.out_features, second.out_features
        runs = [(part, pick * size, size) for pick in range(picks) for part, size in enumerate(sizes)]
        return cls(first, second, ColumnRuns.of(runs, heads=picks))

    @property
    def in_features(self) -> int:
        return self.first.in_features


AnyExpertWeights = ExpertWeights | JoinedExperts


def expert_parts(weights: AnyExpertWeights) -> tuple[ExpertWeights, ...]:
    """Return the weights that experts' weights are joined of: of most products the weights themselves."""
    return (weights.first, weights.second) if isinstance(weights, JoinedExperts) else (weights,)


def takes_together(experts: tuple[Linear, ...]) -> bool:
    """Return whether weights can be ``ExpertWeights``: in one form, grouped ones of one part with inputs in order."""
    return all(map(_is_one_part, experts)) and len(set(map(_kind, experts))) == 1


def _is_one_part(linear: Linear) -> bool:
    if not isinstance(linear, GroupedLinear):
        return True
    first = linear.parts[0]
    return len(linear.parts) == 1 and isinstance(first, GroupedPart) and first.permutation is None


def _parts(linear: Linear) -> tuple[Tensor | None, ...]:
    if isinstance(linear, GroupedLinear):
        return *_only_part(linear).tensors, linear.bias
    scales = linear.scales if isinstance(linear, QuantisedLinear) else None
    return linear.weight, scales, linear.bias


def _only_part(linear: GroupedLinear) -> GroupedPart:
    """Return the part of a grouped weight that kernels of experts take: all rows in one form, inputs in order."""
    (part,) = linear.parts
    assert isinstance(part, GroupedPart) and part.permutation is None
    return part


def _kind(linear: Linear) -> tuple[object, ...]:
    if isinstance(linear, GroupedLinear):
        part = _only_part(linear)
        types = tuple(None if tensor is None else tensor.dtype for tensor in part.tensors)
        return linear.in_features, linear.out_features, part.form, types, linear.bias is not None
    native = linear.kernels if isinstance(linear, PackedLinear) else (linear.format, linear.planes, linear.kernels)
    biased = linear.bias is not None
    return linear.in_features, linear.out_features, linear.weight.dtype, linear.weight.shape, biased, native
