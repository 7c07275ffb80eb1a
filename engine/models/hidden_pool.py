"""``HiddenPool``: for each KV cell the model's hidden states that a draft head reads: the last ones or fused ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.memory import copy_pages, zeros
from ...kernels.ops import copy_residual
from .layers import Projection


@dataclass(frozen=True, slots=True)
class FusedLayers:
    """Hidden states of some layers, as input of a draft head.

    Attributes:
        layers: the layers before which the residual stream [T, H] is read; ascending.
        fuse: projection of these streams, side by side: [T, H * len(layers)] -> [T, H of the head].
    """

    layers: tuple[int, ...]
    fuse: Projection


@dataclass(frozen=True, slots=True)
class LastHidden:
    """Hidden states after the last layer, as input of a draft head.

    Attributes:
        is_normed: whether they are read after the model's last norm, else before it.
    """

    is_normed: bool


class HiddenPool:
    """Hidden states of every token in the KV pool, stored by page like its K and V.

    A prefix hit also finds the hidden states, so a draft head reads a cached prompt like a computed one.

    Args:
        width: H of the head.
        reads: which hidden states are stored.

    Attributes:
        cells: [num_pages * page_size, H of the head], followed by one more page for the tokens that pad a step, whose
            cell is -1.
        page_bytes: bytes of a page.
        holds_last: whether the pool holds the last hidden states, so that a forward pass must keep those of all tokens.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        reads: FusedLayers | LastHidden,
    ) -> None:
        self._pages = zeros((1, num_pages + 1, 1, page_size, width), dtype, device)
        self.cells = self._pages.view(-1, width)
        self.page_bytes = page_size * width * dtype.itemsize
        self.holds_last = isinstance(reads, LastHidden)
        self._reads = reads
        self._seen: list[Tensor] = []

    def see(self, layer: int, residual: Tensor) -> None:
        """Keep a copy of the residual stream [T, H] before a layer, if the layer is one of ``reads``."""
        if isinstance(self._reads, FusedLayers) and layer in self._reads.layers:
            if layer == self._reads.layers[0]:
                self._seen.clear()  # of a pass that was broken off, as one for which there was no memory
            self._seen.append(copy_residual(residual, self.cells.dtype))

    def take_seen(self) -> tuple[Tensor, ...]:
        """Return the copies made since the last call, [T, H] each."""
        seen, self._seen = tuple(self._seen), []
        return seen

    def write_seen(self, seen: Sequence[Tensor], kv_loc: Tensor) -> None:
        """Fuse the copies of a pass and write them to its cells, [T] int64."""
        if isinstance(self._reads, FusedLayers):
            self.cells[kv_loc] = self._reads.fuse(torch.cat(list(seen), dim=1))

    def write_last(self, hidden: Tensor, residual: Tensor, kv_loc: Tensor) -> None:
        """Write the last hidden states of a pass to its cells, [T] int64, if ``holds_last``.

        Args:
            hidden: [T, H], hidden states after the last norm.
            residual: [T, H] fp32, hidden states before the last norm.
        """
        if isinstance(self._reads, LastHidden):
            self.cells[kv_loc] = hidden if self._reads.is_normed else residual.to(self.cells.dtype)

    def copy(self, source: Sequence[int], target: Sequence[int], count: Sequence[int]) -> None:
        """Copy cells from page to page: see ``kernels.memory.copy_pages``."""
        copy_pages(self._pages, None, source, target, count)
