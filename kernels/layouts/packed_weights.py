"""Weights of linear layers in the layout of their device, plain or quantised."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from .column_runs import ColumnRuns
from .grouped_forms import GroupedLinear


class PanelKernels(Protocol):
    """Native kernels that read the panels of a ``PackedLinear``: ``kernels.cpu.native_ops.Kernels``."""

    def linear(self, x: Tensor, layer: PackedLinear, out_dtype: torch.dtype) -> Tensor: ...

    def largest_linear(self, x: Tensor, layer: PackedLinear) -> Largest: ...

    def takes_gated(self, layer: PackedLinear) -> bool: ...

    def gated_linear(self, x: Tensor, layer: PackedLinear, kind: str) -> Tensor: ...


class QuantisedPanelKernels(Protocol):
    """Native kernels that read a ``QuantisedLinear``: ``kernels.cpu.native_quantised.QuantisedKernels``."""

    def linear(self, x: Tensor, layer: QuantisedLinear, out_dtype: torch.dtype) -> Tensor: ...

    def largest_linear(self, x: Tensor, layer: QuantisedLinear) -> Largest: ...

    def takes_gated(self, layer: QuantisedLinear) -> bool: ...

    def gated_linear(self, x: Tensor, layer: QuantisedLinear, kind: str) -> Tensor: ...

    def rows(self, layer: QuantisedLinear, ids: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight packed by ``pack_linear`` for ``linear``. Only ``kernels`` knows the layout of ``weight``.

    Attributes:
        in_features: K.
        out_features: N.
        weight: a plain weight [N, K], or panels of 16 columns.
        bias: [N] or None, of the weight's type.
        kernels: the native kernels that packed ``weight`` and read it, or None for a plain weight.
    """

    in_features: int
    out_features: int
    weight: Tensor
    bias: Tensor | None
    kernels: PanelKernels | None


