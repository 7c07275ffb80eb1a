"""The tiles of a step: what a program of the low-rank kernels works on. Made on the host, once for all projections.

segments            slot 0: tokens 9 10 11 | slot 2: tokens 0 1 2 3 4       tokens = 9 10 11 0 1 2 3 4
tiles of 4 tokens   (0, 0, 3)              | (2, 3, 7) (2, 7, 8)            (slot, first, end) in ``tokens``
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


def make_tiles(slots: Ints, starts: Ints, size: int) -> Ints:
    """Cut segments into tiles of at most ``size`` tokens: [N, 3] int32 lines (slot, first, end).

    Args:
        slots: [G] int32, the slot of each segment.
        starts: [G + 1] int32, segment g owns places ``starts[g]:starts[g + 1]``, none of them empty.
        size: tokens of a tile.
    """
    counts = -(-np.diff(starts) // size)
    segment = np.repeat(np.arange(len(slots)), counts)
    before = np.cumsum(counts) - counts
    first = starts[segment] + (np.arange(len(segment)) - before[segment]) * size
    end = np.minimum(first + size, starts[segment + 1])
    return np.stack([slots[segment], first, end], axis=1).astype(np.int32)
