"""``WeightReader``: checkpoint tensors on their device, plain or packed for matrix products in a weight form."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Final, Literal, cast

import torch
from torch import Tensor

from ...kernels import ops, quantised_weights
from ...kernels.grouped_weights import GroupedLinear, NumberForm, by_module, dequantise, group_form, pack_grouped
from ...kernels.ops import AnyLinear, JoinedLinear, Linear, PackedLinear, QuantisedLinear, pack_linear, parts_of
from ...kernels.quantised_weights import BlockType, Format
from ..checkpoint.gguf import GgufFile
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.quantization_config import KEY
from ..checkpoint.read_config import CONFIG, read_config_file, read_model_config
from ..config import EngineConfig
from ..error_stream import write_line
from ..errors import ConfigError, ModelError
from . import gguf_repacked, measured_form, mxfp4, nvfp4
from .gguf_numbers import GROUPED_TYPES
from .measured_form import FormSpeeds, StoredBlocks, blocks_of, measure_few_rows, measure_forms
from .tensor_names import stored_names
from .weight_readers import PLAIN_TYPES, SafetensorsFolder, WeightSource

WeightForm = Literal[
    "plain", "stored", "stored_widened", "stored_both", "stored_dynamic", "grouped", "int8_weight_only", "int8_dynamic"
]
"""Format of the weights of matrix products.

plain: in the model's type.
stored: GGUF's blocks of 4 and 8 bits as they are, other tensors plain; see ``kernels.quantised_weights.pack_blocks``.
stored_widened: as "stored", but products round the numbers of blocks to the model's type, so that results have the same
    bits as with "plain". FP8, and integers of 8 bits with a scale for each row, stay in their 8 bits too, and the
    scales are applied to sums. If the checkpoint specifies activations in integers of 8 bits and the model is in
    bfloat16, these are used, as in "int8_dynamic".
stored_both: as "stored_widened" for few rows, with the plain form beside it for more rows, with the same bits.
grouped: on a GPU, quantised matrices as they are stored, as precise as the dequantised weight in fp32; see
    ``kernels.grouped_weights``.
stored_dynamic: as "stored", but with activations rounded to 8 bits.
int8_weight_only, int8_dynamic: rounded to 8 bits with a scale for each output (``pack_channels``).
"""

FORMS: dict[str, WeightForm] = {
    "gguf": "stored",
    "gguf_dynamic": "stored_dynamic",
    "int8_dynamic": "int8_dynamic",
    "int8_weight_only": "int8_weight_only",
}
"""The form of each value of ``--quantization`` that takes less memory than plain weights."""

WIDENED: Final = "widened"
"""The value of ``--quantization`` for a quantised checkpoint's weights in the model's type, on every device."""


_DYNAMIC: Final[dict[BlockType, Format]] = {
    "Q4_0": Format.SYMMETRIC,
    "Q4_1": Format.NIBBLES,
    "Q8_0": Format.BYTES,
    "Q4_K": Format.SUPER_NIBBLES,
    "Q6_K": Format.SUPER_6_BITS,
    "Q5_0": Format.SYMMETRIC_5_BITS,
    "Q5_1": Format.FIVE_BITS,
    "Q5_K": Format.SUPER_5_BITS,
    "Q3_K": Format.SUPER_3_BITS,
    "Q2_K": Format.SUPER_2_BITS,
    "IQ4_XS": Format.SUPER_TABLE,
}
_KEPT: Final = {"plain": "widened", "stored_widened": "as stored", "stored_both": "as stored and widened"}
_KEEPS_BYTES: Final = ("stored_widened", "stored_both")
_EXPERT: Final = re.compile(r"\.ffn_\w+\.\d+\.weight$")


def choose_weight_form(
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    checkpoint: Path | GgufFile | None = None,
    measure: Callable[[StoredBlocks, torch.dtype], FormSpeeds] = measure_forms,
    available: int | None = None,
) -> WeightForm:
    """Return the form in which weights are kept: the form that the options name, or by default the fastest one.

    By default only forms are considered that keep the weights of quantised blocks exactly. GGUF files have such blocks,
    and so have folders in GPTQ, AWQ and compressed-tensors formats with integers of four or eight bits.

    Args:
        checkpoint: the checkpoint that will be loaded.
        measure: returns the speeds of both forms of blocks.
        available: bytes of memory, half of which both forms together may use; None if there is enough.

    Raises:
        ConfigError: there are no kernels for the form that the options name.
    """
    has_form = has_kernels(device, dtype)
    if config.quantization == WIDENED:
        return "plain"
    if config.quantization is None:
        if config.load_format != "dummy" and _is_quantised(checkpoint) and takes_grouped(device, dtype):
            return "grouped"
        if not has_form or config.load_format == "dummy":
            return "plain"
        found = _stored(checkpoint)
        if found is None:
            return "stored_widened" if _has_byte_rows(checkpoint) else "plain"
        if isinstance(checkpoint, GgufFile) and _takes_dynamic(found.blocks.type, dtype):
            return "stored_dynamic"
        form = _fastest(found, dtype, measure, available)
        return "stored_widened" if form == "plain" and _has_byte_rows(checkpoint) else form
    if not has_form:
        raise ConfigError(
            f"--quantization {config.quantization} needs --device cpu, the native kernels (a C++ compiler), "
            "and bfloat16 or float32. Try: rootgraft doctor"
        )
    return FORMS[config.quantization]


def takes_grouped(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether kernels of a GPU read weights of 4 to 8 bits as they are stored."""
    return device.type != "cpu" and ops.on_triton(device) and dtype in (torch.bfloat16, torch.float16)


