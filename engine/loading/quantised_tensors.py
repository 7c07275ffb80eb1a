"""Decode the quantised matrices of folders in Hugging Face format: GPTQ, AWQ, compressed-tensors, FP8 and others.

A weight w [N, K] of a module is stored as several tensors, its *parts*. A part is named here by the suffix that follows
the module's name. With q the stored integer, z a zero point, s a scale, and g the group of an input:

    gptq           w[n, k] = s[g(k), n] (q[k, n] - z[g(k), n])     qweight, qzeros, scales, g_idx
    awq            like gptq, with another order of the eight integers in a word
    packed, int8   w[n, k] = s[n, g(k)] (q[n, k] - z[n, g(k)])     weight_packed or weight, weight_scale
    float8         w[n, k] = s q[n, k], s of the matrix, a row, or a block
                   int8 and float8 are torchao's and optimum-quanto's, too, under other names (``usual_part``)
    nvfp4          w[n, k] = q[n, k] s[n, k / 16] / f, q in E2M1, s in E4M3, one f for the matrix (ModelOpt: times f)
    mxfp4_packed   w[n, k] = q[n, k] 2^(e[n, k / 32] - 127)
    bnb_4bit       w = table[q] s[block], blocks of the flat matrix; scales may be quantised once more
    bnb_int8       w[n, k] = q[n, k] s[n] / 127

Decoding is exact in fp32 except for the last rounding of a product. Rows are decoded in pieces, because a matrix takes
up to sixteen times as much memory in fp32 as in the file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final

import torch
from torch import Tensor

from ...kernels.grouped_weights import NumberForm, Offsets, StoredNumbers
from ...kernels.quantised_weights import BLOCK_SIZES, BlockType
from ..checkpoint.quantization_config import Layout, Quantization, Scheme
from ..errors import ModelError, shortened
from . import mxfp4, nvfp4
from .finite import is_within
from .matrix_cuts import RowPieces
from .upload import upload

_PIECE: Final = 1 << 23  # values that are decoded at once
_WORD: Final = 32
_WORD_BYTES: Final = 4
BLOCK: Final = 32
"""Number of inputs of a block of integers that native kernels can multiply with."""
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # position in an AWQ word of the integer of each of eight columns
_FLOAT4: Final = ("nvfp4", "nvfp4_modelopt", "mxfp4_packed")
_FLOAT8: Final = "F8_E4M3"
_FLOAT8_BLOCK: Final = 128
_FLOATS: Final = ("F32", "F16", "BF16")
_LARGEST_SCALE: Final = 1e30  # products of two with numbers of eight bits are finite
_NOT_A_NUMBER: Final = 0x7F  # NaN in E4M3, without its sign.
_MOST_STATE: Final = 1 << 16  # bytes of the JSON that bitsandbytes stores beside a matrix
_BYTES: Final = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F16": 2, "BF16": 2, "F32": 4, "I32": 4, "I64": 8}
_INDICES: Final = ("g_idx", "weight_g_idx", "weight_shape")
_INTEGERS: Final = ("gptq", "gptq_v2", "awq_gemm", "awq_gemv", "packed", "int8")

PARTS: Final[dict[Layout, frozenset[str]]] = {
    "gptq": frozenset({"qweight", "qzeros", "scales", "g_idx"}),
    "gptq_v2": frozenset({"qweight", "qzeros", "scales", "g_idx"}),
    "awq_gemm": frozenset({"qweight", "qzeros", "scales"}),
    "awq_gemv": frozenset({"qweight", "qzeros", "scales"}),
    "packed": frozenset({"weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"}),
    "int8": frozenset({"weight", "weight_scale", "weight_zero_point"}),
    "float8": frozenset({"weight", "weight_scale", "weight_zero_point"}),
    "float8_blocks": frozenset({"weight", "weight_scale_inv"}),
    "mxfp8": frozenset({"weight", "weight_scale_inv"}),
    "nvfp4": frozenset({"weight_packed", "weight_scale", "weight_global_scale"}),
    "nvfp4_modelopt": frozenset({"weight", "weight_scale", "weight_scale_2"}),
    "mxfp4_packed": frozenset({"weight_packed", "weight_scale"}),
    "bnb_4bit": frozenset(
        {"weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"}
        | {f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")}
    ),
    "bnb_int8": frozenset({"weight", "SCB", "weight_format"}),
}
"""Names of the parts of a matrix behind its module's name, by layout."""

LAYOUT_NAMES: Final[dict[Layout, str]] = {
    "gptq": "GPTQ",
    "gptq_v2": "GPTQ v2",
    "awq_gemm": "AWQ",
    "awq_gemv": "AWQ gemv",
    "packed": "compressed-tensors packed integers",
    "int8": "INT8",
    "float8": "FP8",
    "float8_blocks": "FP8 in blocks of 128 by 128",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
    "nvfp4_modelopt": "NVFP4 (ModelOpt)",
    "mxfp4": "MXFP4",
    "mxfp4_packed": "MXFP4",
    "bnb_4bit": "bitsandbytes 4 bits",
    "bnb_int8": "bitsandbytes LLM.int8()",
}
"""Usual names of the layouts, for error messages."""

WITHOUT_EFFECT: Final = frozenset(
    {"input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point", "bias_scale"}
    | {"k_scale", "v_scale", "q_scale", "prob_scale", "k_zero_point", "v_zero_point"}
)
"""Parts that do not change a weight: they specify how activations and cached keys and values may be quantised.

Scales of keys and values are read separately (``kv_scales``); the others are not used."""


# How torchao and optimum-quanto name the parts of a weight, by the method in the config.
_OTHER_PARTS: Final = {
    "torchao": re.compile(r"\._weight_(qdata|scale|zero_point)$"),
    "quanto": re.compile(r"\.weight\._(data|scale)$"),
}


