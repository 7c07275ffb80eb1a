"""Read GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3).

    header     magic "GGUF", version u32, number of tensors u64, number of metadata entries u64
    metadata   key, type u32, value            a string is its length u64 and its UTF-8 bytes,
    tensors    name, dims, type, offset        an array its element type u32, its length u64 and its elements
    data       each tensor at (start of data + offset), both multiples of general.alignment

The file is not trusted: every count, length and offset is checked against the size of the file before memory is
allocated or data read. No torch, so that the tokenizer can read its part without it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ModelError, quoted
from .locate import SPLIT_NAME

MAGIC = b"GGUF"
MAX_DIMS = 4

# Supported types of tensors, by ggml's number: name, elements in a block, bytes in a block.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}  # fmt: skip

# Other types of ggml, to refuse them by name.
_OTHER_TENSOR_TYPES = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 41: "Q1_0",
}  # fmt: skip

# Metadata value types: u8, i8, u16, i16, u32, i32, f32, bool, string, array, u64, i64, f64.
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING = 8
_SPLIT_INDEX, _SPLIT_COUNT, _SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
_MOST_PARTS = 10_000
_ARRAY = 9

# The smallest size of an entry in bytes, to refuse absurd counts before the first entry is read.
_LEAST_METADATA = 8 + 4 + 1
_LEAST_TENSOR = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Type and location of a tensor.

    Attributes:
        shape: in torch's order, outermost dimension first (GGUF writes the innermost first).
        type: name of its type, a key of ``TENSOR_TYPES`` by name.
        offset: bytes from the start of the file.
        num_bytes: size of the tensor in bytes.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    num_bytes: int


class GgufFile:
    """One opened file at ``path``: ``metadata`` by key, ``tensors`` by name, tensor bytes on demand.

    A model that was split into several files (``gguf-split``) is opened by its first file, which has the metadata.
    ``tensors`` contains the tensors of all files. ``parts`` are the files, this one first, each with its
    ``own_tensors``.

    Metadata values are int, float, bool, str, ``list[str]`` or, for arrays of numbers, ``np.ndarray``. The file
    stays mapped as long as the object or an array from ``data`` lives.
    """

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        """Parse the header of a mapped file (see ``open``). Raises ``ModelError``."""
        self.path = path
        self._mapped = mapped
        self._bytes = np.frombuffer(mapped, dtype=np.uint8)
        reader = _Reader(mapped)
        num_tensors, num_metadata = _read_header(reader)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_metadata):
            key, value = _read_metadata(reader)
            _add(self.metadata, key, value, "metadata key")
        # Offsets are relative to the end of the table of tensors, so they become absolute once the table is read.
        table = [_read_tensor(reader) for _ in range(num_tensors)]
        alignment = _alignment(self.metadata)
        start = -(-reader.position // alignment) * alignment
        self.own_tensors: dict[str, GgufTensor] = {}
        for entry in table:
            _add(self.own_tensors, entry.name, _located(entry, start, alignment, reader.size), "tensor")
        self.parts: tuple[GgufFile, ...] = (self,)
        self.tensors = dict(self.own_tensors)
        self._part_of: dict[str, GgufFile] = {}

    def _join(self, others: tuple[GgufFile, ...]) -> None:
        """Add the tensors of the further files of a split model. Raises ModelError."""
        for part in others:
            for name, tensor in part.own_tensors.items():
                _add(self.tensors, name, tensor, "tensor")
                self._part_of[name] = part
        self.parts = (self, *others)
        stated = self.metadata.get(_SPLIT_TENSORS, len(self.tensors))
        if stated != len(self.tensors):
            raise ModelError(
                f"its files hold {len(self.tensors)} tensors together, but its metadata states {quoted(stated)}"
            )

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Map the file at ``path`` and parse its header.

        Raises:
            ModelError: not a readable file, not GGUF, an unsupported version, tensor type or value type, or a header
                that claims more than the file holds.
        """
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # mmap refuses an empty file with a ValueError
            raise ModelError(f"{path.name} cannot be read: {error.args[-1]}.") from error
        try:
            opened = cls(path, mapped)
            names = _split_names(path, opened.metadata)
        except ModelError as error:
            raise ModelError(f"{path.name}: {error}") from None
        if len(names) > 1:
            others = tuple(cls._open_part(path, name, index, len(names)) for index, name in enumerate(names) if index)
            try:
                opened._join(others)
            except ModelError as error:
                raise ModelError(f"{path.name}: {error}") from None
        return opened

    @classmethod
    def _open_part(cls, first: Path, name: str, index: int, count: int) -> GgufFile:
        """Open a further file of a split model. Raises ModelError."""
        path = first.with_name(name)
        if not path.is_file():
            raise ModelError(f"{first.name} is one of {count} files of a model, but {name} is missing from its folder.")
        try:
            with path.open("rb") as file:
                part = cls(path, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise ModelError(f"{name} cannot be read: {error.args[-1]}.") from error
        except ModelError as error:
            raise ModelError(f"{name}: {error}") from None
        if (part.metadata.get(_SPLIT_INDEX), part.metadata.get(_SPLIT_COUNT)) != (index, count):
            raise ModelError(f"{name} is not file {index + 1} of {count} of the model that {first.name} begins.")
        return part

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """Return a tensor's raw bytes, a read-only view of the mapped file. Raises KeyError for an unknown name."""
        if (part := self._part_of.get(name)) is not None:
            return part.data(name)
        tensor = self.own_tensors[name]
        return self._bytes[tensor.offset : tensor.offset + tensor.num_bytes]

    def release(self, data: npt.NDArray[np.uint8]) -> None:
        """Release the memory of bytes that ``data`` returned, or of a part of them. The bytes may be read again."""
        if (advice := getattr(mmap, "MADV_DONTNEED", None)) is None or not data.nbytes:
            return
        start = data.ctypes.data - self._bytes.ctypes.data
        if not 0 <= start < self._bytes.nbytes:  # The data is in another file of a split model.
            for part in self.parts[1:]:
                if 0 <= data.ctypes.data - part._bytes.ctypes.data < part._bytes.nbytes:
                    part.release(data)
            return
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        self._mapped.madvise(advice, first, start + data.nbytes - first)


def _split_names(path: Path, metadata: dict[str, Any]) -> list[str]:
    """Return the names of all files of a split model; for one file its own name alone. Raises ModelError."""
    count, index = metadata.get(_SPLIT_COUNT, 0), metadata.get(_SPLIT_INDEX, 0)
    if not isinstance(count, int) or not isinstance(index, int) or not 0 <= count <= _MOST_PARTS:
        raise ModelError(f"{_SPLIT_COUNT} must be the number of files, at most {_MOST_PARTS}, not {quoted(count)}")
    if count <= 1:
        return [path.name]
    found = SPLIT_NAME.fullmatch(path.name)
    if found is None or int(found["count"]) != count:
        raise ModelError(f"it is one of {count} files of a model, and must be named ...-00001-of-{count:05d}.gguf")
    names = [f"{found['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    if index:
        raise ModelError(f"it is file {index + 1} of {count} of a model: give the first, {names[0]}")
    return names


def begins_as_gguf(path: Path) -> bool:
    """Return whether a path is a file that begins with the letters GGUF."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _add(table: dict[str, Any], name: str, value: Any, what: str) -> None:
    if name in table:
        raise ModelError(f"the {what} {quoted(name)} appears twice")
    table[name] = value


class _Reader:
    """A position in the mapped file; every read is checked against the end."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped = mapped
        self.size = len(mapped)
        self.position = 0

    def take(self, count: int, what: str) -> int:
        """Advance the position by ``count`` bytes, and return the old position."""
        start = self.position
        if count > self.size - start:
            raise ModelError(
                f"truncated or malformed: {what} needs {count} bytes, but only {self.size - start} are left"
            )
        self.position = start + count
        return start

    def bytes(self, count: int, what: str) -> bytes:
        start = self.take(count, what)
        return self._mapped[start : start + count]

    def u32(self, what: str) -> int:
        return int(struct.unpack_from("<I", self._mapped, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(struct.unpack_from("<Q", self._mapped, self.take(8, what))[0])

    def string(self, what: str) -> str:
        return _decode(self.bytes(self.u64(f"the length of {what}"), what), what)

    def strings(self, count: int, what: str) -> list[str]:
        """Return ``count`` strings. The loop calls no function per string: a vocabulary has hundreds of thousands."""
        if count * 8 > self.size - self.position:
            raise ModelError(f"truncated or malformed: {what} claims {count} strings, more than the file holds")
        mapped, size, position = self._mapped, self.size, self.position
        length_at: Callable[[Any, int], tuple[Any, ...]] = struct.Struct("<Q").unpack_from
        raw = []
        for _ in range(count):
            if size - position < 8:
                raise ModelError(f"truncated or malformed: {what} ends inside a string")
            start = position + 8
            position = start + length_at(mapped, position)[0]
            if position > size:
                raise ModelError(
                    f"truncated or malformed: a string of {what} ends {position - size} bytes after the end of the file"
                )
            raw.append(mapped[start:position])
        self.position = position
        return [_decode(item, what) for item in raw]


def _decode(raw: bytes, what: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"malformed: {what} is not UTF-8") from error


def _read_header(reader: _Reader) -> tuple[int, int]:
    """Return the number of tensors and the number of metadata entries."""
    if reader.bytes(4, "the magic") != MAGIC:
        raise ModelError("not a GGUF file: it does not begin with the letters GGUF")
    version = reader.u32("the version")
    if version not in (2, 3):
        raise ModelError(f"GGUF version {version} in little-endian order is not supported; versions 2 and 3 are")
    num_tensors, num_metadata = reader.u64("the number of tensors"), reader.u64("the number of metadata entries")
    least = num_tensors * _LEAST_TENSOR + num_metadata * _LEAST_METADATA
    if least > reader.size - reader.position:
        raise ModelError(
            f"truncated or malformed: {num_tensors} tensors and {num_metadata} metadata entries need at least "
            f"{least} bytes, but only {reader.size - reader.position} are left"
        )
    return num_tensors, num_metadata


def _read_metadata(reader: _Reader) -> tuple[str, Any]:
    key = reader.string("a metadata key")
    what = f"the metadata value {quoted(key)}"
    kind = reader.u32(what)
    if kind == _ARRAY:
        return key, _read_array(reader, what)
    if kind == _STRING:
        return key, reader.string(what)
    return key, _numbers(reader, kind, 1, what)[0].item()


def _read_array(reader: _Reader, what: str) -> Any:
    kind, count = reader.u32(what), reader.u64(what)
    return reader.strings(count, what) if kind == _STRING else _numbers(reader, kind, count, what)


def _numbers(reader: _Reader, kind: int, count: int, what: str) -> npt.NDArray[Any]:
    if kind not in _NUMBERS:
        raise ModelError(f"{what} has the value type {kind}, which is not supported")
    dtype = np.dtype(_NUMBERS[kind])
    return np.frombuffer(reader.bytes(count * dtype.itemsize, what), dtype=dtype)


def _read_tensor(reader: _Reader) -> GgufTensor:
    """Read an entry of the table of tensors; its offset is relative to the start of the data."""
    name = reader.string("a tensor's name")
    what = f"the tensor {quoted(name)}"
    num_dims = reader.u32(what)
    if not 1 <= num_dims <= MAX_DIMS:
        raise ModelError(f"malformed: {what} has {num_dims} dimensions, not 1 to {MAX_DIMS}")
    dims = [reader.u64(what) for _ in range(num_dims)]
    if min(dims) < 1:
        raise ModelError(f"malformed: {what} has a dimension of length 0")
    kind, offset = reader.u32(what), reader.u64(what)
    if kind not in TENSOR_TYPES:
        kind_name = _OTHER_TENSOR_TYPES.get(kind, str(kind))
        known = "docs/reference/models.md lists the supported types"
        raise ModelError(f"{what} is of type {kind_name}, which is not supported; {known}")
    type_name, block, block_bytes = TENSOR_TYPES[kind]
    if dims[0] % block:
        raise ModelError(f"malformed: rows of {what} have {dims[0]} elements, not a multiple of {type_name}'s {block}")
    num_elements = 1
    for dim in dims:
        num_elements *= dim
    return GgufTensor(name, tuple(reversed(dims)), type_name, offset, num_elements // block * block_bytes)


def _alignment(metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise ModelError(f"malformed: general.alignment is {quoted(alignment)}, not a power of two")
    return alignment


def _located(tensor: GgufTensor, start: int, alignment: int, size: int) -> GgufTensor:
    """Return ``tensor`` with its offset made absolute. Raises ``ModelError`` if it is not inside the file."""
    offset = start + tensor.offset
    if tensor.offset % alignment or offset + tensor.num_bytes > size:
        raise ModelError(
            f"truncated or malformed: the tensor {quoted(tensor.name)} has {tensor.num_bytes} bytes at {offset} in a "
            f"file of {size} bytes aligned to {alignment}"
        )
    return GgufTensor(tensor.name, tensor.shape, tensor.type, offset, tensor.num_bytes)