def _is_quantised(checkpoint: Path | GgufFile | None) -> bool:
    """Return whether a checkpoint may have weights of 4 to 8 bits."""
    if isinstance(checkpoint, GgufFile):
        return any(tensor.type in GROUPED_TYPES for tensor in checkpoint.tensors.values())
    if checkpoint is None or not (checkpoint / CONFIG).is_file():
        return False
    return KEY in read_config_file(checkpoint)


def _takes_dynamic(block_type: BlockType, dtype: torch.dtype) -> bool:
    """Return whether a GGUF file's blocks are multiplied with activations of 8 bits, as llama.cpp does.

    On CPUs with bfloat16 dot products the other forms are nearly as fast and more precise. On other CPUs activations of
    8 bits are two to three times as fast, and their answers are as precise as those of llama.cpp.
    """
    kernels = ops.native_kernels()
    if kernels is None or kernels.library.multiplies_bf16 or block_type not in _DYNAMIC:
        return False
    return measured_form.is_dynamic_faster(_DYNAMIC[block_type], dtype)


@dataclass(frozen=True, slots=True)
class _Stored:
    """The type and size of a checkpoint's blocks.

    Attributes:
        num_values: number of values of all tensors.
        num_bytes: bytes of all tensors, with blocks as they are stored.
    """

    blocks: StoredBlocks
    num_values: int
    num_bytes: int
    has_experts: bool


def _stored(checkpoint: Path | GgufFile | None) -> _Stored | None:
    """Return the type of the blocks of a GGUF file or of a quantised folder, None for other checkpoints."""
    if isinstance(checkpoint, GgufFile):
        tensors = checkpoint.tensors.values()
        blocks = blocks_of(
            (_kept_as(each.type), each.shape[-1], each.num_bytes)
            for each in tensors
            if len(each.shape) > 1 and (each.type != "NVFP4" or nvfp4.takes_kept(each.shape[-1]))
        )
        sizes = sum(math.prod(each.shape) for each in tensors), sum(each.num_bytes for each in tensors)
        return None if blocks is None else _Stored(blocks, *sizes, _has_experts(checkpoint))
    if (opened := _quantised_folder(checkpoint)) is None:
        return None
    config, source = opened
    of_blocks = (name for name in source.shapes if not source.byte_scales(name))
    stored = {name: found for name in of_blocks if (found := source.stored(name)) is not None}
    blocks = blocks_of((kind, source.shapes[name][-1], size) for name, (kind, size) in stored.items())
    if blocks is None:
        return None
    values = {name: math.prod(shape) for name, shape in source.shapes.items()}
    num_bytes = sum(stored[name][1] if name in stored else 2 * count for name, count in values.items())
    return _Stored(blocks, sum(values.values()), num_bytes, any(layer.mixture is not None for layer in config.layers))


