"""Parts of the scans of recurrent states in Triton: a program's state, launches, chunks, the gates' functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from ..layouts.state_arguments import StateBatch
from .launch import Launch, cdiv, meta, multiplies_registers, power_of_two

SHORT = 8  # tokens of a row up to which it is scanned token by token: a draft and its verification
_CELLS = 4096  # cells of a state that a program keeps in registers; chunks twice as many where they fit


@triton.jit
def state_cells(head, SIZE: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the part of a head's state [SIZE, DIM] that program (r, h, b) has: all rows of columns ``b * BLOCK ...``.

    Returns:
        The rows [WIDE], the columns [BLOCK] and the offsets of the cells [WIDE, BLOCK] in a slot; then three masks that
        say which rows, columns and cells exist.
    """
    size, dim = tl.arange(0, WIDE), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    in_size, in_dim = size < SIZE, dim < DIM
    cell = (head * SIZE + size[:, None]) * DIM + dim[None, :]
    return size, dim, cell, in_size, in_dim, in_size[:, None] & in_dim[None, :]


@triton.jit
def load_state(state, slot, cell, in_cell, CELLS: tl.constexpr):
    """Load the cells of a slot of CELLS cells; zeros for slot -1, which means that there is no state yet."""
    return tl.load(state + slot.to(tl.int64) * CELLS + cell, in_cell & (slot >= 0), other=0.0)


@triton.jit
def store_state(state, slot, kept, cell, in_cell, CELLS: tl.constexpr):
    """Store the cells of a slot of CELLS cells."""
    tl.store(state + slot.to(tl.int64) * CELLS + cell, kept, in_cell)


@triton.jit
def softplus(x):
    """``log(1 + e^x)`` of fp32, exact for small results too."""
    e = tl.exp(-tl.abs(x))
    rest = tl.where(e < 1e-3, e * (1.0 - e * (0.5 - e * (1.0 / 3.0))), tl.log(1.0 + e))
    return tl.maximum(x, 0.0) + rest


@triton.jit
def sigmoid(x):
    """``1 / (1 + e^-x)`` of fp32, by e^(-|x|), which does not overflow."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def narrow_times_wide(narrow, wide):
    """The product of a matrix as it is stored and one in fp32, which is the sum of two in bfloat16, to 16 bits."""
    if narrow.dtype == tl.bfloat16:
        high = wide.to(tl.bfloat16)
        low = (wide - high.to(tl.float32)).to(tl.bfloat16)
        result = tl.dot(narrow, low, tl.dot(narrow, high))
    else:
        result = tl.dot(narrow.to(tl.float32), wide, input_precision="tf32")
    return result


@triton.jit
def wide_times_narrow(wide, narrow):
    """The product of a matrix in fp32 and one as it is stored, to 16 bits as in `narrow_times_wide`."""
    if narrow.dtype == tl.bfloat16:
        high = wide.to(tl.bfloat16)
        low = (wide - high.to(tl.float32)).to(tl.bfloat16)
        result = tl.dot(low, narrow, tl.dot(high, narrow))
    else:
        result = tl.dot(wide, narrow.to(tl.float32), input_precision="tf32")
    return result


@triton.jit
def chunk_end(checkpoints, token, end, CHUNK: tl.constexpr):
    """How many tokens from this one on a chunk has, which ends at a token with a checkpoint; and that slot, or -1."""
    index = tl.arange(0, CHUNK)
    slots = tl.load(checkpoints + token + index, token + index < end, other=-1)
    count = tl.min(tl.where(slots >= 0, index + 1, CHUNK), 0)
    count = tl.minimum(count, end - token)
    return count, tl.max(tl.where(index == count - 1, slots, -1), 0)


def has_indices(batch: StateBatch) -> bool:
    """Return whether the slots are of the type that kernels read. They may be at any address: rows are read singly."""
    index = (batch.query_start, batch.source, batch.target, batch.checkpoints)
    return all(each.dtype is torch.int32 and each.is_contiguous() for each in index)


def meta_batch(rows: int) -> StateBatch:
    """Return a batch on the meta device, with rows of one token; a row may also have more tokens."""
    starts, source, target, checkpoints = (meta(count, dtype=torch.int32) for count in (rows + 1, rows, rows, rows))
    return StateBatch(starts, source, target, checkpoints)


def row_launches(
    kernels: tuple[Any, Any | None],
    batch: StateBatch,
    args: tuple[Any, ...],
    constants: Mapping[str, int],
    chunk: int,
    chunk_warps: int = 4,
) -> Iterator[Launch]:
    """Yield the launches of a scan: one for rows of few tokens, and one for longer rows if the batch may have some.

    Args:
        kernels: the kernel for rows of few tokens and the kernel for longer rows. The second one is None if the first
            kernel computes all rows.
        args: arguments of both kernels.
        constants: constants of both kernels, with HEADS, and the DIM and SIZE of a head's state.
        chunk: tokens of a chunk of the second kernel.
        chunk_warps: warps of a program of the second kernel on GPUs that ``multiplies_registers``; 8 on others.
    """
    rows, heads, dim, size = len(batch.source), constants["HEADS"], constants["DIM"], constants["SIZE"]
    wide = power_of_two(size, 16)
    shorts, chunks = kernels
    constants = {**constants, "MOST": SHORT, "WIDE": wide}

    def launch(kernel: Any, constants: Mapping[str, int], cells: int, num_warps: int) -> Launch:
        block = min(power_of_two(dim, 16), max(16, cells // wide))
        return Launch(kernel, (rows, heads, cdiv(dim, block)), args, {**constants, "BLOCK": block}, num_warps)

    yield launch(shorts, constants, _CELLS, 4)
    if chunks is not None and (batch.max_query is None or batch.max_query > SHORT):
        is_small = multiplies_registers(batch.query_start.device)
        cells, num_warps = (_CELLS, chunk_warps) if is_small else (2 * _CELLS, 8)
        yield launch(chunks, {**constants, "CHUNK": chunk}, cells, num_warps)
