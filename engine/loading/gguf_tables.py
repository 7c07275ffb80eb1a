"""Decode GGUF's blocks of 256 values of 1 to 4 bits: Q2_K, Q3_K, the IQ and the TQ types.

    value = factor of the block * scale of its group * table[code] - minimum

Each code is an index into a table of sixteen values, which is enough for all of these types. The values are the levels
of a grid's points (``gguf_grids``) with their signs, or small integers. Scales are integers. So products are exact in
fp32, and kernels of a GPU read the codes in four bits (``kernels.layouts.grouped_forms``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from .gguf_grids import grid

Fields = Callable[[Tensor], Tensor]
"""Reads fields from the bytes of blocks: [..., bytes] uint8 -> [..., fields]."""

VALUES: Final = 256
"""Number of values of a block; blocks of IQ4_NL have 32."""


@dataclass(frozen=True, slots=True)
class TableType:
    """A type of blocks.

    Attributes:
        table: sixteen values, which the codes select.
        codes: the code of each value, [..., values] uint8.
        factor: factor of each block, [...] in half precision.
        scales: scales of the groups, [..., groups] int8; None if blocks have the factor alone.
        minima: minima of the groups, [..., groups] uint8, to be multiplied by ``coarse``; None if groups have none.
        coarse: factor of the minima of a block, [...] in half precision.
    """

    table: tuple[float, ...]
    codes: Fields
    factor: Fields
    scales: Fields | None = None
    minima: Fields | None = None
    coarse: Fields | None = None

    def decode(self, raw: Tensor) -> Tensor:
        """[N, bytes] uint8 -> [N, values] fp32, exact but for the subtraction of a minimum."""
        values = torch.tensor(self.table, device=raw.device)[self.codes(raw).int()]
        factor = self.factor(raw).float()[:, None]
        if self.scales is None:
            return values * factor
        scales = factor * self.scales(raw).float()
        in_groups = values.unflatten(1, (scales.shape[1], -1)) * scales[..., None]
        if self.minima is not None and self.coarse is not None:
            in_groups = in_groups - (self.coarse(raw).float()[:, None] * self.minima(raw).float())[..., None]
        decoded: Tensor = in_groups.flatten(1)
        return decoded


def _half(at: int) -> Fields:
    """The number in half precision at a byte."""
    return lambda raw: raw[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _words(raw: Tensor, size: int) -> Tensor:
    """Read unsigned words of ``size`` bytes, the lowest byte first: [..., bytes] uint8 -> [..., words] int64."""
    shifts = 8 * torch.arange(size, device=raw.device)
    words: Tensor = (raw.unflatten(-1, (-1, size)).long() << shifts).sum(-1)
    return words


def _shifted(values: Tensor, *shifts: int) -> Tensor:
    """[..., n] -> [..., shifts, n]: each value shifted to the right."""
    by = torch.tensor(shifts, dtype=values.dtype, device=values.device)[:, None]
    return values[..., None, :] >> by


def _fields(values: Tensor, *shifts: int) -> Tensor:
    """[..., n] -> [..., n * shifts]: the fields of each value, side by side."""
    by = torch.tensor(shifts, dtype=values.dtype, device=values.device)
    return (values[..., None] >> by).flatten(-2)


def _bits(signs: Tensor) -> Tensor:
    """[..., n] -> [..., n, 8]: the bits of a byte, the lowest first."""
    return signs[..., None] >> torch.arange(8, dtype=signs.dtype, device=signs.device) & 1


def _with_parity(signs: Tensor) -> Tensor:
    """Seven signs of eight, whose last one makes the number of minuses even."""
    parity = signs ^ signs >> 4
    parity = parity ^ parity >> 2
    return signs | ((parity ^ parity >> 1) & 1) << 7


def _signed(levels: Tensor, signs: Tensor) -> Tensor:
    """Levels of points [..., points, values] and their signs as bytes [..., n] -> codes [..., values of all]."""
    flat: Tensor = levels.flatten(-2).to(torch.uint8) | (_bits(signs).flatten(-2) << 3).to(torch.uint8)
    return flat


def _points(type_name: str, indices: Tensor) -> Tensor:
    """Look points up: [..., n] -> [..., n, values]."""
    return grid(type_name).to(indices.device)[indices.long()]


def _in_quarters(at: int, count: int) -> Fields:
    """Read numbers of two bits from ``count`` bytes: 32 bytes hold 128 of them, the first 32 in their lowest bits."""
    return lambda raw: (_shifted(raw[..., at : at + count].unflatten(-1, (-1, 32)), 0, 2, 4, 6) & 3).flatten(-3)


def _q3_k_codes(raw: Tensor) -> Tensor:
    """A third bit of each value in 32 bytes in front, an eighth of the block in each bit."""
    third = (_shifted(raw[..., :32], 0, 1, 2, 3, 4, 5, 6, 7) & 1).flatten(-2)
    return (_in_quarters(32, 64)(raw) | third << 2) + 4


def _q3_k_scales(raw: Tensor) -> Tensor:
    """Sixteen of six bits: the lower four in eight bytes, the upper two in four more."""
    low = (_shifted(raw[..., 96:104], 0, 4) & 15).flatten(-2)
    high = (_shifted(raw[..., 104:108], 0, 2, 4, 6) & 3).flatten(-2)
    return (low | high << 4).to(torch.int8) - 32


def _tq1_codes(raw: Tensor) -> Tensor:
    """Five ternary digits in a byte, four in the last four bytes; a byte is the fraction, the first digit highest."""

    def digits(part: Tensor, count: int) -> Tensor:
        powers = torch.tensor((1, 3, 9, 27, 81)[:count], dtype=torch.uint8, device=raw.device)[:, None]
        return ((part[..., None, :] * powers).to(torch.int16) * 3 >> 8).flatten(-2)

    parts = digits(raw[..., :32], 5), digits(raw[..., 32:48], 5), digits(raw[..., 48:52], 4)
    return torch.cat(parts, dim=-1).to(torch.uint8) + 7


def _odd(values: Tensor) -> Tensor:
    """Scales are stored as the halves of odd numbers."""
    return (2 * values + 1).to(torch.int8)


def _iq2_xxs_words(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Four indices of points, and a word with their signs and a scale, of each 32 values."""
    pairs = raw[..., 2:66].unflatten(-1, (8, 8))
    return pairs[..., :4], _words(pairs[..., 4:], 4).squeeze(-1)


