"""Low-rank ops of many adapters in one call, by native kernels, Triton kernels or plain torch.

For each token t of a slot's segment, in place,

    y[t] = gain * (y[t] + B (scale * A x[t])) + add          x [T, K], y [T, N], A [R, K], B [N, R] block by block

where N may be the columns of several modules side by side (q, k, v), each with a rank of its own in B's blocks. gain
and add are what DoRA and biases need. Tokens of no segment are not touched. On the native path sums have one fixed
order: a token's bits do not depend on the other tokens, on the segments or on the number of threads. On a GPU they are
the same in every run of the same step.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from . import lora_reference, ops
from .cpu.build import BuildError, default_cache, load_library
from .cpu.native_lora import NATIVE_TYPES, LoraKernels
from .layouts.lora_arguments import MOST_MODULES, ROW_FIELDS, Factors, Segments, Tiles, pack_expansion, table_row
from .layouts.staging import refill
from .triton import launch

__all__ = ["Factors", "Segments", "SlotTable", "Tiles", "lora_embed", "lora_shrink_expand", "pack_expansion"]


class SlotTable:
    """The factors of all slots for one projection.

    Args:
        sizes: columns of each of its modules, at most three.
        width: K, its inputs; for an embedding the number of its tokens.
        num_slots: slots, all empty at first.
        dtype: of the factors and of x.
        device: where the factors are.

    Attributes:
        lines: [num_slots, ROW_FIELDS] int64 on the device, ``table_row`` of each slot; never moved.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        width: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device = torch.device("cpu"),  # noqa: B008 (immutable)
    ) -> None:
        if not 1 <= len(sizes) <= MOST_MODULES:
            raise ValueError(f"a projection has 1 to {MOST_MODULES} modules, not {len(sizes)}")
        self.sizes = sizes
        self.width = width
        self.dtype = dtype
        self.factors: list[Factors | None] = [None] * num_slots
        self.lines = torch.zeros(num_slots, ROW_FIELDS, dtype=torch.int64, device=device)
        self._reserved = 0

    @property
    def total_rank(self) -> int:
        """The most ranks that a slot has, of all modules together, or that are reserved."""
        return max(self._reserved, *(sum(each.ranks) if each else 0 for each in self.factors))

    def reserve(self, total_rank: int) -> None:
        """Make every launch from now on wide enough for so many ranks, of all modules together.

        For launches that are captured in a graph and replayed when other adapters are in the slots.
        """
        self._reserved = max(self._reserved, total_rank)

    def put(self, slot: int, factors: Factors | None) -> None:
        """Give a slot its factors, or None to empty it. They must not be moved or changed while they are there.

        Raises:
            ValueError: their shapes or types are not those of this projection.
        """
        if factors is not None:
            self._check(factors)
        self.factors[slot] = factors
        refill(self.lines[slot], np.array(table_row(factors)))

    def _check(self, factors: Factors) -> None:
        total = sum(factors.ranks)
        cells = sum(rank * size for rank, size in zip(factors.ranks, self.sizes, strict=True))
        vectors = (factors.gain, factors.add)
        if (
            any(matrix.dtype is not self.dtype or not matrix.is_contiguous() for matrix in (factors.a, factors.b))
            or any(vector is not None and vector.dtype is not torch.float32 for vector in (factors.scale, *vectors))
            or tuple(factors.a.shape) not in ((total, self.width), (self.width, total))
            or factors.scale.shape != (total,)
            or factors.b.shape != (cells,)
            or any(vector is not None and vector.shape != (sum(self.sizes),) for vector in vectors)
        ):
            raise ValueError(
                f"{factors.a.dtype} factors of ranks {factors.ranks}, a {list(factors.a.shape)}, b "
                f"{list(factors.b.shape)}, scale {list(factors.scale.shape)} do not fit a {self.dtype} projection "
                f"from {self.width} to {self.sizes}"
            )


def lora_shrink_expand(y: Tensor, x: Tensor, table: SlotTable, segments: Segments) -> None:
    """Add the adapters' part of a projection to ``y`` [T, N], for inputs ``x`` [T, K] in the factors' type.

    ``y`` is of the same type or float32.

    Raises:
        IndexError: a segment names a token or a slot that does not exist; nothing is written.
        ValueError: x or y has another shape or type than the table's.
    """
    _run(y, x, None, table, segments)


def lora_embed(y: Tensor, token_ids: Tensor, table: SlotTable, segments: Segments) -> None:
    """Add the adapters' part of an embedding to ``y`` [T, H], for the tokens ``token_ids`` [T] int64.

    ``y`` is of the factors' type or float32.

    Raises:
        IndexError: a segment or a token id is out of range; nothing is written.
        ValueError: y or token_ids has another shape than the table's.
    """
    _run(y, None, token_ids, table, segments)


def _run(y: Tensor, x: Tensor | None, token_ids: Tensor | None, table: SlotTable, segments: Segments) -> None:
    rows = y.shape[0]
    if y.shape[1] != sum(table.sizes):
        raise ValueError(f"y is {list(y.shape)}; the projection has {sum(table.sizes)} columns")
    if x is not None and (x.shape != (rows, table.width) or x.dtype is not table.dtype):
        raise ValueError(f"x is {x.dtype} {list(x.shape)}, not {table.dtype} [{rows}, {table.width}]")
    if token_ids is not None and token_ids.shape != (rows,):
        raise ValueError(f"token_ids is {list(token_ids.shape)}, not [{rows}]")
    if segments.tiles is not None and _on_device(y, x, table):
        _run_on_device(y, x, token_ids, table, segments)
        return
    kernels = _native(y, x, table)
    if kernels is None:
        lora_reference.lora_shrink_expand(y, x, token_ids, table.factors, table.sizes, segments)
    else:
        kernels.shrink_expand(
            y, x, token_ids, table.lines.data_ptr(), len(table.factors), table.sizes, table.width, table.dtype, segments
        )


def _on_device(y: Tensor, x: Tensor | None, table: SlotTable) -> bool:
    """Whether the GPU's kernels take these tensors."""
    types = launch.TYPES.values()
    aligned = launch.is_known(y) if x is None else launch.is_known(y, x)
    return ops.on_triton(y.device) and aligned and y.dtype in types and table.dtype in types


def _run_on_device(y: Tensor, x: Tensor | None, token_ids: Tensor | None, table: SlotTable, segments: Segments) -> None:
    from .triton import lora_kernels

    assert segments.tiles is not None
    common = (table.lines, table.total_rank, table.sizes, segments.tokens, segments.tiles)
    if x is not None:
        lora_kernels.shrink_expand(y, x, *common)
    elif token_ids is not None:
        lora_kernels.embed(y, token_ids, *common, table.width, table.dtype)


def _native(y: Tensor, x: Tensor | None, table: SlotTable) -> LoraKernels | None:
    """The native op, where it is allowed, could be built and takes these tensors."""
    taken = LoraKernels.takes(y) if x is None else LoraKernels.takes(y, x)
    return _load() if taken and table.dtype in NATIVE_TYPES and ops.native_kernels() is not None else None


@functools.cache
def _load() -> LoraKernels | None:
    try:
        return LoraKernels(load_library(default_cache()))
    except BuildError:
        return None
