"""Adapters at file:// URIs: links, folders above, what is not a regular file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.adapter_sources.source_files import CONFIG, WEIGHTS, adapter_files

from rootgraft.engine.adapter_sources.adapter_fetcher import AdapterFetcher
from rootgraft.engine.adapter_sources.source_uri import parse_source
from rootgraft.engine.errors import AdapterNotFound, RequestError

Make = Callable[..., AdapterFetcher]
FILES = adapter_files()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """``allowed/a`` is an adapter, ``outside/a`` another one."""
    for name in ("allowed/a", "outside/a"):
        write(tmp_path / name)
    return tmp_path


def write(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_adapter_below_an_allowed_folder_stays_what_it_was(folder: Path, fetcher: Make) -> None:
    make = fetcher(f"file://{folder}/allowed")
    fetched = make.fetch(parse_source(f"file://{folder}/allowed/a"))
    newer = adapter_files(1)
    for name, each in newer.items():
        (folder / "allowed" / "a" / name).write_bytes(each)
    assert content(fetched.folder) == FILES
    assert content(make.fetch(parse_source(f"file://{folder}/allowed/a")).folder) == newer


@pytest.mark.parametrize("kind", ["folder", "file", "above"])
def test_links_lead_nowhere_else(folder: Path, fetcher: Make, kind: str) -> None:
    target = folder / "allowed" / "link"
    if kind == "folder":
        target.symlink_to(folder / "outside" / "a")
    elif kind == "file":
        write(target)
        (target / WEIGHTS).unlink()
        (target / WEIGHTS).symlink_to(folder / "outside" / "a" / WEIGHTS)
    else:
        target.symlink_to("..")
        target /= "outside/a"
    make = fetcher(f"file://{folder}/allowed")
    with pytest.raises(RequestError, match="leads outside the folders") as error:
        make.fetch(parse_source(f"file://{target}"))
    assert error.value.code == "adapter_source_not_allowed"
    assert content(make.fetch(parse_source(f"file://{target}"), trusted=True).folder) == FILES


def test_a_link_that_stays_within_is_followed(folder: Path, fetcher: Make) -> None:
    (folder / "allowed" / "b").symlink_to("a")
    assert (
        content(fetcher(f"file://{folder}/allowed").fetch(parse_source(f"file://{folder}/allowed/b")).folder) == FILES
    )


def test_what_is_no_regular_file_is_refused(folder: Path, fetcher: Make) -> None:
    os.mkfifo(folder / "allowed" / "fifo")
    (folder / "allowed" / "a" / WEIGHTS).unlink()
    (folder / "allowed" / "a" / WEIGHTS).symlink_to("../fifo")
    with pytest.raises(RequestError, match="not a regular file"):
        fetcher(f"file://{folder}/allowed").fetch(parse_source(f"file://{folder}/allowed/a"))
    with pytest.raises(AdapterNotFound, match=f"no {CONFIG}"):
        fetcher(f"file://{folder}/allowed").fetch(parse_source(f"file://{folder}/allowed/none"))
