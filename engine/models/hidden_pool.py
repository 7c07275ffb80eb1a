"""``HiddenPool``: for each KV cell what a draft head reads of the model there, its last hidden states or fused ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.memory import copy_pages, lazy_zeros
from ...kernels.ops import copy_residual
from .layers import Projection


@dataclass(frozen=True, slots=True)
class FusedLayers:
    """Hidden states of some layers as a draft head reads them.

    Attributes:
        layers: those whose input, the residual stream [T, H] in front of them, is read; ascending.
        fuse: the product of these side by side, [T, H * len(layers)] -> [T, H of the head].
    """

    layers: tuple[int, ...]
    fuse: Projection


class HiddenPool:
    """Hidden states of every token in the KV pool, page by page as its K and V.

    A prefix hit brings them along, so a draft head reads a cached prompt like a computed one.

    Args:
        width: H of the head.
        fused: the layers that it reads; None for the last hidden states, after the model's last norm.

    Attributes:
        cells: [num_pages * page_size, H of the head].
        page_bytes: bytes of a page.
        holds_last: it holds the last hidden states, so that a forward pass must keep those of all tokens.
    """

    def __init__(
        self, num_pages: int, page_size: int, width: int, dtype: torch.dtype, fused: FusedLayers | None
    ) -> None:
        self._pages = lazy_zeros((1, num_pages, 1, page_size, width), dtype)
        self.cells = self._pages.view(num_pages * page_size, width)
        self.page_bytes = page_size * width * dtype.itemsize
        self.holds_last = fused is None
        self._fused = fused
        self._seen: list[Tensor] = []

    def see(self, layer: int, residual: Tensor) -> None:
        """Keep a copy of the residual stream [T, H] in front of a layer, if that is one of those read."""
        if self._fused is not None and layer in self._fused.layers:
            self._seen.append(copy_residual(residual, self.cells.dtype))

    def take_seen(self) -> tuple[Tensor, ...]:
        """Return the copies of the pass since the last call, [T, H] each."""
        seen, self._seen = tuple(self._seen), []
        return seen

    def write_seen(self, seen: Sequence[Tensor], kv_loc: Tensor) -> None:
        """Fuse the copies of a pass and write them to its cells, [T] int64."""
        if self._fused is not None:
            self.cells[kv_loc] = self._fused.fuse(torch.cat(list(seen), dim=1))

    def write_last(self, hidden: Tensor, kv_loc: Tensor) -> None:
        """Write the last hidden states [T, H] of a pass to its cells, [T] int64, if it holds those."""
        if self.holds_last:
            self.cells[kv_loc] = hidden

    def copy(self, source: Sequence[int], target: Sequence[int], count: Sequence[int]) -> None:
        """Copy cells from page to page: see ``kernels.memory.copy_pages``."""
        copy_pages(self._pages, None, source, target, count)
