"""GGUF's blocks as numbers and scales of groups, for kernels of a GPU (``kernels.layouts.grouped_forms``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Final

import torch
from torch import Tensor

from ...kernels.grouped_weights import NumberForm, Offsets, Scales, StoredNumbers
from ..checkpoint.gguf import TENSOR_TYPES
from . import mxfp4, nvfp4
from .gguf_tables import INTEGERS, TABLE_TYPES, TableType

_PIECE: Final = 1 << 23  # values that are unpacked at once
_SUPER_BLOCK: Final = 256
_SIZES: Final = {name: (block, size) for name, block, size in TENSOR_TYPES.values()}


def gguf_numbers(type_name: str, rows: Tensor, width: int) -> StoredNumbers | None:
    """Convert a matrix in GGUF blocks to numbers and scales of groups, which represent exactly the same weights.

    Returns None for a type that GPU kernels cannot read, and for a matrix with scales that are not finite. Such a
    matrix is dequantised instead, which raises an error for these scales.

    Args:
        rows: the blocks, [N, bytes of a row] uint8.
        width: number of values in a row.
    """
    if type_name not in GROUPED_TYPES:
        return None
    block, size = _SIZES[type_name]
    found = _READERS[type_name](_Blocks(rows.view(len(rows), width // block, size), block))
    return found if found is None or all(map(_is_finite, (found.scales, found.super_scales, *_minima(found)))) else None


def _minima(found: StoredNumbers) -> tuple[Tensor | None, ...]:
    return (found.offsets if found.offset_kind is Offsets.MINIMA else None), found.super_offsets


def _is_finite(tensor: Tensor | None) -> bool:
    """Return whether a tensor is of integers, or of finite numbers."""
    return tensor is None or not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


class _Blocks:
    """The blocks of a matrix, [N, blocks, bytes] uint8."""

    def __init__(self, raw: Tensor, block: int) -> None:
        self._raw = raw
        self.shape = len(raw), raw.shape[1] * block

    def bytes(self, first: int, end: int) -> Tensor:
        return self._raw[..., first:end]

    def field(self, of: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a field of each block: [N, blocks, ...]."""
        return of(self._raw)

    def halves(self, at: int) -> Tensor:
        """Return the number in half precision at a byte of each block: [N, blocks]."""
        return self._raw[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)

    def pieces(self, unpack: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
        """Yield rows [n, K] of numbers that ``unpack`` computes from [n, blocks, bytes]."""
        step = max(1, _PIECE // self.shape[1])
        for first in range(0, len(self._raw), step):
            yield unpack(self._raw[first : first + step]).flatten(1)


def _nibbles(at: int) -> Callable[[Tensor], Tensor]:
    """Return an unpacker of 4-bit numbers: the low halves of a block's bytes from ``at`` on, then the high ones."""
    return lambda raw: torch.cat((raw[..., at:] & 15, raw[..., at:] >> 4), dim=-1)


def _with_fifth(at: int) -> Callable[[Tensor], Tensor]:
    """Return an unpacker of 5-bit numbers: 32 fifth bits in the four bytes at ``at``, then halves as in `_nibbles`."""

    def unpack(raw: Tensor) -> Tensor:
        shifts = torch.arange(8, dtype=torch.uint8)
        fifth = ((raw[..., at : at + 4, None] >> shifts) & 1).flatten(-2)
        return _nibbles(at + 4)(raw) | (fifth << 4)

    return unpack


def _q4_0(blocks: _Blocks) -> StoredNumbers:
    return StoredNumbers(blocks.shape, NumberForm.INT4, blocks.pieces(_nibbles(2)), blocks.halves(0))


def _q4_1(blocks: _Blocks) -> StoredNumbers:
    pieces, minima = blocks.pieces(_nibbles(4)), blocks.halves(2)
    return StoredNumbers(
        blocks.shape, NumberForm.INT4, pieces, blocks.halves(0), offsets=minima, offset_kind=Offsets.MINIMA
    )


def _q5_0(blocks: _Blocks) -> StoredNumbers:
    return StoredNumbers(blocks.shape, NumberForm.INT5, blocks.pieces(_with_fifth(2)), blocks.halves(0))


def _q5_1(blocks: _Blocks) -> StoredNumbers:
    pieces, minima = blocks.pieces(_with_fifth(4)), blocks.halves(2)
    return StoredNumbers(
        blocks.shape, NumberForm.INT5, pieces, blocks.halves(0), offsets=minima, offset_kind=Offsets.MINIMA
    )


def _q8_0(blocks: _Blocks) -> StoredNumbers:
    return StoredNumbers(blocks.shape, NumberForm.INT8, blocks.pieces(lambda raw: raw[..., 2:]), blocks.halves(0))


def _sub_scales(blocks: _Blocks) -> tuple[Tensor, Tensor]:
    """Scales and minima of six bits of the eight sub-blocks of Q4_K and Q5_K: two of [N, K / 32] uint8."""
    first, second, third = blocks.bytes(4, 8), blocks.bytes(8, 12), blocks.bytes(12, 16)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=-1)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)
    return scales.flatten(1), minima.flatten(1)


