"""Block files: a file is written under a temporary name and then renamed, so a file with its final name is complete.

Writes are not synchronised to the disk. So after a power failure a file may be cut or wrong, which its checksum
detects.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from .block_codec import Buffer

SUFFIX = ".kv"
_UNFINISHED = ".part"
_FOLDER_NAME = re.compile("[0-9a-f]{16}")
_FILE_NAME = re.compile(rf"[0-9a-f]{{48}}(\{SUFFIX}|\{_UNFINISHED})")
# Whoever can write in the folder must not have a read wait for a pipe, or a write go through a link to elsewhere.
_OPEN_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_LOCK = "lock"
_MOST_SLOTS = 64


class SlotInUse(Exception):
    """Another process has this folder."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A block's file that an earlier process has left: name, folder, size and when it was used."""

    key: bytes
    folder: str
    num_bytes: int
    used: float


class BlockFiles:
    """Files in one numbered folder below DIR (DIR/0, DIR/1, ...), locked for this process until ``close``.

    Args:
        folder: DIR, which is created if it does not exist.

    Attributes:
        folder: the folder of this process, below DIR.

    Raises:
        OSError: the folder cannot be made or locked.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(_MOST_SLOTS):
            try:
                self._take(folder / str(number))
                return
            except SlotInUse:
                continue
        raise OSError(f"{_MOST_SLOTS} processes use {folder} already")

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Take DIR/0 or another one of them. Raises SlotInUse, OSError."""
        made = cls.__new__(cls)
        made._take(folder)
        return made

    def _take(self, folder: Path) -> None:
        """Lock a folder for this process. Raises SlotInUse, OSError."""
        self.folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)
        self._lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise SlotInUse(folder) from None

    def path(self, folder: str, key: bytes) -> Path:
        return self.folder / folder / (key.hex() + SUFFIX)

    def write(self, folder: str, key: bytes, parts: Iterable[Buffer]) -> None:
        """Write a file. Raises OSError, and nothing is left then."""
        path = f"{self.folder}/{folder}/{key.hex()}"
        unfinished = path + _UNFINISHED
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _OPEN_FLAGS
        try:
            fd = os.open(unfinished, flags, 0o600)
        except FileNotFoundError:
            # The first file of a tenant, or somebody has removed the folders while this process runs.
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.mkdir(f"{self.folder}/{folder}", 0o700)
            fd = os.open(unfinished, flags, 0o600)
        try:
            try:
                self.write_parts(fd, [memoryview(part) for part in parts])
            finally:
                os.close(fd)
            os.rename(unfinished, path + SUFFIX)
        except BaseException:
            with suppress(OSError):
                os.unlink(unfinished)
            raise

    def write_parts(self, fd: int, parts: list[memoryview]) -> None:
        """Write all parts to an open file in order, in one call unless the system takes less. Raises OSError."""
        while parts:
            count = os.writev(fd, parts)
            while parts and count >= len(parts[0]):
                count -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][count:]

    def read(self, folder: str, key: bytes, num_bytes: int) -> memoryview:
        """Return the content of a file that should have so many bytes: fewer if it has fewer. Raises OSError."""
        path = self.path(folder, key)
        data = memoryview(bytearray(num_bytes + 1))  # one more shows a file that is too long
        with open(path, "rb", buffering=0, opener=open_block) as file:
            length = self.read_into(file.fileno(), data)
        with suppress(OSError):
            os.utime(path)
        return data[:length]

    def read_into(self, fd: int, data: memoryview) -> int:
        """Fill memory from an open file as far as the file goes. Returns the number of bytes. Raises OSError."""
        length = 0
        while length < len(data) and (count := os.readv(fd, [data[length:]])):
            length += count
        return length

    def remove(self, folder: str, key: bytes) -> None:
        with suppress(OSError):
            self.path(folder, key).unlink()

    def scan(self) -> list[FoundFile]:
        """Return the files of earlier processes in the order of their last use, and remove unfinished ones.

        Of several files of one name in different folders the last used one stays.
        """
        found: dict[bytes, FoundFile] = {}
        for file in sorted(self._scan(), key=lambda file: file.used):
            if other := found.pop(file.key, None):
                self.remove(other.folder, other.key)
            found[file.key] = file
        return [*found.values()]

    def _scan(self) -> Iterator[FoundFile]:
        for path in found_files(self.folder):
            if path.suffix == _UNFINISHED:
                with suppress(OSError):
                    path.unlink()
                continue
            with suppress(OSError):
                status = path.lstat()
                yield FoundFile(bytes.fromhex(path.stem), path.parent.name, status.st_size, status.st_mtime)

    def close(self) -> None:
        """Leave the folder to other processes. Its files stay."""
        os.close(self._lock)


def slot_folders(folder: Path) -> list[Path]:
    """Return the folders of processes below DIR."""
    return sorted(each for each in folder.iterdir() if each.is_dir() and each.name.isdecimal())


def found_files(folder: Path) -> Iterator[Path]:
    """Yield the files of blocks below one process's folder, unfinished ones too, and nothing that is of others."""
    for tenant in sorted(each for each in folder.iterdir() if _FOLDER_NAME.fullmatch(each.name) and each.is_dir()):
        with os.scandir(tenant) as entries:
            yield from (Path(entry.path) for entry in entries if _FILE_NAME.fullmatch(entry.name))


def open_block(path: str, flags: int) -> int:
    """Open a block's file to read it, as an opener of ``open``. Raises OSError for what is not a file."""
    fd = os.open(path, flags | _OPEN_FLAGS)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is not a file", path)
    return fd
