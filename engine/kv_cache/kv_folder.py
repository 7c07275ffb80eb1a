"""KV folder: the files of ``--kv-disk`` between two servers, to list, remove, pack into one file and unpack again."""

from __future__ import annotations

import math
import os
import re
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

from ..errors import ConfigError
from ..whole_file import replacing
from .block_codec import NotABlock, describe
from .block_files import SUFFIX, BlockFiles, SlotInUse, found_files, open_block, slot_folders

_MEMBER = re.compile(r"([0-9a-f]{16})/([0-9a-f]{48})\.kv")
_MOST_FILE_BYTES = 1 << 30
# Kinds of members that have no content, whatever size they say.
_EMPTY = (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE)
# Kinds of members that only say more about the next one.
_REMARKS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


@dataclass(slots=True)
class KvGroup:
    """The files of one base model, adapter, salt and tenant.

    Attributes:
        tenant: name of the tenant; None if the files are encrypted, as are then ``base``, ``adapter`` and ``salt``.
        folder: name of the folder that stands for the tenant.
        pages: number of files.
        prompts: number of files of a first page.
        used: time at which one of the files was last used, in seconds since 1970.
    """

    folder: str
    base: str | None = None
    adapter: str | None = None
    salt: str | None = None
    tenant: str | None = None
    pages: int = 0
    prompts: int = 0
    num_bytes: int = 0
    used: float = 0.0


class KvFolder:
    """The folder of KV files, opened while no server uses it.

    Raises:
        ConfigError: it is not a folder of KV files, or a server uses it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder of --kv-disk.")
        self._slots: list[BlockFiles] = []
        try:
            for each in slot_folders(folder):
                self._slots.append(BlockFiles.of(each))
        except SlotInUse:
            self.close()
            raise ConfigError(
                f"A server is using {folder}: stop it, or ask the server. Try: rootgraft cache stats"
            ) from None

    def close(self) -> None:
        """Leave the folder to servers."""
        for slot in self._slots:
            slot.close()

    def groups(self) -> list[KvGroup]:
        """Return the contents, the largest first. Reads the headers of all files."""
        groups: dict[tuple[object, ...], KvGroup] = {}
        for path in self._files():
            with suppress(OSError, NotABlock), open(path, "rb", buffering=0, opener=open_block) as file:
                fields = describe(file.read) or {}
                names: dict[str, Any] = {name: fields.get(name) for name in ("base", "adapter", "salt", "tenant")}
                group = groups.setdefault((path.parent.name, *names.values()), KvGroup(path.parent.name, **names))
                status = path.stat()
                group.pages += 1
                group.prompts += fields.get("position") == 0
                group.num_bytes += status.st_size
                group.used = max(group.used, status.st_mtime)
        return sorted(groups.values(), key=lambda group: -group.num_bytes)

    def size(self) -> tuple[int, int]:
        """Return the number of files and their bytes."""
        sizes = [path.stat().st_size for path in self._files()]
        return len(sizes), sum(sizes)

    def clear(self) -> int:
        """Remove all files. Returns their number."""
        count = 0
        for path in self._files():
            path.unlink()
            count += 1
        return count

    def export(self, file: Path) -> int:
        """Write all files into one (tar), which appears as a whole. Returns their number. Raises OSError."""
        seen: set[str] = set()
        with replacing(file, 0o600) as whole, _new_archive(whole) as out:
            for path in self._files():
                name = f"{path.parent.name}/{path.name}"
                if _MEMBER.fullmatch(name) and name not in seen:
                    seen.add(name)
                    out.add(path, name, recursive=False, filter=_without_owner)
        return len(seen)

    def import_file(self, file: Path, most_bytes: int) -> tuple[int, int]:
        """Import files from an archive that ``export`` wrote, while the total size is within a bound.

        A server checks the content of the files when it reads them.

        Returns:
            The number of files imported, and of files left out because there was no room or their names are not those
            of KV files.

        Raises:
            ConfigError: it is not such an archive, or it is cut.
        """
        slot = self._slots[0] if self._slots else BlockFiles(self._folder)
        if not self._slots:
            self._slots.append(slot)
        _, num_bytes = self.size()
        taken = left = 0
        try:
            with file.open("rb") as archive:
                for member in _members(archive):
                    found = _MEMBER.fullmatch(member.name) if member.isfile() else None
                    if not found or member.size > min(_MOST_FILE_BYTES, most_bytes - num_bytes):
                        left += 1
                        continue
                    slot.write(found[1], bytes.fromhex(found[2]), [archive.read(member.size)])
                    num_bytes += member.size
                    taken += 1
        except tarfile.TarError as error:
            raise ConfigError(
                f"{file} is not a complete file of `rootgraft cache export`: {error}; {taken} files were imported."
            ) from error
        return taken, left

    def _files(self) -> Iterator[Path]:
        for slot in self._slots:
            yield from (path for path in found_files(slot.folder) if path.suffix == SUFFIX)


def _new_archive(file: IO[bytes]) -> tarfile.TarFile:
    return tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT)


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = int(member.mtime)
    return member


def _members(archive: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yield each member of a tar archive, with the archive at its content.

    The library's own loop follows whatever an archive says: into recursion, beyond the file, or backwards for ever.

    Raises:
        tarfile.TarError: it is not an archive, or it is cut.
    """
    size = os.fstat(archive.fileno()).st_size
    while True:
        header = archive.read(tarfile.BLOCKSIZE)
        if not header and archive.tell():
            return
        if len(header) == tarfile.BLOCKSIZE and not any(header):  # An archive ends with blocks of zeros.
            return
        member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        at = archive.tell()
        num_bytes = 0 if member.type in _EMPTY else member.size
        if not 0 <= num_bytes <= size - at:
            raise tarfile.ReadError(f"{member.name[:80]!r} goes beyond its end")
        if member.type not in _REMARKS:
            yield member
        archive.seek(at + math.ceil(num_bytes / tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE)