def usual_part(stored: str, quantization: Quantization | None) -> str:
    """Return the usual name of a part of a matrix that torchao or quanto has stored, any other name unchanged."""
    names = None if quantization is None else _OTHER_PARTS.get(quantization.method)
    if names is None:
        return stored
    return names.sub(lambda found: ".weight" if found[1] in ("qdata", "data") else f".weight_{found[1]}", stored)


def part_names(quantization: Quantization | None) -> tuple[str, ...]:
    """Return the names of all parts that a checkpoint may have, longest first."""
    layouts = {rule.scheme.layout for rule in quantization.rules} if quantization else set()
    return tuple(sorted({name for layout in layouts for name in PARTS.get(layout, ())}, key=len, reverse=True))


@dataclass(frozen=True, slots=True)
class View:
    """A tensor in a safetensors file: shape and type are known, its numbers are read when they are asked for.

    Attributes:
        part: the index of the view along the tensor's first dimension; None for the whole tensor.
    """

    file: Any
    stored: str
    part: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.file.get_slice(self.stored).get_shape())
        return shape if self.part is None else shape[1:]

    @property
    def dtype(self) -> str:
        """The type by its name in the format: ``F16``, ``I32``, ``F8_E4M3``."""
        return str(self.file.get_slice(self.stored).get_dtype())

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _BYTES.get(self.dtype, 4)

    def tensor(self) -> Tensor:
        """Read the numbers, in the type in which they are stored."""
        if self.part is not None:
            some: Tensor = self.file.get_slice(self.stored)[self.part]
            return some
        found: Tensor = self.file.get_tensor(self.stored)
        return found


