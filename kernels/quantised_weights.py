"""Quantised linear layers on the CPU: packing weights of 2 to 8 bits for ``kernels.ops.linear``.

A weight w [N, K] is stored as integers q with a scale d (and with four bits a minimum m) for each block of 32 along K,
or for each row. Rows of x are quantised on the fly, either each block of 32, or, for weights with row scales, as a
whole, to integers a with a scale s. Then

    y[n] = sum over blocks of  d s (sum of q a)  +  m s (sum of a)

with exact inner sums.

``dynamic=True``: with blocks, integers are within L = 127 and s = largest magnitude / L, which is llama.cpp's
arithmetic. With row scales, this is "w8a8": the usual values of a row of x are within 127, and its outliers are kept in
two bytes (``cpu/src/int8/int8_rows.h``; LLM.int8(), Dettmers et al. 2022, found that outliers are few and must be
kept). Such rounding changes a few percent of the most likely tokens.

``dynamic=False``: the product equals that with the dequantised weight. With blocks, L = 127 * 128, which is finer than
bfloat16 but takes two byte products instead of one. With row scales x is not quantised: ``y[n] = d (sum of q x)``.

``widened=True``: x is not quantised. The dequantised weight is rounded to the type of x, and the result has the same
bits as the product with a plain weight of these values.

The result of a row is bit-identical whatever the other rows and the number of threads are. There is no torch path:
without native kernels, weights are dequantised when they are loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from . import ops
from .cpu.native_quantised import FLOAT8_GROUP, MOST_WIDTH, PANEL_ROWS, QuantisedKernels
from .layouts.packed_weights import Format, QuantisedLinear

__all__ = [
    "BLOCK_SIZES",
    "FLOAT8_GROUP",
    "MOST_WIDTH",
    "PANEL_ROWS",
    "BlockType",
    "Format",
    "QuantisedLinear",
    "available",
    "flush",
    "is_dynamic_slow",
    "is_widened_only",
    "pack_block_rows",
    "pack_blocks",
    "pack_bytes",
    "pack_channels",
    "rows",
    "with_widened",
]

BlockType = Literal[
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "U4_ZERO_POINT",
    "E2M1",
    "NVFP4",
    "IQ2",
]

BLOCK_SIZES: dict[BlockType, tuple[int, int]] = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "U4_ZERO_POINT": (32, 20),
    "E2M1": (32, 18),
    "NVFP4": (256, 148),
    "IQ2": (256, 110),
}
"""Values and bytes of a block, by its name in GGUF. Some names are not GGUF's:

U4_ZERO_POINT is Q4_1 with a zero point z in place of the minimum: ``d * (q - z)``. It is exact for the four bits of AWQ
and GPTQ, for which a minimum would need too many digits. E2M1 is MXFP4 with half its scale in half precision. NVFP4 is
256 numbers of E2M1: half of the matrix's factor in fp32, sixteen scales in E4M3, and 16 bytes for each 32 numbers. IQ2
is Q3_K with numbers that choose one of 1, 25/8, 43/8 and 0, or, in the second half of the range, their negatives.
"""

_PLAIN: dict[BlockType, Format] = {
    "Q4_0": Format.SYMMETRIC,
    "Q4_1": Format.NIBBLES,
    "Q5_0": Format.SYMMETRIC_5_BITS,
    "Q5_1": Format.FIVE_BITS,
    "Q8_0": Format.BYTES,
    "U4_ZERO_POINT": Format.ZERO_POINTS,
    "IQ4_NL": Format.TABLE,
    "E2M1": Format.FLOAT4,
}
_SUPER: dict[BlockType, Format] = {
    "Q2_K": Format.SUPER_2_BITS,
    "Q3_K": Format.SUPER_3_BITS,
    "Q4_K": Format.SUPER_NIBBLES,
    "Q5_K": Format.SUPER_5_BITS,
    "Q6_K": Format.SUPER_6_BITS,
    "IQ4_XS": Format.SUPER_TABLE,
    "NVFP4": Format.SUPER_FLOAT4,
    "IQ2": Format.SUPER_GRID,
}
_WITHOUT_AMX = _SUPER.keys() | {"Q5_0", "Q5_1"}
"""Types for which AMX cannot be used in products with x in 8 bits."""


def available() -> bool:
    """Return whether the native kernels are enabled and could be built."""
    return ops.native_kernels() is not None


def _kernels() -> QuantisedKernels:
    native = ops.native_kernels()
    if native is None:
        raise RuntimeError("quantised weights need the native kernels")
    return native.quantised


def is_widened_only(block_type: BlockType, *, dynamic: bool = False) -> bool:
    """Return whether products with blocks of a type need unquantised x. True for blocks with zero points or a table.

    K-quants and blocks of 5 bits can also be multiplied with x in 8 bits, but not in 15.

    Args:
        dynamic: whether x is quantised to 8 bits.
    """
    return block_type in ("U4_ZERO_POINT", "IQ4_NL", "E2M1", "NVFP4", "IQ2") or (
        block_type in _WITHOUT_AMX and not dynamic
    )


def is_dynamic_slow(block_type: BlockType) -> bool:
    """Return whether products with x in 8 bits cannot use the machine's fastest instructions: AMX for some types."""
    return block_type in _WITHOUT_AMX and _kernels().arranges


