"""Safetensors files of a model's folder: their names, and the position of each tensor's bytes. Reads no tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ModelError, quoted

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_LENGTH_BYTES = 8  # size of the header's length, at the beginning of the file
_MOST_HEADER = 100_000_000  # the format's own limit


def shard_names(folder: Path) -> list[str]:
    """Return the names of a model's safetensors files: the names in its index, or the name of the only file.

    Raises:
        ModelError: there are only pickles, or the index is malformed.
    """
    if (folder / INDEX).is_file():
        return _indexed(folder / INDEX)
    if (folder / SINGLE).is_file():
        return [SINGLE]
    for path in sorted(folder.iterdir()):
        if path.suffix in _PICKLES:
            raise ModelError(
                f"{path.name} is a pickle, which can run any code when it is loaded. Convert the model to safetensors."
            )
    raise ModelError(f"There is neither {SINGLE} nor {INDEX} in the model's folder.")


def tensor_spans(path: Path) -> tuple[bytes, list[tuple[int, int]]]:
    """Return a file's header, and the start and end of each tensor in the file.

    Raises:
        ModelError: the file cannot be read, or its header is malformed.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = file.read(min(length, _MOST_HEADER))
        if len(header) < length:
            raise ValueError("a header longer than the file, or than the format allows")
        table, start = json.loads(header), _LENGTH_BYTES + length
        return header, [(start + first, start + last) for first, last in _offsets(table)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path.name} cannot be read: it is missing, truncated or malformed.") from error


def _offsets(table: dict[str, Any]) -> Iterator[tuple[int, int]]:
    for name, entry in table.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            yield first, last


def _indexed(index: Path) -> list[str]:
    try:
        files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{INDEX} is malformed: it must be JSON with an object 'weight_map' of file names.") from error
    for name in files:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{INDEX} names {quoted(name)}, which is not a .safetensors file in the same folder.")
    return files
