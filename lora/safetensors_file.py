"""Strict reader of untrusted ``adapter_model.safetensors`` files (format: https://github.com/huggingface/safetensors).

    | 8 bytes: length n | n bytes: JSON header | tensors, one after another without gaps |

Every number is checked before use. The file is read and not mapped into memory, so that a file that is truncated
meanwhile causes an error and does not kill the process.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .config import unique_keys
from .errors import AdapterError

MOST_HEADER_BYTES = 1 << 20
MOST_TENSORS = 4096
_MOST_NAME = 512
_MOST_DIMENSION = 1 << 31
_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def read_tensors(path: Path, most_bytes: int) -> dict[str, Tensor]:
    """Read all tensors of a file by name, in their stored types. The tensors share one block of memory.

    Args:
        most_bytes: limit of the file's size.

    Raises:
        AdapterError: the file is missing, too large, or malformed, or has a number that is not finite.
    """
    try:
        with path.open("rb") as file:
            head, size = _read_head(file, path.name, most_bytes)
            # The layout is checked before memory is allocated for the tensors.
            entries, start = _layout(head, size, path.name)
            data = bytearray(size)
            data[: len(head)] = head
            if file.readinto(memoryview(data)[len(head) :]) != size - len(head) or file.read(1):
                raise AdapterError(f"{path.name} changed while it was being read.")
    except OSError as error:
        raise AdapterError(f"{path.name} cannot be read: {error.strerror}.") from None
    return {entry.name: _tensor(entry, data, start) for entry in entries}


def read_shards(
    paths: Sequence[Path], most_bytes: int, read: Callable[[Path, int], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Read the tensors of several files, with ``read_tensors`` or ``read_shapes``.

    Args:
        most_bytes: limit of all files together.

    Raises:
        AdapterError: as for ``read``, or a tensor is in two files.
    """
    found: dict[str, Tensor] = {}
    for path in paths:
        tensors = read(path, most_bytes)
        if twice := found.keys() & tensors.keys():
            raise AdapterError(f"The tensor {min(twice)} is in two of the adapter's files.", min(twice))
        found |= tensors
        most_bytes -= sum(tensor.nbytes for tensor in tensors.values())
        if len(found) > MOST_TENSORS:
            raise AdapterError(f"The adapter's files list more than {MOST_TENSORS:,} tensors, which is the limit.")
    return found


def read_shapes(path: Path, most_bytes: int) -> dict[str, Tensor]:
    """Read the header of a file.

    Returns tensors on the meta device by name. Raises AdapterError like ``read_tensors``.
    """
    try:
        with path.open("rb") as file:
            head, size = _read_head(file, path.name, most_bytes)
    except OSError as error:
        raise AdapterError(f"{path.name} cannot be read: {error.strerror}.") from None
    entries, _ = _layout(head, size, path.name)
    return {entry.name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for entry in entries}


def _read_head(file: BinaryIO, name: str, most_bytes: int) -> tuple[bytes, int]:
    """Return the beginning of a file, which contains its header, and its size.

    Raises AdapterError if it is too large.
    """
    size = os.fstat(file.fileno()).st_size
    if size > most_bytes:
        raise AdapterError(f"{name} has {size:,} bytes; the limit is {most_bytes:,}.")
    return file.read(min(size, 8 + MOST_HEADER_BYTES)), size


def _layout(head: bytes, size: int, name: str) -> tuple[list[_Entry], int]:
    """Return the tensors of a file of ``size`` bytes that begins with ``head``, and the offset of the first tensor."""
    header, start = _header(head, size, name)
    entries = [_entry(tensor, value) for tensor, value in header.items() if tensor != "__metadata__"]
    if not entries:
        raise AdapterError(f"{name} holds no tensors.")
    _check_layout(entries, size - start, name)
    return entries, start