class Format(IntEnum):
    """Storage format of a quantised weight, and the arithmetic of its product.

    NIBBLES: blocks of 32 along K, ``d * q + m`` with q of 4 bits, d and m in half precision (GGUF's Q4_1).
    BYTES: blocks of 32 along K, ``d * q`` with q of 8 bits, d in half precision (GGUF's Q8_0).
    CHANNELS: rows, ``d * q`` with q of 8 bits, d in fp32.
    WIDENED: as CHANNELS, but x is not quantised, and q is widened to the type of x (weight-only quantisation).
    SUPER_NIBBLES: blocks of 32 in super-blocks of 256, ``(d * s) * q - e * t`` with q of 4 bits (GGUF's Q4_K).
    SUPER_6_BITS: blocks of 16 in super-blocks of 256, ``(d * s) * (q - 32)`` with q of 6 bits (GGUF's Q6_K).
    SYMMETRIC: as NIBBLES, ``d * (q - 8)`` (GGUF's Q4_0).
    ZERO_POINTS: as NIBBLES, ``d * (q - z)`` with an integer z in half precision (AWQ, GPTQ).
    FLOAT8: rows, ``d * q`` with q in E4M3, d in fp32 for all inputs or each 128 of them, rounded to the type of x.
    TABLE: as SYMMETRIC, ``d * t[q]``, t the sixteen integers of GGUF's IQ4_NL.
    FLOAT4: as TABLE, with t twice the numbers of E2M1 (MXFP4).
    SUPER_5_BITS: as SUPER_NIBBLES, with q of 5 bits (GGUF's Q5_K).
    SUPER_3_BITS: blocks of 16 in super-blocks of 256, ``(d * s) * (q - 4)`` with q of 3 bits (GGUF's Q3_K).
    SUPER_2_BITS: as SUPER_3_BITS, ``(d * s) * q - e * t`` with q of 2 bits (GGUF's Q2_K).
    SUPER_TABLE: blocks of 32 in super-blocks of 256, ``(d * s) * t[q]`` with TABLE's integers (GGUF's IQ4_XS).
    SUPER_FLOAT4: ``(f * s) * t[q]`` with FLOAT4's t, s in E4M3 and f in fp32 (NVFP4).
    SUPER_GRID: as SUPER_3_BITS, ``(d * s) * t[q]``, t the six values of GGUF's IQ2_XXS, IQ2_XS and IQ2_S.
    FIVE_BITS: as NIBBLES, with q of 5 bits (GGUF's Q5_1).
    SYMMETRIC_5_BITS: as SYMMETRIC, ``d * (q - 16)`` with q of 5 bits (GGUF's Q5_0).
    NIBBLE_ROWS and the other formats that end in ROWS: the formats without ROWS, arranged for products of few rows by
    AMX.

    For NIBBLES, SYMMETRIC and BYTES, x is quantised to 8 or 15 bits in blocks of 32; for formats with q of 5 bits or
    with super-blocks, to 8 bits. Alternatively x is not quantised, and the weight's numbers are rounded to the type of
    x; formats with zero points or a table always do this. For CHANNELS x is quantised to 8 bits, and its outliers are
    multiplied separately. See ``kernels.quantised_weights``.
    """

    NIBBLES = 0
    BYTES = 1
    CHANNELS = 2
    WIDENED = 3
    SUPER_NIBBLES = 4
    SUPER_6_BITS = 5
    SYMMETRIC = 6
    ZERO_POINTS = 7
    NIBBLE_ROWS = 8
    BYTE_ROWS = 9
    SUPER_NIBBLE_ROWS = 10
    SYMMETRIC_ROWS = 11
    ZERO_POINT_ROWS = 12
    FLOAT8 = 13
    TABLE = 14
    FLOAT4 = 15
    SUPER_5_BITS = 16
    SUPER_3_BITS = 17
    SUPER_2_BITS = 18
    SUPER_TABLE = 19
    SUPER_FLOAT4 = 20
    FIVE_BITS = 21
    SYMMETRIC_5_BITS = 22
    SUPER_GRID = 23
    TABLE_ROWS = 24
    FLOAT4_ROWS = 25
    SUPER_5_BITS_ROWS = 26
    SUPER_3_BITS_ROWS = 27
    SUPER_2_BITS_ROWS = 28
    SUPER_TABLE_ROWS = 29
    SUPER_FLOAT4_ROWS = 30
    FIVE_BITS_ROWS = 31
    SYMMETRIC_5_BITS_ROWS = 32
    SUPER_GRID_ROWS = 33
    SUPER_6_BITS_ROWS = 34

    @property
    def description(self) -> str:
        """The format in a few words for a log line."""
        return _DESCRIPTIONS[self.unarranged]

    @property
    def unarranged(self) -> Format:
        """The format of the same numbers, not arranged for AMX."""
        return {arranged: form for form, arranged in _ARRANGED.items()}.get(self, self)

    @property
    def arranged(self) -> Format | None:
        """The format of the same numbers, arranged for AMX; None where there is none."""
        return _ARRANGED.get(self)


