"""Adapters of several ranks: rank 0 reads each one whole, and gives every rank its part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ...lora.base_projections import EMBEDDING, BaseLayout
from ...lora.lora_step import AdapterBank
from ...lora.own.own_weights import OwnWeights
from ...lora.prepare_factors import PreparedAdapter
from ...lora.published.saved_modules import NormWeights
from ...lora.split_factors import ModuleSplit, split_adapter
from ..checkpoint.model_config import ModelConfig
from ..loading.rank_splits import module_splits, tensor_splits
from ..loading.stages import LAYERS, stage_layers, stage_name
from .model_runner import StepMirror

_WEIGHT = ".weight"


class RankMirror(StepMirror, Protocol):
    """Makes the other ranks compute the steps of rank 0, and change their adapter slots like rank 0."""

    def install(self, slot: int, parts: Sequence[PreparedAdapter], /) -> None:
        """Write parts of an adapter, in the order of the ranks from 1 on, into their slots."""

    def clear(self, slot: int, /) -> None:
        """Empty a slot."""


class AdapterParts:
    """The part of an adapter that each rank holds: its shard of the factors of its layers.

    An adapter's own weights are not split. Its own embedding is on the ranks that have the embedding, its own head only
    on rank 0, which draws tokens, and its own norms on the ranks of their layers. But a norm over heads is cut to the
    heads of the rank.

    Args:
        model: configuration of the whole model.
        layout: layout of the whole model.
        width: number of tensor-parallel ranks, which have shards of the same layers.
        count: number of pipeline stages.
    """

    def __init__(self, model: ModelConfig, layout: BaseLayout, width: int, count: int) -> None:
        self._layout = layout
        self._splits = [_splits(model, layout, rank, width) for rank in range(width)]
        self._places = [
            _Place(stage_layers(model.num_layers, stage, count), is_first=stage == count - 1, is_last=stage == 0)
            for stage in range(count)
        ]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._splits) * len(self._places)

    def of(self, adapter: PreparedAdapter, rank: int) -> PreparedAdapter:
        """Return a rank's part of a whole adapter, under the rank's names of its layers."""
        stage, shard = divmod(rank, len(self._splits))
        place, splits = self._places[stage], self._splits[shard]
        kept = {name: each for name, each in adapter.factors.items() if place.name(name) is not None}
        part = split_adapter(replace(adapter, factors=kept), self._layout, splits, shard)
        named = {place.name(name) or name: each for name, each in part.factors.items()}
        own = None if adapter.own is None else _own(adapter.own, place, splits, has_head=rank == 0)
        return replace(part, factors=named, own=own, num_bytes=part.num_bytes + (own.num_bytes if own else 0))


@dataclass(frozen=True, slots=True)
class _Place:
    """The layers of a rank, and whether it has the model's first ones and its last ones."""

    layers: range
    is_first: bool
    is_last: bool

    def name(self, name: str) -> str | None:
        """Return the rank's name of a product or norm of the whole model; None for another rank's."""
        if name == EMBEDDING:
            return name if self.is_first else None
        if name.startswith(LAYERS):
            return stage_name(name, self.layers)
        return name if self.is_last else None


def _splits(model: ModelConfig, layout: BaseLayout, rank: int, size: int) -> dict[str, ModuleSplit]:
    """Return the runs of a rank by module, those of norms over its heads included."""
    if size == 1:
        return {}
    norms = {
        name.removesuffix(_WEIGHT): ModuleSplit("outputs", runs)
        for name, dim, runs in tensor_splits(model, rank, size)
        if dim == 0 and name.removesuffix(_WEIGHT) in layout.norms
    }
    return norms | dict(module_splits(model, rank, size))


def _own(own: OwnWeights, place: _Place, splits: Mapping[str, ModuleSplit], *, has_head: bool) -> OwnWeights | None:
    """Return a rank's part of the weights that replace the model's; None if the rank has no such weights."""
    norms = {place.name(name): _cut(norm, splits.get(name)) for name, norm in own.norms.items()}
    found = replace(
        own,
        embedding=own.embedding if place.is_first else None,
        head=own.head if has_head else None,
        score=own.score if has_head else None,
        norms={name: norm for name, norm in norms.items() if name is not None},
    )
    return found if has_head or found.embedding is not None or found.norms else None


def _cut(norm: NormWeights, split: ModuleSplit | None) -> NormWeights:
    if split is None:
        return norm
    return NormWeights(*(None if each is None else split.take(each, 0) for each in (norm.weight, norm.bias)))


class SplitBank(AdapterBank):
    """The adapter slots of rank 0. Installing an adapter also sends each other rank its part, for the same slot.

    Args:
        own: layout of rank 0's part of the model.
    """

    def __init__(self, parts: AdapterParts, mirror: RankMirror, own: BaseLayout, num_slots: int) -> None:
        super().__init__(own, num_slots)
        self._mirror = mirror
        self._parts = parts

    def bring(self, adapter: PreparedAdapter) -> bool:
        """Return true: parts are copied when they are put into a slot, on all ranks before the same step."""
        return True

    def install(self, slot: int, adapter: PreparedAdapter) -> None:
        """Put an adapter into a slot: each rank gets its part."""
        first, *others = (self._parts.of(adapter, rank) for rank in range(self._parts.size))
        self._mirror.install(slot, others)
        super().install(slot, first)

    def clear(self, slot: int) -> None:
        self._mirror.clear(slot)
        super().clear(slot)
