"""Sampling parameters on the device of the logits: of the rows of a draw as columns, or of all rows in a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .staging import to_device

COLUMNS: Final = {
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float64,
    "min_p": torch.float32,
    "top_n_sigma": torch.float32,
}
"""Columns of ``DrawParams`` that are options of a request, and their types."""


class DrawParams(NamedTuple):
    """Parameters of the draws of n rows. Each tensor but the noise is [n, 1].

    Attributes:
        temperature: float32; 0 for the likeliest token.
        top_k: int64, 0 is off.
        top_p: float64, 1 is off.
        min_p: float32, 0 is off.
        u: float64 in [0, 1), the random number of a draw by rank.
        noise: [n, 96 + V / 2048 rounded up] float64 above 0, the random numbers of a race; None if there is none.
        top_n_sigma: float32, 0 or less is off; None if it is off in all rows.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    u: Tensor
    noise: Tensor | None = None
    top_n_sigma: Tensor | None = None

    @classmethod
    def of(
        cls,
        values: Mapping[str, npt.NDArray[Any]] | npt.NDArray[np.void],
        column: Callable[[npt.NDArray[Any]], Tensor],
        u: npt.NDArray[np.float64],
        noise: Tensor | None = None,
    ) -> DrawParams:
        """Return the parameters of some rows.

        Args:
            values: values of the rows, [n], for each of ``COLUMNS``.
            column: converts an array [n] to a tensor [n, 1] on the device of the logits.
        """
        # The host knows here what a kernel would have to wait for: that no row has the option.
        off = {"top_n_sigma"} if not (values["top_n_sigma"] > 0).any() else set()
        columns = {name: column(values[name]) for name in COLUMNS if name not in off}
        return cls(**columns, u=column(u), noise=noise)

    def rows(self, index: Tensor | slice) -> DrawParams:
        """Return the parameters of some rows."""
        columns = {name: column[index] for name, column in self._asdict().items() if column is not None}
        return DrawParams(**columns)


class DrawTable:
    """Parameters and seeds of the draws of all rows, kept on a device, so that a step only names its rows.

    Attributes:
        rows: [num_rows, 6] float64: the ``COLUMNS`` in their order, then the bits of the seed.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.rows = torch.zeros(num_rows, len(COLUMNS) + 1, dtype=torch.float64, device=device)

    def write(self, rows: npt.NDArray[np.int64], values: npt.NDArray[np.void]) -> None:
        """Replace some rows, without waiting for the device.

        Args:
            rows: [n] int64, indices of the rows, all different.
            values: structured array [n] with the fields ``COLUMNS`` and ``seed``, uint64.
        """
        table = np.stack([*(values[name].astype(np.float64) for name in COLUMNS), values["seed"].view(np.float64)], 1)
        # Copied as integers: a copy as floats may change the bits of seeds that are a NaN.
        numbers = to_device(table.view(np.int64), self.rows.device)
        self.rows.view(torch.int64)[to_device(rows, self.rows.device)] = numbers
