"""Named sources: adapters that the operator names by source and not by folder, in options and in calls of ``LLM``."""

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

# Engine processes read names here and download nothing: they are spared the HTTP client.
if TYPE_CHECKING:
    from .adapter_fetcher import AdapterFetcher, FetchedAdapter

MOST_LISTED = 1_000  # folders of adapters


def adapter_names(root: Path) -> list[str]:
    """Return the names by which requests may ask for the folders of adapters below one: ``name`` and ``team/name``.

    In order, and at most ``MOST_LISTED``. It reads the disk.
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


def named_source(path: str, root: str | None) -> AdapterSource | None:
    """Return the source that a path names; None if it is the path of a folder.

    A name such as ``org/name`` is a folder where there is one, and of the Hub where there is none.

    Args:
        root: the folder that relative paths begin at; None for the working directory.

    Raises:
        RequestError: it looks like a source and is malformed.
    """
    if has_scheme(path) or (is_hub_name(path) and not (Path(root or "") / path).exists()):
        return parse_source(path)
    return None


def named_folder(path: str, root: str | None) -> str:
    """Return the path of a folder that the operator names: first as a shell reads it, then below ``--lora-dir``.

    Args:
        path: as given; a source is returned as it is.
        root: ``--lora-dir``, where what reads adapters begins with relative paths.
    """
    if root is None or has_scheme(path) or not (folder := Path(path).absolute()).is_dir():
        return path
    below = Path(root).absolute()
    return str(folder.relative_to(below) if folder.is_relative_to(below) else folder)


def looked_in(path: str, root: str | None) -> str:
    """Return the folders that a path of the operator's was looked for in, for an error."""
    return path if root is None else f"{path}, nor {Path(root) / path}"


def fetch_named(config: EngineConfig, fetcher: AdapterFetcher) -> tuple[EngineConfig, Mapping[str, FetchedAdapter]]:
    """Fetch the adapters of ``--lora-modules`` that are named by source, all at the same time.

    Returns:
        The options with their folders in place of their sources, and the adapters by name.

    Raises:
        ConfigError: the first that cannot be fetched.
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