class QuantisedTensor:
    """A quantised matrix of a folder: its shape, and its rows decoded.

    Args:
        name: name of the weight, for errors.
        parts: the stored tensors by the suffix after the module's name.

    Raises:
        ModelError: a part is missing, or its shape or type does not fit the scheme.
    """

    def __init__(self, name: str, scheme: Scheme, parts: Mapping[str, View]) -> None:
        self._name = name
        self._scheme = scheme
        self._parts = parts
        self._open = _OPENERS[scheme.layout]
        self.shape = _SHAPES[scheme.layout](_Checked(name, scheme, parts))

    def check(self) -> None:
        """Read scales, zero points and indices of groups. Raises ModelError for values that no matrix has."""
        self._opened()

    def read(self, out: Tensor) -> None:
        """Write the dequantised matrix into ``out`` [N, K]. Raises ModelError for scales that are not finite."""
        for first, rows in self.pieces():
            upload(out[first : first + len(rows)], rows)

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Yield some rows [n, K] fp32 at a time, with the number of the first."""
        opened = self._opened()
        count = self.shape[0]
        for first in range(0, count, self._step):
            rows = opened.decode(first, min(count, first + self._step))
            if not is_within(rows, torch.finfo(torch.float32).max):
                raise ModelError(f"The tensor {shortened(self._name)} is malformed: it has values that are not finite.")
            yield first, rows

    def numbers(self) -> StoredNumbers | None:
        """Return the matrix as it is stored, for kernels of a GPU; None if they have no form for its numbers."""
        return self._opened().stored(self.shape, self._step)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix as it is kept on a GPU: integers take four or eight bits there, a zero point a byte."""
        scheme, (rows, width) = self._scheme, self.shape
        if scheme.layout not in _INTEGERS:
            return sum(view.nbytes for part, view in self._parts.items() if part not in _INDICES)
        scales = self._parts.get("scales") or self._parts["weight_scale"]
        count = rows * width // scheme.group if scheme.group else max(rows, math.prod(scales.shape))
        of_group = _BYTES.get(scales.dtype, 4) + (not scheme.symmetric)
        return rows * width * (4 if scheme.bits <= 4 else 8) // 8 + count * of_group

    @property
    def description(self) -> str:
        """The scheme in a few words: layout, bits, group."""
        scheme = self._scheme
        has_bits = scheme.layout in _INTEGERS
        bits = [f"{scheme.bits} bits", "" if scheme.symmetric else "zero points"] if has_bits else []
        group = "" if scheme.group is None else f"groups of {scheme.group}"
        return ", ".join(filter(None, (LAYOUT_NAMES[scheme.layout], *bits, group)))

    @property
    def byte_scales(self) -> int:
        """Number of scales in a row of 8-bit numbers that native CPU kernels use; 0 if the matrix has another form.

        It is 1, or for FP8 in blocks the number of blocks in a row.
        """
        scheme, (_, width) = self._scheme, self.shape
        is_integer = scheme.layout in ("int8", "packed", "bnb_int8") and scheme.bits == 8 and scheme.symmetric
        is_float = scheme.layout in ("float8", "float8_blocks")
        if not (is_integer or is_float) or scheme.group or width % _WORD_BYTES:
            return 0
        scales = self._parts.get("weight_scale_inv") or self._parts.get("weight_scale")
        is_in_blocks = is_float and scales is not None and scales.shape == _blocks_shape(self.shape)
        return -(-width // _FLOAT8_BLOCK) if is_in_blocks else 1

    @property
    def rounds_inputs(self) -> bool:
        """Whether the matrix was made for inputs in integers of 8 bits."""
        return self._scheme.rounds_inputs

    def bytes(self) -> StoredNumbers | None:
        """Return what `numbers` returns; None unless it is INT8 or E4M3 in a form of native CPU kernels."""
        if not self.byte_scales or (stored := self.numbers()) is None:
            return None
        is_plain = stored.offsets is None and stored.group_of is None and stored.scales is not None
        return stored if is_plain and stored.numbers in (NumberForm.INT8, NumberForm.E4M3) else None

    def blocks(self) -> tuple[BlockType, RowPieces] | None:
        """Return the type of blocks with the same numbers, and rows of them [n, bytes]; None without such a type."""
        if (found := self.block_type) is None:
            return None
        return found, RowPieces(self._opened().blocks(found), self.shape[0], self._step)

    @cached_property
    def block_type(self) -> BlockType | None:
        """The type of GGUF blocks that can hold exactly the same weights, None if there is no such type.

        This depends on scales, zero points and groups, which are read.

        Raises:
            ModelError: a scale, zero point or index of a group has an impossible value.
        """
        scheme, width = self._scheme, self.shape[1]
        is_integer = scheme.layout in _INTEGERS and scheme.bits in (4, 8)
        fits = is_integer and not width % BLOCK and not (scheme.group or width) % BLOCK
        return self._opened().block_type(width) if fits or scheme.layout in _FLOAT4 else None

    @property
    def _step(self) -> int:
        """Rows that are unpacked at once."""
        return max(1, _PIECE // self.shape[1] // _WORD) * _WORD

    def _opened(self) -> Opened:
        return self._open(_Checked(self._name, self._scheme, self._parts))


Rows = Callable[[int, int], Tensor]
"""Returns rows [first, end) of a matrix."""


@dataclass(frozen=True, slots=True)
class Integers:
    """A matrix of integers with a scale and a zero point for each group of inputs: ``s (q - z)``.

    Attributes:
        numbers: q, rows [n, K] of uint8, or of int8.
        zeros: z, [N, groups of a row] fp32.
        scales: s, [N, groups of a row] fp32.
        bits: number of bits of q.
        group_of: the group of each input [K], if groups are not in order; None if they are.
    """

    numbers: Rows
    zeros: Tensor
    scales: Tensor
    bits: int
    group_of: Tensor | None = None

    def decode(self, first: int, end: int) -> Tensor:
        """Return rows [n, K] in fp32."""
        numbers = self.numbers(first, end).float()
        each = (_in_groups(part[first:end], numbers.shape[1], self.group_of) for part in (self.zeros, self.scales))
        zero, scale = each
        return (numbers - zero) * scale

    def stored(self, shape: tuple[int, int], step: int) -> StoredNumbers | None:
        """Return the numbers [N, K] for kernels of a GPU, in pieces of `step` rows.

        None if a zero point is not an integer of 8 bits.
        """
        is_signed = self.numbers(0, 1).dtype is torch.int8
        is_byte = self.bits > 4
        zeros = self.zeros + 128 if is_signed else self.zeros
        middle = 128 if is_byte else 8
        is_middle = bool((zeros == middle).all())
        if not bool(((zeros >= 0) & (zeros <= 255) & (zeros == zeros.floor())).all()):
            return None

        def codes(first: int, end: int) -> Tensor:
            found = self.numbers(first, end)
            if is_signed:
                found = found.view(torch.uint8)
            # The result is signed bytes if all zero points are the middle of the range, and unsigned bytes otherwise.
            return found ^ 128 if is_byte and is_signed is not is_middle else found

        return StoredNumbers(
            shape=shape,
            numbers=NumberForm.INT8 if is_byte else NumberForm.INT4,
            pieces=RowPieces(codes, shape[0], step),
            scales=self.scales,
            offsets=None if is_middle else zeros.to(torch.uint8),
            offset_kind=Offsets.MIDDLE if is_middle else Offsets.ZERO_POINTS,
            group_of=self.group_of,
        )

    def block_type(self, width: int) -> BlockType | None:
        """Return the type of blocks of 32 inputs that hold exactly the same weights, None if there is no such type.

        No type has groups that are out of order or of another size, or scales with more digits than half precision.
        """
        groups = self.scales.shape[1]
        is_in_order = self.group_of is None and width % BLOCK == 0 and (width // groups) % BLOCK == 0
        if not is_in_order or not torch.equal(self.scales.half().float(), self.scales):
            return None
        if self.bits == 8:
            return "Q8_0" if bool((self.zeros == self.zeros[0, 0]).all()) and self._byte_zero() is not None else None
        return "Q4_0" if bool((self.zeros == 8).all()) else "U4_ZERO_POINT"

    def _byte_zero(self) -> int | None:
        """Return the number that is subtracted from bytes to make them signed, None for an unusual zero point."""
        zero = int(self.zeros[0, 0])
        is_signed = self.numbers(0, 1).dtype is torch.int8
        return zero if zero == (0 if is_signed else 128) else None

    def blocks(self, block_type: BlockType) -> Rows:
        """Return what reads rows as blocks, [n, bytes of a row] uint8."""
        return partial(self._blocks, block_type=block_type)

    def _blocks(self, first: int, end: int, block_type: BlockType) -> Tensor:
        numbers = self.numbers(first, end)
        blocks = numbers.shape[1] // BLOCK
        in_blocks = numbers.unflatten(1, (blocks, BLOCK))
        if block_type == "Q8_0":
            signed = numbers if numbers.dtype is torch.int8 else (numbers ^ 128).view(torch.int8)
            packed = signed.contiguous().view(torch.uint8).unflatten(1, (blocks, BLOCK))
        else:
            low, high = in_blocks.unflatten(2, (2, BLOCK // 2)).unbind(2)
            packed = low | (high << 4)
        factors = [self.scales] if block_type != "U4_ZERO_POINT" else [self.scales, self.zeros]
        halves = [_of_blocks(part[first:end].half(), blocks).unsqueeze(-1).view(torch.uint8) for part in factors]
        return torch.cat((*halves, packed), dim=2).flatten(1)


@dataclass(frozen=True, slots=True)
class Floats:
    """A matrix of small floating point numbers, or of indices into a table, with scales.

    Attributes:
        codes: reads rows [n, K] uint8, with one number in each byte.
        decode: reads rows in fp32.
        meaning: meaning of the bytes, without rows; None if GPU kernels have no form for it.
        kept_as: type of blocks with the same numbers that native kernels of a CPU can read; None if there is none.
        kept: reads rows in blocks of that type.
    """

    codes: Rows
    decode: Rows
    meaning: StoredNumbers | None
    kept_as: BlockType | None = None
    kept: Rows | None = None

    def stored(self, shape: tuple[int, int], step: int) -> StoredNumbers | None:
        """Return the numbers [N, K] for kernels of a GPU, in pieces of `step` rows; None if no kernel reads them."""
        if self.meaning is None:
            return None
        return replace(self.meaning, shape=shape, pieces=RowPieces(self.codes, shape[0], step))

    def block_type(self, width: int) -> BlockType | None:
        """Return the type of blocks that hold the same numbers; None if rows do not consist of whole blocks of it."""
        return self.kept_as if self.kept_as and width % BLOCK_SIZES[self.kept_as][0] == 0 else None

    def blocks(self, block_type: BlockType) -> Rows:
        """Return what reads rows as blocks, [n, bytes of a row] uint8."""
        assert block_type == self.kept_as and self.kept is not None
        return self.kept


Opened = Integers | Floats
"""The parts of a matrix."""

_NOWHERE: Final = (0, 0)  # placeholder for a shape, which the caller sets


def _of_blocks(values: Tensor, blocks: int) -> Tensor:
    """Repeat the value of a group for its blocks: [n, G] -> [n, blocks], contiguous."""
    return values.repeat_interleave(blocks // values.shape[1], dim=1).contiguous()


class _Checked:
    """Parts of a matrix, with errors that name the weight, the part and what would fit."""

    def __init__(self, name: str, scheme: Scheme, parts: Mapping[str, View]) -> None:
        self.name = name
        self.scheme = scheme
        self._parts = parts

    def wrong(self, part: str, wanted: str) -> ModelError:
        """Return the error for a part that is missing or is not as ``wanted``."""
        view = self._parts.get(part)
        found = "is missing" if view is None else f"is {view.dtype} {list(view.shape)}"
        return ModelError(
            f"The tensor {shortened(self.name)} in the layout {self.scheme.layout} is malformed: {part} {found}; "
            f"{wanted} is needed."
        )

    def shape(self, part: str, dims: int, *dtypes: str) -> tuple[int, ...]:
        """Return the shape of a part. Raises ModelError unless it has ``dims`` sizes above 0 and one of the types."""
        view = self._parts.get(part)
        if view is None or len(view.shape) != dims or view.dtype not in dtypes or not all(view.shape):
            raise self.wrong(part, f"{' or '.join(dtypes)} of {dims} dimensions")
        return view.shape

    def has(self, part: str) -> bool:
        return part in self._parts

    def check(self, part: str, *shapes: tuple[int, ...], dtypes: tuple[str, ...] = _FLOATS) -> None:
        """Check a part's shape and type."""
        view = self._parts.get(part)
        if view is None or view.shape not in shapes or view.dtype not in dtypes:
            raise self.wrong(part, f"{' or '.join(dtypes)} {' or '.join(str(list(shape)) for shape in shapes)}")

    def tensor(self, part: str) -> Tensor:
        return self._parts[part].tensor()

    def dtype(self, part: str) -> str:
        return self._parts[part].dtype

    def scales(self, part: str) -> Tensor:
        """Return a part in fp32 after checking it as ``bounded`` does."""
        return self.bounded(part, self.tensor(part).float())

    def bounded(self, part: str, scales: Tensor) -> Tensor:
        """Return scales that come from a part, which must be finite and at most ``_LARGEST_SCALE``."""
        if not is_within(scales, _LARGEST_SCALE):
            raise self.malformed(f"{part} has numbers that are not finite, or above {_LARGEST_SCALE:.0e}")
        return scales

    def malformed(self, why: str) -> ModelError:
        """Return the error for numbers that a matrix cannot have."""
        return ModelError(f"The tensor {shortened(self.name)} is malformed: {why}.")

    def float8(self, part: str) -> tuple[Tensor, Rows]:
        """Return a part in E4M3, and its rows as bytes; reading the rows raises ModelError for NaN."""
        found = self.tensor(part)

        def rows(first: int, end: int) -> Tensor:
            some = found[first:end].view(torch.uint8)
            if bool(((some & _NOT_A_NUMBER) == _NOT_A_NUMBER).any()):
                raise self.malformed(f"{part} has numbers that are NaN")
            return some

        return found, rows

    def groups(self, width: int, part: str) -> int:
        """Return the number of groups of a row, by the config. Raises ModelError if a row has a partial group."""
        size = self.scheme.group or width
        if width % size:
            raise self.wrong(part, f"a width that is a multiple of the config's group of {size}, not {width},")
        return width // size


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpack integers that follow each other from a word's lowest bit on: [n, W] int32 -> [n, count] uint8.

    An integer may cross the boundary of two words, as integers of three bits do.
    """
    bytes_ = words.contiguous().view(torch.uint8)
    if bits == 8:
        return bytes_[:, :count]
    if bits == 4:
        return torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).flatten(1)[:, :count]
    if bits == 2:
        return torch.stack([(bytes_ >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(1)[:, :count]
    starts = torch.arange(count, device=words.device) * bits
    padded = torch.nn.functional.pad(bytes_, (0, 1)).to(torch.int16)
    low, shift = padded[:, starts // 8], (starts % 8).to(torch.int16)
    high = padded[:, starts // 8 + 1]
    return (((low | (high << 8)).to(torch.int32) >> shift) & ((1 << bits) - 1)).to(torch.uint8)


def words_of(count: int, bits: int) -> int:
    """Return how many words ``count`` integers of ``bits`` bits take."""
    return -(-count * bits // _WORD)


def _in_groups(values: Tensor, width: int, group_of: Tensor | None) -> Tensor:
    """Spread a number for each group [n, G] over the inputs [n, width]."""
    if group_of is not None:
        return values[:, group_of]
    return values.repeat_interleave(width // values.shape[1], dim=1) if values.shape[1] > 1 else values


# GPTQ and AWQ


def _gptq_shape(parts: _Checked) -> tuple[int, int]:
    bits = parts.scheme.bits
    packed, columns = parts.shape("qweight", 2, "I32")
    width = packed * _WORD // bits
    if packed * _WORD % bits:
        raise parts.wrong("qweight", f"rows that hold whole integers of {bits} bits")
    groups = parts.groups(width, "qweight")
    parts.check("scales", (groups, columns))
    parts.check("qzeros", (groups, words_of(columns, bits)), dtypes=("I32",))
    if parts.has("g_idx"):
        parts.check("g_idx", (width,), dtypes=("I32", "I64"))
    return columns, width


def _open_gptq(parts: _Checked) -> Opened:
    bits, (columns, width) = parts.scheme.bits, _gptq_shape(parts)
    words, scales = parts.tensor("qweight"), parts.scales("scales")
    zeros = _gptq_zeros(parts, bits, columns).float()
    return Integers(
        numbers=lambda first, end: unpacked(words[:, first:end].T, bits, width),
        zeros=zeros.T.contiguous(),
        scales=scales.T.contiguous(),
        bits=bits,
        group_of=_group_indices(parts, width, len(scales)),
    )


def _gptq_zeros(parts: _Checked, bits: int, columns: int) -> Tensor:
    """Return the zero points [G, N]. The first version of the format stores each zero point minus one.

    If a word holds a whole number of integers, GPTQModel subtracts from the word, so a zero point of 0 borrows from the
    next integer, and adding to the word undoes this. Otherwise (three bits) it subtracts from each integer on its own.
    """
    words = parts.tensor("qzeros")
    if parts.scheme.layout == "gptq_v2":
        return unpacked(words, bits, columns)
    if _WORD % bits:
        return (unpacked(words, bits, columns) + 1) & ((1 << bits) - 1)
    ones = sum(1 << start for start in range(0, _WORD, bits))
    return unpacked((words.long() + ones).to(torch.int32), bits, columns)


def _group_indices(parts: _Checked, width: int, groups: int) -> Tensor | None:
    """Return the group of each input if groups are not in order, as with ``desc_act``. Raises ModelError."""
    if not parts.has("g_idx"):
        return None
    found = parts.tensor("g_idx").long()
    if bool((found < 0).any()) or bool((found >= groups).any()):
        raise parts.malformed(f"g_idx has indices outside of 0 to {groups - 1}")
    in_order = torch.arange(width) // (width // groups)
    return None if torch.equal(found, in_order) else found


def _awq_shape(parts: _Checked) -> tuple[int, int]:
    width, words = parts.shape("qweight", 2, "I32")
    columns = words * 8
    groups = parts.groups(width, "qweight")
    parts.check("qzeros", (groups, words), dtypes=("I32",))
    parts.check("scales", (groups, columns))
    return columns, width


def _open_awq(parts: _Checked) -> Opened:
    _awq_shape(parts)
    words, scales = parts.tensor("qweight"), parts.scales("scales")
    return Integers(
        numbers=lambda first, end: _awq_unpacked(words[:, first // 8 : -(-end // 8)]).T[first % 8 :][: end - first],
        zeros=_awq_unpacked(parts.tensor("qzeros")).T.float().contiguous(),
        scales=scales.T.contiguous(),
        bits=4,
    )


def _awq_unpacked(words: Tensor) -> Tensor:
    """[n, W] int32 -> [n, 8 W] uint8: each word's eight integers in the order of their columns."""
    in_words = unpacked(words, 4, words.shape[1] * 8).view(len(words), -1, 8)
    return in_words[..., torch.tensor(_AWQ_ORDER)].flatten(1)


def _awq_gemv_shape(parts: _Checked) -> tuple[int, int]:
    columns, words = parts.shape("qweight", 2, "I32")
    width = words * 8
    groups = parts.groups(width, "qweight")
    padded = _awq_gemv_words(groups, parts.scheme.group or width)
    parts.check("qzeros", (columns, padded), dtypes=("I32",))
    parts.check("scales", (columns, padded * 8))
    return columns, width


def _awq_gemv_words(groups: int, size: int) -> int:
    """Return the words of a row's zero points, padded by how many groups a kernel of the format reads at once."""
    multiple, words = max(1, 128 // size), math.ceil(groups / 8)
    return math.ceil(words / multiple) * multiple


def _open_awq_gemv(parts: _Checked) -> Opened:
    _, width = _awq_gemv_shape(parts)
    groups = parts.groups(width, "qweight")
    words, scales = parts.tensor("qweight"), parts.scales("scales")[:, :groups]
    return Integers(
        numbers=lambda first, end: unpacked(words[first:end], 4, width),
        zeros=unpacked(parts.tensor("qzeros"), 4, groups).float(),
        scales=scales,
        bits=4,
    )


# compressed-tensors, FP8


def _packed_shape(parts: _Checked) -> tuple[int, int]:
    bits = parts.scheme.bits
    rows, words = parts.shape("weight_packed", 2, "I32")
    parts.check("weight_shape", (2,), dtypes=("I64", "I32"))
    stated = tuple(parts.tensor("weight_shape").tolist())
    width = stated[1]
    if stated[0] != rows or width < 1 or words_of(width, bits) != words:
        raise parts.wrong("weight_packed", f"a shape that holds {list(stated)}, as weight_shape states,")
    groups = _check_scales(parts, rows, width)
    if not parts.scheme.symmetric:
        parts.check("weight_zero_point", (words_of(rows, bits), groups), dtypes=("I32",))
    if parts.has("weight_g_idx"):
        parts.check("weight_g_idx", (width,), dtypes=("I32", "I64"))
    return rows, width


def _check_scales(parts: _Checked, rows: int, width: int) -> int:
    """Check the scales of a matrix, of a row, or of groups of inputs, and return how many a row has."""
    if parts.scheme.group is not None:
        groups = parts.groups(width, "weight_scale")
        parts.check("weight_scale", (rows, groups))
        return groups
    parts.check("weight_scale", (rows, 1), (rows,), (1,), (), (1, 1))
    return 1


def _row_scales(parts: _Checked, rows: int) -> Tensor:
    """Return the scales as [N, groups of a row] fp32."""
    found = parts.scales("weight_scale")
    return found.reshape(1, 1).expand(rows, 1) if found.numel() == 1 else found.reshape(rows, -1)


def _open_packed(parts: _Checked) -> Opened:
    bits, (rows, width) = parts.scheme.bits, _packed_shape(parts)
    words, scales, middle = parts.tensor("weight_packed"), _row_scales(parts, rows), 1 << (bits - 1)
    zeros = torch.full_like(scales, middle)
    if not parts.scheme.symmetric:
        zeros = unpacked(parts.tensor("weight_zero_point").T, bits, rows).T.float()
    group_of = None
    if parts.has("weight_g_idx"):
        found = parts.tensor("weight_g_idx").long()
        group_of = _packed_groups(parts, found, width, scales.shape[1])
    return Integers(lambda first, end: unpacked(words[first:end], bits, width), zeros, scales, bits, group_of)


def _packed_groups(parts: _Checked, found: Tensor, width: int, groups: int) -> Tensor | None:
    """Return the group of each input; None if groups are in order, or if all indices are -1, which means the same."""
    if bool((found == -1).all()) or torch.equal(found, torch.arange(width) // (width // groups)):
        return None
    if bool((found < 0).any()) or bool((found >= groups).any()):
        raise parts.malformed(f"weight_g_idx has indices outside of 0 to {groups - 1}")
    return found


def _int8_shape(parts: _Checked) -> tuple[int, int]:
    rows, width = parts.shape("weight", 2, "I8")
    groups = _check_scales(parts, rows, width)
    if not parts.scheme.symmetric or _has_zeros(parts):
        shapes = ((rows, groups), (rows,), (1,), (), (1, 1)) if groups == 1 else ((rows, groups),)
        parts.check("weight_zero_point", *shapes, dtypes=("I8",))
    return rows, width


def _has_zeros(parts: _Checked) -> bool:
    """Return whether there are zero points that must be 0."""
    return parts.scheme.has_zeros and parts.has("weight_zero_point")


def _open_int8(parts: _Checked) -> Opened:
    rows, _ = _int8_shape(parts)
    numbers, scales = parts.tensor("weight"), _row_scales(parts, rows)
    zeros = torch.zeros_like(scales)
    if _has_zeros(parts) and bool(parts.tensor("weight_zero_point").any()):
        raise parts.malformed("weight_zero_point has other values than 0 in a symmetric scheme")
    if not parts.scheme.symmetric:
        found = parts.tensor("weight_zero_point").float()
        zeros = found.reshape(1, 1).expand(rows, 1) if found.numel() == 1 else found.reshape(rows, -1)
    return Integers(lambda first, end: numbers[first:end], zeros, scales, bits=8)


def _blocks_shape(shape: tuple[int, int]) -> tuple[int, int]:
    """Return the shape of the scales of a matrix in blocks of 128 by 128."""
    rows, columns = (math.ceil(size / _FLOAT8_BLOCK) for size in shape)
    return rows, columns


def _float8_shape(parts: _Checked) -> tuple[int, int]:
    rows, width = parts.shape("weight", 2, _FLOAT8)
    if parts.scheme.group is not None:
        _check_scales(parts, rows, width)
        return rows, width
    blocks = _blocks_shape((rows, width))
    parts.check("weight_scale", (rows, 1), (rows,), (1,), (), (1, 1), blocks)
    return rows, width


def _open_float8(parts: _Checked) -> Opened:
    rows, width = _float8_shape(parts)
    (numbers, codes), scales = parts.float8("weight"), parts.scales("weight_scale")
    is_in_blocks = scales.dim() == 2 and scales.shape[0] != rows and scales.numel() > 1
    if is_in_blocks:
        return _in_blocks(numbers, codes, scales)
    of_rows = _row_scales(parts, rows)
    return Floats(
        codes=codes,
        decode=lambda first, end: numbers[first:end].float() * _in_groups(of_rows[first:end], width, None),
        meaning=StoredNumbers(_NOWHERE, NumberForm.E4M3, (), of_rows),
    )


def _float8_blocks_shape(parts: _Checked) -> tuple[int, int]:
    rows, width = parts.shape("weight", 2, _FLOAT8)
    parts.check("weight_scale_inv", _blocks_shape((rows, width)))
    return rows, width


def _in_blocks(numbers: Tensor, codes: Rows, scales: Tensor) -> Opened:
    """Decode E4M3 numbers with a scale for each block of 128 by 128."""
    wide = scales.repeat_interleave(_FLOAT8_BLOCK, dim=1)[:, : numbers.shape[1]]

    def decode(first: int, end: int) -> Tensor:
        rows = torch.arange(first, end) // _FLOAT8_BLOCK
        return numbers[first:end].float() * wide[rows]

    of_rows = scales.repeat_interleave(_FLOAT8_BLOCK, dim=0)[: len(numbers)]
    return Floats(
        codes=codes,
        decode=decode,
        meaning=StoredNumbers(_NOWHERE, NumberForm.E4M3, (), of_rows, group=_FLOAT8_BLOCK),
    )


def _open_float8_blocks(parts: _Checked) -> Opened:
    return _in_blocks(*parts.float8("weight"), parts.scales("weight_scale_inv"))


def _mxfp8_shape(parts: _Checked) -> tuple[int, int]:
    rows, width = parts.shape("weight", 2, _FLOAT8)
    parts.check("weight_scale_inv", (rows, -(-width // mxfp4.BLOCK)), dtypes=("U8",))
    return rows, width


def _open_mxfp8(parts: _Checked) -> Opened:
    """Decode E4M3 numbers with the exponent of a power of two for each 32 inputs of a row, as in MXFP4."""
    _, width = _mxfp8_shape(parts)
    (numbers, codes), exponents = parts.float8("weight"), parts.tensor("weight_scale_inv").int() - mxfp4.BIAS
    scales = parts.bounded("weight_scale_inv", torch.ldexp(torch.ones(exponents.shape), exponents))
    is_whole = width % mxfp4.BLOCK == 0

    def decode(first: int, end: int) -> Tensor:
        return numbers[first:end].float() * scales[first:end].repeat_interleave(mxfp4.BLOCK, dim=1)[:, :width]

    meaning = StoredNumbers(_NOWHERE, NumberForm.E4M3, (), scales) if is_whole else None
    return Floats(codes, decode, meaning)


# Four-bit floats


def _nvfp4_shape(parts: _Checked) -> tuple[int, int]:
    weight, total = _nvfp4_names(parts)
    rows, packed = parts.shape(weight, 2, "U8")
    width = 2 * packed
    if width % nvfp4.GROUP:
        raise parts.wrong(weight, f"a width that is a multiple of {nvfp4.GROUP}")
    parts.check("weight_scale", (rows, width // nvfp4.GROUP), dtypes=(_FLOAT8,))
    parts.check(total, (1,), (), dtypes=("F32",))
    return rows, width


def _nvfp4_names(parts: _Checked) -> tuple[str, str]:
    is_modelopt = parts.scheme.layout == "nvfp4_modelopt"
    return ("weight", "weight_scale_2") if is_modelopt else ("weight_packed", "weight_global_scale")


def _open_nvfp4(parts: _Checked) -> Opened:
    _, width = _nvfp4_shape(parts)
    weight, total = _nvfp4_names(parts)
    numbers, scales, factor = parts.tensor(weight), parts.scales("weight_scale"), parts.scales(total).reshape(())
    if parts.scheme.layout == "nvfp4":  # compressed-tensors stores the factor by which the scales were multiplied
        if not factor:
            raise parts.malformed(f"{total} is 0")
        factor = parts.bounded(total, 1 / factor)
    wide, small = scales * factor, parts.tensor("weight_scale").view(torch.uint8)

    def codes(first: int, end: int) -> Tensor:
        return _halves(numbers[first:end])

    def kept(first: int, end: int) -> Tensor:
        return nvfp4.kept_rows(codes(first, end), small[first:end], float(factor))

    return Floats(
        codes=codes,
        decode=lambda first, end: nvfp4.e2m1(codes(first, end)) * _in_groups(wide[first:end], width, None),
        meaning=nvfp4.stored_meaning(small, float(factor)),
        kept_as=nvfp4.KEPT_AS,
        kept=kept,
    )


def _halves(packed: Tensor) -> Tensor:
    """NumberForm of four bits in bytes, the first in the low half: [n, K / 2] uint8 -> [n, K]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def _mxfp4_packed_shape(parts: _Checked) -> tuple[int, int]:
    rows, packed = parts.shape("weight_packed", 2, "U8")
    if 2 * packed % mxfp4.BLOCK:
        raise parts.wrong("weight_packed", f"a width that is a multiple of {mxfp4.BLOCK}")
    parts.check("weight_scale", (rows, 2 * packed // mxfp4.BLOCK), dtypes=("U8",))
    return rows, 2 * packed


def _open_mxfp4_packed(parts: _Checked) -> Opened:
    _, width = _mxfp4_packed_shape(parts)
    numbers, exponents = parts.tensor("weight_packed"), parts.tensor("weight_scale")
    if not mxfp4.are_numbers(exponents):
        raise parts.malformed(f"weight_scale has exponents above {mxfp4.MOST_EXPONENT}, whose numbers are not finite")

    def decode(first: int, end: int) -> Tensor:
        return mxfp4.scaled_values(_halves(numbers[first:end]), _in_groups(exponents[first:end].int(), width, None))

    def kept(first: int, end: int) -> Tensor:
        return mxfp4.kept_rows(numbers[first:end].unflatten(1, (-1, mxfp4.BLOCK // 2)), exponents[first:end])

    return Floats(
        codes=lambda first, end: _halves(numbers[first:end]),
        decode=decode,
        meaning=mxfp4.stored_meaning(exponents),
        kept_as=mxfp4.KEPT_AS if mxfp4.fit_half(exponents) else None,
        kept=kept,
    )


# bitsandbytes


@dataclass(frozen=True, slots=True)
class _BlockState:
    """Facts that bitsandbytes stores with a matrix of four bits: its shape, and how many values share a scale."""

    shape: tuple[int, int]
    block: int
    nested_block: int | None
    nested_offset: float


def _bnb_state(parts: _Checked) -> _BlockState:
    names = [name for name in PARTS["bnb_4bit"] if "quant_state" in name and parts.has(name)]
    if len(names) != 1:
        raise parts.malformed("it needs one weight.quant_state")
    if parts.shape(names[0], 1, "U8")[0] > _MOST_STATE:
        raise parts.wrong(names[0], f"a JSON object of at most {_MOST_STATE} bytes")
    try:
        state = _read_state(json.loads(bytes(parts.tensor(names[0]).tolist())))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise parts.malformed(f"{names[0]} does not give the shape and the block sizes") from error
    return state


def _read_state(found: Any) -> _BlockState:
    """Read the object that bitsandbytes writes. Raises ValueError, KeyError or TypeError for another one."""
    rows, width = (int(size) for size in found["shape"])
    nested = found.get("nested_blocksize")
    state = _BlockState(
        shape=(rows, width),
        block=int(found["blocksize"]),
        nested_block=None if nested is None else int(nested),
        nested_offset=float(found.get("nested_offset") or 0.0),
    )
    if min(rows, width, state.block, state.nested_block or 1) < 1 or not math.isfinite(state.nested_offset):
        raise ValueError("sizes must be above 0")
    return state


def _bnb_4bit_shape(parts: _Checked) -> tuple[int, int]:
    state = _bnb_state(parts)
    count = state.shape[0] * state.shape[1]
    packed, scales = -(-count // 2), -(-count // state.block)
    _check_bnb_bytes(parts, packed)
    parts.check("weight.quant_map", (16,), dtypes=("F32",))
    if state.nested_block is None:
        parts.check("weight.absmax", (scales,), dtypes=("F32",))
    else:
        parts.check("weight.absmax", (scales,), dtypes=("U8",))
        parts.check("weight.nested_absmax", (-(-scales // state.nested_block),), dtypes=("F32",))
        parts.check("weight.nested_quant_map", (256,), dtypes=("F32",))
    return state.shape


def _check_bnb_bytes(parts: _Checked, packed: int) -> None:
    """Check the packed numbers, which may be stored in a type of more bytes."""
    sizes = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4}
    size = sizes.get(parts.dtype("weight"), 1) if parts.has("weight") else 1
    parts.check("weight", (-(-packed // size), 1), (1, -(-packed // size)), dtypes=tuple(sizes))


def _open_bnb_4bit(parts: _Checked) -> Opened:
    state, (_, width) = _bnb_state(parts), _bnb_4bit_shape(parts)
    packed = parts.tensor("weight").contiguous().view(torch.uint8).reshape(-1)
    table, scales = parts.scales("weight.quant_map"), _bnb_scales(parts, state)

    def codes(first: int, end: int) -> Tensor:
        start, stop = first * width, end * width
        some = packed[start // 2 : -(-stop // 2)]
        numbers = torch.stack((some >> 4, some & 15), dim=-1).flatten()[start % 2 : start % 2 + stop - start]
        return numbers.view(end - first, width)

    def decode(first: int, end: int) -> Tensor:
        blocks = torch.arange(first * width, end * width).view(-1, width) // state.block
        return table[codes(first, end).int()] * scales[blocks]

    meaning = None
    if width % state.block == 0:  # else a block spans two rows
        meaning = StoredNumbers(_NOWHERE, NumberForm.TABLE, (), scales.view(-1, width // state.block), table=table)
    return Floats(codes, decode, meaning)


def _bnb_scales(parts: _Checked, state: _BlockState) -> Tensor:
    """Return the scale of each block, which double quantisation stores in eight bits."""
    if state.nested_block is None:
        return parts.scales("weight.absmax")
    numbers, table = parts.tensor("weight.absmax"), parts.scales("weight.nested_quant_map")
    factors = parts.scales("weight.nested_absmax").repeat_interleave(state.nested_block)[: len(numbers)]
    return parts.bounded("weight.nested_absmax", table[numbers.int()] * factors + state.nested_offset)


def _bnb_int8_shape(parts: _Checked) -> tuple[int, int]:
    rows, width = parts.shape("weight", 2, "I8")
    parts.check("SCB", (rows,), dtypes=("F32",))
    return rows, width


def _open_bnb_int8(parts: _Checked) -> Opened:
    if parts.has("weight_format"):
        parts.check("weight_format", (), (1,), dtypes=("U8", "I8", "I32", "I64"))
        if int(parts.tensor("weight_format").reshape(-1)[0]) != 0:
            raise parts.wrong("weight_format", "0, which is plain rows,")
    numbers, scales = parts.tensor("weight"), parts.scales("SCB") / 127
    return Floats(
        codes=lambda first, end: numbers[first:end].view(torch.uint8),
        decode=lambda first, end: numbers[first:end].float() * scales[first:end, None],
        meaning=StoredNumbers(_NOWHERE, NumberForm.INT8, (), scales[:, None]),
    )


_SHAPES: Final[dict[Layout, Callable[[_Checked], tuple[int, int]]]] = {
    "gptq": _gptq_shape,
    "gptq_v2": _gptq_shape,
    "awq_gemm": _awq_shape,
    "awq_gemv": _awq_gemv_shape,
    "packed": _packed_shape,
    "int8": _int8_shape,
    "float8": _float8_shape,
    "float8_blocks": _float8_blocks_shape,
    "mxfp8": _mxfp8_shape,
    "nvfp4": _nvfp4_shape,
    "nvfp4_modelopt": _nvfp4_shape,
    "mxfp4_packed": _mxfp4_packed_shape,
    "bnb_4bit": _bnb_4bit_shape,
    "bnb_int8": _bnb_int8_shape,
}

_OPENERS: Final[dict[Layout, Callable[[_Checked], Opened]]] = {
    "gptq": _open_gptq,
    "gptq_v2": _open_gptq,
    "awq_gemm": _open_awq,
    "awq_gemv": _open_awq_gemv,
    "packed": _open_packed,
    "int8": _open_int8,
    "float8": _open_float8,
    "float8_blocks": _open_float8_blocks,
    "mxfp8": _open_mxfp8,
    "nvfp4": _open_nvfp4,
    "nvfp4_modelopt": _open_nvfp4,
    "mxfp4_packed": _open_mxfp4_packed,
    "bnb_4bit": _open_bnb_4bit,
    "bnb_int8": _open_bnb_int8,
}
