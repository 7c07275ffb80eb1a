"""Named sources: adapters that the operator names by source instead of folder, in options and in calls of ``LLM``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...lora.errors import AdapterError
from ...lora.safe_paths import check_name
from ..config import EngineConfig
from ..errors import ConfigError, EngineError
from .source_uri import AdapterSource, has_scheme, is_hub_name, parse_source

# Engine processes read names here and download nothing, so they do not import the HTTP client.
if TYPE_CHECKING:
    from .adapter_fetcher import AdapterFetcher, FetchedAdapter

MOST_LISTED = 1_000  # most folders of adapters that are listed


def adapter_names(root: Path) -> list[str]:
    """Return the names for requests of the adapters' folders below ``root``: ``name`` and ``team/name``.

    Names are sorted, and at most ``MOST_LISTED`` are returned. The function reads the disk.
    """
    found: list[str] = []
    with suppress(OSError):
        for pattern in ("*/adapter_config.json", "*/*/adapter_config.json"):
            for file in root.glob(pattern):
                name = file.parent.relative_to(root).as_posix()
                with suppress(AdapterError):
                    check_name(name)
                    found.append(name)
    return sorted(found)[:MOST_LISTED]


def is_adapter(folder: Path, name: str) -> bool:
    """Return whether the folder of adapters has a folder of this name. The loader checks its content."""
    try:
        check_name(name)
        return (folder / name).is_dir()
    except (AdapterError, OSError):
        return False


def named_source(path: str, root: str | None) -> AdapterSource | None:
    """Return the source that a path names; None if it is the path of a folder.

    A name such as ``org/name`` is a folder if there is one, and otherwise a name on the Hub.

    Args:
        root: base folder of relative paths; None for the working directory.

    Raises:
        RequestError: the text looks like a source but is malformed.
    """
    if has_scheme(path) or (is_hub_name(path) and not (Path(root or "") / path).exists()):
        return parse_source(path)
    return None


def named_folder(path: str, root: str | None) -> str:
    """Return the path of a folder that the operator names: relative to the working directory, else to ``--lora-dir``.

    Args:
        path: path as given; a source is returned unchanged.
        root: folder of ``--lora-dir``, which is the base folder of relative paths for readers of adapters.
    """
    if root is None or has_scheme(path) or not (folder := Path(path).absolute()).is_dir():
        return path
    below = Path(root).absolute()
    return str(folder.relative_to(below) if folder.is_relative_to(below) else folder)


def looked_in(path: str, root: str | None) -> str:
    """Return the folders in which the operator's path was searched, for an error."""
    return path if root is None else f"{path}, nor {Path(root) / path}"


def fetch_named(config: EngineConfig, fetcher: AdapterFetcher) -> tuple[EngineConfig, Mapping[str, FetchedAdapter]]:
    """Fetch all adapters of ``--lora-modules`` that are named by source, concurrently.

    Returns:
        The options with folders in place of the sources, and the adapters by name.

    Raises:
        ConfigError: an adapter cannot be fetched; only the first error is raised.
    """
    begun, fetched = {}, {}
    given = config.named_adapters
    named = {name: named_folder(path, config.lora_dir) for name, path in given.items()}
    for name, path in named.items():
        try:
            if (source := named_source(path, config.lora_dir)) is not None:
                begun[name] = fetcher.begin(source, trusted=True)
        except EngineError as error:
            raise ConfigError(f"--lora-modules {name}: {error}") from error
    for name, download in begun.items():
        try:
            fetched[name] = download.result.result()
        except EngineError as error:
            here = (
                ""
                if has_scheme(named[name])
                else f"There is no folder {looked_in(named[name], config.lora_dir)} here. "
            )
            raise ConfigError(f"--lora-modules {name}: {here}{error}") from error
    folders = named | {name: str(each.folder) for name, each in fetched.items()}
    modules = tuple(json.dumps({"name": name, "path": folder}) for name, folder in folders.items())
    return (config if folders == given else replace(config, lora_modules=modules)), fetched
