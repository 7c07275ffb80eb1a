"""Weight sources: safetensors folders, GGUF files and random weights, read tensor by tensor.

A source knows the shapes of all tensors before one is read, and writes each into the caller's memory, in its type and
on its device: a checkpoint is never in memory as a whole beside the model.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...lora.base_projections import in_tower, language_model_name
from ..checkpoint.families.family_table import BY_NAME
from ..checkpoint.gguf import GgufFile
from ..checkpoint.gguf_config import ROPE_TENSORS
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.safetensors_files import shard_names
from ..errors import ModelError, shortened
from .dequantise import dequantise
from .tensor_names import Shape, expected_shapes, from_gguf

_FLOATS = ("F32", "F16", "BF16")


class WeightSource(Protocol):
    """Tensors of a checkpoint by their Hugging Face names."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shapes of all tensors."""

    def read(self, name: str, out: Tensor) -> None:
        """Write a tensor into ``out``, which has its shape and is contiguous."""

    def blocks(self, name: str) -> tuple[str, Tensor] | None:
        """Return a matrix [N, K] in GGUF blocks: their type and [N, bytes of a row] uint8; None if not stored so."""


class SafetensorsFolder:
    """A folder with ``model.safetensors``, or with an index and its shards.

    Args:
        towers: modules beside the language model, whose tensors are left out. With any, the others' names are those
            of the language model on its own.

    Raises:
        ModelError: there are only pickles, the index is malformed, a shard is missing, truncated or malformed, or a
            tensor is stored in a type other than F32, F16 and BF16.
    """

    def __init__(self, folder: Path, towers: tuple[str, ...] = ()) -> None:
        self.shapes: dict[str, Shape] = {}
        self._stored: dict[str, tuple[Any, str]] = {}  # file, and name there
        for shard in shard_names(folder):
            file = _open(folder / shard)
            for stored in file.keys():  # noqa: SIM118 (not a dict)
                if not in_tower(stored, towers):
                    self._add(language_model_name(stored) if towers else stored, file, stored, shard)

    def _add(self, name: str, file: Any, stored: str, shard: str) -> None:
        view = file.get_slice(stored)
        if name in self._stored:
            raise ModelError(f"The tensor {shortened(name)} is there twice, the second time in {shortened(shard)}.")
        if view.get_dtype() not in _FLOATS:
            raise ModelError(
                f"The tensor {shortened(name)} is stored as {view.get_dtype()}, which is not supported; "
                f"{', '.join(_FLOATS)} are."
            )
        self.shapes[name] = tuple(view.get_shape())
        self._stored[name] = file, stored

    def read(self, name: str, out: Tensor) -> None:
        file, stored = self._stored[name]
        out.copy_(file.get_tensor(stored))

    def blocks(self, name: str) -> None:
        return None


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path.name} cannot be read: it is missing, truncated or malformed.") from error


class GgufWeights:
    """A GGUF file, with names, order of rows and norms as in the Hugging Face checkpoint it was made from.

    Raises:
        ModelError: two tensors have the same Hugging Face name.
    """

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._norm_offset = config.norm_offset
        self._interleaved = _interleaved_heads(config)
        stored = [name for name in file.tensors if name not in ROPE_TENSORS]
        self._names = {from_gguf(name, config): name for name in stored}
        if len(self._names) != len(stored):
            raise ModelError("The GGUF file has two tensors for the same purpose.")
        self.shapes = {name: file.tensors[stored].shape for name, stored in self._names.items()}

    def read(self, name: str, out: Tensor) -> None:
        """Dequantise a tensor, and undo the changes of the conversion to GGUF."""
        if self._norm_offset and name.endswith("norm.weight"):
            # The file holds offset + weight, which loses the weight's last digits in a type of 16 bits.
            exact = torch.empty_like(out, dtype=torch.float32)
            self._decode(name, exact)
            out.copy_(exact - self._norm_offset)
            return
        self._decode(name, out)
        self._order_rows(name, out)

    def blocks(self, name: str) -> tuple[str, Tensor]:
        """Return a matrix in GGUF blocks; only its order of rows may differ from the published tensor."""
        stored = self._names[name]
        rows = torch.from_numpy(self._file.data(stored).reshape(self.shapes[name][0], -1).copy())
        self._order_rows(name, rows)
        return self._file.tensors[stored].type, rows

    def _order_rows(self, name: str, rows: Tensor) -> None:
        for part, num_heads in self._interleaved.items():
            if part in name:
                _deinterleave(rows, num_heads)

    def _decode(self, name: str, out: Tensor) -> None:
        stored = self._names[name]
        dequantise(self._file.data(stored), self._file.tensors[stored].type, out)


def _interleaved_heads(config: ModelConfig) -> dict[str, int]:
    """Return the name parts of tensors whose rows are permuted in GGUF files, with their numbers of heads."""
    if not BY_NAME[config.family].permuted_gguf:
        return {}
    return {".q_proj.": config.num_heads, ".k_proj.": config.num_kv_heads}


def _deinterleave(rows: Tensor, num_heads: int) -> None:
    """Reorder the rows of each head in place: 0, 2, 4, ... 1, 3, 5, ... (the inverse of llama.cpp's permutation)."""
    pairs = rows.view(num_heads, -1, 2, *rows.shape[1:])
    rows.copy_(pairs.transpose(1, 2).reshape(rows.shape))


class RandomWeights:
    """Random weights for any model, to measure speed and memory without a checkpoint.

    A tensor depends only on its name, shape, type and device.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.shapes = expected_shapes(config)
        self._norm = 1.0 - config.norm_offset

    def read(self, name: str, out: Tensor) -> None:
        """Fill a tensor: matrices preserve the variance of their inputs; norms are identities."""
        if name.endswith("norm.weight"):
            out.fill_(self._norm)
            return
        bound = (3 / out.shape[-1]) ** 0.5
        out.uniform_(-bound, bound, generator=torch.Generator(out.device).manual_seed(zlib.crc32(name.encode())))

    def blocks(self, name: str) -> None:
        return None
