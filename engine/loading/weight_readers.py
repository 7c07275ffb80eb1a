"""Weight sources: safetensors folders, GGUF files and random weights, read tensor by tensor.

A source knows the shapes of all tensors before it reads any. It writes each tensor into memory that the caller
provides, in the dtype and on the device of that memory, so a whole checkpoint is never in memory beside the model.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...kernels.grouped_weights import StoredNumbers
from ...kernels.memory import release_mapped
from ...kernels.quantised_weights import BLOCK_SIZES, PANEL_ROWS, BlockType
from ...lora.base_projections import in_tower, language_model_name, usual_name
from ..checkpoint.gguf import TENSOR_TYPES, GgufFile
from ..checkpoint.gguf_config import ROPE_TENSORS, predicting_layers
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.quantization_config import Quantization, Scheme
from ..checkpoint.safetensors_files import shard_names
from ..errors import ModelError, shortened
from . import gguf_repacked, mxfp4, nvfp4
from .dequantise import dequantise
from .gguf_numbers import GROUPED_TYPES, gguf_numbers, grouped_bits
from .gguf_orders import column_orders, row_orders
from .matrix_cuts import RowPieces
from .quantised_tensors import PARTS, WITHOUT_EFFECT, QuantisedTensor, View, part_names, usual_part
from .tensor_names import (
    EMBEDDING,
    GGUF_DELTA_PARTS,
    GGUF_KV_UP,
    HEAD,
    HEAD_BIAS,
    KV_SCALES,
    SCORE,
    Shape,
    delta_from_gguf,
    expected_shapes,
    experts_from_gguf,
    from_gguf,
    fused_from_gguf,
    is_computed,
    latent_from_gguf,
)
from .upload import upload

_BARE_EMBEDDING = EMBEDDING.removeprefix("model.")
_FLOATS = ("F32", "F16", "BF16", "F64")
PLAIN_TYPES = frozenset({*_FLOATS, "random"})
# Matrices of all experts in one tensor, and their scales (Step 3.5).
_STACK = re.compile(r"(.+\.experts\.(?:gate|up|down)_proj)(_scale_inv)?")
_STACK_PARTS = re.compile(r"(\.weight)?(_scale_inv)?$")
_BLOCK_SCALES = "weight_scale_inv"
"""Results of ``WeightSource.storage`` for tensors that are not quantised."""
_NVFP4_PARTS = ("scale", "input_scale")  # beside a matrix in a GGUF file; the second is for activations of 4 bits
_PIECE = 8 << 20  # bytes of blocks that are copied and packed at once
_BLOCK_BYTES = {name: size for name, _, size in TENSOR_TYPES.values()}


class WeightSource(Protocol):
    """Tensors of a checkpoint by their Hugging Face names."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shapes of all tensors."""

    def read(self, name: str, out: Tensor, part: int | None = None) -> None:
        """Write a tensor, or a part of it along its first dimension, into ``out``, of its shape and contiguous."""

    def blocks(self, name: str) -> tuple[str, Iterable[Tensor]] | None:
        """Return block type and rows, in pieces, of a matrix [N, K]; None if no block type can hold its exact numbers.

        Pieces are [n, bytes of a row] uint8, with n a multiple of ``PANEL_ROWS`` except for the last piece. Each piece
        is read from the file when it is requested.
        """

    def part_rows(self, name: str, part: int) -> tuple[BlockType, Tensor] | None:
        """Return one matrix [N, K] of a stack of [K, N] in blocks, rows [N, bytes] uint8; None if there are none."""

    def stored(self, name: str) -> tuple[str, int] | None:
        """Return the block type of a tensor and its bytes, without reading its numbers; None if it has no blocks."""

    def numbers(self, name: str, part: int | None = None) -> StoredNumbers | None:
        """Return a matrix [N, K], or matrix ``part`` of a stack, as stored; None if GPU kernels cannot read this form.

        If the stack stores [K, N], the matrix is transposed to [N, K].
        """

    def storage(self, name: str) -> str:
        """Return how a tensor is stored, in a few words: its type, or the scheme of its quantisation."""

    def byte_rows(self, name: str) -> StoredNumbers | None:
        """Return a matrix [N, K] in 8 bits with scales of rows, or of FP8 in blocks; None if it is stored otherwise."""

    def byte_scales(self, name: str) -> int:
        """Return the number of scales of a row of ``byte_rows``, without reading it; 0 if that is None."""

    def rounds_inputs(self, name: str) -> bool:
        """Return whether a matrix was made for inputs in integers of 8 bits."""

    def grouped_bytes(self, name: str) -> int | None:
        """Return the bytes that the ``numbers`` of a tensor need, without reading them; None if it has none."""


def _in_model(name: str) -> str:
    """Return the name that a tensor of a bare model has in one with a head."""
    return name if name in (HEAD, HEAD_BIAS, SCORE) else f"model.{name}"


def _transposed(matrix: Tensor) -> Tensor:
    return matrix.T.contiguous()


