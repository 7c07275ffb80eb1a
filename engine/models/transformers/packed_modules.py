"""Linear modules of the transformers library on our native kernels: packed weights, products by our op.

On a CPU, torch's own products of a few rows take most of a decode step, and its threads compete with those of our
kernels. The packed weight replaces the module's own. Code that reads the weight directly, without calling the module,
gets no numbers, and the check at start detects this.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ....kernels.ops import PackedLinear, linear, native_kernels, pack_linear

_ATTRIBUTE: Final = "rootgraft_packed"
_ROWS: Final = 1024  # rows of a weight that are unpacked at once


def pack(module: Any, dtype: torch.dtype) -> None:
    """Let a linear module compute by our packed product, if a native kernel supports its weight."""
    weight, kernels = plain_weight(module), native_kernels()
    if type(module) not in (nn.Linear, Conv1D) or weight.dtype is not dtype:
        return
    if kernels is None or not kernels.takes_weight(weight):
        return
    packed = pack_linear(weight, module.bias)

    def forward(x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        return linear(x.reshape(-1, packed.in_features), packed).view(*x.shape[:-1], packed.out_features)

    shape = module.weight.shape
    setattr(module, _ATTRIBUTE, packed)
    module.forward = forward
    module.weight = nn.Parameter(weight.new_full((1,), torch.nan).expand(shape), requires_grad=False)


def plain_weight(module: Any) -> Tensor:
    """Return a module's weight [out, in], or [V, H] for an embedding; GPT-2's modules store it transposed."""
    packed: PackedLinear | None = getattr(module, _ATTRIBUTE, None)
    if packed is None:
        weight: Tensor = module.weight.detach()
        return weight.T if isinstance(module, Conv1D) else weight
    bias_free = PackedLinear(packed.in_features, packed.out_features, packed.weight, None, packed.kernels)
    # A product with the identity is exact.
    ones = torch.eye(packed.in_features, dtype=packed.weight.dtype)
    return torch.cat([linear(rows, bias_free) for rows in ones.split(_ROWS)]).T
