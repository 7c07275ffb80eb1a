"""What the low-rank op takes: an adapter's factors in one projection, and the tokens of a step sorted by adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_MODULES = 3
"""Modules that one projection may serve: q, k and v."""

BLOCK = 64
"""Rows of B that lie together."""

ROW_FIELDS = 5 + MOST_MODULES
"""int64 fields of a line of the table of slots: addresses of a, scale, b, gain, add, and the ranks."""


def pack_expansion(b: Tensor) -> Tensor:
    """B [n, r] in blocks of 64 rows, each transposed to [r, 64], the last as wide as what is left: flat, n * r values.

    So a kernel that makes 64 outputs at a time reads it from beginning to end.
    """
    return torch.cat([rows.T.reshape(-1) for rows in b.split(BLOCK)])


def unpack_expansion(packed: Tensor, size: int, rank: int) -> Tensor:
    """B [size, rank] from what ``pack_expansion`` made of it."""
    if not rank:
        return packed.new_empty(size, 0)
    blocks = packed.split(BLOCK * rank)
    return torch.cat([block.view(rank, -1).T for block in blocks])


@dataclass(frozen=True, slots=True)
class Factors:
    """One adapter's part in one projection of K inputs and N outputs, whose modules stand side by side in N.

    A module of n columns has its own rank r, which may be 0: the adapter leaves it alone, its
    gain and add too. R is the sum of the ranks.

    Attributes:
        a: [R, K], the modules' A on top of each other; for an embedding of V tokens its transpose [V, R].
        scale: [R] fp32, the factor of each rank.
        ranks: of each module.
        b: of each module its B [n, r] as ``pack_expansion`` lays it out, one after another, flat.
        gain: [N] fp32, or None for ones.
        add: [N] fp32, or None for zeros.
    """

    a: Tensor
    scale: Tensor
    ranks: tuple[int, ...]
    b: Tensor
    gain: Tensor | None = None
    add: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """All of them, in the order in which they are used."""
        return [tensor for tensor in (self.a, self.scale, self.b, self.gain, self.add) if tensor is not None]

    def map(self, move: Callable[[Tensor], Tensor]) -> Factors:
        """The same with ``move`` of each tensor, called in the order of ``tensors``."""
        a, scale, b = move(self.a), move(self.scale), move(self.b)
        gain, add = (None if vector is None else move(vector) for vector in (self.gain, self.add))
        return Factors(a, scale, self.ranks, b, gain, add)

    @property
    def num_bytes(self) -> int:
        """Memory of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())


def table_row(factors: Factors | None) -> tuple[int, ...]:
    """The line of the table of slots for these factors; None means that the slot leaves the projection alone."""
    if factors is None:
        return (0,) * ROW_FIELDS
    tensors = (factors.a, factors.scale, factors.b, factors.gain, factors.add)
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    return (*addresses, *factors.ranks, *(0,) * (MOST_MODULES - len(factors.ranks)))


@dataclass(frozen=True, slots=True)
class Tiles:
    """The segments of a step in pieces of like size, for kernels whose programs take a tile of tokens each.

    Attributes:
        lines: [N, 3] int32: the slot of each tile, and from where to where in ``Segments.tokens`` its tokens are.
            Tiles without tokens are allowed.
        size: tokens of a tile, at most.
    """

    lines: Tensor
    size: int


@dataclass(frozen=True, slots=True)
class Segments:
    """The adapted tokens of a step, sorted by slot; tokens of the base model are not among them.

    Attributes:
        tokens: [S] int32, rows of x and y; segment g owns ``tokens[starts[g]:starts[g + 1]]``.
        slots: [G] int32, the slot of each segment.
        starts: [G + 1] int32.
        tiles: the same in tiles, for devices with such kernels; else None.
    """

    tokens: Tensor
    slots: Tensor
    starts: Tensor
    tiles: Tiles | None = None
