"""Repack GGUF's ternary and grid types into blocks of K-quants, which CPU kernels read, without changing the weights.

    TQ1_0, TQ2_0     d (q - 1)                   Q2_K   with steps of 1                       2.6 bits of each number
    IQ1_S, IQ3_S     (d / m) (2 s + 1) v         Q5_K   q = v + 16, the minimum 16 (d / m)    5.5
    IQ1_M, IQ3_XXS   (d / m) (2 s + 1) v         Q6_K   q = v + 32                            6.6
    IQ2_XXS to _S    d (2 s + 1) t[q]            IQ2    Q3_K of indices into six values       3.6

v is an integer, m a power of two. The last column is bits per weight. Repacked blocks are larger than those in the
file, but take only a sixth to a half of the memory of dequantised weights. The values of IQ2's types have too many
digits for any of GGUF's blocks, so their blocks, ``IQ2``, hold indices into a table in the layout of Q3_K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ...kernels.quantised_weights import BLOCK_SIZES, BlockType
from ..checkpoint.gguf import TENSOR_TYPES
from .gguf_tables import TABLE_TYPES, VALUES

_SIZES: Final = {name: size for name, _, size in TENSOR_TYPES.values()}
_BLOCK: Final = 32
_SIGNED_STEP: Final = 32  # offset that Q3_K adds to its scales of six bits before it stores them
_MOST_MINIMUM: Final = 65504 / 16  # factor whose 16-fold is within half precision


@dataclass(frozen=True, slots=True)
class _Repacking:
    """The conversion of a type's blocks to another type.

    Attributes:
        kept_as: type of the repacked blocks.
        divisor: m in the table above.
        pack: packs v [..., 256] (for IQ2 types, indices into the table), scales [..., groups] or None, and factors
            [...] into the bytes of blocks.
    """

    kept_as: BlockType
    divisor: int
    pack: Callable[[Tensor, Tensor | None, Tensor], Tensor]


def kept_as(type_name: str) -> BlockType | None:
    """Return the type of blocks that keeps the numbers of one; None for one that is kept by none other."""
    found = _REPACKINGS.get(type_name)
    return None if found is None else found.kept_as


def kept_bytes(type_name: str, stored: int) -> int:
    """Return the number of bytes of repacked blocks, for ``stored`` bytes of a type that is repacked."""
    return stored // _SIZES[type_name] * BLOCK_SIZES[_REPACKINGS[type_name].kept_as][1]


def are_exact(type_name: str, raw: Tensor) -> bool:
    """Return whether all factors of a matrix, the bytes of its blocks, are finite and exact in the other format."""
    factors = TABLE_TYPES[type_name].factor(raw.reshape(-1, _SIZES[type_name])).float()
    divisor = _REPACKINGS[type_name].divisor
    divided = (factors / divisor).half().float()
    return bool(((divided * divisor == factors) & (divided.abs() <= _MOST_MINIMUM)).all())


def repacked_rows(rows: Tensor, type_name: str) -> Tensor:
    """Return rows [n, bytes] uint8 of a type whose factors ``are_exact`` in the blocks that it is ``kept_as``."""
    repacking, table = _REPACKINGS[type_name], TABLE_TYPES[type_name]
    raw = rows.view(len(rows), -1, _SIZES[type_name])
    # Of IQ2 the level of a code is in its lowest two bits, its sign in the fourth.
    places = (code % 4 + code // 8 * 4 for code in range(16))
    levels = places if repacking.kept_as == "IQ2" else (value * repacking.divisor for value in table.table)
    numbers = torch.tensor([int(level) for level in levels], dtype=torch.int8)
    scales = None if table.scales is None else table.scales(raw).to(torch.uint8)
    factors = (table.factor(raw).float() / repacking.divisor).half()
    return repacking.pack(numbers[table.codes(raw).int()], scales, factors).flatten(1)


def _as_bytes(factors: Tensor) -> Tensor:
    """[...] in half precision -> [..., 2] uint8."""
    return factors[..., None].contiguous().view(torch.uint8)


def _fields(values: Tensor, bits: int) -> Tensor:
    """[..., n, k] of few bits -> [..., k] bytes with n of them, the first in the lowest bits."""
    shifts = bits * torch.arange(values.shape[-2], dtype=torch.uint8)[:, None]
    packed: Tensor = (values << shifts).sum(-2).to(torch.uint8)
    return packed


def _as_q2_k(numbers: Tensor, _: Tensor | None, factors: Tensor) -> Tensor:
    """Steps of scale and minimum, both 1; two bits, of four blocks in 32 bytes; both factors."""
    steps = torch.full((*factors.shape, 16), 0x11, dtype=torch.uint8)
    pairs = _fields((numbers + 1).to(torch.uint8).unflatten(-1, (2, 4, _BLOCK)), 2).flatten(-2)
    factor = _as_bytes(factors)
    return torch.cat((steps, pairs, factor, factor), dim=-1)


def _as_iq2(numbers: Tensor, scales: Tensor | None, factors: Tensor) -> Tensor:
    """Third bits, of eight blocks in 32 bytes; two bits, of four blocks; sixteen scales of six bits; the factor."""
    assert scales is not None
    q = numbers.to(torch.uint8)
    third = _fields((q >> 2).unflatten(-1, (8, _BLOCK)), 1)
    pairs = _fields((q & 3).unflatten(-1, (2, 4, _BLOCK)), 2).flatten(-2)
    steps = scales.repeat_interleave(16 // scales.shape[-1], dim=-1) + _SIGNED_STEP
    low = _fields((steps & 15).unflatten(-1, (2, 8)), 4)
    high = _fields((steps >> 4).unflatten(-1, (4, 4)), 2)
    return torch.cat((third, pairs, low, high, _as_bytes(factors)), dim=-1)


def _as_q5_k(numbers: Tensor, scales: Tensor | None, factors: Tensor) -> Tensor:
    """Both factors; eight scales of six bits, minima the same; fifth bits; four bits, of two blocks in 32 bytes."""
    assert scales is not None
    q = (numbers + 16).to(torch.uint8).unflatten(-1, (8, _BLOCK))
    early, late = scales[..., :4], scales[..., 4:]
    steps = torch.cat((early | late >> 4 << 6, early | late >> 4 << 6, late & 15 | (late & 15) << 4), dim=-1)
    nibbles = _fields((q & 15).unflatten(-2, (4, 2)), 4).flatten(-2)
    return torch.cat((_as_bytes(factors), _as_bytes(16 * factors), steps, _fields(q >> 4, 1), nibbles), dim=-1)


def _as_q6_k(numbers: Tensor, scales: Tensor | None, factors: Tensor) -> Tensor:
    """Four bits, of two blocks in 32 bytes, and two bits, of four, of each half; a scale of each 16; the factor."""
    assert scales is not None
    q = (numbers + 32).to(torch.uint8).unflatten(-1, (2, 4, _BLOCK))
    low = (q & 15).unflatten(-2, (2, 2))  # half, pair of quarters, quarter
    nibbles = _fields(low.transpose(-3, -2), 4).flatten(-3)
    of_16 = scales.repeat_interleave(VALUES // 16 // scales.shape[-1], dim=-1)
    return torch.cat((nibbles, _fields(q >> 4, 2).flatten(-2), of_16, _as_bytes(factors)), dim=-1)


_REPACKINGS: Final[dict[str, _Repacking]] = {
    "TQ1_0": _Repacking("Q2_K", 1, _as_q2_k),
    "TQ2_0": _Repacking("Q2_K", 1, _as_q2_k),
    "IQ1_S": _Repacking("Q5_K", 8, _as_q5_k),
    "IQ3_S": _Repacking("Q5_K", 1, _as_q5_k),
    "IQ1_M": _Repacking("Q6_K", 8, _as_q6_k),
    "IQ3_XXS": _Repacking("Q6_K", 2, _as_q6_k),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S"), _Repacking("IQ2", 1, _as_iq2)),
}
