"""An adapter's folder is replaced while it is read: what is loaded is one version, never a mix of two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.models.lora_folders import file_of, good_config, good_tensors, small_reader, write_folder

from rootgraft.lora import read_adapter
from rootgraft.lora.errors import AdapterError


def write(path: Path, version: int) -> None:
    """Put a version in the place of another one, by a rename as a careful publisher does."""
    new = path.with_name(f"new-{version}")
    write_folder(new, good_config(r=2, lora_alpha=4 + version), file_of(good_tensors(version, 2)))
    if path.exists():
        path.rename(path.with_name(f"old-{version}"))
    new.rename(path)


def overwrite(path: Path, version: int) -> None:
    """The same file by file, in place."""
    write_folder(path, good_config(r=2, lora_alpha=4 + version), file_of(good_tensors(version, 2)))


def replacing(monkeypatch: pytest.MonkeyPatch, times: int, replace: Callable[[int], None]) -> list[int]:
    """Let the folder be replaced between config and weights, in the first so many reads."""
    reads: list[int] = []
    read = read_adapter.read_tensors

    def read_later(*arguments: Any) -> Any:
        reads.append(len(reads) + 1)
        if len(reads) <= times:
            replace(reads[-1])
        return read(*arguments)

    monkeypatch.setattr(read_adapter, "read_tensors", read_later)
    return reads


@pytest.mark.parametrize("put", [write, overwrite])
@pytest.mark.parametrize("times", [1, 2])
def test_the_version_that_is_there_at_the_end_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put: Callable[[Path, int], None], times: int
) -> None:
    folder, alone = tmp_path / "a", tmp_path / "alone"
    put(alone, times)
    expected = small_reader().read(str(alone)).digest
    put(folder, 0)
    reads = replacing(monkeypatch, times, lambda version: put(folder, version))
    assert small_reader().read(str(folder)).digest == expected
    assert len(reads) == times + 1


def test_a_folder_that_is_replaced_all_the_time_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder := tmp_path / "a", 0)
    reads = replacing(monkeypatch, 9, lambda version: write(folder, version))
    with pytest.raises(AdapterError, match="changed while they were being read: load it again"):
        small_reader().read(str(folder))
    assert len(reads) == 3


def test_a_fault_of_files_that_stay_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "a", good_config(r=2), b"no tensors")
    reads = replacing(monkeypatch, 0, lambda version: None)
    with pytest.raises(AdapterError):
        small_reader().read(str(tmp_path / "a"))
    assert len(reads) == 1
