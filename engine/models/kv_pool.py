"""The K and V tensors of all layers, in pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...kernels.layouts import int8_kv_layout
from ...kernels.memory import copy_pages, lazy_zeros, populate
from ..batch import PageCopy
from ..checkpoint.model_config import ModelConfig

_POPULATED_AT_ONCE = 1 << 21  # bytes of a layer: a huge page, for which other threads that ask for memory may wait


def bytes_per_page(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page of ``page_size`` tokens: K and V in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * page_size * _width(config, dtype) * dtype.itemsize


def _width(config: ModelConfig, dtype: torch.dtype) -> int:
    """The last dimension of the pool's tensors."""
    return config.head_dim + (int8_kv_layout.SCALE_BYTES if dtype is int8_kv_layout.DTYPE else 0)


class KvPool:
    """K and V of every page, written by the kernels of a forward pass and by ``copy``.

    Args:
        dtype: the model's, or ``int8_kv_layout.DTYPE``.

    Attributes:
        k: [num_layers, num_pages, num_kv_heads, page_size, head_dim], or 8-bit (``int8_kv_layout``).
        v: the same.
        k_layers: ``k`` layer by layer, each [num_pages, num_kv_heads, page_size, head_dim].
        v_layers: the same for ``v``.
    """

    def __init__(
        self, config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.num_layers, num_pages, config.num_kv_heads, page_size, _width(config, dtype))
        self.k = _zeros(shape, dtype, device)
        self.v = _zeros(shape, dtype, device)
        self.k_layers = tuple(self.k.unbind(0))
        self.v_layers = tuple(self.v.unbind(0))
        self.num_pages = num_pages
        self.page_size = page_size

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Do the copies in their order. Raises IndexError for a page or a count outside the pool."""
        if not copies:  # as in most steps
            return
        source = [copy.source for copy in copies]
        target = [copy.target for copy in copies]
        count = [copy.num_tokens for copy in copies]
        copy_pages(self.k, self.v, source, target, count)

    def populate(self, first: int) -> int:
        """Take the memory of some pages from ``first`` on now, on a CPU: a step that writes a page waits for it else.

        Another thread may compute meanwhile. Where the operating system cannot do that, nothing is done.

        Returns:
            Up to which page there is nothing left to do.
        """
        end = min(first + max(1, _POPULATED_AT_ONCE // self.k_layers[0][0].nbytes), self.num_pages)
        try:
            for layer in (*self.k_layers, *self.v_layers):
                populate(layer[first:end])
        except OSError:
            return self.num_pages
        return end


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, not garbage: a masked position still meets its V in a product, and 0 * NaN is NaN.

    On a CPU they take memory only as they are written: torch's own would fill gigabytes that may never be used.
    """
    return lazy_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
