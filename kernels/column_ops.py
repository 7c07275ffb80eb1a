"""Ops on columns: reordering columns, and gates, on native kernels or plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .backend import native_for, on_triton
from .layouts.column_runs import ColumnRuns

__all__ = ["ColumnRuns", "output_gate", "take_columns"]

_LANES = 16


def take_columns(runs: ColumnRuns, first: Tensor, second: Tensor | None = None) -> Tensor:
    """Copy runs of columns of [T, ...], or of two such tensors of one type, side by side: -> [T, *``runs.shape``].

    Factors are applied in fp32, and the products are rounded once. The columns of a token are all its numbers in order,
    head after head. A second tensor [columns] is the same for all tokens.

    Raises:
        ValueError: a tensor has fewer columns than the runs need.
    """
    kernels = None
    if not on_triton(first.device):
        kernels = native_for(first) if second is None else native_for(first, second)
    if kernels is not None:
        return kernels.take_columns(runs, first, second)
    if second is not None and second.ndim == 1:
        second = second.expand(len(first), -1)
    matrices = (first.flatten(1), None if second is None else second.flatten(1))
    parts = []
    factors = [None] * len(runs.table) if runs.factors is None else runs.factors.tolist()
    for (index, column, count), factor in zip(runs.table.tolist(), factors, strict=True):
        matrix = matrices[index]
        if matrix is None or matrix.shape[1] < column + count:
            raise ValueError(f"matrix {index} lacks columns that are asked for: {column} to {column + count}")
        part = matrix[:, column : column + count]
        parts.append(part if factor is None else (part.float() * factor).to(part.dtype))
    return torch.cat(parts, dim=1).view(-1, *runs.shape)


def output_gate(x: Tensor, gate: Tensor, first: int = 0, repeat: int = 1, *, is_softplus: bool = False) -> Tensor:
    """``x * sigmoid(gate)`` in fp32: [T, W], and a gate from column ``first`` of [T, columns] on -> [T, W] of x's type.

    Args:
        repeat: number of adjacent columns of x with the same gate, which has W / ``repeat`` columns.
        is_softplus: whether x is multiplied by ``log(1 + exp(gate))`` instead.
    """
    kernels = None if on_triton(x.device) else native_for(x, gate)
    if kernels is not None and x.shape[1] % _LANES == 0 and (repeat == 1 or repeat % _LANES == 0):
        return kernels.output_gate(x, gate, first, repeat, is_softplus=is_softplus)
    columns = gate[:, first : first + x.shape[1] // repeat].float()
    factor = functional.softplus(columns) if is_softplus else torch.sigmoid(columns)
    gated: Tensor = x.float().unflatten(1, (-1, repeat)) * factor[:, :, None]
    return gated.flatten(1).to(x.dtype)
