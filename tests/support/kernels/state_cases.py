"""Ragged batches with recurrent states: rows of many lengths that read, write and keep slots of a pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rootgraft.kernels.layouts.state_arguments import StateBatch

SHORT = (3, 0, 1, 5, 2, 1)
LONG = (3, 0, 1, 45, 9, 1)
SOURCES = (-1, 1, 2, 9, 4, 7)  # the last row reads a slot and keeps its state there
TARGETS = (0, 1, 2, 3, 4, 5)
CHECKPOINTS = {1: 6, 4: 10, 8: 11, 11: 7, 20: 12, 48: 13, 58: 7}
SLOTS = 15


def state_batch(
    lengths: Sequence[int] = LONG,
    sources: Sequence[int] = SOURCES,
    targets: Sequence[int] = TARGETS,
    *,
    knows_longest: bool = False,
) -> StateBatch:
    """The batch of these rows, whose checkpoints are those of ``CHECKPOINTS`` that it has tokens for."""
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    kept = [CHECKPOINTS.get(token, -1) for token in range(starts[-1])]
    if starts[-1] > 12:
        kept[11] = -1  # that slot is read by the last row
    index = [torch.tensor(each, dtype=torch.int32) for each in (starts, sources, targets, kept)]
    return StateBatch(*index, max(lengths) if knows_longest else None)


def random_state(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A pool whose slot of the row that begins is not a number."""
    state = torch.randn(SLOTS, *shape).to(dtype)
    state[0] = torch.nan
    return state
