"""Weights of 4 to 8 bits on a GPU, as their checkpoints store them: numbers, and scales of groups of inputs.

    w[n, k] = factor[n] * scale[n, g] * (number[n, k] - zero[n, g]) + minimum[n, g]        g = k // group

All terms but the numbers are optional. If a checkpoint stores inputs in another order, x is permuted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

import torch
from torch import Tensor


class NumberForm(IntEnum):
    """The meaning of the bits of a number.

    INT4, INT5, INT6: unsigned integers of 4, 5 or 6 bits.
    INT8: signed integers of 8 bits; unsigned ones if there are zero points.
    E4M3, E2M1: floating point numbers of 8 and of 4 bits (OCP).
    TABLE: indices of 4 bits into a table of 16 values (NF4, FP4 of bitsandbytes).
    """

    INT4 = 0
    INT5 = 1
    INT6 = 2
    INT8 = 3
    E4M3 = 4
    E2M1 = 5
    TABLE = 6

    @property
    def bits(self) -> int:
        return _BITS[self]

    @property
    def high_bits(self) -> int:
        """Number of bits above the lowest four. They are stored in a separate tensor."""
        return self.bits - 4 if self.bits < 8 else 0

    @property
    def middle(self) -> int:
        """The zero point of numbers without a zero point of their own: it is subtracted from each number."""
        return 1 << (self.bits - 1) if self in (NumberForm.INT4, NumberForm.INT5, NumberForm.INT6) else 0


_BITS: Final = {
    NumberForm.INT4: 4,
    NumberForm.INT5: 5,
    NumberForm.INT6: 6,
    NumberForm.INT8: 8,
    NumberForm.E4M3: 8,
    NumberForm.E2M1: 4,
    NumberForm.TABLE: 4,
}


class Scales(IntEnum):
    """How the scales of groups are stored.

    NONE: groups have no scales; only rows have factors.
    FLOATS: scales in half precision, bfloat16 or fp32.
    E8M0: exponents of powers of two, in a byte (MXFP4).
    E4M3: floating point numbers of 8 bits (NVFP4).
    PRODUCTS: an integer for each group, times one number in half precision for each super-block of 256 inputs.
    """

    NONE = 0
    FLOATS = 1
    E8M0 = 2
    E4M3 = 3
    PRODUCTS = 4


class Offsets(IntEnum):
    """The offset that is subtracted from numbers before they are scaled, or is added afterwards.

    MIDDLE: no stored offset; the middle of the range of an unsigned integer stands for 0.
    ZERO_POINTS: an unsigned integer of 8 bits for each group, subtracted from its numbers.
    MINIMA: a number in half precision for each group, added to its scaled numbers.
    PRODUCTS: an integer for each group, times one number in half precision for each super-block, subtracted from the
        scaled numbers.
    """

    MIDDLE = 0
    ZERO_POINTS = 1
    MINIMA = 2
    PRODUCTS = 3


SUPER_BLOCK: Final = 256
"""Inputs that share the number by which ``PRODUCTS`` are multiplied."""

MOST_CHUNK: Final = 128
LEAST_CHUNK: Final = 32


class GroupForm(NamedTuple):
    """The properties of a weight that a kernel needs at compile time.

    Attributes:
        group: number of inputs that share a scale; 0 if all inputs of a row do.
        chunk: number of inputs that are stored side by side in each row and multiplied together.
    """

    numbers: NumberForm
    scales: Scales
    offsets: Offsets
    group: int
    chunk: int

    @property
    def description(self) -> str:
        """The form in a few words for a log line."""
        names = {NumberForm.E4M3: "FP8", NumberForm.E2M1: "FP4", NumberForm.TABLE: "4-bit floats (a table)"}
        name = names.get(self.numbers, f"{self.numbers.bits}-bit integers")
        return f"{name}, {f'groups of {self.group}' if self.group else 'scales of rows'}"


@dataclass(frozen=True, slots=True)
class StoredNumbers:
    """A matrix [N, K] as a checkpoint stores it, on the CPU, for ``kernels.grouped_weights.pack_grouped``.

    Attributes:
        pieces: consecutive rows [n, K] uint8, a number in each byte (INT8: in two's complement).
        scales: [N, G], scales in the type that ``form`` defines; None for NONE.
        super_scales: [N, K / 256] in half precision, factors of the scales for PRODUCTS.
        offsets: [N, G], offsets in the type that ``form`` defines; None for MIDDLE.
        super_offsets: [N, K / 256] in half precision, factors of the offsets for PRODUCTS.
        factors: [N] fp32, a factor of each row, or None for 1.
        table: [16] fp32, the values of the numbers for TABLE.
        group_of: [K], the group of each input if groups are not in order; None if they are.
    """

    shape: tuple[int, int]
    numbers: NumberForm
    pieces: Iterable[Tensor]
    scales: Tensor | None = None
    scale_kind: Scales = Scales.FLOATS
    super_scales: Tensor | None = None
    offsets: Tensor | None = None
    offset_kind: Offsets = Offsets.MIDDLE
    super_offsets: Tensor | None = None
    factors: Tensor | None = None
    table: Tensor | None = None
    group_of: Tensor | None = None
    group: int | None = None


@dataclass(frozen=True, slots=True)
class GroupedPart:
    """Some rows of a weight, all in one form.

    Attributes:
        weight: [K / chunk, N, bytes] uint8. For numbers of 4 bits, byte j of a chunk has input j in its low half and
            input ``chunk / 2 + j`` in its high half.
        high: [K / chunk, N, bytes] uint8, the bits above the lowest four of INT5 and INT6, or None.
        scales: [G, N], or None.
        super_scales: [K / 256, N], or None.
        offsets: [G, N], or None.
        super_offsets: [K / 256, N], or None.
        factors: [N] fp32, or None.
        table: [16] fp32, or None.
        permutation: [K] int64, for each stored input its index in x; None if inputs are in order.
    """

    form: GroupForm
    weight: Tensor
    high: Tensor | None = None
    scales: Tensor | None = None
    super_scales: Tensor | None = None
    offsets: Tensor | None = None
    super_offsets: Tensor | None = None
    factors: Tensor | None = None
    table: Tensor | None = None
    permutation: Tensor | None = None

    @property
    def rows(self) -> int:
        """Output features, N."""
        return self.weight.shape[1]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that a kernel reads, in the order of its arguments."""
        return (
            self.weight,
            self.high,
            self.scales,
            self.super_scales,
            self.offsets,
            self.super_offsets,
            self.factors,
            self.table,
        )

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (*self.tensors, self.permutation) if each is not None)


@dataclass(frozen=True, slots=True)
class GroupedLinear:
    """A weight that is kept on a GPU as it was stored, for ``kernels.ops.linear``.

    Attributes:
        in_features: K.
        out_features: N.
        dtype: type of x.
        parts: consecutive rows of the weight. Matrices that were stored in different forms are separate parts. A part
            that is a tensor [n, K] in ``dtype`` is a plain weight.
        bias: [N] in ``dtype``, or None.
    """

    in_features: int
    out_features: int
    dtype: torch.dtype
    parts: tuple[GroupedPart | Tensor, ...]
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.parts)

    @property
    def device(self) -> torch.device:
        first = self.parts[0]
        return first.device if isinstance(first, Tensor) else first.weight.device

    @property
    def form(self) -> GroupForm:
        """The form of its first part that is not plain."""
        return next(each.form for each in self.parts if isinstance(each, GroupedPart))
