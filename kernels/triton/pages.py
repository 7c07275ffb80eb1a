"""Triton kernel that copies a KV page in all layers at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import triton
import triton.language as tl
from torch import Tensor

from .launch import NARROW_TYPES, Launch, cdiv, is_narrow, meta

_BLOCK = 1024  # numbers of a program


@triton.jit(do_not_specialize=["source", "target", "cells", "num_pages", "kv_heads"])
def _copy_page(k, v, source, target, cells, num_pages, kv_heads, page, dim, BLOCK: tl.constexpr, VALUES: tl.constexpr):
    """Program (l, h, b): numbers ``b * BLOCK ...`` of KV head h of layer l, of K and, with VALUES, of V.

    ``page`` is the number of values of one head in a page, and ``dim`` the number of values in a cell. The first
    ``cells`` cells of the page are copied.
    """
    layer = tl.program_id(0).to(tl.int64) * num_pages
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = i < cells * dim
    origin = ((layer + source) * kv_heads + tl.program_id(1)) * page + i
    destination = ((layer + target) * kv_heads + tl.program_id(1)) * page + i
    tl.store(k + destination, tl.load(k + origin, inside, other=0.0), inside)
    if VALUES:
        tl.store(v + destination, tl.load(v + origin, inside, other=0.0), inside)


def takes(*caches: Tensor) -> bool:
    """Return whether the kernel supports these caches [L, num_pages, Hkv, page_size, D]: K and V, or only K."""
    return is_narrow(*caches) and caches[0].shape[4] % 16 == 0


def copy_pages(k: Tensor, v: Tensor | None, source: Sequence[int], target: Sequence[int], count: Sequence[int]) -> None:
    """``kernels.memory.copy_pages``, one launch per copy: copies stay in order and need no transfer to the device."""
    for origin, destination, cells in zip(source, target, count, strict=True):
        _launch(k, v, origin, destination, cells).run()


def _launch(k: Tensor, v: Tensor | None, source: int, target: int, cells: int) -> Launch:
    layers, num_pages, kv_heads, page_size, dim = k.shape
    args = (k, k if v is None else v, source, target, cells, num_pages, kv_heads, page_size * dim, dim)
    constants = {"BLOCK": _BLOCK, "VALUES": v is not None}
    return Launch(_copy_page, (layers, kv_heads, cdiv(cells * dim, _BLOCK)), args, constants)


def variants() -> Iterator[tuple[str, Launch]]:
    """Yield every compilation of ``copy_pages``."""
    for name, dtype in NARROW_TYPES.items():
        cache = meta(2, 8, 2, 16, 64, dtype=dtype)
        yield f"copy_page/{name}", _launch(cache, cache, 0, 1, 16)
        yield f"copy_page/{name}-keys", _launch(cache, None, 0, 1, 16)