def _header(head: bytes, size: int, name: str) -> tuple[dict[str, Any], int]:
    """Parse the header. Returns the header and the offset of the tensors."""
    if size < 8:
        raise AdapterError(f"{name} has {size} bytes; a safetensors file has at least 8.")
    length = int.from_bytes(head[:8], "little")
    if length > MOST_HEADER_BYTES:
        raise AdapterError(f"{name} claims a header of {length:,} bytes; the limit is {MOST_HEADER_BYTES:,}.")
    if length > size - 8:
        raise AdapterError(f"{name} claims a header of {length:,} bytes, but only {size - 8:,} bytes follow.")
    try:
        header = json.loads(head[8 : 8 + length].decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise AdapterError(f"{name} has a malformed header: {reason}.") from None
    if not isinstance(header, dict):
        raise AdapterError(f"{name} has a header that is not a JSON object.")
    if len(header) > MOST_TENSORS + 1:
        raise AdapterError(f"{name} lists {len(header):,} tensors; the limit is {MOST_TENSORS:,}.")
    return header, 8 + length


def _entry(name: str, value: Any) -> _Entry:
    if len(name) > _MOST_NAME:
        raise AdapterError(f"A tensor has a name of {len(name):,} characters; the limit is {_MOST_NAME}.")
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise AdapterError(f"The tensor {name} must have dtype, shape and data_offsets in the header.", name)
    dtype = value["dtype"]
    if not isinstance(dtype, str) or dtype not in _TYPES:
        raise AdapterError(f"The tensor {name} has type {str(dtype)[:40]!r}; supported are {', '.join(_TYPES)}.", name)
    shape = _naturals(value["shape"])
    if shape is None or not 1 <= len(shape) <= 2 or not all(1 <= size < _MOST_DIMENSION for size in shape):
        raise AdapterError(
            f"The tensor {name} has shape {str(value['shape'])[:80]}; it must have one or two sizes of at least 1.",
            name,
        )
    offsets = _naturals(value["data_offsets"])
    if offsets is None or len(offsets) != 2:
        raise AdapterError(
            f"The tensor {name} has data_offsets {str(value['data_offsets'])[:80]}, not two numbers.", name
        )
    entry = _Entry(name, _TYPES[dtype], shape, *offsets)
    if entry.end - entry.begin != math.prod(shape) * entry.dtype.itemsize:
        raise AdapterError(
            f"The tensor {name} of type {dtype} and shape {list(shape)} cannot lie at {list(offsets)}: "
            f"it has {math.prod(shape) * entry.dtype.itemsize:,} bytes.",
            name,
        )
    return entry


def _naturals(value: Any) -> tuple[int, ...] | None:
    """Return the value as a tuple if it is a list of integers >= 0, else None."""
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        return None
    return tuple(value)


def _check_layout(entries: list[_Entry], size: int, name: str) -> None:
    """Check that the tensors fill the file without overlaps or gaps."""
    at = 0
    for entry in sorted(entries, key=lambda entry: entry.begin):
        if entry.begin != at:
            what = "overlaps the one before it" if entry.begin < at else "leaves a gap before it"
            raise AdapterError(f"The tensor {entry.name} begins at {entry.begin:,}, which {what}.", entry.name)
        at = entry.end
    if at != size:
        raise AdapterError(f"{name} has {size:,} bytes of tensors, but its header describes {at:,}.")


def _tensor(entry: _Entry, data: bytearray, start: int) -> Tensor:
    flat = _flat(entry, data, start)
    if not torch.isfinite(flat).all():
        raise AdapterError(f"The tensor {entry.name} holds values that are not finite.", entry.name)
    return flat.view(entry.shape)


def _flat(entry: _Entry, data: bytearray, start: int) -> Tensor:
    begin = start + entry.begin
    if begin % entry.dtype.itemsize == 0:
        return torch.frombuffer(data, dtype=entry.dtype, count=math.prod(entry.shape), offset=begin)
    # Older writers did not align the header, so the tensor's bytes are copied.
    aligned = bytearray(data[begin : start + entry.end])
    return torch.frombuffer(aligned, dtype=entry.dtype)
