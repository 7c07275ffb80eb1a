"""``ColumnRuns``: columns of one or two matrices in the order in which an op takes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ColumnRuns:
    """Runs of adjacent columns, side by side in a result.

    Attributes:
        table: [runs, 3] int64 on the CPU: 0 or 1 for the matrix, first column, number of columns.
        shape: of a row of the result: its columns, or heads and their dimensions.
        needed: columns that the two matrices must have at least.
    """

    table: Tensor
    shape: tuple[int, ...]
    needed: tuple[int, int]

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return math.prod(self.shape)

    @classmethod
    def of(cls, runs: Sequence[tuple[int, int, int]], *, heads: int | None = None) -> ColumnRuns:
        """Return the record of runs, each as matrix, first column and number of columns; of equal ``heads``."""
        if any(matrix not in (0, 1) or first < 0 or count < 1 for matrix, first, count in runs):
            raise ValueError(f"runs of columns must be of matrix 0 or 1, from 0 on, of at least one: {list(runs)}")
        first, second = (max((at + count for each, at, count in runs if each == index), default=0) for index in (0, 1))
        columns = sum(count for *_, count in runs)
        shape = (columns,) if heads is None else (heads, columns // heads)
        return cls(torch.tensor(runs, dtype=torch.int64), shape, (first, second))
