"""Safe paths: checks of untrusted adapter names and paths."""

from __future__ import annotations

import re
from pathlib import Path

from .errors import AdapterError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.:@+-]*)*")
_MOST_NAME = 256
_SHARD = re.compile(r"adapter_model-[0-9]{5}-of-([0-9]{5})\.safetensors")
_MOST_SHARDS = 256


def check_name(name: str) -> None:
    """Raise ``AdapterError`` unless ``name`` is a valid adapter name.

    It has the form of a hub's name: ``team/assistant-v2``.
    """
    if len(name) > _MOST_NAME:
        raise AdapterError(
            f"The adapter's name has {len(name):,} characters; at most {_MOST_NAME} are allowed.", "name"
        )
    if not _NAME.fullmatch(name):
        raise AdapterError(
            f"{name!r} is not a name for an adapter: use letters, digits and '_', after the first also '.', ':', "
            "'@', '+' and '-', in parts divided by '/'.",
            "name",
        )


def find_folder(path: str, root: Path | None) -> Path:
    """Resolve the folder of an adapter.

    Args:
        path: path of the adapter's folder; relative to ``root`` if ``root`` is set.
        root: folder that must contain the adapter's folder, after ``..``, absolute paths and links are resolved; None
            for no limit.

    Raises:
        AdapterError: the folder does not exist, or is outside of ``root``.
    """
    if "\0" in path or len(path) > 4096:
        raise AdapterError("The adapter's path is not a path.", "path")
    try:
        folder = (Path(path) if root is None else root / path).resolve()
        if root is not None and not folder.is_relative_to(root.resolve()):
            raise AdapterError("The adapter's path leads outside the folder of adapters.", "path")
        if not folder.is_dir():
            raise AdapterError("There is no folder at the adapter's path.", "path")
    except (OSError, RuntimeError, ValueError):
        raise AdapterError("The adapter's path cannot be followed.", "path") from None
    return folder


def find_files(folder: Path, root: Path | None) -> tuple[Path, tuple[Path, ...]]:
    """Return the config file and the weights files in a folder: one weights file, or several shards.

    Raises:
        AdapterError: a file is missing, or is a link to a place outside of ``root``.
    """
    config, weights = folder / CONFIG, folder / WEIGHTS
    files = (weights,) if weights.is_file() else _shards(folder) or (weights,)
    if not files[0].is_file() and (folder / _PICKLE).is_file():
        raise AdapterError(
            f"{_PICKLE} is a pickle, which can run any code when it is loaded. Save the adapter as {WEIGHTS}."
        )
    for file in (config, *files):
        if not file.is_file():
            raise AdapterError(f"There is no {file.name} in the adapter's folder.", "path")
        if root is not None and not file.resolve().is_relative_to(root.resolve()):
            raise AdapterError(f"{file.name} is a link that leads outside the folder of adapters.", "path")
    return config, files


def _shards(folder: Path) -> tuple[Path, ...]:
    """Return the shards of an adapter in order; () without shards.

    Raises AdapterError for shards of different counts.
    """
    try:
        counts = {int(match[1]) for file in folder.iterdir() if (match := _SHARD.fullmatch(file.name))}
    except OSError:
        return ()
    if len(counts) > 1 or any(not 1 <= count <= _MOST_SHARDS for count in counts):
        raise AdapterError(
            f"The adapter's folder must have all shards of one {WEIGHTS}, 1 to {_MOST_SHARDS}; according to their "
            f"names they belong to {', '.join(map(str, sorted(counts)))}.",
            "path",
        )
    return tuple(folder / _shard(index, count) for count in counts for index in range(1, count + 1))


def _shard(index: int, count: int) -> str:
    return f"adapter_model-{index:05}-of-{count:05}.safetensors"
