"""Layout of 8-bit KV caches, and reading and writing them in plain torch.

A key or value of a token and head is D bytes and one scale in fp32, its largest magnitude / 127; integers are rounded
to the nearest, ties to even. The cache of a layer has shape [num_pages, Hkv, page_size, D + 4] bytes, but the shape
only gives the size: a KV head of a page holds page_size * D bytes first, then page_size scales. The bytes are in the
order in which integer products read them:

    keys    [page_size / 16, D / 4, 16 keys, 4] bytes of value + 128
    values  [page_size / 4, D, 4 keys] signed bytes

The native kernels define the same layout in ``kernels/cpu/src/attention/int8_kv.h``.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

DTYPE: Final = torch.uint8  # element type of an 8-bit cache
SCALE_BYTES: Final = 4
CELLS: Final = 16  # page sizes are multiples of it
_WORD: Final = 4
_BIAS: Final = 128
_MOST: Final = 127
_LEAST: Final = 1e-30  # least largest magnitude; below it all bytes are 0


def is_int8(cache: Tensor) -> bool:
    return cache.dtype is DTYPE


def head_dim(cache: Tensor) -> int:
    """Return D of a cache of any type."""
    return cache.shape[-1] - SCALE_BYTES if is_int8(cache) else cache.shape[-1]


def keys(pages: Tensor) -> Tensor:
    """Dequantise the keys of some pages: [n, Hkv, page_size, D + 4] bytes -> [n, Hkv, page_size, D] fp32."""
    count, heads, page_size, _ = pages.shape
    data, scales = _parts(pages)
    panels = data.view(count, heads, page_size // CELLS, -1, CELLS, _WORD)
    numbers = panels.transpose(3, 4).reshape(count, heads, page_size, -1).float() - _BIAS
    return numbers * scales[..., None]


def values(pages: Tensor) -> Tensor:
    """Dequantise the values of some pages, shapes as for ``keys``."""
    count, heads, page_size, _ = pages.shape
    data, scales = _parts(pages)
    words = data.view(torch.int8).view(count, heads, page_size // _WORD, -1, _WORD)
    return words.transpose(3, 4).reshape(count, heads, page_size, -1).float() * scales[..., None]


def store_keys(cache: Tensor, page: Tensor, cell: Tensor, k: Tensor, static: Tensor | None = None) -> None:
    """Quantise keys of tokens into their cells: page and cell [T], k [T, Hkv, D] of any floating type.

    Args:
        static: [Hkv] fp32, scales to use for all tokens; None for a scale computed for each token.
    """
    numbers, scales = _rounded(k, static)
    data, known = _parts(cache)
    panels = data.view(*data.shape[:2], -1, k.shape[2] // _WORD, CELLS, _WORD)
    panels[page, :, cell // CELLS, :, cell % CELLS] = (numbers + _BIAS).byte().unflatten(2, (-1, _WORD))
    known[page, :, cell] = scales


def store_values(cache: Tensor, page: Tensor, cell: Tensor, v: Tensor, static: Tensor | None = None) -> None:
    """Quantise values of tokens into their cells, as ``store_keys``."""
    numbers, scales = _rounded(v, static)
    data, known = _parts(cache)
    words = data.view(torch.int8).view(*data.shape[:2], -1, v.shape[2], _WORD)
    words[page, :, cell // _WORD, :, cell % _WORD] = numbers.to(torch.int8)
    known[page, :, cell] = scales


def _parts(pages: Tensor) -> tuple[Tensor, Tensor]:
    """Views: the bytes [n, Hkv, page_size * D], and the scales [n, Hkv, page_size] in fp32."""
    flat = pages.flatten(2)
    size = pages.shape[2] * head_dim(pages)
    return flat[..., :size], flat[..., size:].view(torch.float32)


def by_static(x: Tensor, static: Tensor) -> tuple[Tensor, Tensor]:
    """Divide x [T, Hkv, D] fp32 by static scales [Hkv]; returns also the scales [T, Hkv] to store.

    For a vector with a number that is not finite, the scale is not finite either, and the result is zeros.
    """
    most = x.abs().amax(-1)
    known = torch.where(most.isfinite(), static, most)
    return torch.where(most.isfinite()[..., None], x / static[:, None], 0.0), known


def _rounded(x: Tensor, static: Tensor | None) -> tuple[Tensor, Tensor]:
    """Round to integers within 127, as floats, or within -128 by static scales; returns them and their scales."""
    if static is not None:
        scaled, known = by_static(x.float(), static)
        return scaled.round().clamp(-_BIAS, _MOST), known
    most = x.float().abs().amax(-1)
    inverse = torch.where(most > _LEAST, torch.full_like(most, _MOST) / most, 0.0)  # number / tensor rounds twice
    return (x.float() * inverse[..., None]).round(), most / _MOST
