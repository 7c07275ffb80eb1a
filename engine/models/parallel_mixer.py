"""Attention and a state space side by side in one layer (Falcon H1)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...kernels.column_ops import ColumnRuns, take_columns
from ...kernels.expert_ops import ExpertWeights, sum_experts
from .forward_inputs import ForwardInputs
from .layers import Attention, Projection
from .mamba2 import Mamba2


@dataclass(frozen=True, slots=True)
class MixerColumns:
    """Columns of the results of both mixers.

    Attributes:
        joined: queries, followed by the results of the scan.
        queries: the queries in ``joined``.
        scanned: the results of the scan in ``joined``.
        attended: attention's output, multiplied by its factor.
        summed: the state space's output, multiplied by its factor.
    """

    joined: ColumnRuns
    queries: ColumnRuns
    scanned: ColumnRuns
    attended: ColumnRuns
    summed: ColumnRuns

    @classmethod
    def of(cls, num_heads: int, query_size: int, width: int, hidden: int, factors: tuple[float, float]) -> MixerColumns:
        """Return the columns for ``query_size`` query columns, ``width`` scan columns, and two output factors."""
        attended, summed = (ColumnRuns.of([(0, 0, hidden)], factors=[factor]) for factor in factors)
        return cls(
            ColumnRuns.of([(0, 0, query_size), (1, 0, width)]),
            ColumnRuns.of([(0, 0, query_size)], heads=num_heads),
            ColumnRuns.of([(0, query_size, width)]),
            attended,
            summed,
        )


@dataclass(frozen=True, slots=True)
class ParallelMixer:
    """Attention and a state space in parallel: ``f * attention(x) + g * state(x)``.

    ``store`` must be called first, then the layer itself with its result. The layer's caches are those of attention.

    Attributes:
        index: index of the layer, which is the key of its states in ``ForwardInputs.beside``.
        columns: columns of the results of both mixers.
    """

    index: int
    attention: Attention
    state: Mamba2
    columns: MixerColumns

    def store(self, x: Tensor, inputs: ForwardInputs, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Write K, V and states of T tokens: [T, H] -> [T, columns of queries and of the scan]."""
        assert inputs.beside is not None
        q = self.attention.store(x, inputs, k_cache, v_cache)
        return take_columns(self.columns.joined, q, self.state.store(x, inputs, *inputs.beside[self.index]))

    def __call__(self, joined: Tensor, inputs: ForwardInputs, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Compute attention and both output projections: [S, columns] -> [S, H]."""
        columns = self.columns
        attended = self.attention(take_columns(columns.queries, joined), inputs, k_cache, v_cache)
        summed = self.state(take_columns(columns.scanned, joined), inputs, k_cache, v_cache)
        return sum_experts(take_columns(columns.attended, attended), None, take_columns(columns.summed, summed))

    @property
    def before_kv(self) -> tuple[Projection, ...]:
        """Products before K, V and states."""
        return *self.attention.before_kv, *self.state.before_kv

    @property
    def behind_kv(self) -> tuple[Projection, ...]:
        """Products after K, V and states are stored."""
        return *self.attention.behind_kv, *self.state.behind_kv

    @property
    def of_heads(self) -> tuple[tuple[int, ExpertWeights], ...]:
        """Products with a weight for each head; this layer has none."""
        return ()
