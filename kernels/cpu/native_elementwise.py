"""Native kernels of norms, sums and activations as functions on torch tensors."""

from __future__ import annotations

import math
from struct import Struct
from typing import Final

import torch
from torch import Tensor

from ..layouts.column_runs import ColumnRuns
from .native_library import Fields, NativeLibrary

_BF16: Final = torch.bfloat16
_FP32: Final = torch.float32
_LANES: Final = 16

# Formats of the C++ structures: q for integers, booleans and addresses (0 for null), d for real numbers.
_RMS_NORM: Final = Struct("10q2d")
_LAYER_NORM: Final = Struct("11q2d")
_ADD_SCALED: Final = Struct("6q2d")
_COPY_RESIDUAL: Final = Struct("6q")
_ACTIVATION: Final = Struct("8q")
_XIELU: Final = Struct("7q")
_TAKE_COLUMNS: Final = Struct("13q")
_OUTPUT_GATE: Final = Struct("11q")

KINDS: Final = ("silu", "gelu_tanh", "relu2", "gelu")
"""Activations, in the order of the C++ enumeration."""


class ElementwiseKernels:
    """Ops of a compiled library that work row by row; the tensors are those that ``Kernels.takes`` accepts.

    Attributes:
        library: the compiled library, with thread count and arena.
    """

    def __init__(self, library: NativeLibrary) -> None:
        self.library = library
        self._rms_norm = library.bind("rms_norm", _RMS_NORM, Fields((4,)))
        self._layer_norm = library.bind("layer_norm", _LAYER_NORM, Fields((5,)))
        self._add_scaled = library.bind("add_scaled", _ADD_SCALED, Fields((2,)))
        self._copy_residual = library.bind("copy_residual", _COPY_RESIDUAL, Fields((2,)))
        self._activation = library.bind("activation", _ACTIVATION, Fields((2,)))
        self._xielu = library.bind("xielu", _XIELU, Fields((3,)))
        self._take_columns = library.bind("take_columns", _TAKE_COLUMNS, Fields((5,)))
        self._output_gate = library.bind("output_gate", _OUTPUT_GATE, Fields((3,)))

    def rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        offset: float,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """Norm x, or with a residual (fp32) add x to it in place and norm the sum."""
        rows, width = x.shape
        _check_sizes(x, residual, weight)
        out = self.library.empty((rows, width), dtype=out_dtype)
        self._rms_norm(
            _RMS_NORM.pack(
                x.data_ptr(),
                0 if residual is None else residual.data_ptr(),
                weight.data_ptr(),
                out.data_ptr(),
                rows,
                width,
                x.dtype is _BF16,
                weight.dtype is _BF16,
                out_dtype is _BF16,
                self.library.num_threads,
                eps,
                offset,
            )
        )
        return out

    def layer_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        offset: float,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """Return the layer norm of x plus residual, [T, N] in ``out_dtype``; the bias is of the weight's type."""
        rows, width = x.shape
        _check_sizes(x, residual, weight)
        if bias is not None and (bias.shape != weight.shape or bias.dtype is not weight.dtype):
            raise ValueError(f"the bias is {bias.dtype} {list(bias.shape)}, the weight {weight.dtype} [{width}]")
        out = self.library.empty((rows, width), dtype=out_dtype)
        self._layer_norm(
            _LAYER_NORM.pack(
                x.data_ptr(),
                0 if residual is None else residual.data_ptr(),
                weight.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                out.data_ptr(),
                rows,
                width,
                x.dtype is _BF16,
                weight.dtype is _BF16,
                out_dtype is _BF16,
                self.library.num_threads,
                eps,
                offset,
            )
        )
        return out

    def add_scaled(self, x: Tensor, residual: Tensor, factor: float, kept: float) -> None:
        """See ``kernels.ops.add_scaled``."""
        rows, width = x.shape
        if residual.shape != x.shape or residual.dtype is not _FP32:
            raise ValueError(f"x is [{rows}, {width}]; a residual must be float32 like it")
        sizes = (rows, width, x.dtype is _BF16, self.library.num_threads)
        self._add_scaled(_ADD_SCALED.pack(x.data_ptr(), residual.data_ptr(), *sizes, factor, kept))

    def copy_residual(self, residual: Tensor, dtype: torch.dtype) -> Tensor:
        """See ``kernels.ops.copy_residual``."""
        rows, width = residual.shape
        out = self.library.empty((rows, width), dtype=dtype)
        addresses = (residual.data_ptr(), out.data_ptr())
        self._copy_residual(_COPY_RESIDUAL.pack(*addresses, rows, width, dtype is _BF16, self.library.num_threads))
        return out

    def activation(self, x: Tensor, kind: str, *, gated: bool) -> Tensor:
        """See ``kernels.ops.gated_activation`` and ``kernels.ops.activation``."""
        rows, columns = x.shape[0], math.prod(x.shape[1:])  # A view would keep the pass from being recorded.
        width = columns // 2 if gated else columns
        out = self.library.empty((rows, width) if gated else x.shape, dtype=x.dtype)
        self._activation(
            _ACTIVATION.pack(
                x.data_ptr(),
                out.data_ptr(),
                rows,
                width,
                KINDS.index(kind),
                gated,
                x.dtype is _BF16,
                self.library.num_threads,
            )
        )
        return out

    def xielu(self, x: Tensor, factors: Tensor) -> Tensor:
        """See ``kernels.ops.xielu``."""
        if factors.shape != (4,) or factors.dtype is not _FP32:
            raise ValueError(f"factors must be float32 [4], not {factors.dtype} {list(factors.shape)}")
        rows, width = x.shape
        out = self.library.empty((rows, width), dtype=x.dtype)
        sizes = (rows, width, x.dtype is _BF16, self.library.num_threads)
        self._xielu(_XIELU.pack(x.data_ptr(), out.data_ptr(), factors.data_ptr(), *sizes))
        return out

    def take_columns(self, runs: ColumnRuns, first: Tensor, second: Tensor | None) -> Tensor:
        """See ``kernels.column_ops.take_columns``."""
        tokens, columns = len(first), math.prod(first.shape[1:])
        is_row = second is not None and second.ndim == 1  # one row for all tokens
        others = 0 if second is None else math.prod(second.shape[0 if is_row else 1 :])
        is_short = second is not None and not is_row and len(second) != tokens
        if columns < runs.needed[0] or others < runs.needed[1] or is_short:
            shapes = f"[{tokens}, {columns}] and {None if second is None else list(second.shape)}"
            raise ValueError(f"{shapes} lack columns that are asked for: {list(runs.needed)}")
        out = self.library.empty((tokens, *runs.shape), dtype=first.dtype)
        addresses = (
            first.data_ptr(),
            0 if second is None else second.data_ptr(),
            runs.table.data_ptr(),
            0 if runs.factors is None else runs.factors.data_ptr(),
            out.data_ptr(),
        )
        steps = columns, 0 if is_row else others
        sizes = (tokens, len(runs.table), *steps, runs.columns, first.itemsize, first.dtype is _BF16)
        self._take_columns(_TAKE_COLUMNS.pack(*addresses, *sizes, self.library.num_threads))
        return out

    def output_gate(self, x: Tensor, gate: Tensor, first: int, repeat: int, *, is_softplus: bool) -> Tensor:
        """See ``kernels.column_ops.output_gate``."""
        tokens, width = x.shape
        fits = width % _LANES == 0 and width % repeat == 0 and (repeat == 1 or repeat % _LANES == 0)
        if len(gate) != tokens or gate.shape[1] < first + width // repeat or not fits:
            raise ValueError(f"x {list(x.shape)} and gate {list(gate.shape)} from {first} do not fit")
        out = self.library.empty((tokens, width), dtype=x.dtype)
        addresses = (x.data_ptr(), gate.data_ptr(), out.data_ptr())
        sizes = (tokens, width, gate.shape[1], first, repeat, is_softplus, x.dtype is _BF16)
        self._output_gate(_OUTPUT_GATE.pack(*addresses, *sizes, self.library.num_threads))
        return out


def _check_sizes(x: Tensor, residual: Tensor | None, weight: Tensor) -> None:
    rows, width = x.shape
    if weight.shape != (width,) or (
        residual is not None and (residual.shape != x.shape or residual.dtype is not _FP32)
    ):
        raise ValueError(f"x is [{rows}, {width}], weight {list(weight.shape)}; a residual must be float32 like x")
