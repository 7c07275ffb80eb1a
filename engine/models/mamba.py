"""A selective state space with a state for each channel, in place of a layer's attention (Mamba, Jamba)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...kernels.column_ops import ColumnRuns, take_columns
from ...kernels.expert_ops import ExpertWeights
from ...kernels.ops import gated_activation, rms_norm
from ...kernels.state_ops import ConvParams, SelectiveParams, causal_conv, selective_scan
from .forward_inputs import ForwardInputs
from .layers import Projection


@dataclass(frozen=True, slots=True)
class SelectiveColumns:
    """Columns of the parts in the results of Mamba's projections.

    Attributes:
        step: inputs of the projection to steps.
        into: B, after ``step``.
        out_of: C, after B.
        both: B and C together, if they have no norms.
        joined: B and C, if they are two matrices.
        gated: the gate, which follows x in the first projection, and the results of the scan.
    """

    step: ColumnRuns
    into: ColumnRuns
    out_of: ColumnRuns
    both: ColumnRuns
    joined: ColumnRuns
    gated: ColumnRuns

    @classmethod
    def of(cls, width: int, rank: int, size: int) -> SelectiveColumns:
        """Return the columns for ``width`` channels, ``rank`` inputs of the steps and ``size`` values of a state."""
        runs = ([(0, 0, rank)], [(0, rank, size)], [(0, rank + size, size)], [(0, rank, 2 * size)])
        both, gated = [(0, 0, size), (1, 0, size)], [(0, width, width), (1, 0, width)]
        return cls(*(ColumnRuns.of(each) for each in (*runs, both, gated)))


@dataclass(frozen=True, slots=True)
class SelectiveNorms:
    """Weights of the RMS norms of the steps' inputs, of B and of C."""

    step: Tensor
    into: Tensor
    out_of: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Mamba:
    """A Mamba layer: ``output(scan(conv(x)) * silu(gate))``, where steps, B and C are computed from ``conv(x)``.

    ``store`` must be called first, then the layer itself with its result.

    Attributes:
        input: the projection to x and gate, side by side.
        selection: projection of conv(x) to the inputs of ``steps``, B and C.
        steps: projection to a step for each channel, without the bias that the scan adds.
        norms: norms of the inputs of ``steps``, of B and of C, None if absent.
        columns: columns of these parts.
    """

    input: Projection
    selection: Projection
    steps: Projection
    output: Projection
    conv: ConvParams
    scan: SelectiveParams
    norms: SelectiveNorms | None
    columns: SelectiveColumns

    def store(self, x: Tensor, inputs: ForwardInputs, convolved: Tensor, summed: Tensor) -> Tensor:
        """Scan T tokens and write the states of their rows: [T, H] -> [T, width].

        Args:
            convolved: [slots, taps - 1, width], the last inputs of the convolution.
            summed: [slots, 1, state_size, width], the states.
        """
        assert inputs.states is not None
        projected = self.input(x, inputs.lora)
        mixed = causal_conv(projected, convolved, inputs.states, self.conv)
        selected = self.selection(mixed, inputs.lora)
        steps = take_columns(self.columns.step, selected)
        if self.norms is None:
            both = take_columns(self.columns.both, selected)
        else:
            eps, dtype = self.norms.eps, x.dtype
            steps = rms_norm(steps, self.norms.step, eps, 0.0, dtype)
            into = rms_norm(take_columns(self.columns.into, selected), self.norms.into, eps, 0.0, dtype)
            out_of = rms_norm(take_columns(self.columns.out_of, selected), self.norms.out_of, eps, 0.0, dtype)
            both = take_columns(self.columns.joined, into, out_of)
        y = selective_scan(mixed, self.steps(steps, inputs.lora), both, summed, inputs.states, self.scan)
        return gated_activation(take_columns(self.columns.gated, projected, y), "silu")

    def __call__(self, y: Tensor, inputs: ForwardInputs, convolved: Tensor, summed: Tensor) -> Tensor:
        """Apply the output projection: [S, width] -> [S, H]."""
        return self.output(y, inputs.lora)

    @property
    def before_kv(self) -> tuple[Projection, ...]:
        """Products before the states."""
        return self.input, self.selection, self.steps

    @property
    def behind_kv(self) -> tuple[Projection, ...]:
        """Products after the states."""
        return (self.output,)

    @property
    def of_heads(self) -> tuple[tuple[int, ExpertWeights], ...]:
        """Products with a weight for each head; this layer has none."""
        return ()
