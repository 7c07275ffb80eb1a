"""The weight of a linear layer, laid out for its device, as it is or quantised."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from ..cpu.native_ops import Kernels
    from ..cpu.native_quantised import QuantisedKernels


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """What ``pack_linear`` makes and ``linear`` takes; the layout of ``weight`` is nobody else's business.

    Attributes:
        in_features: K.
        out_features: N.
        weight: the plain [N, K], or the panels of ``kernels.cpu``.
        bias: [N] or None, of the weight's type.
        kernels: the native kernels that laid ``weight`` out and can read it, or None: it is plain.
    """

    in_features: int
    out_features: int
    weight: Tensor
    bias: Tensor | None
    kernels: Kernels | None


class Format(IntEnum):
    """How a quantised weight is stored, and what is computed with it.

    NIBBLES: blocks of 32 along K, ``d * q + m`` with q of 4 bits, d and m in half precision (GGUF's Q4_1 and Q4_0).
    BYTES: blocks of 32 along K, ``d * q`` with q of 8 bits, d in half precision (GGUF's Q8_0).
    CHANNELS: rows, ``d * q`` with q of 8 bits, d in fp32.
    WIDENED: the same, but x is not quantised: q is widened to its type.

    In the first two, x is quantised to 8 or 15 bits in blocks of 32, in the third to 8 with its outliers apart; see
    ``kernels.quantised_weights``.
    """

    NIBBLES = 0
    BYTES = 1
    CHANNELS = 2
    WIDENED = 3

    @property
    def description(self) -> str:
        """What a person needs to know of it."""
        return ("4-bit blocks", "8-bit blocks", "8 bits (x too)", "8 bits")[self]


@dataclass(frozen=True, slots=True)
class QuantisedLinear:
    """What ``pack_blocks`` and ``pack_channels`` make and ``linear`` takes; layouts are nobody else's business.

    Attributes:
        in_features: K.
        out_features: N.
        weight: panels of integers.
        planes: bytes of a value of x, where x is quantised: 1 for 8 bits, 2 for 15.
        scales: what the integers are multiplied with.
        bias: [N] fp32 or None.
        kernels: the native kernels that read it.
    """

    in_features: int
    out_features: int
    format: Format
    planes: int
    weight: Tensor
    scales: Tensor
    bias: Tensor | None
    kernels: QuantisedKernels


Linear = PackedLinear | QuantisedLinear


class Largest(NamedTuple):
    """The largest of each of S rows of numbers.

    Attributes:
        value: [S] fp32, NaN where there is one.
        column: [S] int64, the first of equal ones; it means nothing where the value is NaN.
    """

    value: Tensor
    column: Tensor