def pack_blocks(
    raw: Tensor, block_type: BlockType, bias: Tensor | None = None, *, dynamic: bool = False, widened: bool = False
) -> QuantisedLinear:
    """Pack a weight stored in GGUF blocks. Integers and scales keep their values.

    Args:
        raw: [N, blocks of a row * bytes of a block] uint8, on the CPU.
        block_type: type of all blocks of the weight.
        bias: [N] or None.
        dynamic: whether to quantise rows of x to 8 bits instead of 15.
        widened: whether not to quantise rows of x, and to round the weight's numbers to its type.

    Raises:
        ValueError: the shape is not that of whole blocks; a scale is not finite; both ways of rounding are requested,
            or one that ``is_widened_only`` excludes.
        RuntimeError: there are no native kernels.
    """
    if raw.dim() != 2 or raw.dtype is not torch.uint8:
        raise ValueError(f"{raw.dtype} {list(raw.shape)} are not rows of {block_type} blocks")
    rows, row_bytes = raw.shape
    return pack_block_rows([raw], (rows, row_bytes), block_type, bias, dynamic=dynamic, widened=widened)


def pack_block_rows(
    pieces: Iterable[Tensor],
    shape: tuple[int, int],
    block_type: BlockType,
    bias: Tensor | None = None,
    *,
    dynamic: bool = False,
    widened: bool = False,
) -> QuantisedLinear:
    """Pack like ``pack_blocks`` a weight that comes some rows at a time, so that it is never in memory as a whole.

    Args:
        pieces: consecutive rows [n, bytes of a row] uint8; n is a multiple of ``PANEL_ROWS`` except in the last piece.
        shape: rows of the weight, and bytes of a row.

    Raises:
        ValueError: see ``pack_blocks``; or the pieces do not form such a weight.
        RuntimeError: there are no native kernels.
    """
    if dynamic and widened:
        raise ValueError("rows of x are quantised, or the weight's numbers are rounded to their type, not both")
    if is_widened_only(block_type, dynamic=dynamic) and not widened:
        raise ValueError(f"products with {block_type} blocks and such rows of x are not supported")
    (columns, row_bytes), (_, size) = shape, BLOCK_SIZES[block_type]
    if row_bytes % size or not columns * row_bytes:
        raise ValueError(f"{list(shape)} bytes are not rows of whole {block_type} blocks of {size} bytes")
    in_blocks = (piece.contiguous().view(-1, row_bytes // size, size) for piece in pieces)
    if block_type in _SUPER:
        shape_in_blocks = columns, row_bytes // size
        return _kernels().pack_super_blocks(in_blocks, shape_in_blocks, _SUPER[block_type], bias, int(dynamic))
    planes = 0 if widened else 1 if dynamic else 2
    return _kernels().pack_blocks(in_blocks, (columns, row_bytes // size), _PLAIN[block_type], bias, planes)


def with_widened(
    layer: QuantisedLinear, dtype: torch.dtype, bias: Tensor | None = None, *, few_rows: int
) -> QuantisedLinear:
    """Return a weight in blocks together with a second, widened form, with which more rows are multiplied.

    Both forms give the same bits.

    Args:
        layer: packed by ``pack_blocks`` with ``widened=True``.
        dtype: type of x: bfloat16 or float32.
        bias: [N], the same as it was packed with, or None.
        few_rows: largest number of rows of x that are multiplied with the blocks.

    Raises:
        ValueError: rows of x are quantised for this weight, it has a second form, or x has another type.
        RuntimeError: there are no native kernels.
    """
    is_blocks = not layer.planes and layer.format not in (Format.CHANNELS, Format.WIDENED, Format.FLOAT8)
    if not is_blocks or layer.widened is not None or dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"a weight in {layer.format.description} has no widened form in {dtype} beside it")
    return _kernels().with_widened(layer, dtype, bias, few_rows)


def flush(layer: QuantisedLinear) -> None:
    """Flush a weight from all caches, so that its next product reads memory, as most products in a step do."""
    _kernels().flush(layer)


def pack_channels(weight: Tensor, bias: Tensor | None = None, *, dynamic: bool) -> QuantisedLinear:
    """Quantise a weight [N, K] in bfloat16 or float32 to 8 bits with a scale for each row.

    Args:
        dynamic: whether to quantise rows of x too.

    Raises:
        ValueError: the weight has another type, an odd K in bfloat16, or a K beyond 2^17.
        RuntimeError: there are no native kernels.
    """
    if weight.dim() != 2 or not QuantisedKernels.takes_weight(weight):
        raise ValueError(f"{weight.dtype} {list(weight.shape)} on {weight.device} cannot be quantised by channels")
    return _kernels().pack_channels(weight, Format.CHANNELS if dynamic else Format.WIDENED, bias)


def pack_bytes(
    pieces: Iterable[Tensor], shape: tuple[int, int], scales: Tensor, bias: Tensor | None = None, *, form: Format
) -> QuantisedLinear:
    """Pack a weight that is stored in 8 bits, without further rounding.

    Args:
        pieces: consecutive rows [n, K] uint8: signed integers, or E4M3; n is a multiple of ``PANEL_ROWS`` except in the
            last piece.
        shape: [N, K].
        scales: [N, 1]; for E4M3 also [N, ceil(K / 128)].
        form: FLOAT8 for E4M3; WIDENED or CHANNELS for integers. Sums are scaled in fp32, but for E4M3 with AMX, which
            multiplies scaled numbers that are rounded to bf16. Rows of x are quantised only for CHANNELS.

    Raises:
        ValueError: the scales do not fit, or the weight is wider than ``MOST_WIDTH`` for CHANNELS.
        RuntimeError: there are no native kernels.
    """
    groups = {1, -(-shape[1] // FLOAT8_GROUP)} if form is Format.FLOAT8 else {1}
    if scales.dim() != 2 or len(scales) != shape[0] or scales.shape[1] not in groups:
        raise ValueError(f"scales {list(scales.shape)} do not fit a weight {list(shape)} in 8 bits")
    if form is Format.CHANNELS and shape[1] > MOST_WIDTH:
        raise ValueError(f"a weight {list(shape)} has more than {MOST_WIDTH} inputs, whose sums may leave 32 bits")
    return _kernels().pack_bytes(pieces, shape, form, scales, bias)


def rows(layer: QuantisedLinear, ids: Tensor) -> Tensor:
    """Dequantise rows of the weight for an embedding: [T] int64 -> [T, K] fp32.

    Raises:
        IndexError: an id is not in 0 .. N - 1.
    """
    return layer.kernels.rows(layer, ids)
