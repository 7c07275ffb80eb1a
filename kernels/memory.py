"""KV memory: lazily committed zeros on the CPU, and copies of KV pages on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import reference
from .backend import native_for, on_triton
from .cpu import arena
from .layouts import kv_forms


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate zeros on the CPU, aligned to a memory page. Memory is used when it is first written.

    The memory is in huge pages if the operating system has them, and is freed with its last view.

    Raises:
        OSError: not enough address space.
    """
    return arena.lazy_zeros(shape, dtype)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros on any device. On a CPU uses ``lazy_zeros``, as torch would write memory that stays unused."""
    return lazy_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)


def populate(tensor: Tensor) -> None:
    """Allocate the memory of ``lazy_zeros``, or of a contiguous part, before the first write. The values stay.

    Another thread may use the same memory meanwhile.

    Raises:
        OSError: not supported by the operating system.
    """
    arena.populate(tensor)


def release_mapped(tensor: Tensor) -> None:
    """Remove a contiguous tensor's whole pages from this process's memory, if it is mapped from a file.

    They are read from the file again if they are used later. Other tensors keep their memory.
    """
    arena.release_mapped(tensor)


def trim_heap() -> None:
    """Return freed memory that the C library has kept for later to the operating system."""
    arena.trim_heap()


def copy_pages(k: Tensor, v: Tensor | None, source: Sequence[int], target: Sequence[int], count: Sequence[int]) -> None:
    """Copy, in list order, the first ``count[i]`` cells of page ``source[i]`` to page ``target[i]`` in all layers.

    For 8-bit KV whole pages are copied.

    Args:
        k: [L, num_pages, Hkv, page_size, D], the K caches of all layers, or in a form of ``kernels.layouts.kv_forms``.
        v: the same for V; None if the keys are the values.
        source: pages to copy from.
        target: pages to copy to.
        count: number of cells to copy, at most page_size each.

    Raises:
        IndexError: a page or a count is outside of the cache.
    """
    _check_pages(k, source, target, count)
    if kv_forms.has_scales(k.dtype):
        # The cells of a page with scales are not contiguous, so whole pages are copied, as float32 words.
        k, v = k.view(torch.float32), None if v is None else v.view(torch.float32)
        count = [k.shape[3]] * len(count)
    caches = (k,) if v is None else (k, v)
    if on_triton(k.device):
        from .triton import pages

        if pages.takes(*caches):
            return pages.copy_pages(k, v, source, target, count)
    if source and (kernels := native_for(*caches)) is not None:
        return kernels.copy_pages(k, v, source, target, count)
    return reference.copy_pages(k, v, source, target, count)


def _check_pages(k: Tensor, source: Sequence[int], target: Sequence[int], count: Sequence[int]) -> None:
    num_pages, page_size = k.shape[1], k.shape[3]
    for page in (*source, *target):
        if not 0 <= page < num_pages:
            raise IndexError(f"page {page} is not in 0 .. {num_pages - 1}")
    for cells in count:
        if not 0 <= cells <= page_size:
            raise IndexError(f"count {cells} is not in 0 .. {page_size}")
