"""Adapters of tensor-parallel ranks: rank 0 reads each one whole, and gives every rank its shard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ...kernels.collectives import Ranks
from ...lora.base_projections import BaseLayout
from ...lora.lora_step import AdapterBank
from ...lora.prepare_factors import PreparedAdapter
from ...lora.split_factors import split_adapter
from ..checkpoint.gguf import GgufFile
from ..checkpoint.read_config import read_model_config
from ..loading.rank_splits import module_splits
from .model_runner import StepMirror


class RankMirror(StepMirror, Protocol):
    """Has the other ranks do what rank 0 does."""

    def install(self, slot: int, shards: Sequence[PreparedAdapter], /) -> None:
        """Write shards of an adapter, in the order of the ranks from 1 on, into their slots."""

    def clear(self, slot: int, /) -> None:
        """Empty a slot."""


def make_split_bank(
    ranks: Ranks,
    mirror: RankMirror | None,
    checkpoint: Path | GgufFile,
    whole: BaseLayout,
    own: BaseLayout,
    num_slots: int,
) -> AdapterBank:
    """Return the slots of a rank. On rank 0 they take whole adapters, and give each other rank its shard.

    Args:
        whole: layout of the whole model.
        own: of this rank's shard.
    """
    if mirror is None:
        return AdapterBank(own, num_slots)
    return SplitBank(ranks, mirror, checkpoint, whole, own, num_slots)


class SplitBank(AdapterBank):
    """The slots of rank 0, whose adapters are written in the slots of all ranks, each rank's shard."""

    def __init__(
        self,
        ranks: Ranks,
        mirror: RankMirror,
        checkpoint: Path | GgufFile,
        whole: BaseLayout,
        own: BaseLayout,
        num_slots: int,
    ) -> None:
        super().__init__(own, num_slots)
        model = read_model_config(checkpoint)
        self._mirror = mirror
        self._whole = whole
        self._splits = [dict(module_splits(model, rank, ranks.size)) for rank in range(ranks.size)]

    def bring(self, adapter: PreparedAdapter) -> bool:
        """Return true: shards are copied when they are put into a slot, on all ranks before the same step."""
        return True

    def install(self, slot: int, adapter: PreparedAdapter) -> None:
        """Put an adapter into a slot: each rank gets the part of its shard."""
        first, *others = (split_adapter(adapter, self._whole, splits, rank) for rank, splits in enumerate(self._splits))
        self._mirror.install(slot, others)
        super().install(slot, first)

    def clear(self, slot: int) -> None:
        self._mirror.clear(slot)
        super().clear(slot)
