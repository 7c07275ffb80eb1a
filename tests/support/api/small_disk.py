"""A file system of its own, so small that a test can fill it; where mounting is not permitted there is none."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BLOCK = 4096


class SmallDisk:
    """A mounted folder, and a ballast that takes all of its free space.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def fill(self, leave: int = 0) -> None:
        """Take all space but some blocks."""
        with self._ballast.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(BLOCK))
            except OSError as error:
                assert error.errno == errno.ENOSPC
            file.truncate(max(0, file.tell() - leave * BLOCK))

    def free(self) -> None:
        self._ballast.unlink()

    @property
    def names(self) -> set[str]:
        """Files below the folder, by name."""
        return {path.name for path in self.path.rglob("*") if path.is_file() and path != self._ballast}


@contextmanager
def mounted(folder: Path, size: int) -> Iterator[SmallDisk | None]:
    """A disk of ``size`` bytes at ``folder`` within the block; None where this user may not mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        done = False
    if not done:
        yield None
        return
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
