"""A fetcher of adapters that takes folders in place, and folders to take."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rootgraft.engine.adapter_sources.adapter_fetcher import FetchedAdapter
from rootgraft.engine.adapter_sources.remote_files import CONFIG, WEIGHTS, content_digest
from rootgraft.engine.adapter_sources.source_uri import AdapterSource


class FolderFetcher:
    """Fetches folders in place."""

    def __init__(self) -> None:
        self.released: list[Path] = []

    def begin(self, source: AdapterSource, *, trusted: bool = False) -> Any:
        result: Future[FetchedAdapter] = Future()
        folder = Path(source.location)
        result.set_result(FetchedAdapter(folder, source.pinned("", content_digest(folder))))
        return type("Begun", (), {"result": result})()

    def release(self, fetched: FetchedAdapter) -> None:
        self.released.append(fetched.folder)

    def close(self) -> None:
        """Do nothing."""


def adapter_folder(path: Path, name: str) -> str:
    """Make the folder of an adapter. Returns its source."""
    (path / name).mkdir()
    (path / name / CONFIG).write_text("{}")
    (path / name / WEIGHTS).write_text(name)
    return f"file://{path / name}"
