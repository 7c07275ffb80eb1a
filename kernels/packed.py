"""The weight of a linear layer, laid out for its device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from kernels.cpu.native import Kernels


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