def _paired_nibbles(raw: Tensor) -> Tensor:
    """[n, blocks, 128] bytes -> [n, blocks, 8, 32]: 32 bytes hold two sub-blocks, the first in their low halves."""
    quarters = raw.unflatten(-1, (4, 1, 32))
    return torch.cat((quarters & 15, quarters >> 4), dim=-2).flatten(-3, -2)


def _super(blocks: _Blocks, numbers: NumberForm, unpack: Callable[[Tensor], Tensor]) -> StoredNumbers:
    scales, minima = _sub_scales(blocks)
    return StoredNumbers(
        shape=blocks.shape,
        numbers=numbers,
        pieces=blocks.pieces(unpack),
        scales=scales,
        scale_kind=Scales.PRODUCTS,
        super_scales=blocks.halves(0),
        offsets=minima,
        offset_kind=Offsets.PRODUCTS,
        super_offsets=blocks.halves(2),
    )


def _q4_k(blocks: _Blocks) -> StoredNumbers:
    return _super(blocks, NumberForm.INT4, lambda raw: _paired_nibbles(raw[..., 16:]).flatten(2))


def _q5_k(blocks: _Blocks) -> StoredNumbers:
    def unpack(raw: Tensor) -> Tensor:
        shifts = torch.arange(8, dtype=torch.uint8)[:, None]
        fifth = (raw[..., None, 16:48] >> shifts & 1) << 4
        return (_paired_nibbles(raw[..., 48:]) | fifth).flatten(2)

    return _super(blocks, NumberForm.INT5, unpack)


def _q6_k(blocks: _Blocks) -> StoredNumbers:
    """Two halves of 128: 64 bytes of low nibbles, 32 bytes of high bit pairs; a scale for each 16."""

    def unpack(raw: Tensor) -> Tensor:
        low = raw[..., :128].unflatten(-1, (2, 1, 64))
        low = torch.cat((low & 15, low >> 4), dim=-2).unflatten(-1, (2, 32)).flatten(-3, -2)
        shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8)[:, None]
        high = (raw[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3) << 4
        numbers: Tensor = (low | high).flatten(2)
        return numbers

    scales = blocks.bytes(192, 208).contiguous().view(torch.int8).flatten(1)
    return StoredNumbers(
        blocks.shape, NumberForm.INT6, blocks.pieces(unpack), scales, Scales.PRODUCTS, super_scales=blocks.halves(208)
    )


def _mxfp4(blocks: _Blocks) -> StoredNumbers | None:
    exponents = blocks.bytes(0, 1).flatten(1)
    if not mxfp4.are_numbers(exponents):
        return None
    return StoredNumbers(blocks.shape, NumberForm.E2M1, blocks.pieces(_nibbles(1)), exponents, Scales.E8M0)


def _nvfp4(blocks: _Blocks) -> StoredNumbers | None:
    scales = blocks.field(nvfp4.block_scales).flatten(1)
    if not nvfp4.are_numbers(scales):
        return None
    return replace(nvfp4.stored_meaning(scales, 1.0), shape=blocks.shape, pieces=blocks.pieces(nvfp4.block_codes))


def _of_table(kind: TableType) -> Callable[[_Blocks], StoredNumbers]:
    """Return the reader of a type whose codes are indices into a table, or integers less eight."""

    def read(blocks: _Blocks) -> StoredNumbers:
        is_integer = kind.minima is not None or kind.table == INTEGERS
        scales, minima, coarse = kind.scales, kind.minima, kind.coarse
        factor = blocks.field(kind.factor)
        return StoredNumbers(
            shape=blocks.shape,
            numbers=NumberForm.INT4 if is_integer else NumberForm.TABLE,
            pieces=blocks.pieces(kind.codes),
            scales=factor if scales is None else blocks.field(scales).flatten(1),
            scale_kind=Scales.FLOATS if scales is None else Scales.PRODUCTS,
            super_scales=None if scales is None else factor,
            offsets=None if minima is None else blocks.field(minima).flatten(1),
            offset_kind=Offsets.MIDDLE if minima is None else Offsets.PRODUCTS,
            super_offsets=None if coarse is None else blocks.field(coarse),
            table=None if is_integer else torch.tensor(kind.table),
        )

    return read


_READERS: Final[dict[str, Callable[[_Blocks], StoredNumbers | None]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    **{name: _of_table(kind) for name, kind in TABLE_TYPES.items()},
}

GROUPED_TYPES: Final = frozenset(_READERS)
"""Types of blocks that kernels of a GPU multiply with as they are."""


@cache
def grouped_bits(type_name: str) -> float:
    """Return the bits of a value for kernels of a GPU: as in the file, or four for types with fewer bits."""
    block, size = _SIZES[type_name]
    if type_name not in TABLE_TYPES:
        return 8 * size / block
    raw = torch.zeros(1, _SUPER_BLOCK // block * size, dtype=torch.uint8)
    found = _READERS[type_name](_Blocks(raw.view(1, -1, size), block))
    assert found is not None
    tensors = (found.scales, found.super_scales, found.offsets, found.super_offsets)
    return found.numbers.bits + 8 * sum(each.nbytes for each in tensors if each is not None) / math.prod(found.shape)
