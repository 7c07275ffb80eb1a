"""A selective state space in place of a layer's attention (Mamba-2)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...kernels.column_ops import ColumnRuns, take_columns
from ...kernels.expert_ops import ExpertWeights
from ...kernels.ops import gated_activation
from ...kernels.state_ops import ConvParams, GatedNormParams, SsmParams, causal_conv, gated_norm, ssm_scan
from .forward_inputs import ForwardInputs
from .layers import Projection


@dataclass(frozen=True, slots=True)
class Mamba2:
    """A Mamba-2 layer: ``output(norm(scan(conv(x, B, C)) * silu(gate)))``.

    ``store`` must be called first, then the layer itself with its result.

    Attributes:
        input: the projection to gate, x, B, C and a step for each head, side by side.
        conv: convolution of x, B and C.
        scan: the state space.
        norm: the norm and the gate after it; or, without a norm, the columns of the gate beside the scan's results.
        scaled: the projection's columns with their factors; None without factors (Falcon H1 has some).
    """

    input: Projection
    output: Projection
    conv: ConvParams
    scan: SsmParams
    norm: GatedNormParams | ColumnRuns
    scaled: ColumnRuns | None = None

    def store(self, x: Tensor, inputs: ForwardInputs, convolved: Tensor, summed: Tensor) -> Tensor:
        """Scan T tokens and write the states of their rows: [T, H] -> [T, heads * head_dim].

        Args:
            convolved: [slots, taps - 1, columns], the last inputs of the convolution.
            summed: [slots, heads, state_size, head_dim], the states.
        """
        assert inputs.states is not None
        scan, states = self.scan, inputs.states
        projected = self.input(x, inputs.lora)
        if self.scaled is not None:
            projected = take_columns(self.scaled, projected)
        mixed = causal_conv(projected, convolved, states, self.conv, scan.width)
        y = ssm_scan(mixed, projected, scan.width + scan.columns, summed, states, scan)
        if isinstance(self.norm, ColumnRuns):
            return gated_activation(take_columns(self.norm, projected, y), "silu")
        return gated_norm(y, projected, self.norm)

    def __call__(self, y: Tensor, inputs: ForwardInputs, convolved: Tensor, summed: Tensor) -> Tensor:
        """Apply the output projection: [S, heads * head_dim] -> [S, H]."""
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