_ARRANGED: Final = {
    Format.NIBBLES: Format.NIBBLE_ROWS,
    Format.BYTES: Format.BYTE_ROWS,
    Format.SUPER_NIBBLES: Format.SUPER_NIBBLE_ROWS,
    Format.SYMMETRIC: Format.SYMMETRIC_ROWS,
    Format.ZERO_POINTS: Format.ZERO_POINT_ROWS,
    Format.TABLE: Format.TABLE_ROWS,
    Format.FLOAT4: Format.FLOAT4_ROWS,
    Format.SUPER_5_BITS: Format.SUPER_5_BITS_ROWS,
    Format.SUPER_3_BITS: Format.SUPER_3_BITS_ROWS,
    Format.SUPER_2_BITS: Format.SUPER_2_BITS_ROWS,
    Format.SUPER_TABLE: Format.SUPER_TABLE_ROWS,
    Format.SUPER_FLOAT4: Format.SUPER_FLOAT4_ROWS,
    Format.FIVE_BITS: Format.FIVE_BITS_ROWS,
    Format.SYMMETRIC_5_BITS: Format.SYMMETRIC_5_BITS_ROWS,
    Format.SUPER_GRID: Format.SUPER_GRID_ROWS,
    Format.SUPER_6_BITS: Format.SUPER_6_BITS_ROWS,
}
_DESCRIPTIONS: Final = {
    Format.NIBBLES: "4-bit blocks",
    Format.BYTES: "8-bit blocks",
    Format.CHANNELS: "8 bits (x too)",
    Format.WIDENED: "8 bits",
    Format.SUPER_NIBBLES: "4-bit super-blocks",
    Format.SUPER_6_BITS: "6-bit super-blocks",
    Format.SYMMETRIC: "4-bit blocks",
    Format.ZERO_POINTS: "4-bit blocks",
    Format.FLOAT8: "FP8",
    Format.TABLE: "4-bit blocks",
    Format.FLOAT4: "4-bit blocks",
    Format.SUPER_5_BITS: "5-bit super-blocks",
    Format.SUPER_3_BITS: "3-bit super-blocks",
    Format.SUPER_2_BITS: "2-bit super-blocks",
    Format.SUPER_GRID: "3-bit super-blocks",
    Format.SUPER_TABLE: "4-bit super-blocks",
    Format.SUPER_FLOAT4: "4-bit super-blocks",
    Format.FIVE_BITS: "5-bit blocks",
    Format.SYMMETRIC_5_BITS: "5-bit blocks",
}


class WidenedForm(NamedTuple):
    """The second form of a weight in blocks, for products with more rows of x. Both forms give the same bits.

    Attributes:
        weight: panels like those of a ``PackedLinear``.
        bias: [N] in the weight's type, or None.
        few_rows: largest number of rows of x for which the blocks are used instead.
    """

    weight: Tensor
    bias: Tensor | None
    few_rows: int


@dataclass(frozen=True, slots=True)
class QuantisedLinear:
    """A weight packed by ``pack_blocks`` or ``pack_channels`` for ``linear``.

    Attributes:
        in_features: K.
        out_features: N.
        weight: panels of integers.
        planes: number of bytes of a quantised value of x: 1 for 8 bits, 2 for 15; 0 if the weight's numbers are rounded
            to the type of x instead. For FLOAT8 the number of scales of a row.
        scales: factors of the integers.
        bias: [N] fp32 or None.
        kernels: the native kernels that read it.
        widened: the same weight in a second form, whose type is that of x; None if only the blocks are kept.
    """

    in_features: int
    out_features: int
    format: Format
    planes: int
    weight: Tensor
    scales: Tensor
    bias: Tensor | None
    kernels: QuantisedPanelKernels
    widened: WidenedForm | None = None


Linear = PackedLinear | QuantisedLinear | GroupedLinear


@dataclass(frozen=True, slots=True)
class JoinedLinear:
    """Two weights in different forms on a CPU, for products of the same x whose outputs are put side by side.

    Attributes:
        columns: order of the columns: those of the first product, then those of the second.
    """

    first: AnyLinear
    second: Linear
    columns: ColumnRuns

    @classmethod
    def of(cls, first: AnyLinear, second: Linear) -> JoinedLinear:
        """Join two weights with as many inputs."""
        assert first.in_features == second.in_features
        runs = [(index, 0, each.out_features) for index, each in enumerate((first, second))]
        return cls(first, second, ColumnRuns.of(runs))

    @property
    def in_features(self) -> int:
        return self.first.in_features

    @property
    def out_features(self) -> int:
        return self.first.out_features + self.second.out_features


AnyLinear = Linear | JoinedLinear


def parts_of(layer: AnyLinear) -> tuple[Linear, ...]:
    """Return the weights that a layer is joined of, in the order of their outputs: of most layers the layer itself."""
    return (*parts_of(layer.first), layer.second) if isinstance(layer, JoinedLinear) else (layer,)


class Largest(NamedTuple):
    """Maximum and argmax of each of S rows.

    Attributes:
        value: [S] fp32, NaN if the row contains one.
        column: [S] int64, the first of equal maxima; undefined where the value is NaN.
    """

    value: Tensor
    column: Tensor