def _of_unit_columns(matrix: Tensor) -> Tensor:
    """Return a matrix whose columns have the length 1, as Ling's code computes it: fp32."""
    matrix = matrix.float()
    lengths: Tensor = torch.linalg.vector_norm(matrix, dim=0, keepdim=True)
    return matrix / (lengths + 1e-7)


class SafetensorsFolder:
    """A folder with ``model.safetensors``, or with an index and its shards.

    A quantised matrix appears as one tensor, under the name and in the shape that it would have without quantisation.

    Args:
        towers: modules beside the language model, whose tensors are left out. If there are any, names are converted to
            those that the language model has on its own.
        quantization: meaning of the parts of quantised matrices.
        names: parts of names, each with its replacement here, as in ``usual_name``.

    Attributes:
        may_be_bare: whether the folder holds a whole model, which may have been saved without a head.
        is_bare: whether the model was saved without a head, as embedders are; names then lack the prefix ``model.``.
        kv_scales: scales of cached keys and values, by name.

    Raises:
        ModelError: there are only pickles, the index is malformed, a shard is missing, truncated or malformed, or a
            tensor is stored in a type other than F32, F16, BF16 and F64, MXFP4, or those of its module's scheme.
    """

    may_be_bare: ClassVar[bool] = True

    def __init__(
        self,
        folder: Path,
        towers: tuple[str, ...] = (),
        quantization: Quantization | None = None,
        names: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.shapes: dict[str, Shape] = {}
        self.kv_scales: dict[str, View] = {}
        self._quantization = quantization
        self._part_names = part_names(quantization)
        self._stored: dict[str, tuple[Any, str]] = {}  # file, and name there
        self._mxfp4: dict[str, dict[str, tuple[Any, str]]] = {}  # the same by ending, for tensors stored as two
        # For each of those tensors: whether the CPU's native kernels support its scales.
        self._fitting: dict[str, bool] = {}
        self._parts: dict[str, tuple[Scheme, dict[str, View]]] = {}  # by module, or by the tensor of all experts
        files = [(shard, _open(folder / shard)) for shard in shard_names(folder)]
        has_bare_embedding = any(_BARE_EMBEDDING in file.keys() for _, file in files)  # noqa: SIM118 (not a dict)
        self.is_bare = self.may_be_bare and not towers and has_bare_embedding
        for shard, file in files:
            for stored in file.keys():  # noqa: SIM118 (not a dict)
                if not in_tower(stored, towers):
                    found = usual_part(stored, quantization)
                    name = usual_name(language_model_name(found) if towers else found, names)
                    if stored.endswith(KV_SCALES):
                        self.kv_scales[_in_model(name) if self.is_bare else name] = View(file, stored)
                        continue
                    self._add(_in_model(name) if self.is_bare else name, file, stored, shard)
        for name, parts in self._mxfp4.items():
            self.shapes[name] = _mxfp4_shape(name, parts)
        self._quantised = self._quantised_tensors()
        self.shapes |= {name: tensor.shape for name, tensor in self._quantised.items()}
        self._pieces: dict[str, tuple[str, int | None, slice]] = {}  # whole tensor, expert if it is stacked, rows
        self._zeros: set[str] = set()
        self._joined: dict[str, tuple[str, ...]] = {}  # tensors whose rows follow one another
        self._converted: dict[
            str, Callable[[Tensor], Tensor]
        ] = {}  # plain tensors that are not read as they are stored

    def split_experts(self, modules: Mapping[str, Sequence[tuple[str, ...]]]) -> None:
        """Show stacked tensors of experts [E, N, K] as the matrices of the experts' modules, N rows side by side.

        Args:
            modules: module names of each expert, by the name of the stacked tensor. Tensors that the folder lacks, or
                has in another shape, are not changed.
        """
        for stacked, experts in modules.items():
            if stacked in self._parts and len(experts[0]) == 1:
                self._split_stack(stacked, [name for (name,) in experts])
            shape = self.shapes.get(stacked, ())
            if stacked not in self._stored or len(shape) != 3 or shape[0] != len(experts) or shape[1] % len(experts[0]):
                continue
            del self.shapes[stacked]
            rows = shape[1] // len(experts[0])
            for expert, names in enumerate(experts):
                for part, name in enumerate(names):
                    self.shapes[f"{name}.weight"] = (rows, shape[2])
                    self._pieces[f"{name}.weight"] = stacked, expert, slice(part * rows, (part + 1) * rows)

    def _split_stack(self, stacked: str, experts: list[str]) -> None:
        """Show a stack of matrices in FP8 as the matrices of the experts' modules. Raises ModelError."""
        scheme, parts = self._parts[stacked]
        for part, view in parts.items():
            if view.shape[0] != len(experts):
                raise ModelError(
                    f"The {part} of {shortened(stacked)} is of {view.shape[0]} experts, not {len(experts)}."
                )
        for expert, module in enumerate(experts):
            name = f"{module}.weight"
            own = {part: View(view.file, view.stored, expert) for part, view in parts.items()}
            self._quantised[name] = QuantisedTensor(name, scheme, own)
            self.shapes[name] = self._quantised[name].shape

    def split_rows(self, parts: Mapping[str, Sequence[str]]) -> None:
        """Show plain matrices as matrices of equal numbers of rows, one after another.

        Args:
            parts: names of the matrices, in order, by the name of the whole. Those that the folder lacks, does not
                store as plain tensors, or has in another shape, are not changed.
        """
        for whole, names in parts.items():
            shape = self.shapes.get(whole, ())
            if whole not in self._stored or len(shape) != 2 or shape[0] % len(names):
                continue
            del self.shapes[whole]
            rows = shape[0] // len(names)
            for part, name in enumerate(names):
                self.shapes[name] = (rows, shape[1])
                self._pieces[name] = whole, None, slice(part * rows, (part + 1) * rows)

    def transpose(self, names: Iterable[str]) -> None:
        """Show plain matrices that are stored as [in, out] as [out, in]."""
        for name in names:
            if name in self._stored and len(shape := self.shapes[name]) == 2:
                self.shapes[name] = shape[::-1]
                self._converted[name] = _transposed

    def join_rows(self, parts: Mapping[str, Sequence[str]]) -> None:
        """Show plain tensors with the same number of columns as one tensor, their rows one after another.

        A vector is a row.

        Args:
            parts: names of the tensors, in order, by the name of the whole. Those that the folder lacks, or does not
                store as plain tensors with equal columns, are not changed.
        """
        for name, stored in parts.items():
            shapes = [self.shapes.get(part, ()) for part in stored]
            if name in self.shapes or any(part not in self._stored for part in stored) or not all(shapes):
                continue
            if len({shape if len(shape) == 1 else shape[1:] for shape in shapes}) == 1:
                self._joined[name] = tuple(stored)
                is_rows = len(shapes[0]) == 1
                self.shapes[name] = (
                    (len(shapes), shapes[0][0]) if is_rows else (sum(shape[0] for shape in shapes), *shapes[0][1:])
                )
                for part in stored:
                    del self.shapes[part]

    def add_zeros(self, shapes: Mapping[str, Shape]) -> None:
        """Show tensors of zeros, by their names, where the folder lacks them."""
        missing = {name: shape for name, shape in shapes.items() if name not in self.shapes}
        self.shapes |= missing
        self._zeros |= missing.keys()

    def _add(self, name: str, file: Any, stored: str, shard: str) -> None:
        view = View(file, stored)
        ending = next((each for each in (mxfp4.BLOCKS, mxfp4.SCALES) if name.endswith(each)), None)
        if ending is not None and view.dtype == "U8":
            self._mxfp4.setdefault(name.removesuffix(ending), {})[ending] = file, stored
        elif not self._add_part(name, view) and not self._add_stack(name, view):
            self._add_plain(name, view, shard)

    def _add_stack(self, name: str, view: View) -> bool:
        """Keep a stack of experts' matrices in FP8 [E, N, K], or its scales; returns whether the tensor is either."""
        match = _STACK.fullmatch(name)
        if match is None or self._quantization is None or len(view.shape) != 3:
            return False
        module = _STACK_PARTS.sub("", view.stored)
        scheme = self._quantization.scheme(module) or self._quantization.scheme(match[1])
        if scheme is None or scheme.layout != "float8_blocks" or (view.dtype in _FLOATS and match[2] is None):
            return False
        self._parts.setdefault(match[1], (scheme, {}))[1]["weight" if match[2] is None else _BLOCK_SCALES] = view
        return True

    def _add_part(self, name: str, view: View) -> bool:
        """Keep a part of a quantised matrix, or drop one without effect; returns whether the tensor is either."""
        if self._quantization is None:
            return False
        if name.rpartition(".")[2] in WITHOUT_EFFECT:
            return True
        part = next((each for each in self._part_names if name.endswith(f".{each}")), None)
        if part is None:
            return False
        module, stored_module = (
            name.removesuffix(f".{part}"),
            usual_part(view.stored, self._quantization).removesuffix(f".{part}"),
        )
        scheme = self._quantization.scheme(stored_module) or self._quantization.scheme(module)
        if scheme is None or part not in PARTS[scheme.layout]:
            return False
        parts = self._parts.setdefault(module, (scheme, {}))[1]
        if part in parts:
            raise ModelError(f"The tensor {shortened(name)} appears twice.")
        parts[part] = view
        return True

    def _add_plain(self, name: str, view: View, shard: str) -> None:
        if name in self._stored:
            raise ModelError(f"The tensor {shortened(name)} appears twice, the second time in {shortened(shard)}.")
        if view.dtype not in _FLOATS and is_computed(name):
            return
        if view.dtype not in _FLOATS:
            raise ModelError(
                f"The tensor {shortened(name)} is stored as {view.dtype}, which is not supported; "
                f"{', '.join(_FLOATS)} are, and the types that quantization_config in config.json names."
            )
        self.shapes[name] = view.shape
        self._stored[name] = view.file, view.stored

    def _quantised_tensors(self) -> dict[str, QuantisedTensor]:
        """Return the quantised matrices by name. A module with nothing but a weight of a plain type is a plain one."""
        found: dict[str, QuantisedTensor] = {}
        for module, (scheme, parts) in self._parts.items():
            if _STACK.fullmatch(module):
                continue  # see ``split_experts``
            name = f"{module}.weight"
            if parts.keys() == {"weight"} and parts["weight"].dtype in _FLOATS:
                self._add_plain(name, parts["weight"], "")
            else:
                found[name] = QuantisedTensor(name, scheme, parts)
        return found

    def check_scales(self) -> None:
        """Check the scales and zero points of all quantised matrices, before memory is allocated for weights.

        Scales and zero points are a few per cent of the files' bytes.

        Raises:
            ModelError: a scale, zero point or group index has a value that is impossible in a matrix. It is raised
                before memory is allocated for the matrices.
        """
        for tensor in self._quantised.values():
            tensor.check()
        for name, parts in self._mxfp4.items():
            _, (file, stored) = _in_order(parts)
            _check_exponents(name, file.get_tensor(stored))

    def read(self, name: str, out: Tensor, part: int | None = None) -> None:
        """Copy a tensor, or decode a quantised one, or a part of one in MXFP4."""
        if name in self._quantised:
            self._quantised[name].read(out)
            return
        if name in self._mxfp4:
            assert part is not None
            upload(out, mxfp4.decode_mxfp4(*self._mxfp4_part(name, part)).T)
            return
        if name in self._pieces:
            whole, expert, rows = self._pieces[name]
            file, stored = self._stored[whole]
            view = file.get_slice(stored)
            upload(out, view[rows] if expert is None else view[expert, rows])
            return
        if name in self._zeros:
            out.zero_()
            return
        if name in self._joined:
            first = 0
            for each in self._joined[name]:
                file, stored = self._stored[each]
                found = file.get_tensor(stored)
                rows = found if found.dim() == out.dim() else found[None]
                upload(out[first : first + len(rows)], rows)
                first += len(rows)
            return
        file, stored = self._stored[name]
        if part is not None:
            upload(out, file.get_slice(stored)[part])
            return
        found = file.get_tensor(stored)
        convert = self._converted.get(name)
        upload(out, found if convert is None else convert(found))
        release_mapped(found)

    def normalise_columns(self, name: str) -> None:
        """Divide the columns of a plain matrix by their lengths whenever it is read, as ``norm_head`` requires.

        Raises:
            ModelError: the tensor is quantised.
        """
        if name in self._quantised:
            raise ModelError(f"{name} is quantised, so its columns cannot be normalised (norm_head).")
        self._converted[name] = _of_unit_columns

    def plain_slices(self, name: str) -> Any | None:
        """Return a plain tensor of which only slices are read (``view[first:end]``); None for other tensors."""
        if name not in self._stored or name in self._quantised or name in self._converted:
            return None
        file, stored = self._stored[name]
        return file.get_slice(stored)

    def blocks(self, name: str) -> tuple[str, Iterable[Tensor]] | None:
        """Return a quantised matrix in blocks with the same numbers; None if there are no such blocks."""
        return self._quantised[name].blocks() if name in self._quantised else None

    def stored(self, name: str) -> tuple[str, int] | None:
        """Return the type of blocks that a quantised matrix has in memory, and their bytes."""
        if name in self._mxfp4:
            if not self._fits_half(name):
                return None
            values, size = BLOCK_SIZES[mxfp4.KEPT_AS]
            return mxfp4.KEPT_AS, math.prod(self.shapes[name]) // values * size
        found = self._quantised[name].block_type if name in self._quantised else None
        if found is None:
            return None
        values, size = BLOCK_SIZES[found]
        return found, math.prod(self.shapes[name]) // values * size

    def numbers(self, name: str, part: int | None = None) -> StoredNumbers | None:
        """Return a quantised matrix, or one of a stack in MXFP4, as it is stored."""
        if name in self._quantised:
            return self._quantised[name].numbers() if part is None else None
        if name not in self._mxfp4 or part is None:
            return None
        return mxfp4.stored_numbers(*self._mxfp4_part(name, part))

    def part_rows(self, name: str, part: int) -> tuple[BlockType, Tensor] | None:
        """Return one matrix of a stack in MXFP4, transposed, in blocks [N, bytes]."""
        if name not in self._mxfp4:
            return None
        blocks, scales = self._mxfp4_part(name, part)
        return (mxfp4.KEPT_AS, mxfp4.kept_rows(blocks, scales)) if mxfp4.fit_half(scales) else None

    def _fits_half(self, name: str) -> bool:
        """Return whether all scales of a stack in MXFP4 fit half precision: experts are kept in one form."""
        if name not in self._fitting:
            _, (file, stored) = _in_order(self._mxfp4[name])
            self._fitting[name] = mxfp4.fit_half(file.get_tensor(stored))
        return self._fitting[name]

    def _mxfp4_part(self, name: str, part: int) -> tuple[Tensor, Tensor]:
        """Return blocks and scales of one matrix of a stack. Raises ModelError for scales without finite numbers."""
        blocks, scales = (file.get_slice(stored)[part] for file, stored in _in_order(self._mxfp4[name]))
        _check_exponents(name, scales)
        return blocks, scales

    def storage(self, name: str) -> str:
        """Return the type of a plain tensor, or the scheme of a quantised one."""
        if name in self._quantised:
            return self._quantised[name].description
        if name in self._zeros:
            return "F32"
        stored = self._pieces[name][0] if name in self._pieces else self._joined.get(name, (name,))[0]
        return "MXFP4" if name in self._mxfp4 else View(*self._stored[stored]).dtype

    def byte_rows(self, name: str) -> StoredNumbers | None:
        """Return a quantised matrix in 8 bits."""
        return self._quantised[name].bytes() if name in self._quantised else None

    def byte_scales(self, name: str) -> int:
        """Return the scales of a row of a matrix in 8 bits."""
        return self._quantised[name].byte_scales if name in self._quantised else 0

    def rounds_inputs(self, name: str) -> bool:
        """Return whether the scheme of a quantised matrix rounds inputs."""
        return name in self._quantised and self._quantised[name].rounds_inputs

    def grouped_bytes(self, name: str) -> int | None:
        """Return the bytes of a quantised matrix."""
        if name in self._quantised:
            return self._quantised[name].nbytes
        if name not in self._mxfp4:
            return None
        return sum(math.prod(View(*each).shape) for each in _in_order(self._mxfp4[name]))


def _check_exponents(name: str, scales: Tensor) -> None:
    """Raise ModelError for scales in MXFP4 that are not of finite numbers."""
    if not mxfp4.are_numbers(scales):
        raise ModelError(
            f"The tensor {shortened(name)} is malformed: {mxfp4.SCALES} has exponents above {mxfp4.MOST_EXPONENT}, "
            "whose numbers are not finite."
        )


def _in_order(parts: Mapping[str, tuple[Any, str]]) -> tuple[tuple[Any, str], tuple[Any, str]]:
    return parts[mxfp4.BLOCKS], parts[mxfp4.SCALES]


def _mxfp4_shape(name: str, parts: Mapping[str, tuple[Any, str]]) -> Shape:
    """The shape of a tensor stored in MXFP4, as it would be stored plainly: [E, K, N]."""
    if len(parts) != 2:
        raise ModelError(f"The tensor {shortened(name)} in MXFP4 lacks its blocks or its scales.")
    blocks, scales = (list(View(*each).shape) for each in _in_order(parts))
    if len(blocks) != 4 or blocks[3] != mxfp4.BLOCK // 2 or blocks[:3] != scales:
        raise ModelError(f"The tensor {shortened(name)} in MXFP4 has blocks {blocks} and scales {scales}.")
    return blocks[0], blocks[2] * mxfp4.BLOCK, blocks[1]


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
        self._columns = column_orders(config)
        self._split = _split_matrices(file, config)
        joined = _joined_matrices(file, config)
        self._orders = row_orders(config, joined=bool(joined))
        read = {name for parts in (*self._split.values(), *joined.values()) for name in parts}
        self._factors = _nvfp4_factors(file)
        self._fitting: dict[str, bool] = {}  # whether blocks in memory hold the scales of a tensor
        skipped = ROPE_TENSORS | read | {_beside(name, part) for name in self._factors for part in _NVFP4_PARTS}
        behind = tuple(f"blk.{index}." for index in predicting_layers(file, config))
        stored = [name for name in file.tensors if name not in skipped and not name.startswith(behind)]
        found = [_stored_tensor(file, name, config) for name in stored]
        found += [{name: _joined_tensor(file, *parts)} for name, parts in joined.items()]
        self._tensors = {name: tensor for tensors in found for name, tensor in tensors.items()}
        if len(self._tensors) != sum(map(len, found)):
            raise ModelError("The GGUF file has two tensors for the same purpose.")
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        for name, (keys, values) in self._split.items():
            heads, rank, plain = file.tensors[keys].shape
            self.shapes[name] = (heads * (plain + file.tensors[values].shape[1]), rank)

    def read(self, name: str, out: Tensor, part: int | None = None) -> None:
        """Dequantise a tensor, and undo the changes of the conversion to GGUF. Parts are tensors of their own here."""
        assert part is None
        if name in self._split:
            self._read_split(self._split[name], out)
            return
        if self._norm_offset and name.endswith("norm.weight") and ".linear_attn." not in name:
            # The file holds offset + weight, which loses the weight's last digits in a type of 16 bits.
            exact = torch.empty_like(out, dtype=torch.float32)
            self._decode(name, exact)
            out.copy_(exact - self._norm_offset)
            return
        self._decode(name, out)
        if name.endswith(".A_log"):  # the file holds -exp of it
            out.copy_(torch.log(-out))
        self._order_rows(name, out)
        for words, order in self._columns.items():
            if words in name:
                order(out.t())

    def part_rows(self, name: str, part: int) -> None:
        return None

    def blocks(self, name: str) -> tuple[str, Iterable[Tensor]] | None:
        """Return a matrix in GGUF blocks; only its order of rows may differ from the published tensor."""
        if self._is_rebuilt(name):
            return None
        kind = self._file.tensors[self._tensors[name].stored].type
        if kind == "NVFP4":
            keeps = partial(nvfp4.kept_block_rows, factor=self._factor(name))
            return (nvfp4.KEPT_AS, map(keeps, self._rows(name))) if nvfp4.takes_kept(self.shapes[name][-1]) else None
        if not self._scales_fit(name):
            return None
        if (kept_as := gguf_repacked.kept_as(kind)) is not None:
            return kept_as, map(partial(gguf_repacked.repacked_rows, type_name=kind), self._rows(name))
        if kind == "MXFP4":
            return mxfp4.KEPT_AS, map(mxfp4.with_half_scales, self._rows(name))
        return kind, self._rows(name)

    def _scales_fit(self, name: str) -> bool:
        """Return whether blocks in memory can hold the scales of a matrix, and of all experts in its tensor, exactly.

        The answer is read from the file, so a plan made before loading agrees with the weights that are loaded later.
        """
        tensor = self._tensors[name]
        return all(map(self._blocks_hold, tensor.parts or (tensor.stored,)))

    def _blocks_hold(self, stored: str) -> bool:
        """Read a tensor in another type's blocks, once, for whether these hold its scales; True for other types."""
        if stored not in self._fitting:
            fits, kind = True, self._file.tensors[stored].type
            if kind == "MXFP4" or gguf_repacked.kept_as(kind) is not None:
                blocks = self._file.data(stored).reshape(-1, _BLOCK_BYTES[kind])
                count = max(1, _PIECE // blocks.shape[1])
                for first in range(0, len(blocks), count):
                    piece = torch.from_numpy(blocks[first : first + count].copy())
                    self._file.release(blocks[first : first + count])
                    fits &= mxfp4.rows_fit_half(piece) if kind == "MXFP4" else gguf_repacked.are_exact(kind, piece)
            self._fitting[stored] = fits
        return self._fitting[stored]

    def _rows(self, name: str) -> RowPieces:
        """Return a matrix in pieces of rows. Reading a piece copies it and then releases its part of the mapped file.

        A matrix whose rows are reordered is a single piece.
        """
        rows = self._data(name).reshape(self.shapes[name][0], -1)
        if any(part in name for part in self._orders):
            return RowPieces(lambda first, end: self._ordered(name, rows)[first:end], len(rows), len(rows))

        def read(first: int, end: int) -> Tensor:
            copied = torch.from_numpy(rows[first:end].copy())
            self._file.release(rows[first:end])
            return copied

        return RowPieces(read, len(rows), max(1, _PIECE // rows.shape[1] // PANEL_ROWS) * PANEL_ROWS)

    def _ordered(self, name: str, rows: NDArray[np.uint8]) -> Tensor:
        """A copy of all rows of a matrix in their published order."""
        copied = torch.from_numpy(rows.copy())
        self._file.release(rows)
        self._order_rows(name, copied)
        return copied

    def stored(self, name: str) -> tuple[str, int] | None:
        """Return the type and bytes of the blocks in which a tensor of the file is kept in memory.

        None for a tensor that is joined from two tensors, has reordered columns, or has scales that no blocks in memory
        can hold.
        """
        if name in self._split or self._is_rebuilt(name) or not self._scales_fit(name):
            return None
        kind, num_bytes = self._file.tensors[self._tensors[name].stored].type, self._data(name).nbytes
        if kind == "NVFP4":
            shape = self.shapes[name]
            return (nvfp4.KEPT_AS, nvfp4.kept_bytes(math.prod(shape))) if nvfp4.takes_kept(shape[-1]) else None
        if (kept_as := gguf_repacked.kept_as(kind)) is not None:
            return kept_as, gguf_repacked.kept_bytes(kind, num_bytes)
        return (mxfp4.KEPT_AS, mxfp4.kept_bytes(num_bytes)) if kind == "MXFP4" else (kind, num_bytes)

    def numbers(self, name: str, part: int | None = None) -> StoredNumbers | None:
        """Return a matrix in blocks as numbers and scales; its rows are in the published order."""
        if name in self._split or part is not None or len(self.shapes[name]) != 2 or self._is_rebuilt(name):
            return None
        kind = self._file.tensors[self._tensors[name].stored].type
        found = gguf_numbers(kind, torch.cat(list(self._rows(name))), self.shapes[name][1])
        if kind != "NVFP4" or found is None:
            return found
        return replace(found, factors=torch.full((found.shape[0],), self._factor(name)))

    def storage(self, name: str) -> str:
        """Return the type of a tensor; of one that is put together from two the first one's."""
        stored = self._split[name][0] if name in self._split else self._tensors[name].stored
        return self._file.tensors[stored].type

    def byte_rows(self, name: str) -> None:
        return None

    def byte_scales(self, name: str) -> int:
        return 0

    def rounds_inputs(self, name: str) -> bool:
        return False

    def grouped_bytes(self, name: str) -> int | None:
        """Return the bytes of a matrix in blocks that kernels of a GPU read."""
        shape = self.shapes[name]
        if name in self._split or self._is_rebuilt(name) or len(shape) != 2:
            return None
        kind = self._file.tensors[self._tensors[name].stored].type
        return math.ceil(math.prod(shape) * grouped_bits(kind) / 8) if kind in GROUPED_TYPES else None

    def _read_split(self, parts: tuple[str, str], out: Tensor) -> None:
        """Join the rows of a head's keys, which are stored transposed, and the rows of its values."""
        keys, values = (torch.empty(self._file.tensors[name].shape, dtype=out.dtype) for name in parts)
        for name, tensor in zip(parts, (keys, values), strict=True):
            self._dequantise(self._file.data(name), name, tensor)
        out.copy_(torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1))

    def _order_rows(self, name: str, rows: Tensor) -> None:
        for part, order in self._orders.items():
            if part in name:
                order(rows)

    def _is_rebuilt(self, name: str) -> bool:
        """Return whether a matrix cannot stay in blocks.

        Some matrices have inputs in another order, and reordering them may cut blocks. Others are joined from parts
        with different types of blocks, or from parts in NVFP4, each of which has its own factor.
        """
        if any(part in name for part in self._columns):
            return True
        parts = self._tensors[name].parts if name in self._tensors else ()
        types = {self._file.tensors[part].type for part in parts}
        return len(types) > 1 or "NVFP4" in types  # whose parts have factors of their own

    def _decode(self, name: str, out: Tensor) -> None:
        tensor = self._tensors[name]
        for part, rows in zip(tensor.parts, self._split_rows(tensor, out), strict=True):
            self._dequantise(self._file.data(part), part, rows)
        if not tensor.parts:
            self._dequantise(self._data(name), tensor.stored, out, tensor.expert or 0)

    def _split_rows(self, tensor: _StoredTensor, out: Tensor) -> tuple[Tensor, ...]:
        """The rows of each part of a matrix that is stored in parts."""
        return out.split([self._file.tensors[part].shape[0] for part in tensor.parts]) if tensor.parts else ()

    def _factor(self, name: str) -> float:
        """Return the factor of a matrix in NVFP4."""
        tensor = self._tensors[name]
        return self._factors[tensor.stored][tensor.expert or 0]

    def _dequantise(self, data: NDArray[np.uint8], stored: str, out: Tensor, expert: int = 0) -> None:
        """Decode bytes of a tensor, and release them, so that the file is not in memory in addition to the model."""
        try:
            factor = self._factors[stored][expert] if stored in self._factors else None
            dequantise(data, self._file.tensors[stored].type, out, factor)
        except ValueError as error:
            raise ModelError(f"The tensor {shortened(stored)} is malformed: {error}.") from None
        self._file.release(data)

    def _data(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor."""
        tensor = self._tensors[name]
        if tensor.parts:
            return np.concatenate([self._file.data(part) for part in tensor.parts])
        data = self._file.data(tensor.stored)
        if tensor.rows is not None:
            first, end = tensor.rows
            return data.reshape(self._file.tensors[tensor.stored].shape[0], -1)[first:end].reshape(-1)
        return data if tensor.expert is None else data.reshape(tensor.experts, -1)[tensor.expert]


def _nvfp4_factors(file: GgufFile) -> dict[str, tuple[float, ...]]:
    """Return the factors of the file's NVFP4 tensors by name: one for a matrix, or one for each expert of a stack.

    A factor that the file does not have is 1.

    Raises:
        ModelError: the number of factors is wrong, or a factor is not finite in fp32.
    """
    found: dict[str, tuple[float, ...]] = {}
    for name, tensor in file.tensors.items():
        if tensor.type != "NVFP4":
            continue
        count = tensor.shape[0] if len(tensor.shape) == 3 else 1
        beside = file.tensors.get(_beside(name, _NVFP4_PARTS[0]))
        if beside is None:
            found[name] = (1.0,) * count
            continue
        if beside.type != "F32" or beside.shape != (count,):
            raise ModelError(
                f"The tensor {shortened(beside.name)} is malformed: it is {beside.type} {list(beside.shape)}; "
                f"F32 [{count}] is needed."
            )
        factors = torch.empty(count)
        try:
            dequantise(file.data(beside.name), "F32", factors)
        except ValueError as error:
            raise ModelError(f"The tensor {shortened(beside.name)} is malformed: {error}.") from None
        found[name] = tuple(factors.tolist())
    return found


def _beside(name: str, part: str) -> str:
    """Return the name ``NAME.PART`` of a tensor that belongs to the matrix ``NAME.weight``."""
    return f"{name.removesuffix('weight')}{part}"


def _split_matrices(file: GgufFile, config: ModelConfig) -> dict[str, tuple[str, str]]:
    """Return the matrices stored as two tensors, of keys and of values, by Hugging Face names. Raises ModelError."""
    found: dict[str, tuple[str, str]] = {}
    for stored in file.tensors:
        if (name := latent_from_gguf(stored, config)) is None:
            continue
        keys, values = GGUF_KV_UP
        of_keys, of_values = stored.replace(values, keys), stored.replace(keys, values)
        shapes = [file.tensors[each].shape if each in file.tensors else () for each in (of_keys, of_values)]
        if [len(shape) for shape in shapes] != [3, 3] or shapes[0][:2] != (shapes[1][0], shapes[1][2]):
            raise ModelError(f"The GGUF tensors {of_keys} {shapes[0]} and {of_values} {shapes[1]} do not fit together.")
        found[name] = of_keys, of_values
    return found


def _joined_matrices(file: GgufFile, config: ModelConfig) -> dict[str, tuple[str, str]]:
    """Return the two GGUF tensors that hold the first and the last rows of a matrix, by its Hugging Face name.

    Raises:
        ModelError: the second tensor is missing, or has another number of columns.
    """
    found: dict[str, tuple[str, str]] = {}
    for stored, tensor in file.tensors.items():
        if (name := delta_from_gguf(stored, config)) is None:
            continue
        other = stored.replace(*GGUF_DELTA_PARTS)
        shape = file.tensors[other].shape if other in file.tensors else ()
        if len(tensor.shape) != 2 or len(shape) != 2 or shape[1] != tensor.shape[1]:
            raise ModelError(f"The GGUF tensors {stored} {tensor.shape} and {other} {shape} do not fit together.")
        found[name] = stored, other
    return found


def _joined_tensor(file: GgufFile, first: str, second: str) -> _StoredTensor:
    rows, columns = file.tensors[first].shape
    return _StoredTensor((rows + file.tensors[second].shape[0], columns), first, parts=(first, second))


class _StoredTensor(NamedTuple):
    """Shape of a tensor, and where a GGUF file stores it.

    It may be a whole stored tensor, one expert's part of one, some rows of one, or the rows of several stored tensors.
    """

    shape: Shape
    stored: str
    expert: int | None = None
    experts: int = 1
    rows: tuple[int, int] | None = None
    parts: tuple[str, ...] = ()


def _stored_tensor(file: GgufFile, stored: str, config: ModelConfig) -> dict[str, _StoredTensor]:
    """Return the contents of a stored tensor, by Hugging Face names."""
    shape = file.tensors[stored].shape
    experts = experts_from_gguf(stored, config)
    if experts and shape[0] == len(experts):
        return {name: _StoredTensor(shape[1:], stored, i, len(experts)) for i, name in enumerate(experts)}
    if (rows := fused_from_gguf(stored, config)) is not None:
        return {name: _StoredTensor((end - first, *shape[1:]), stored, rows=(first, end)) for name, first, end in rows}
    name = from_gguf(stored, config)
    if name.endswith((".mamba.A_log", ".mamba.D", ".mamba.norm.weight")):  # by heads, or by groups
        return {name: _StoredTensor((math.prod(shape),), stored)}
    if name.endswith((".conv.conv.weight", ".conv1d.weight")) and len(shape) == 2:  # a matrix for each channel
        return {name: _StoredTensor((shape[0], 1, shape[1]), stored)}
    is_vector = name.endswith("_gate.weight") and len(shape) == 1  # a matrix of one row
    return {name: _StoredTensor((1, *shape) if is_vector else shape, stored)}


class RandomWeights:
    """Random weights for any model, to measure speed and memory without a checkpoint.

    A tensor depends only on its name, shape, type and device.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.shapes = expected_shapes(config)
        self._norm = 1.0 - config.norm_offset

    def read(self, name: str, out: Tensor, part: int | None = None) -> None:
        """Fill a tensor: matrices preserve the variance of their inputs; norms are identities."""
        if out.is_meta:  # a model of shapes alone
            return
        if name.endswith("norm.weight"):
            out.fill_(self._norm)
            return
        bound = (3 / out.shape[-1]) ** 0.5
        seed = zlib.crc32((name if part is None else f"{name}[{part}]").encode())
        out.uniform_(-bound, bound, generator=torch.Generator(out.device).manual_seed(seed))

    def part_rows(self, name: str, part: int) -> None:
        return None

    def blocks(self, name: str) -> None:
        return None

    def stored(self, name: str) -> None:
        return None

    def numbers(self, name: str, part: int | None = None) -> None:
        return None

    def storage(self, name: str) -> str:
        return "random"

    def byte_rows(self, name: str) -> None:
        return None

    def byte_scales(self, name: str) -> int:
        return 0

    def rounds_inputs(self, name: str) -> bool:
        return False

    def grouped_bytes(self, name: str) -> None:
        return None
