"""``HiddenPool``: for each KV cell what a draft head reads of the model there, fused hidden states of some layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.memory import copy_pages, lazy_zeros
from ...kernels.ops import copy_residual
from .layers import Projection


class HiddenPool:
    """Fused hidden states of every token in the KV pool, page by page as its K and V.

    A prefix hit brings them along, so a draft head reads a cached prompt like a computed one.

    Args:
        layers: those whose input, the residual stream [T, H] in front of them, is read; ascending.
        fuse: the product of these side by side, [T, H * len(layers)] -> [T, H of the head].

    Attributes:
        cells: [num_pages * page_size, H of the head].
        page_bytes: bytes of a page.
    """

    def __init__(
        self, num_pages: int, page_size: int, layers: tuple[int, ...], fuse: Projection, dtype: torch.dtype
    ) -> None:
        self._pages = lazy_zeros((1, num_pages, 1, page_size, fuse.sizes[0]), dtype)
        self.cells = self._pages.view(num_pages * page_size, fuse.sizes[0])
        self.page_bytes = page_size * fuse.sizes[0] * dtype.itemsize
        self._layers, self._fuse = layers, fuse
        self._seen: list[Tensor] = []

    def see(self, layer: int, residual: Tensor) -> None:
        """Keep a copy of the residual stream [T, H] in front of a layer, if that is one of those read."""
        if layer in self._layers:
            self._seen.append(copy_residual(residual, self.cells.dtype))

    def take_seen(self) -> tuple[Tensor, ...]:
        """Return the copies of the pass since the last call, [T, H] each."""
        seen, self._seen = tuple(self._seen), []
        return seen

    def write(self, seen: Sequence[Tensor], kv_loc: Tensor) -> None:
        """Fuse the copies of a pass and write them to its cells, [T] int64."""
        self.cells[kv_loc] = self._fuse(torch.cat(list(seen), dim=1))

    def copy(self, source: Sequence[int], target: Sequence[int], count: Sequence[int]) -> None:
        """Copy cells from page to page: see ``kernels.memory.copy_pages``."""
        copy_pages(self._pages, None, source, target, count)