def _kept_as(type_name: str) -> str:
    """Return the type of blocks that a type of GGUF has in memory, if it is kept in blocks."""
    return gguf_repacked.kept_as(type_name) or (mxfp4.KEPT_AS if type_name == "MXFP4" else type_name)


def _quantised_folder(checkpoint: Path | GgufFile | None) -> tuple[ModelConfig, SafetensorsFolder] | None:
    """Return the config of a folder whose weights are quantised, and its tensors; None for other checkpoints."""
    if checkpoint is None or isinstance(checkpoint, GgufFile) or not (checkpoint / CONFIG).is_file():
        return None
    # Looked at before ``read_model_config``, which refuses the class of a draft head.
    if KEY not in read_config_file(checkpoint):
        return None
    config = read_model_config(checkpoint)
    if config.quantization is None:
        return None
    return config, SafetensorsFolder(checkpoint, config.towers, config.quantization, stored_names(config))


def _has_byte_rows(checkpoint: Path | GgufFile | None) -> bool:
    """Return whether a folder has matrices in 8 bits with scales of rows, or FP8 in blocks."""
    opened = _quantised_folder(checkpoint)
    return opened is not None and any(map(opened[1].byte_scales, opened[1].shapes))


def _fastest(
    stored: _Stored,
    dtype: torch.dtype,
    measure: Callable[[StoredBlocks, torch.dtype], FormSpeeds],
    available: int | None,
) -> WeightForm:
    """Return the form of blocks by what fits the memory and, for large checkpoints, by both forms' speeds."""
    of_both = stored.num_bytes + stored.num_values * dtype.itemsize
    takes_both = not stored.has_experts and (available is None or of_both <= available // 2)
    if stored.blocks.num_bytes < measured_form.LEAST_BYTES:
        return "stored_both" if takes_both else "plain"
    speeds = measure(stored.blocks, dtype)
    form: WeightForm = "stored_widened" if speeds.stored else "plain"
    if takes_both and not speeds.is_never_slower:
        form = "stored_both"
    write_line(f"Weights are kept {_KEPT[form]}: {speeds}")
    return form


def _has_experts(file: GgufFile) -> bool:
    """Whether weights are of experts or of heads, whose products take one form: stacked, or one by one as in 2023."""
    return any(len(tensor.shape) > 2 or _EXPERT.search(name) for name, tensor in file.tensors.items())


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for forms other than "plain"."""
    return device.type == "cpu" and dtype in (torch.bfloat16, torch.float32) and quantised_weights.available()


class WeightReader:
    """Reads tensors from a source, each directly into its final memory.

    Args:
        form: form of packed weights. All but "plain" need a CPU, the native kernels, and bfloat16 or float32.
    """

    def __init__(self, source: WeightSource, dtype: torch.dtype, device: torch.device, form: WeightForm) -> None:
        self.dtype = dtype
        self.device = device
        self.widened_storage: set[str] = (
            set()
        )  # how matrices that are quantised in the checkpoint, but not here, are stored
        self._source = source
        self._form = form

    def tensor(self, *names: str) -> Tensor:
        """Return the named tensors, concatenated by rows."""
        shapes = self._source.shapes
        rows = [shapes[name][0] for name in names]
        out = torch.empty((sum(rows), *shapes[names[0]][1:]), dtype=self.dtype, device=self.device)
        for name, part in zip(names, torch.split(out, rows), strict=True):
            self._source.read(name, part)
        return out

    def number(self, name: str) -> Tensor:
        """Return a tensor of one number and no dimensions."""
        out = torch.empty((), dtype=self.dtype, device=self.device)
        self._source.read(name, out)
        return out

    def part(self, name: str, index: int) -> Tensor:
        """Return one entry along the first dimension of a tensor."""
        out = torch.empty(self._source.shapes[name][1:], dtype=self.dtype, device=self.device)
        self._source.read(name, out, index)
        return out

    def exact(self, name: str) -> Tensor:
        """Return a tensor in fp32, whatever the model's type."""
        out = torch.empty(self._source.shapes[name], dtype=torch.float32, device=self.device)
        self._source.read(name, out)
        return out

    def packed(self, *names: str, bias: Tensor | None = None) -> AnyLinear:
        """Return the named matrices, concatenated by rows, for ``kernels.ops.linear``. Raises ModelError.

        On a CPU, matrices that are kept in different forms are multiplied separately.
        """
        alike = [list(run) for _, run in groupby(names, self._kept_as)]
        if len(alike) == 1:
            return self.packed_together(*names, bias=bias)
        counts = [sum(self._source.shapes[name][0] for name in run) for run in alike]
        biases = [None] * len(alike) if bias is None else bias.split(counts)
        found: AnyLinear | None = None
        for run, part in zip(alike, biases, strict=True):
            next_one = self.packed_together(*run, bias=part)
            found = next_one if found is None else JoinedLinear.of(found, next_one)
        assert found is not None
        return found

    def _kept_as(self, name: str) -> tuple[object, ...]:
        """Return the properties that, with the width, must be equal for matrices that are kept as one matrix."""
        if not self._form.startswith("stored"):
            return ()
        if self._form in _KEEPS_BYTES and (scales := self._source.byte_scales(name)):
            found = self._source.byte_rows(name)
            return scales, found and found.numbers, self._source.rounds_inputs(name)
        stored = self._source.stored(name)
        return (stored[0] if stored and stored[0] in quantised_weights.BLOCK_SIZES else None,)

    def packed_together(self, *names: str, bias: Tensor | None = None) -> Linear:
        """Return the named matrices as one weight, widened if they are stored in different forms."""
        grouped = self.grouped(*names, bias=bias)
        if grouped is not None:
            return grouped
        # Before blocks: rows of 8 bits whose scales fit half precision have the numbers of Q8_0's, in more bytes.
        in_bytes = self.byte_rows(*names, bias=bias)
        if in_bytes is not None:
            return in_bytes
        blocks = self.stored(*names, bias=bias)
        if blocks is None:
            return self.pack(names[0], self.tensor(*names), bias)
        if self._form != "stored_both":
            return blocks
        few_rows = measure_few_rows(blocks.format.unarranged, self.dtype)
        if not few_rows:
            return self.pack(names[0], self.tensor(*names), bias)
        return quantised_weights.with_widened(blocks, self.dtype, bias, few_rows=few_rows)

    def byte_rows(self, *names: str, bias: Tensor | None = None) -> QuantisedLinear | None:
        """Return matrices [N, K] as one, in their INT8 or FP8 numbers; None for another form. Raises ModelError."""
        if self._form not in _KEEPS_BYTES or not all(map(self._source.byte_scales, names)):
            return None
        found = [self._source.byte_rows(name) for name in names]
        kept = [each for each in found if each is not None]
        scales = [each.scales for each in kept if each.scales is not None]
        kinds = {each.numbers for each in kept}
        if len(scales) < len(names) or len(kinds) != 1 or len({each.shape[1] for each in scales}) != 1:
            return None
        pieces: Iterable[Tensor] = chain.from_iterable(each.pieces for each in kept)
        if any(each.shape[0] % quantised_weights.PANEL_ROWS for each in kept[:-1]):
            pieces = [torch.cat(list(pieces))]
        shape = sum(each.shape[0] for each in kept), kept[0].shape[1]
        form = Format.FLOAT8 if kinds == {NumberForm.E4M3} else Format.WIDENED
        # A user of float32 wants all digits, so inputs are not rounded.
        rounds_inputs = self.dtype is torch.bfloat16 and all(map(self._source.rounds_inputs, names))
        if form is Format.WIDENED and rounds_inputs and shape[1] <= quantised_weights.MOST_WIDTH:
            form = Format.CHANNELS
        return quantised_weights.pack_bytes(pieces, shape, torch.cat(scales), bias, form=form)

    def grouped(self, *names: str, bias: Tensor | None = None) -> GroupedLinear | None:
        """Return matrices [N, K] joined, in their quantised numbers, for a GPU; None if no kernel reads any of them."""
        if self._form != "grouped":
            return None
        found = [self._source.numbers(name) for name in names]
        kept = [each if each is not None and group_form(each) is not None else None for each in found]
        if not any(kept):
            return None
        parts = [self.tensor(name) if each is None else each for name, each in zip(names, kept, strict=True)]
        return pack_grouped(parts, self.device, self.dtype, bias)

    def grouped_part(self, name: str, index: int, turns: int, bias: Tensor | None) -> GroupedLinear | None:
        """Return one matrix of a stack for GPU kernels that read it as stored; None if its form is another one.

        Args:
            turns: number of modules whose rows alternate in the stored matrix. In the result the rows are sorted by
                module.
        """
        found = self._source.numbers(name, index) if self._form == "grouped" else None
        if found is None:
            return None
        return pack_grouped([by_module(found, turns)], self.device, self.dtype, bias)

    def stored_part(self, name: str, index: int, turns: int, bias: Tensor | None) -> QuantisedLinear | None:
        """Return an expert's matrix in the GGUF blocks of the file, for native CPU kernels; None for another form."""
        found = self._source.part_rows(name, index) if self._form.startswith("stored") else None
        if found is None:
            return None
        block_type, rows = found
        by_modules = rows.view(-1, turns, rows.shape[1]).transpose(0, 1).reshape(rows.shape)
        return quantised_weights.pack_blocks(by_modules, block_type, bias, widened=True)

    def widened(self, layer: AnyLinear) -> Linear:
        """Return a weight in the model's type, whatever it is in."""
        if isinstance(layer, PackedLinear):
            return layer
        parts = parts_of(layer)
        biases = [part.bias.to(self.dtype) for part in parts if part.bias is not None]
        rows = [self._rows_of(part).to(self.dtype) for part in parts]
        return pack_linear(torch.cat(rows), torch.cat(biases) if biases else None)

    def _rows_of(self, layer: Linear) -> Tensor:
        """Read a weight back: [N, K]. A plain one's panels by a product with ones, which is exact."""
        if isinstance(layer, GroupedLinear):
            return dequantise(layer)
        if isinstance(layer, QuantisedLinear):
            return quantised_weights.rows(layer, torch.arange(layer.out_features))
        return ops.linear(torch.eye(layer.in_features, dtype=self.dtype), replace(layer, bias=None)).T

    def plain(self, name: str, bias: Tensor | None = None) -> Linear:
        """Return a matrix in the model's type, whatever the form."""
        return pack_linear(self.tensor(name), bias)

    def pack(self, name: str, weight: Tensor, bias: Tensor | None) -> Linear:
        """Pack a matrix, read from a tensor of this name. Raises ModelError."""
        if not self._form.startswith("int8"):
            if name in self._source.shapes and (storage := self._source.storage(name)) not in PLAIN_TYPES:
                self.widened_storage.add(storage)
            return pack_linear(weight, bias)
        try:
            return quantised_weights.pack_channels(weight, bias, dynamic=self._form == "int8_dynamic")
        except ValueError as error:
            raise ModelError(f"{name} cannot be quantised: {error}.") from error

    def stored(self, *names: str, bias: Tensor | None = None) -> QuantisedLinear | None:
        """Return matrices [N, K] as one, in blocks of the file; None for another form or type. Raises ModelError."""
        parts = [self._source.blocks(name) for name in names] if self._form.startswith("stored") else [None]
        types = {part[0] for part in parts if part}
        if None in parts or len(types) != 1 or not types <= quantised_weights.BLOCK_SIZES.keys():
            return None
        pieces: Iterable[Tensor] = chain.from_iterable(part[1] for part in parts if part)
        rows = [self._source.shapes[name][0] for name in names]
        if any(count % quantised_weights.PANEL_ROWS for count in rows[:-1]):
            pieces = [torch.cat(list(pieces))]
        try:
            block_type = cast(quantised_weights.BlockType, types.pop())
            dynamic = self._form == "stored_dynamic" and not (
                quantised_weights.is_widened_only(block_type, dynamic=True)
                or quantised_weights.is_dynamic_slow(block_type)
            )
            widened = not dynamic and (self._form != "stored" or quantised_weights.is_widened_only(block_type))
            values, size = quantised_weights.BLOCK_SIZES[block_type]
            shape = sum(rows), self._source.shapes[names[0]][-1] // values * size
            return quantised_weights.pack_block_rows(pieces, shape, block_type, bias, dynamic=dynamic, widened=widened)
        except ValueError as error:
            raise ModelError(f"{names[0]} is malformed: {error}.") from error