def _signs_of_words(words: Tensor) -> Tensor:
    """[..., n] words with four times seven signs -> [..., 4 n] bytes of eight."""
    return _with_parity(_fields(words, 0, 7, 14, 21) & 127)


def _iq2_xxs_codes(raw: Tensor) -> Tensor:
    indices, words = _iq2_xxs_words(raw)
    return _signed(_points("IQ2_XXS", indices.flatten(-2)), _signs_of_words(words))


def _iq2_xs_codes(raw: Tensor) -> Tensor:
    words = _words(raw[..., 2:66], 2)
    return _signed(_points("IQ2_XS", words & 511), _with_parity(words >> 9))


def _iq2_s_codes(raw: Tensor) -> Tensor:
    high = _fields(raw[..., 66:74], 0, 2, 4, 6) & 3
    return _signed(_points("IQ2_S", raw[..., 2:34].int() | high.int() << 8), raw[..., 34:66])


def _nibbles(at: int, count: int) -> Fields:
    """Two scales in a byte, the first in its low half."""
    return lambda raw: _odd(_fields(raw[..., at : at + count], 0, 4) & 15)


def _iq3_xxs_codes(raw: Tensor) -> Tensor:
    words = _words(raw[..., 66:98], 4)
    return _signed(_points("IQ3_XXS", raw[..., 2:66]), _signs_of_words(words))


def _iq3_s_codes(raw: Tensor) -> Tensor:
    high = _bits(raw[..., 66:74]).flatten(-2)
    return _signed(_points("IQ3_S", raw[..., 2:66].int() | high.int() << 8), raw[..., 74:106])


def _shifted_grid(indices: Tensor, is_down: Tensor) -> Tensor:
    """Codes of points of three levels, which are moved up or down by an eighth: of the latter the next three codes."""
    return (_points("IQ1_S", indices) + 3 * is_down[..., None].to(torch.uint8)).flatten(-2)


def _iq1_s_codes(raw: Tensor) -> Tensor:
    words = _words(raw[..., 34:50], 2)
    indices = raw[..., 2:34].long() | (_fields(words, 0, 3, 6, 9) & 7) << 8
    return _shifted_grid(indices, (words >> 15).repeat_interleave(4, dim=-1))


