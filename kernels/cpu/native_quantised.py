"""Native kernels of quantised weights as functions on torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from struct import Struct
from typing import Final

import torch
from torch import Tensor

from ..layouts.packed_weights import Format, Largest, QuantisedLinear, WidenedForm
from .native_elementwise import KINDS
from .native_library import Fields, NativeLibrary

BLOCK: Final = 32  # Number of values with one scale, in the formats with blocks.
SUPER_BLOCK: Final = 256  # Number of values whose scales have common factors, in the formats with super-blocks.
MOST_WIDTH: Final = 1 << 17
"""Largest number of inputs: the sum of that many products of two bytes fits in 32 bits."""
FLOAT8_GROUP: Final = 128  # Number of inputs with one scale, in FP8 by blocks.
PANEL_ROWS: Final = 16  # Rows of a weight in a panel: output columns side by side.

_WORD: Final = 4  # Bytes of a word.
_BF16: Final = torch.bfloat16
_TYPES: Final = (_BF16, torch.float32)
_NO_MEMORY: Final = 2  # return code of a C function whose allocation failed

_SUPER_SIZES: Final = {
    Format.SUPER_NIBBLES: (4, 10),
    Format.SUPER_6_BITS: (6, 9),
    Format.SUPER_5_BITS: (5, 10),
    Format.SUPER_3_BITS: (3, 9),
    Format.SUPER_2_BITS: (2, 10),
    Format.SUPER_GRID: (3, 9),
    Format.SUPER_TABLE: (4, 5),
    Format.SUPER_FLOAT4: (4, 10),
}
"""Number of bits of a packed number, and of half-precision words for the scales of a super-block."""

_FIVE_BITS: Final = (Format.FIVE_BITS, Format.SYMMETRIC_5_BITS)
_PACK_BLOCKS: Final = Struct("7q")
_PACK_CHANNELS: Final = Struct("7q")
_ROWS: Final = Struct("9q")
_QUANTISED: Final = Struct("16q")
_BOTH_FORMS: Final = Struct("19q")
_WIDEN_BLOCKS: Final = Struct("8q")
_ARRANGE_BLOCKS: Final = Struct("5q")
_FLUSH_LINES: Final = Struct("2q")
_WIDENED: Final = Struct("12q")


class QuantisedKernels:
    """Quantised ops of a compiled library, with the meaning of their namesakes in ``kernels.quantised_weights``."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._pack_blocks = library.bind("pack_blocks", _PACK_BLOCKS)
        self._pack_super_blocks = library.bind("pack_super_blocks", _PACK_BLOCKS)
        self._pack_channels = library.bind("pack_channels", _PACK_CHANNELS)
        self._rows = library.bind("quantised_rows", _ROWS)
        self._quantised_linear = library.bind("quantised_linear", _QUANTISED, Fields((6,), following=14))
        self._both_forms_linear = library.bind("both_forms_linear", _BOTH_FORMS, Fields((6,)))
        self._widen_blocks = library.bind("widen_blocks", _WIDEN_BLOCKS)
        self._arrange_blocks = library.bind("arrange_blocks", _ARRANGE_BLOCKS)
        self._flush_lines = library.bind("flush_lines", _FLUSH_LINES)
        # Whether blocks are rearranged for products of few rows by AMX.
        self.arranges = bool(library.handle.arranges_blocks())
        pays = library.handle.gated_linear_pays
        self._gated_dtypes = {dtype for dtype in _TYPES if pays(dtype is _BF16)}
        self._widened_linear = library.bind("widened_linear", _WIDENED, Fields((5,)))

    @staticmethod
    def takes_weight(weight: Tensor) -> bool:
        """Return whether a weight [N, K] can be quantised by channels: bf16 needs an even K, to pair neighbours."""
        even = weight.dtype is not _BF16 or weight.shape[1] % 2 == 0
        fits = 0 < weight.shape[1] <= MOST_WIDTH and weight.shape[0] > 0
        return weight.is_cpu and weight.dtype in _TYPES and even and fits

    def pack_blocks(
        self, pieces: Iterable[Tensor], shape: tuple[int, int], form: Format, bias: Tensor | None, planes: int
    ) -> QuantisedLinear:
        """Pack pieces [n, K / 32, 18, 20, 22, 24 or 34] uint8 of [N, K / 32]; ValueError: a scale is not finite."""
        columns, blocks = shape
        halves = 2 if form in (Format.NIBBLES, Format.ZERO_POINTS, Format.FIVE_BITS) else 1
        words = 5 if form in _FIVE_BITS else 8 if form is Format.BYTES else 4
        weight, scales = self._empty_panels(shape, halves, words)
        if not self._packs_all(self._pack_blocks, pieces, shape, form, weight, scales):
            raise ValueError("a block has a scale or a minimum that is infinite or not a number")
        if not planes:
            form = self._arrange(weight, scales, form)
        return QuantisedLinear(blocks * BLOCK, columns, form, planes, weight, scales, _wide(bias), self)

    def pack_super_blocks(
        self, pieces: Iterable[Tensor], shape: tuple[int, int], form: Format, bias: Tensor | None, planes: int
    ) -> QuantisedLinear:
        """Pack pieces [n, K / 256, bytes of a super-block] uint8 of [N, K / 256]; ValueError: a factor is not finite.

        Args:
            planes: 0, or 1 for rows of x in 8 bits.
        """
        columns, supers = shape
        bits, halves = _SUPER_SIZES[form]
        weight, scales = self._empty_panels(shape, halves, bits * SUPER_BLOCK // (8 * _WORD))
        if not self._packs_all(self._pack_super_blocks, pieces, shape, form, weight, scales):
            raise ValueError("a super-block has a factor that is infinite or not a number")
        if not planes:
            form = self._arrange(weight, scales, form)
        return QuantisedLinear(supers * SUPER_BLOCK, columns, form, planes, weight, scales, _wide(bias), self)

    def _arrange(self, weight: Tensor, scales: Tensor, form: Format) -> Format:
        """Arrange blocks by columns if products round their numbers and that is faster; return their format."""
        arranged = form.arranged
        if not self.arranges or arranged is None:
            return form
        blocks = weight.shape[0] * weight.shape[1] * (SUPER_BLOCK // BLOCK if form in _SUPER_SIZES else 1)
        settings = (blocks, form, self._library.num_threads)
        self._arrange_blocks(_ARRANGE_BLOCKS.pack(weight.data_ptr(), scales.data_ptr(), *settings))
        return arranged

    def with_widened(
        self, layer: QuantisedLinear, dtype: torch.dtype, bias: Tensor | None, few_rows: int
    ) -> QuantisedLinear:
        """Return blocks with their widened form beside them; see ``quantised_weights.with_widened``."""
        pair = 2 if dtype is _BF16 else 1
        panels = -(-layer.out_features // PANEL_ROWS)
        wide = self._library.arena.empty((panels, layer.in_features // pair, PANEL_ROWS, pair), dtype)
        addresses = (layer.weight.data_ptr(), layer.scales.data_ptr(), wide.data_ptr())
        sizes = (layer.out_features, layer.in_features)
        threads = self._library.num_threads
        self._widen_blocks(_WIDEN_BLOCKS.pack(*addresses, *sizes, layer.format, dtype is _BF16, threads))
        wide_bias = None if bias is None else bias.detach().to(dtype).contiguous()
        return replace(layer, widened=WidenedForm(wide, wide_bias, few_rows))

    def flush(self, layer: QuantisedLinear) -> None:
        """See ``quantised_weights.flush``."""
        parts = (layer.weight, layer.scales, None if layer.widened is None else layer.widened.weight)
        for part in parts:
            if part is not None:
                self._flush_lines(_FLUSH_LINES.pack(part.data_ptr(), part.nbytes))

    def _empty_panels(self, shape: tuple[int, int], halves: int, words: int) -> tuple[Tensor, Tensor]:
        """Allocate panels for the numbers and the scales of blocks: ``words`` and ``halves`` of each row."""
        panels, blocks = -(-shape[0] // PANEL_ROWS), shape[1]
        weight = self._library.arena.empty((panels, blocks, words, PANEL_ROWS), torch.int32)
        return weight, self._library.arena.empty((panels, blocks, halves, PANEL_ROWS), torch.float16)

    def _packs_all(
        self,
        pack: Callable[[bytes], int],
        pieces: Iterable[Tensor],
        shape: tuple[int, int],
        kind: int,
        weight: Tensor,
        scales: Tensor,
    ) -> bool:
        """Pack pieces of a weight's rows to their panels. Returns False if ``pack`` finds a factor that is not finite.

        Args:
            kind: argument of ``pack`` after the sizes.
        """
        settings = (shape[1], kind, self._library.num_threads)
        return not any(
            pack(_PACK_BLOCKS.pack(rows.data_ptr(), *addresses, rows.shape[0], *settings))
            for rows, addresses in _placed(pieces, shape[0], weight, scales)
        )

    def pack_channels(self, weight: Tensor, form: Format, bias: Tensor | None) -> QuantisedLinear:
        """Quantise and pack a weight [N, K] that ``takes_weight`` accepts."""
        columns, width = weight.shape
        weight = weight.detach().contiguous()
        panels = -(-columns // PANEL_ROWS)
        packed = self._library.arena.empty((panels, -(-width // _WORD), PANEL_ROWS), torch.int32)
        scales = self._library.arena.empty((panels, PANEL_ROWS), torch.float32)
        addresses = (weight.data_ptr(), packed.data_ptr(), scales.data_ptr())
        settings = (weight.dtype is _BF16, self._library.num_threads)
        if self._pack_channels(_PACK_CHANNELS.pack(*addresses, columns, width, *settings)):
            raise MemoryError("quantising a weight could not allocate a row")
        return QuantisedLinear(width, columns, form, 1, packed, scales, _wide(bias), self)

    def pack_bytes(
        self, pieces: Iterable[Tensor], shape: tuple[int, int], form: Format, scales: Tensor, bias: Tensor | None
    ) -> QuantisedLinear:
        """Pack bytes [n, K] uint8 of a weight [N, K] unchanged, with its scales [N, G] in fp32.

        Args:
            form: WIDENED or CHANNELS for signed integers with a scale of each row, or FLOAT8.
        """
        columns, width = shape
        panels, words = -(-columns // PANEL_ROWS), -(-width // _WORD)
        packed = self._library.arena.empty((panels, words, PANEL_ROWS), torch.int32)
        as_bytes = packed.view(torch.uint8).view(panels, words, PANEL_ROWS, _WORD)
        first = 0
        for piece in pieces:
            stored = piece if form is Format.FLOAT8 else piece ^ 128
            rows = torch.nn.functional.pad(stored, (0, words * _WORD - width, 0, -len(piece) % PANEL_ROWS))
            end = first + len(rows) // PANEL_ROWS
            as_bytes[first:end] = rows.view(-1, PANEL_ROWS, words, _WORD).transpose(1, 2)
            first = end
        wide = torch.nn.functional.pad(scales.float(), (0, 0, 0, panels * PANEL_ROWS - columns))
        of_panels = self._library.arena.empty((panels, scales.shape[1], PANEL_ROWS), torch.float32)
        of_panels.copy_(wide.view(panels, PANEL_ROWS, -1).transpose(1, 2))
        planes = scales.shape[1] if form is Format.FLOAT8 else 1
        return QuantisedLinear(width, columns, form, planes, packed, of_panels, _wide(bias), self)

    def rows(self, layer: QuantisedLinear, ids: Tensor) -> Tensor:
        """Dequantise rows of the weight, [T] int64 -> [T, K] fp32."""
        if ids.dtype is not torch.int64 or ids.dim() != 1 or not ids.is_cpu:
            raise ValueError(f"ids must be int64 [T] on the CPU, not {ids.dtype} {list(ids.shape)} on {ids.device}")
        if layer.format is Format.FLOAT8:
            return _float8_rows(layer, ids)
        ids = ids.contiguous()
        out = torch.empty((ids.shape[0], layer.in_features), dtype=torch.float32)
        addresses = (ids.data_ptr(), layer.weight.data_ptr(), layer.scales.data_ptr(), out.data_ptr())
        sizes = (ids.shape[0], layer.out_features, layer.in_features)
        if self._rows(_ROWS.pack(*addresses, *sizes, layer.format, self._library.num_threads)):
            raise IndexError(f"an id is not in 0 .. {layer.out_features - 1}")
        return out

    def linear(self, x: Tensor, layer: QuantisedLinear, out_dtype: torch.dtype) -> Tensor:
        """x [T, K] -> [T, N]; see ``kernels.ops.linear``."""
        out = self._library.empty((x.shape[0], layer.out_features), dtype=out_dtype)
        self._multiply(x, layer, out, 0)
        return out

    def largest_linear(self, x: Tensor, layer: QuantisedLinear) -> Largest:
        """See ``kernels.ops.largest_linear``; not for the format WIDENED."""
        found = Largest(
            self._library.empty((x.shape[0],), dtype=torch.float32),
            self._library.empty((x.shape[0],), dtype=torch.int64),
        )
        self._multiply(x, layer, found.value, found.column.data_ptr())
        return found

    def takes_gated(self, layer: QuantisedLinear) -> bool:
        """Return whether the weight has no bias, its halves are whole panels, and its format has a gated product."""
        fits = layer.bias is None and layer.out_features % (2 * PANEL_ROWS) == 0
        has_op = layer.widened is None or layer.widened.weight.dtype in self._gated_dtypes
        return fits and has_op and (layer.format is Format.CHANNELS or not layer.planes)

    def gated_linear(self, x: Tensor, layer: QuantisedLinear, kind: str) -> Tensor:
        """See ``kernels.ops.gated_linear``, for a layer that ``takes_gated``."""
        out = self._library.empty((x.shape[0], layer.out_features // 2), dtype=x.dtype)
        self._multiply(x, layer, out, 0, 1 + KINDS.index(kind))
        return out

    def _multiply(self, x: Tensor, layer: QuantisedLinear, out: Tensor, columns: int, gate: int = 0) -> None:
        """Write the product; if ``columns`` is an address, write the maximum and argmax of the product's rows instead.

        Args:
            gate: 1 + the number of the activation of the product's first half, for ``gated_linear``; 0 without a gate.
        """
        rows, width = x.shape
        if width != layer.in_features or x.dtype not in _TYPES or not x.is_cpu or out.dtype not in _TYPES:
            raise ValueError(
                f"x is {x.dtype} [{rows}, {width}] on {x.device}; the layer takes bfloat16 or float32 "
                f"[T, {layer.in_features}] on the CPU"
            )
        if not x.is_contiguous():
            x = x.contiguous()
        is_widened = layer.format in (Format.WIDENED, Format.FLOAT8)
        if is_widened and x.dtype is _BF16 and width % 2:
            x = x.float()  # The op reads pairs of bf16, and the second row would begin within a pair.
        addresses = (
            x.data_ptr(),
            layer.weight.data_ptr(),
            layer.scales.data_ptr(),
            0 if layer.bias is None else layer.bias.data_ptr(),
            out.data_ptr(),
        )
        sizes = (rows, layer.out_features, width)
        flags = (x.dtype is _BF16, out.dtype is _BF16, self._library.num_threads)
        if is_widened:
            groups = layer.planes if layer.format is Format.FLOAT8 else 0
            failed = self._widened_linear(_WIDENED.pack(*addresses, *sizes, *flags, groups))
        elif layer.widened is not None and x.dtype is layer.widened.weight.dtype:
            wide, bias, few_rows = layer.widened
            fields = (*addresses, columns, *sizes, layer.format, layer.planes, *flags, 0, gate)
            others = (wide.data_ptr(), 0 if bias is None else bias.data_ptr(), few_rows)
            failed = self._both_forms_linear(_BOTH_FORMS.pack(*fields, *others))
        else:
            formats = (layer.format, layer.planes)
            failed = self._quantised_linear(_QUANTISED.pack(*addresses, columns, *sizes, *formats, *flags, 0, gate))
        if failed == _NO_MEMORY:
            raise MemoryError("a quantised product could not allocate its rows")


def _float8_rows(layer: QuantisedLinear, ids: Tensor) -> Tensor:
    """Dequantise rows of FP8: [T] int64 -> [T, K] fp32. Raises IndexError like ``QuantisedKernels.rows``."""
    if bool(((ids < 0) | (ids >= layer.out_features)).any()):
        raise IndexError(f"an id is not in 0 .. {layer.out_features - 1}")
    panels, words, _ = layer.weight.shape
    stored = layer.weight.view(torch.uint8).view(panels, words, PANEL_ROWS, _WORD)
    numbers = stored[ids // PANEL_ROWS, :, ids % PANEL_ROWS].flatten(1)[:, : layer.in_features].contiguous()
    scales = layer.scales[ids // PANEL_ROWS, :, ids % PANEL_ROWS]
    if scales.shape[1] > 1:
        scales = scales.repeat_interleave(FLOAT8_GROUP, dim=1)[:, : layer.in_features]
    return numbers.view(torch.float8_e4m3fn).float() * scales


def _wide(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().float().contiguous()


def _placed(
    pieces: Iterable[Tensor], columns: int, weight: Tensor, scales: Tensor
) -> Iterator[tuple[Tensor, tuple[int, int]]]:
    """Yield each piece of a weight's rows with the addresses of its panels. ValueError if a piece does not fit."""
    done = 0
    for rows in pieces:
        if done % PANEL_ROWS or not 0 < rows.shape[0] <= columns - done:
            raise ValueError(f"{rows.shape[0]} rows of blocks after {done} are not the next of {columns}")
        panel = done // PANEL_ROWS
        yield rows, (weight[panel].data_ptr(), scales[panel].data_ptr())
        done += rows.shape[0]
    if done != columns:
        raise ValueError(f"there are {done} rows of blocks, not {columns}")
