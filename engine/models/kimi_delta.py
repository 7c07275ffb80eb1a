"""Kimi delta attention of a layer: a gated delta rule that multiplies each row of the state by a factor of its own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...kernels.column_ops import ColumnRuns, take_columns
from ...kernels.expert_ops import ExpertWeights
from ...kernels.state_ops import ConvParams, DeltaParams, GatedNormParams, causal_conv, delta_scan, gated_norm
from .forward_inputs import ForwardInputs
from .layers import Projection


@dataclass(frozen=True, slots=True)
class KimiDeltaColumns:
    """Columns of the parts in the results of the narrow projections.

    Attributes:
        forget: inputs of the projection to steps.
        gate: inputs of the projection to the gate, which follow ``forget``.
        gates: rates of the heads, followed by the steps, which are a second matrix.
    """

    forget: ColumnRuns
    gate: ColumnRuns
    gates: ColumnRuns

    @classmethod
    def of(cls, num_heads: int, head_dim: int) -> KimiDeltaColumns:
        """Return the columns for ``num_heads`` heads; both projections have ``head_dim`` inputs."""
        runs = ([(0, 0, head_dim)], [(0, head_dim, head_dim)])
        return cls(*(ColumnRuns.of(each) for each in (*runs, [(0, 0, num_heads), (1, 0, num_heads * head_dim)])))


@dataclass(frozen=True, slots=True)
class NarrowSteps:
    """The two products to steps over a narrow vector, beside which is the narrow input of the gate (Kimi Linear).

    Attributes:
        narrow: the projection to the inputs of ``forget`` and of the gate.
        forget: projection to a step for each row of each head's state.
        columns: columns of the parts in these results.
    """

    narrow: Projection
    forget: Projection
    columns: KimiDeltaColumns


@dataclass(frozen=True, slots=True)
class KimiDelta:
    """Kimi delta attention: ``output(norm(scan(conv(q, k, v), steps, rates)) * sigmoid(gate))``.

    ``store`` must be called first, then the layer itself with its result.

    Attributes:
        input: the projection to q, k and v.
        rates: the projection to rates; without ``narrow`` also to a step for each row of each head's state, without the
            bias that the scan adds. Ranks split it by heads, while each has the whole projection to narrow vectors.
        gate: projection to the gate of the results.
        narrow: the products to steps and to the gate's input over narrow vectors; None if ``rates`` and ``gate`` read
            hidden states (Ling 3).
    """

    input: Projection
    rates: Projection
    gate: Projection
    narrow: NarrowSteps | None
    output: Projection
    conv: ConvParams
    scan: DeltaParams
    norm: GatedNormParams

    def store(self, x: Tensor, inputs: ForwardInputs, convolved: Tensor, summed: Tensor) -> Tensor:
        """Scan T tokens and write the states of their rows: [T, H] -> [T, heads * head_dim].

        Args:
            convolved: [slots, taps - 1, columns], the last inputs of the convolution.
            summed: [slots, heads, head_dim, head_dim], the states.
        """
        assert inputs.states is not None
        projected, gates, of_gate = self.input(x, inputs.lora), self.rates(x, inputs.lora), x
        if self.narrow is not None:
            columns, both = self.narrow.columns, self.narrow.narrow(x, inputs.lora)
            of_gate = take_columns(columns.gate, both)
            steps = self.narrow.forget(take_columns(columns.forget, both), inputs.lora)
            gates = take_columns(columns.gates, gates, steps)
        gate = self.gate(of_gate, inputs.lora)
        mixed = causal_conv(projected, convolved, inputs.states, self.conv)
        y = delta_scan(mixed, gates, (self.scan.num_heads, 0), summed, inputs.states, self.scan)
        return gated_norm(y, gate, self.norm)

    def __call__(self, y: Tensor, inputs: ForwardInputs, convolved: Tensor, summed: Tensor) -> Tensor:
        """Apply the output projection: [S, heads * head_dim] -> [S, H]."""
        return self.output(y, inputs.lora)

    @property
    def before_kv(self) -> tuple[Projection, ...]:
        """Products before the states."""
        narrow = () if self.narrow is None else (self.narrow.narrow, self.narrow.forget)
        return (self.input, self.rates, *narrow, self.gate)

    @property
    def behind_kv(self) -> tuple[Projection, ...]:
        """Products after the states."""
        return (self.output,)

    @property
    def of_heads(self) -> tuple[tuple[int, ExpertWeights], ...]:
        """Products with a weight for each head; this layer has none."""
        return ()
