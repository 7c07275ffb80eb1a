"""Load what a layer has in place of attention: a short convolution, or a state space."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.state_ops import ConvParams, SsmParams
from ..checkpoint.families.recurrent import Mamba2Layer, RecurrentLayer, ShortConvLayer
from ..errors import ModelError
from ..models.layers import LayerMixer, Projection
from ..models.mamba2 import Mamba2
from ..models.short_conv import ShortConv
from .tensor_names import recurrent_block, recurrent_linears
from .weight_forms import WeightReader


def load_recurrent(weights: WeightReader, prefix: str, layer: RecurrentLayer, hidden: int, eps: float) -> LayerMixer:
    """Return the recurrent layer whose tensors begin with ``prefix``; ``eps`` is of the model's norms.

    Raises:
        ModelError: a weight does not fit the form of quantised weights, or the device has no kernel of such a layer.
    """
    if isinstance(layer, Mamba2Layer) and weights.device.type == "cuda":
        raise ModelError("Mamba-2 layers are computed on a CPU alone: there is no GPU kernel yet. Try: --device cpu")
    block = f"{prefix}.{recurrent_block(layer)}"
    into, out_of = (
        _projection(weights, f"{block}.{name}", rows, biased=layer.biased)
        for name, rows, _ in recurrent_linears(layer, hidden)
    )
    if isinstance(layer, ShortConvLayer):
        return ShortConv(into, out_of, _conv(weights, f"{block}.conv", biased=layer.biased, gated=True))
    return Mamba2(
        into,
        out_of,
        _conv(weights, f"{block}.conv1d", biased=layer.conv_biased, gated=False),
        _scan(weights, block, layer),
        weights.tensor(f"{block}.norm.weight"),
        eps,
    )


def _projection(weights: WeightReader, name: str, rows: int, *, biased: bool) -> Projection:
    bias = weights.tensor(f"{name}.bias") if biased else None
    return Projection((name,), (rows,), weights.packed(f"{name}.weight", bias=bias))


def _conv(weights: WeightReader, name: str, *, biased: bool, gated: bool) -> ConvParams:
    weight: Tensor = weights.tensor(f"{name}.weight")  # [W, 1, taps]
    bias = weights.tensor(f"{name}.bias") if biased else None
    return ConvParams(weight.squeeze(1).T.contiguous(), bias, gated)


def _scan(weights: WeightReader, block: str, layer: Mamba2Layer) -> SsmParams:
    return SsmParams(
        num_heads=layer.num_heads,
        head_dim=layer.head_dim,
        num_groups=layer.num_groups,
        state_size=layer.state_size,
        decay=-torch.exp(weights.exact(f"{block}.A_log")),
        step_bias=weights.exact(f"{block}.dt_bias"),
        skip=weights.exact(f"{block}.D"),
    )
