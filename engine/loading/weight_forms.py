"""``WeightReader``: checkpoint tensors on their device, plain or packed for matrix products in a weight form."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Final, Literal, cast

import torch
from torch import Tensor

from ...kernels import quantised_weights
from ...kernels.ops import Linear, QuantisedLinear, pack_linear
from ..checkpoint.gguf import GgufFile
from ..config import EngineConfig
from ..errors import ConfigError, ModelError
from . import measured_form
from .measured_form import FormSpeeds, StoredBlocks, blocks_of, measure_few_rows, measure_forms
from .weight_readers import WeightSource

WeightForm = Literal[
    "plain", "stored", "stored_widened", "stored_both", "stored_dynamic", "int8_weight_only", "int8_dynamic"
]
"""Format of the weights of matrix products.

plain: in the model's type.
stored: GGUF's blocks of 4 and 8 bits as they are, other tensors plain; see ``kernels.quantised_weights.pack_blocks``.
stored_widened: the same, and numbers of blocks rounded to the model's type in products: the bits of "plain".
stored_both: the same for few rows, and beside it the plain form for more: again the bits of "plain".
stored_dynamic: as "stored", and activations rounded to 8 bits.
int8_weight_only, int8_dynamic: rounded to 8 bits with a scale for each output (``pack_channels``).
"""

FORMS: dict[str, WeightForm] = {
    "gguf": "stored",
    "gguf_dynamic": "stored_dynamic",
    "int8_dynamic": "int8_dynamic",
    "int8_weight_only": "int8_weight_only",
}
"""The form of each value of ``--quantization``."""


_KEPT: Final = {"plain": "widened", "stored_widened": "as stored", "stored_both": "as stored and widened"}
_EXPERT: Final = re.compile(r"\.ffn_\w+\.\d+\.weight$")


def choose_weight_form(
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    checkpoint: Path | GgufFile | None = None,
    measure: Callable[[StoredBlocks, torch.dtype], FormSpeeds] = measure_forms,
    available: int | None = None,
) -> WeightForm:
    """Return the form that the options name, or the fastest one of a GGUF file's blocks with the same bits.

    Args:
        checkpoint: what will be loaded.
        measure: the speeds of both forms of blocks.
        available: bytes of memory, of which both forms may take half; None for enough.

    Raises:
        ConfigError: no kernel computes the form.
    """
    has_form = has_kernels(device, dtype)
    if config.quantization is None:
        if not (has_form and isinstance(checkpoint, GgufFile)) or config.load_format == "dummy":
            return "plain"
        if (blocks := blocks_of(checkpoint)) is None:
            return "plain"
        return _fastest(checkpoint, blocks, dtype, measure, available)
    if not has_form:
        raise ConfigError(
            f"--quantization {config.quantization} needs --device cpu, the native kernels (a C++ compiler), "
            "and bfloat16 or float32. Try: rootgraft doctor"
        )
    return FORMS[config.quantization]


def _fastest(
    file: GgufFile,
    blocks: StoredBlocks,
    dtype: torch.dtype,
    measure: Callable[[StoredBlocks, torch.dtype], FormSpeeds],
    available: int | None,
) -> WeightForm:
    """Return the form of a GGUF file's blocks by what fits the memory and, for large files, by both forms' speeds."""
    takes_both = not _has_experts(file) and (available is None or _bytes_of_both(file, dtype) <= available // 2)
    if blocks.num_bytes < measured_form.LEAST_BYTES:
        return "stored_both" if takes_both else "plain"
    speeds = measure(blocks, dtype)
    form: WeightForm = "stored_widened" if speeds.stored else "plain"
    if takes_both and not speeds.is_never_slower:
        form = "stored_both"
    print(f"Weights are kept {_KEPT[form]}: {speeds}", file=sys.stderr, flush=True)
    return form


def _has_experts(file: GgufFile) -> bool:
    """Whether weights are of experts or of heads, whose products take one form: stacked, or one by one as in 2023."""
    return any(len(tensor.shape) > 2 or _EXPERT.search(name) for name, tensor in file.tensors.items())


def _bytes_of_both(file: GgufFile, dtype: torch.dtype) -> int:
    return sum(tensor.num_bytes + math.prod(tensor.shape) * dtype.itemsize for tensor in file.tensors.values())


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for forms other than "plain"."""
    return device.type == "cpu" and dtype in (torch.bfloat16, torch.float32) and quantised_weights.available()


class WeightReader:
    """Reads tensors from a source, each directly into its final memory.

    Args:
        form: of packed weights. All but "plain" need a CPU, the native kernels, and bfloat16 or float32.
    """

    def __init__(self, source: WeightSource, dtype: torch.dtype, device: torch.device, form: WeightForm) -> None:
        self.dtype = dtype
        self.device = device
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

    def packed(self, *names: str, bias: Tensor | None = None) -> Linear:
        """Return the named matrices, concatenated by rows, for ``kernels.ops.linear``. Raises ModelError."""
        blocks = self.stored(*names, bias=bias)
        if blocks is None:
            return self.pack(names[0], self.tensor(*names), bias)
        if self._form != "stored_both":
            return blocks
        few_rows = measure_few_rows(blocks.format.unarranged, self.dtype)
        if not few_rows:
            return self.pack(names[0], self.tensor(*names), bias)
        return quantised_weights.with_widened(blocks, self.dtype, bias, few_rows=few_rows)

    def plain(self, name: str, bias: Tensor | None = None) -> Linear:
        """Return a matrix in the model's type, whatever the form."""
        return pack_linear(self.tensor(name), bias)

    def pack(self, name: str, weight: Tensor, bias: Tensor | None) -> Linear:
        """Pack a matrix, read from a tensor of this name. Raises ModelError."""
        if not self._form.startswith("int8"):
            return pack_linear(weight, bias)
        try:
            return quantised_weights.pack_channels(weight, bias, dynamic=self._form == "int8_dynamic")
        except ValueError as error:
            raise ModelError(f"{name} cannot be quantised: {error}.") from error

    def stored(self, *names: str, bias: Tensor | None = None) -> QuantisedLinear | None:
        """Return the same in the blocks that they are stored in, None for another form or type. Raises ModelError."""
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
            widened = self._form in ("stored_widened", "stored_both") or quantised_weights.is_widened_only(block_type)
            dynamic = self._form == "stored_dynamic" and not widened
            values, size = quantised_weights.BLOCK_SIZES[block_type]
            shape = sum(rows), self._source.shapes[names[0]][-1] // values * size
            return quantised_weights.pack_block_rows(pieces, shape, block_type, bias, dynamic=dynamic, widened=widened)
        except ValueError as error:
            raise ModelError(f"{names[0]} is malformed: {error}.") from error
