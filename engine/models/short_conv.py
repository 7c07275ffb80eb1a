"""The short convolution in place of a layer's attention (LFM2)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...kernels.expert_ops import ExpertWeights
from ...kernels.state_ops import ConvParams, causal_conv
from .forward_inputs import ForwardInputs
from .layers import Projection


@dataclass(frozen=True, slots=True)
class ShortConv:
    """A short convolution (LFM2): ``output(C * conv(B * x))``.

    ``store`` must be called first, then the layer itself with its result.

    Attributes:
        input: the projection to B, C and x.
        params: parameters of the convolution.
    """

    input: Projection
    output: Projection
    params: ConvParams

    def store(self, x: Tensor, inputs: ForwardInputs, state: Tensor, _: Tensor) -> Tensor:
        """Convolve T tokens and write the states of their rows [slots, taps - 1, H]: [T, H] -> [T, H]."""
        assert inputs.states is not None
        return causal_conv(self.input(x, inputs.lora), state, inputs.states, self.params)

    def __call__(self, y: Tensor, inputs: ForwardInputs, state: Tensor, _: Tensor) -> Tensor:
        """Apply the output projection: [S, H] -> [S, H]."""
        return self.output(y, inputs.lora)

    @property
    def before_kv(self) -> tuple[Projection, ...]:
        """Products before the states."""
        return (self.input,)

    @property
    def behind_kv(self) -> tuple[Projection, ...]:
        """Products after the states."""
        return (self.output,)

    @property
    def of_heads(self) -> tuple[tuple[int, ExpertWeights], ...]:
        """Products with a weight for each head; this layer has none."""
        return ()
