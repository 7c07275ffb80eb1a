"""Files of clients in a folder: content and a few facts of each, bounded in bytes, each for its owner alone.

    FOLDER/file-<32 hexadecimal digits>.data     the content
    FOLDER/file-<32 hexadecimal digits>.json     the facts; written last, so that a file is there as a whole or not

A path is made of an id that this module has made itself, never of what a client says.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson

from ..errors import HTTPError

MAX_FILES = 10_000  # of one owner
DEFAULT_EXPIRY = 30 * 86400
_OWNERS_SHARE = 0.5
_NAME = re.compile(r"file-[0-9a-f]{32}\.(data|json|part)")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """What is known of a file.

    Attributes:
        owner: the tenant, empty where there are no keys.
        bytes: its size.
        created_at, expires_at: seconds since 1970.
    """

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int

    def body(self) -> dict[str, Any]:
        """The file as OpenAI shows it."""
        fields = {name: value for name, value in asdict(self).items() if name != "owner"}
        return {**fields, "object": "file", "status": "processed", "status_details": None}


class FileStore:
    """The files of a folder. Its index belongs to one event loop, ``write`` may run on any thread.

    Args:
        folder: made if it is not there; it must belong to this process alone.
        max_bytes: of all files together; an owner has half of it at most, where there are several.
        clock: seconds since 1970.
    """

    def __init__(self, folder: Path, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._max_bytes = max_bytes
        self._clock = clock
        self._files: dict[str, StoredFile] = {}
        self._load()

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(file.bytes for file in self._files.values())

    def check_room(self, owner: str, size: int) -> None:
        """Raise HTTPError 413 if a file of this size has no room."""
        self._forget_expired()
        own = [file.bytes for file in self._files.values() if file.owner == owner]
        limit = self._max_bytes * (_OWNERS_SHARE if owner else 1)
        if len(own) >= MAX_FILES:
            raise HTTPError(413, f"There are {MAX_FILES} files already: delete some.", code="storage_full")
        if sum(own) + size > limit or self.num_bytes + size > self._max_bytes:
            raise HTTPError(413, "There is no room for this file: delete others.", code="storage_full")

    def new(
        self, owner: str, filename: str, purpose: str, size: int, expiry: int | None, file_id: str | None = None
    ) -> StoredFile:
        """The facts of a file that is about to be written."""
        now = int(self._clock())
        until = now + (expiry or DEFAULT_EXPIRY)
        return StoredFile(file_id or new_file_id(), owner, filename[:255], purpose, size, now, until)

    def write(self, file: StoredFile, chunks: Iterable[bytes]) -> StoredFile:
        """Write content and facts, durably. Returns the facts with the size that it came to."""
        size = 0
        part = self._folder / f"{file.id}.part"
        with part.open("wb") as out:
            for chunk in chunks:
                size += out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        part.replace(self.path(file))
        facts = {**asdict(file), "bytes": size}
        write_json(self._folder / f"{file.id}.json", facts)
        return StoredFile(**facts)

    def add(self, file: StoredFile) -> None:
        """Take a file that has been written into the index."""
        self._files[file.id] = file

    def get(self, owner: str, file_id: str) -> StoredFile | None:
        """A file of this owner's."""
        self._forget_expired()
        file = self._files.get(file_id)
        return file if file is not None and file.owner == owner else None

    def of(self, owner: str) -> list[StoredFile]:
        """All files of an owner, in the order in which they were made."""
        self._forget_expired()
        return [file for file in self._files.values() if file.owner == owner]

    def path(self, file: StoredFile) -> Path:
        """Where its content is."""
        return self._folder / f"{file.id}.data"

    def delete(self, file: StoredFile) -> None:
        """Forget a file."""
        self._files.pop(file.id, None)
        for suffix in ("json", "data"):
            (self._folder / f"{file.id}.{suffix}").unlink(missing_ok=True)

    def _forget_expired(self) -> None:
        now = self._clock()
        for file in [file for file in self._files.values() if file.expires_at <= now]:
            self.delete(file)

    def _load(self) -> None:
        """Take in what is there; what a crash has left half written goes."""
        found = [StoredFile(**orjson.loads(path.read_bytes())) for path in self._folder.glob("file-*.json")]
        for file in sorted(found, key=lambda file: (file.created_at, file.id)):
            if self.path(file).exists():
                self._files[file.id] = file
        for path in self._folder.iterdir():
            is_ours = _NAME.fullmatch(path.name) is not None
            if is_ours and (path.stem not in self._files or path.suffix == ".part"):
                path.unlink()


def new_file_id() -> str:
    """An id that nobody can guess."""
    return f"file-{uuid4().hex}"


def write_json(path: Path, value: Any) -> None:
    """Put JSON in the place of a file, durably, as a whole or not at all."""
    part = path.with_suffix(".part")
    with part.open("wb") as out:
        out.write(orjson.dumps(value))
        out.flush()
        os.fsync(out.fileno())
    part.replace(path)
