"""``ColumnRuns``: columns of one or two matrices in the order in which an op takes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ColumnRuns:
    """Runs of adjacent columns of one or two matrices, which are put side by side in a result.

    Attributes:
        table: [runs, 3] int64 on the CPU: index of the matrix (0 or 1), first column, number of columns.
        shape: shape of a row of the result: its columns, or heads and their dimensions.
        needed: columns that the two matrices must have at least.
        factors: [runs] float32 on the CPU, by which columns are multiplied; None for copies.
    """

    table: Tensor
    shape: tuple[int, ...]
    needed: tuple[int, int]
    factors: Tensor | None = None

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return math.prod(self.shape)

    @classmethod
    def of(
        cls,
        runs: Sequence[tuple[int, int, int]],
        *,
        heads: int | None = None,
        factors: Sequence[float] | None = None,
    ) -> ColumnRuns:
        """Return the record of runs; each is the index of a matrix, the first column and the number of columns.

        Args:
            heads: number of heads of equal size that a row of the result is divided into; None for no division.
            factors: factors of the columns of each run.
        """
        if any(matrix not in (0, 1) or first < 0 or count < 1 for matrix, first, count in runs):
            raise ValueError(f"runs of columns must be of matrix 0 or 1, from 0 on, of at least one: {list(runs)}")
        first, second = (max((at + count for each, at, count in runs if each == index), default=0) for index in (0, 1))
        columns = sum(count for *_, count in runs)
        shape = (columns,) if heads is None else (heads, columns // heads)
        scales = None if factors is None else torch.tensor(factors, dtype=torch.float32)
        if scales is not None and scales.shape != (len(runs),):
            raise ValueError(f"{len(runs)} runs of columns need as many factors, not {len(scales)}")
        return cls(torch.tensor(runs, dtype=torch.int64), shape, (first, second), scales)
