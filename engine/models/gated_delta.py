"""A gated delta net of a layer in place of attention (Qwen3-Next, Qwen 3.5, OLMo Hybrid)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...kernels.column_ops import ColumnRuns, take_columns
from ...kernels.expert_ops import ExpertWeights
from ...kernels.state_ops import ConvParams, DeltaParams, GatedNormParams, causal_conv, delta_scan, gated_norm
from .forward_inputs import ForwardInputs
from .layers import Projection


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """A gated delta net: ``output(norm(scan(conv(q, k, v), steps, rates)) * silu(gate))``.

    ``store`` must be called first, then the layer itself with its result.

    Attributes:
        input: the projection to q, k, v and the gate.
        rates: the projection to rates and steps of each head.
        order: column order in the results of both projections; None if the parts are side by side in the order above.
        conv: convolution of q, k and v.
        scan: the gated delta rule.
        norm: norm of each head, and the gate after it.
        is_gate_beside_rates: whether the gate is in front of the rates in the result of ``rates``, not behind q, k and
            v in that of ``input`` (OLMo Hybrid).
    """

    input: Projection
    rates: Projection
    output: Projection
    order: tuple[ColumnRuns, ColumnRuns] | None
    conv: ConvParams
    scan: DeltaParams
    norm: GatedNormParams
    is_gate_beside_rates: bool = False

    def store(self, x: Tensor, inputs: ForwardInputs, convolved: Tensor, summed: Tensor) -> Tensor:
        """Scan T tokens and write the states of their rows: [T, H] -> [T, heads * head_dim].

        Args:
            convolved: [slots, taps - 1, columns], the last inputs of the convolution.
            summed: [slots, heads, key_dim, head_dim], the states.
        """
        assert inputs.states is not None
        scan, states = self.scan, inputs.states
        projected, rates = self.input(x, inputs.lora), self.rates(x, inputs.lora)
        if self.order is not None:
            projected, rates = take_columns(self.order[0], projected), take_columns(self.order[1], rates)
        mixed = causal_conv(projected, convolved, states, self.conv)
        if self.is_gate_beside_rates:
            y = delta_scan(mixed, rates, (scan.width + scan.num_heads, scan.width), summed, states, scan)
            return gated_norm(y, rates, self.norm)
        y = delta_scan(mixed, rates, (scan.num_heads, 0), summed, states, scan)
        return gated_norm(y, projected, self.norm, scan.columns)

    def __call__(self, y: Tensor, inputs: ForwardInputs, convolved: Tensor, summed: Tensor) -> Tensor:
        """Apply the output projection: [S, heads * head_dim] -> [S, H]."""
        return self.output(y, inputs.lora)

    @property
    def before_kv(self) -> tuple[Projection, ...]:
        """Products before the states."""
        return self.input, self.rates

    @property
    def behind_kv(self) -> tuple[Projection, ...]:
        """Products after the states."""
        return (self.output,)

    @property
    def of_heads(self) -> tuple[tuple[int, ExpertWeights], ...]:
        """Products with a weight for each head; this layer has none."""
        return ()
