"""Arguments of the LoRA op: factors of an adapter, the slots' table of a projection, tokens of a step by slot."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .staging import refill

MOST_MODULES = 3
"""Modules of a fused projection: q, k and v."""

BLOCK = 64
"""Rows of B that are packed together."""

ROW_FIELDS = 5 + MOST_MODULES
"""int64 fields of a row of the slots' table: addresses of a, scale, b, gain, add, and the ranks."""


def pack_expansion(b: Tensor) -> Tensor:
    """Pack B [n, r] in blocks of 64 rows, each transposed to [r, 64]. Returns n * r values in one dimension.

    The last block may be narrower. A kernel that computes 64 outputs at a time reads its block sequentially.
    """
    return torch.cat([rows.T.reshape(-1) for rows in b.split(BLOCK)])


def unpack_expansion(packed: Tensor, size: int, rank: int) -> Tensor:
    """Invert ``pack_expansion``: returns B [size, rank]."""
    if not rank:
        return packed.new_empty(size, 0)
    blocks = packed.split(BLOCK * rank)
    return torch.cat([block.view(rank, -1).T for block in blocks])


@dataclass(frozen=True, slots=True)
class Factors:
    """One adapter's low-rank factors in one projection of K inputs and N outputs.

    The modules of a fused projection are adjacent in N. A module of n columns has its own rank r; rank 0 means that the
    adapter does not change it, its gain and add included. R is the sum of the ranks.

    Attributes:
        a: [R, K], the modules' A stacked; for an embedding of V tokens its transpose [V, R].
        scale: [R] fp32, the factor of each rank.
        ranks: ranks of each module.
        b: each module's B [n, r] packed by ``pack_expansion``, concatenated, flat.
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
        """All tensors in the order of their use."""
        return [tensor for tensor in (self.a, self.scale, self.b, self.gain, self.add) if tensor is not None]

    def map(self, move: Callable[[Tensor], Tensor]) -> Factors:
        """Return factors with ``move`` applied to each tensor, in the order of ``tensors``."""
        a, scale, b = move(self.a), move(self.scale), move(self.b)
        gain, add = (None if vector is None else move(vector) for vector in (self.gain, self.add))
        return Factors(a, scale, self.ranks, b, gain, add)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())


def _table_row(factors: Factors | None) -> tuple[int, ...]:
    """A slot's row of the table; zeros where the slot does not change the projection."""
    if factors is None:
        return (0,) * ROW_FIELDS
    tensors = (factors.a, factors.scale, factors.b, factors.gain, factors.add)
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    return (*addresses, *factors.ranks, *(0,) * (MOST_MODULES - len(factors.ranks)))


