"""Forms of paged KV: the model's type, 8 bits in the order of a CPU's products, and rows of 8 bits for a GPU.

The type of a cache determines its form. In rows of 8 bits a key or value of a token and head is D bytes and one scale
in fp32: its largest magnitude divided by that of the byte's type. The cache of a layer has shape [num_pages, Hkv,
page_size, D + 4], but the shape only gives the size: a KV head of a page holds page_size rows of D bytes first, then
page_size scales. The CPU's order is that of ``int8_kv_layout``.

With static scales from a checkpoint, all tokens of a KV head have the same scale: numbers beyond the byte's range are
clamped to it. Static scales are stored with each token nevertheless, so that all code reads a cache in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from . import int8_kv_layout
from .int8_kv_layout import SCALE_BYTES

INT8: Final = torch.int8
"""Type of a cache of signed integers, in rows."""
FLOAT8: Final = torch.float8_e4m3fn
"""Type of a cache of E4M3, in rows."""
ROW_DTYPES: Final = (INT8, FLOAT8)
NAMES: Final = {INT8: "int8 rows", FLOAT8: "fp8 rows", int8_kv_layout.DTYPE: "int8"}
StaticForm = Literal["int8", "fp8"]
"""Numbers that static scales are made for: signed integers, or E4M3."""
_STATIC_FORMS: Final[dict[torch.dtype, StaticForm]] = {INT8: "int8", FLOAT8: "fp8", int8_kv_layout.DTYPE: "int8"}
_LARGEST: Final = {INT8: 127.0, FLOAT8: 448.0}
_LEAST: Final = 1e-30  # least largest magnitude; below it all bytes are 0


@dataclass(frozen=True, slots=True)
class StaticScales:
    """Scales of a layer's keys and values: number = value / scale, rounded, within the range of the form.

    Attributes:
        form: form of the numbers.
        values: [2, Hkv] fp32, of the keys of each KV head, then of the values; finite and above 0.
    """

    form: StaticForm
    values: Tensor


def static_of(cache: Tensor, scales: StaticScales | None) -> Tensor | None:
    """Return static scales [2, Hkv] where they are made for a cache's numbers; None elsewhere."""
    is_used = scales is not None and _STATIC_FORMS.get(cache.dtype) == scales.form
    return scales.values if scales is not None and is_used else None


def takes_static(dtype: torch.dtype, form: StaticForm) -> bool:
    """Return whether static scales of a form are made for the numbers of a cache of this type."""
    return _STATIC_FORMS.get(dtype) == form


def form_name(dtype: torch.dtype) -> str:
    """Return the name of the form of a cache of this type: what of it can be read by another pool of the name."""
    return NAMES.get(dtype, str(dtype).removeprefix("torch."))


def is_rows(cache: Tensor) -> bool:
    """Return whether a cache has rows of 8 bits."""
    return cache.dtype in ROW_DTYPES


def has_scales(dtype: torch.dtype) -> bool:
    """Return whether a cache of this type has a scale for each token and head."""
    return dtype in NAMES


def head_dim(cache: Tensor) -> int:
    """Return D of a cache of any form."""
    return cache.shape[-1] - SCALE_BYTES if has_scales(cache.dtype) else cache.shape[-1]


def keys(pages: Tensor) -> Tensor:
    """Return the keys of some pages: [n, Hkv, page_size, D or D + 4] -> [n, Hkv, page_size, D], of bytes in fp32."""
    if is_rows(pages):
        return _rows(pages)
    return int8_kv_layout.keys(pages) if int8_kv_layout.is_int8(pages) else pages


def values(pages: Tensor) -> Tensor:
    """Return the values of some pages, shapes as for ``keys``."""
    if is_rows(pages):
        return _rows(pages)
    return int8_kv_layout.values(pages) if int8_kv_layout.is_int8(pages) else pages


def store(
    k_cache: Tensor,
    v_cache: Tensor,
    page: Tensor,
    cell: Tensor,
    k: Tensor,
    v: Tensor,
    scales: StaticScales | None = None,
) -> None:
    """Write keys and values of tokens to their cells: page and cell [T], k and v [T, Hkv, D] of any floating type.

    Args:
        scales: static scales; without effect if they were made for another form of numbers.
    """
    of_k, of_v = (None, None) if (known := static_of(k_cache, scales)) is None else known
    if is_rows(k_cache):
        _store_rows(k_cache, page, cell, k, of_k)
        _store_rows(v_cache, page, cell, v, of_v)
    elif int8_kv_layout.is_int8(k_cache):
        int8_kv_layout.store_keys(k_cache, page, cell, k, of_k)
        int8_kv_layout.store_values(v_cache, page, cell, v, of_v)
    else:
        k_cache[page, :, cell] = k.to(k_cache.dtype)
        v_cache[page, :, cell] = v.to(v_cache.dtype)


def _parts(pages: Tensor) -> tuple[Tensor, Tensor]:
    """Views: the rows as bytes [n, Hkv, page_size, D], and the scales [n, Hkv, page_size] in fp32."""
    page_size, dim = pages.shape[2], head_dim(pages)
    flat = pages.view(torch.uint8).flatten(2)
    size = page_size * dim
    return flat[..., :size].unflatten(2, (page_size, dim)), flat[..., size:].view(torch.float32)


def _rows(pages: Tensor) -> Tensor:
    numbers, scales = _parts(pages)
    return numbers.contiguous().view(pages.dtype).float() * scales[..., None]


def _store_rows(cache: Tensor, page: Tensor, cell: Tensor, x: Tensor, static: Tensor | None) -> None:
    numbers, scales = _parts(cache)
    exact, largest = x.float(), _LARGEST[cache.dtype]
    if static is not None:
        scaled, known = int8_kv_layout.by_static(exact, static)
        rounded = scaled.round().clamp(-128, 127).to(INT8) if cache.dtype is INT8 else _saturated(scaled)
    else:
        most = exact.abs().amax(-1)
        inverse = torch.where(most > _LEAST, torch.full_like(most, largest) / most, 0.0)
        scaled, known = exact * inverse[..., None], most / largest
        rounded = scaled.round().to(INT8) if cache.dtype is INT8 else _saturated(scaled)
    numbers[page, :, cell] = rounded.view(torch.uint8)
    scales[page, :, cell] = known


def _saturated(x: Tensor) -> Tensor:
    return x.clamp(-_LARGEST[FLOAT8], _LARGEST[FLOAT8]).to(FLOAT8)