def _iq1_m_codes(raw: Tensor) -> Tensor:
    high = _fields(raw[..., 32:48], 0, 4)
    return _shifted_grid(raw[..., :32].int() | (high & 7).int() << 8, high >> 3 & 1)


def _iq1_m_factor(raw: Tensor) -> Tensor:
    """Return the float16 factor of each block: its bits are the top four of each of the four words of scales."""
    words = _words(raw[..., 48:56], 2) >> 12
    bits = (words << torch.tensor((0, 4, 8, 12), device=raw.device)).sum(-1)
    # As a signed number of 16 bits.
    return (bits - ((bits >> 15) << 16)).to(torch.int16).view(torch.float16)


def _iq1_m_scales(raw: Tensor) -> Tensor:
    return _odd(_fields(_words(raw[..., 48:56], 2), 0, 3, 6, 9) & 7)


def _iq4_codes(at: int) -> Fields:
    """Sixteen bytes hold 32 values, the first sixteen in their low halves."""
    return lambda raw: (_shifted(raw[..., at:].unflatten(-1, (-1, 16)), 0, 4) & 15).flatten(-3)


def _iq4_xs_scales(raw: Tensor) -> Tensor:
    low = _fields(raw[..., 4:8], 0, 4) & 15
    high = _fields(_words(raw[..., 2:4], 2), *range(0, 16, 2)) & 3
    return ((low | high << 4) - 32).to(torch.int8)


def _with_signs(*levels: float) -> tuple[float, ...]:
    padded = (*levels, *(0.0 for _ in range(8 - len(levels))))
    return (*padded, *(-level for level in padded))


INTEGERS: Final = tuple(float(code - 8) for code in range(16))
"""The table for codes that kernels read as integers of four bits: code - 8."""

_TWO_BITS: Final = _with_signs(*(level / 8 for level in (8, 25, 43)))
_ONE_BIT: Final = (*(level / 8 for level in (-7, 1, 9, -9, -1, 7)), *(0.0 for _ in range(10)))
_FOUR_BITS: Final = tuple(
    float(level) for level in (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
)

TABLE_TYPES: Final[dict[str, TableType]] = {
    "Q2_K": TableType(
        tuple(map(float, range(16))),
        _in_quarters(16, 64),
        _half(80),
        lambda raw: (raw[..., :16] & 15).to(torch.int8),
        lambda raw: raw[..., :16] >> 4,
        _half(82),
    ),
    "Q3_K": TableType(INTEGERS, _q3_k_codes, _half(108), _q3_k_scales),
    "IQ1_S": TableType(_ONE_BIT, _iq1_s_codes, _half(0), lambda raw: _odd(_words(raw[..., 34:50], 2) >> 12 & 7)),
    "IQ1_M": TableType(_ONE_BIT, _iq1_m_codes, _iq1_m_factor, _iq1_m_scales),
    "IQ2_XXS": TableType(_TWO_BITS, _iq2_xxs_codes, _half(0), lambda raw: _odd(_iq2_xxs_words(raw)[1] >> 28)),
    "IQ2_XS": TableType(_TWO_BITS, _iq2_xs_codes, _half(0), _nibbles(66, 8)),
    "IQ2_S": TableType(_TWO_BITS, _iq2_s_codes, _half(0), _nibbles(74, 8)),
    "IQ3_XXS": TableType(
        _with_signs(*(level / 4 for level in (4, 12, 20, 28, 36, 44, 52, 62))),
        _iq3_xxs_codes,
        _half(0),
        lambda raw: _odd(_words(raw[..., 66:98], 4) >> 28),
    ),
    "IQ3_S": TableType(_with_signs(1, 3, 5, 7, 9, 11, 13, 15), _iq3_s_codes, _half(0), _nibbles(106, 4)),
    "IQ4_NL": TableType(_FOUR_BITS, _iq4_codes(2), _half(0)),
    "IQ4_XS": TableType(_FOUR_BITS, _iq4_codes(8), _half(0), _iq4_xs_scales),
    "TQ1_0": TableType(INTEGERS, _tq1_codes, _half(52)),
    "TQ2_0": TableType(INTEGERS, lambda raw: _in_quarters(0, 64)(raw) + 7, _half(64)),
}
"""The types by their names in GGUF."""