class SlotTable:
    """The factors of all slots for one projection.

    Args:
        sizes: number of columns of each module, for at most three modules.
        width: K, the number of inputs; for an embedding the number of tokens of the vocabulary.
        num_slots: number of slots, all empty at first.
        dtype: type of the factors and of x.
        device: device of the factors.
        rows: memory for the attribute ``rows``, filled with zeros; None to allocate it.

    Attributes:
        rows: [num_slots, ROW_FIELDS] int64 on the device, addresses and ranks of each slot; never moved.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        width: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device = torch.device("cpu"),  # noqa: B008 (immutable)
        rows: Tensor | None = None,
    ) -> None:
        if not 1 <= len(sizes) <= MOST_MODULES:
            raise ValueError(f"a projection has 1 to {MOST_MODULES} modules, not {len(sizes)}")
        self.sizes = sizes
        self.width = width
        self.dtype = dtype
        self.factors: list[Factors | None] = [None] * num_slots
        self.rows = torch.zeros(num_slots, ROW_FIELDS, dtype=torch.int64, device=device) if rows is None else rows
        self._reserved = 0

    @property
    def total_rank(self) -> int:
        """The largest total rank of a slot, all modules together, or the reserved one if that is larger."""
        return max(self._reserved, *(sum(each.ranks) if each else 0 for each in self.factors))

    def reserve(self, total_rank: int) -> None:
        """Make every later launch wide enough for this total rank of all modules.

        This is needed for launches that are captured in a CUDA graph and replayed with other adapters in the slots.
        """
        self._reserved = max(self._reserved, total_rank)

    def widened(self, total_rank: int) -> SlotTable:
        """Return a copy that shares the slots, and whose kernels are launched for this total rank at least."""
        wide = copy.copy(self)
        wide.reserve(total_rank)
        return wide

    def put(self, slot: int, factors: Factors | None) -> None:
        """Set the factors of a slot, or empty it with None. The tensors must not move or change until the next ``put``.

        Raises:
            ValueError: shapes or types do not fit this projection.
        """
        refill(self.rows[slot : slot + 1], self.hold(slot, [factors]))

    def hold(self, first: int, factors: Sequence[Factors | None]) -> NDArray[np.int64]:
        """Keep the factors of adjacent slots from ``first`` on.

        Returns:
            [n, ROW_FIELDS], to be written to ``rows`` from ``first`` on before a step uses them.
        """
        for each in factors:
            if each is not None:
                self._check(each)
        end = first + len(factors)
        self.factors[first:end] = factors
        return np.array([_table_row(each) for each in factors], np.int64)

    def _check(self, factors: Factors) -> None:
        total = sum(factors.ranks)
        cells = sum(rank * size for rank, size in zip(factors.ranks, self.sizes, strict=True))
        vectors = (factors.gain, factors.add)
        if (
            any(matrix.dtype is not self.dtype or not matrix.is_contiguous() for matrix in (factors.a, factors.b))
            or any(vector is not None and vector.dtype is not torch.float32 for vector in (factors.scale, *vectors))
            or tuple(factors.a.shape) not in ((total, self.width), (self.width, total))
            or factors.scale.shape != (total,)
            or factors.b.shape != (cells,)
            or any(vector is not None and vector.shape != (sum(self.sizes),) for vector in vectors)
        ):
            raise ValueError(
                f"{factors.a.dtype} factors of ranks {factors.ranks}, a {list(factors.a.shape)}, b "
                f"{list(factors.b.shape)}, scale {list(factors.scale.shape)} do not fit a {self.dtype} projection "
                f"from {self.width} to {self.sizes}"
            )


@dataclass(frozen=True, slots=True)
class Tiles:
    """The segments of a step cut into tiles of bounded size, for kernels whose programs take one tile each.

    Attributes:
        lines: [N, 3] int32: slot, first and end position in ``Segments.tokens``. Empty tiles are allowed.
        size: largest number of tokens in a tile.
        places: [T, 3] int32, for each token of the step its slot, its position in ``Segments.tokens`` and its tile, all
            -1 for a token of the base model; None in a step with too many tokens for the kernels that read it.
    """

    lines: Tensor
    size: int
    places: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Segments:
    """The adapted tokens of a step sorted by slot; tokens of the base model are left out.

    Attributes:
        tokens: [S] int32, rows of x and y; segment g owns ``tokens[starts[g]:starts[g + 1]]``.
        slots: [G] int32, the slot of each segment.
        starts: [G + 1] int32.
        tiles: the same segments in tiles, for devices with tiled kernels; else None.
    """

    tokens: Tensor
    slots: Tensor
    starts: Tensor
    tiles: Tiles | None = None

    def check_slots(self) -> None:
        """Raise ValueError if slots and starts are missing, as in captured passes, where kernels read tiles alone."""
        if self.starts.shape[0] != self.slots.shape[0] + 1:
            raise ValueError(
                f"segments of {self.tokens.shape[0]} tokens have {self.slots.shape[0]} slots and "
                f"{self.starts.shape[0]} starts: only kernels that read tiles compute them; others need one start more "
                "than slots"
            )


@dataclass(frozen=True, slots=True)
class ShrunkInputs:
    """The result ``scale * A x`` of a projection, whose launch may still run in parallel with other launches.

    Attributes:
        sums: [most, S, R] fp32, the result in parts that must be added up.
        parts: [N] int32, number of parts of each tile.
        wait: makes later launches wait for the result; called once, before the result is read.
    """

    sums: Tensor
    parts: Tensor
    wait: Callable[[], None]
