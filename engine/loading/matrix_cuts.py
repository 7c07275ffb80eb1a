"""Cuts of quantised matrices: selects rows or columns of a checkpoint's matrix without changing its numbers.

Rows may be cut anywhere, columns only between blocks. If a cut is within a group of inputs that share a scale, all
groups of the matrix are split into smaller ones, each with a copy of the scale. The smaller size divides both the old
size and the positions of all cuts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.grouped_weights import StoredNumbers
from ...kernels.layouts.grouped_forms import SUPER_BLOCK

Run = tuple[int, int]
"""A run of rows or columns: the first one, and the end, which is excluded."""


class RowPieces:
    """The rows of a matrix in pieces, each of which is read when it is requested.

    Args:
        read: returns rows [n, ...] for two arguments: the first row and the end, which is excluded.
        count: number of all rows.
        step: largest number of rows in a piece.
    """

    def __init__(self, read: Callable[[int, int], Tensor], count: int, step: int) -> None:
        self._read = read
        self._count = count
        self._step = step

    def __iter__(self) -> Iterator[Tensor]:
        return self.of((0, self._count))

    def of(self, *runs: Run) -> Iterator[Tensor]:
        """Yield the rows of the given runs only, in pieces."""
        for first, end in runs:
            for start in range(first, end, self._step):
                yield self._read(start, min(end, start + self._step))


class MatrixCut(NamedTuple):
    """The part of a matrix [N, K] that is kept: runs of its rows (``dim`` 0) or of its columns (1), side by side."""

    dim: int
    runs: tuple[Run, ...]

    @property
    def size(self) -> int:
        """Number of rows or columns that are kept."""
        return sum(end - first for first, end in self.runs)

    def is_between(self, size: int) -> bool:
        """Return whether all cuts are between blocks of ``size`` columns; cuts of rows always are."""
        return self.dim == 0 or not any(first % size or end % size for first, end in self.runs)

    def take(self, part: Tensor, size: int = 1) -> Tensor:
        """Return the kept part of a tensor [N, K / size, ...], rounded up if the last block is incomplete."""
        unit = size if self.dim else 1
        kept = [part.narrow(self.dim, first // unit, -(-end // unit) - first // unit) for first, end in self.runs]
        return torch.cat(kept, self.dim)

    def pieces(self, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the kept part of rows that come in pieces [n, K]; of ``RowPieces`` other rows are not read."""
        if self.dim == 1:
            yield from map(self.take, pieces)
        elif isinstance(pieces, RowPieces):
            yield from pieces.of(*self.runs)
        else:
            yield self.take(torch.cat(list(pieces)))


def cut_blocks(pieces: Iterable[Tensor], cut: MatrixCut, block: tuple[int, int]) -> Iterator[Tensor]:
    """Yield the kept part of a matrix in blocks, as one piece [n, bytes] uint8.

    Args:
        pieces: rows of the whole matrix, [n, bytes of a row].
        cut: the part to keep; its boundaries are between blocks.
        block: number of values and number of bytes of a block.
    """
    values, size = block
    if cut.dim == 0:
        yield torch.cat(list(cut.pieces(pieces)))
    else:
        yield torch.cat([cut.take(piece.view(len(piece), -1, size), values).flatten(1) for piece in pieces])


def cut_numbers(stored: StoredNumbers, cut: MatrixCut) -> StoredNumbers | None:
    """Return the kept part of a matrix; None if columns are cut within a super-block, or have groups out of order."""
    if cut.dim == 0:
        return _cut_rows(stored, cut)
    rows, width = stored.shape
    has_super = stored.super_scales is not None or stored.super_offsets is not None
    if stored.group_of is not None or (has_super and not cut.is_between(SUPER_BLOCK)):
        return None
    groups = 1 if stored.scales is None else stored.scales.shape[1]
    group = stored.group or width // groups
    size = group if groups == 1 else math.gcd(group, *(edge for run in cut.runs for edge in run if edge != width))

    def of_groups(part: Tensor) -> Tensor:
        return part if groups == 1 else cut.take(part.repeat_interleave(group // size, 1), size)

    return replace(
        stored,
        shape=(rows, cut.size),
        pieces=cut.pieces(stored.pieces),
        scales=_changed(stored.scales, of_groups),
        super_scales=_changed(stored.super_scales, partial(cut.take, size=SUPER_BLOCK)),
        offsets=_changed(stored.offsets, of_groups),
        super_offsets=_changed(stored.super_offsets, partial(cut.take, size=SUPER_BLOCK)),
        group=size if stored.group else None,
    )


def _cut_rows(stored: StoredNumbers, cut: MatrixCut) -> StoredNumbers:
    return replace(
        stored,
        shape=(cut.size, stored.shape[1]),
        pieces=cut.pieces(stored.pieces),
        scales=_changed(stored.scales, cut.take),
        super_scales=_changed(stored.super_scales, cut.take),
        offsets=_changed(stored.offsets, cut.take),
        super_offsets=_changed(stored.super_offsets, cut.take),
        factors=_changed(stored.factors, cut.take),
    )


def _changed(tensor: Tensor | None, change: Callable[[Tensor], Tensor]) -> Tensor | None:
    return None if tensor is None else change(tensor)
