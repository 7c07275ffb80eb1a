"""Cached adapters: lists the downloaded adapters in a cache on disk with their sources, and removes them."""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.locate import cache_folder
from ..errors import ModelError
from .download_cache import UNCHECKED, DownloadCache
from .remote_files import CONFIG, WEIGHTS


@dataclass(frozen=True, slots=True)
class CachedAdapter:
    """Content in a cache of adapters.

    Attributes:
        name: a source that had the adapter, or ``sha256:DIGEST`` if no source is known.
        digest: SHA-256 of its content.
        path: folder of the adapter.
        size: number of bytes on disk.
        used: last use, in seconds since 1970.
        is_loaded: whether a running server has loaded it.
    """

    name: str
    digest: str
    path: Path
    size: int
    used: float
    is_loaded: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the adapter in commands; a name on the Hub is also accepted without ``hf://``."""
        return self.name, self.name.removeprefix("hf://"), self.digest, str(self.path)


def adapter_cache_folder(given: str | None = None) -> Path:
    """Return the folder of ``--adapter-cache-dir``, or its default; it may not exist yet."""
    return cache_folder().parent / "adapters" if given is None else Path(given).expanduser()


def cached_adapters(root: Path) -> list[CachedAdapter]:
    """Return the complete adapters in a cache, sorted by name; none if there is no such folder. Changes nothing."""
    sources = defaultdict(set)
    for path in (root / "versions").glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            note = json.loads(path.read_bytes())
            sources[str(note["digest"])].add(str(note["source"]).removesuffix(UNCHECKED))
    found = []
    for path in (root / "content").glob("*"):
        with suppress(OSError):
            files = [(path / name).stat() for name in (CONFIG, WEIGHTS)]
            # If a branch and its commit are both recorded, a person has named the branch.
            name = min(sources[path.name], key=lambda source: (len(source), source), default=f"sha256:{path.name}")
            is_loaded = any(each.st_nlink > 1 for each in files)
            size = sum(each.st_size for each in files)
            found.append(CachedAdapter(name, path.name, path, size, path.stat().st_mtime, is_loaded))
    return sorted(found, key=lambda adapter: adapter.name.lower())


def remove_cached(root: Path, adapter: CachedAdapter) -> None:
    """Delete an adapter from a cache.

    Raises:
        ModelError: a running server has loaded it.
        AdapterUnavailable: the cache is not writable.
    """
    cache = DownloadCache(root, 0)
    try:
        if not cache.remove(adapter.digest):
            raise ModelError(f"{adapter.name} is loaded by a server: unload it there first. Try: rootgraft ps")
    finally:
        cache.close()
