"""Split factors: shards an adapter for tensor parallelism. Each rank gets the factors for its part of the base model.

A product that is split by outputs has the whole A and its own rows of B. A product that is split by inputs has its own
columns of A and the whole B: the sum over the ranks of ``B (A_r x_r)`` is ``B A x``, so the sum over the ranks of the
base model's products includes the adapter. The gain of DoRA multiplies each part of such a sum. Rank 0 adds the terms
outside of the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..kernels.layouts.lora_arguments import Factors, pack_expansion, unpack_expansion
from .base_projections import BaseLayout, ProjectionShape
from .prepare_factors import PreparedAdapter, join_factors


@dataclass(frozen=True, slots=True)
class ModuleSplit:
    """The part of a module's weight [out, in] that a rank holds.

    Attributes:
        side: whether the rank has a part of the outputs or of the inputs.
        runs: runs of outputs or inputs, each as (first, end), in their order.
    """

    side: Literal["outputs", "inputs"]
    runs: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Number of outputs or inputs of the rank."""
        return sum(end - first for first, end in self.runs)

    def take(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the rank's part of a tensor along a dimension."""
        return torch.cat([tensor.narrow(dim, first, end - first) for first, end in self.runs], dim)


def split_adapter(
    adapter: PreparedAdapter, layout: BaseLayout, splits: Mapping[str, ModuleSplit], rank: int
) -> PreparedAdapter:
    """Return a rank's part of an adapter.

    Args:
        adapter: the adapter, prepared for the whole base model.
        layout: layout of the whole base model.
        splits: splits by module. Each rank has modules without an entry entirely.
    """
    shapes = {shape.name: shape for shape in layout.projections if shape.heads is None}
    heads = dict(_own_heads(layout, splits))
    parts = {
        heads.get(name, name): _part(factors, shapes[name], splits, rank) if name in shapes else factors
        for name, factors in adapter.factors.items()
        if name in shapes or name in heads
    }
    block, factors = join_factors(parts, pinned=layout.device.type == "cuda")
    return replace(adapter, factors=factors, block=block, num_bytes=block.nbytes)


def _own_heads(layout: BaseLayout, splits: Mapping[str, ModuleSplit]) -> Iterator[tuple[str, str]]:
    """Yield the products of a rank's heads: their names in the whole model, and their names on the rank."""
    for shape in layout.projections:
        if shape.heads is None:
            continue
        split, rows = splits.get(shape.name), shape.heads.plain + shape.heads.value
        first, end = (0, shape.heads.count * rows) if split is None else split.runs[0]
        for product in shape.products:
            place = product.place
            if place is not None and first <= place.expert * rows < end:
                yield product.name, f"{place.product}.{place.expert - first // rows}"


def _part(factors: Factors, shape: ProjectionShape, splits: Mapping[str, ModuleSplit], rank: int) -> Factors:
    found = [splits.get(name) for name in shape.modules]
    if found[0] is None:
        return factors
    if found[0].side == "inputs":
        a = found[0].take(factors.a, 1).contiguous()
        return replace(factors, a=a, add=factors.add if rank == 0 else None)
    cells = [size * part for size, part in zip(shape.sizes, factors.ranks, strict=True)]
    matrices = [
        unpack_expansion(packed, size, part)
        for packed, size, part in zip(factors.b.split(cells), shape.sizes, factors.ranks, strict=True)
    ]
    rows = [split.take(matrix, 0) for split, matrix in zip(found, matrices, strict=True) if split is not None]
    return replace(
        factors,
        b=torch.cat([pack_expansion(each) for each in rows if each.shape[1]]),
        gain=_columns(factors.gain, shape, found),
        add=_columns(factors.add, shape, found),
    )


def _columns(vector: Tensor | None, shape: ProjectionShape, splits: list[ModuleSplit | None]) -> Tensor | None:
    """Return a rank's part of a vector that contains all outputs of a projection."""
    if vector is None:
        return None
    parts = vector.split(shape.sizes)
    return torch.cat([split.take(part, 0) for split, part in zip(splits, parts, strict=True) if split is not None])
