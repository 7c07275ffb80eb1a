"""File store: keeps the files of clients with metadata in a folder, with limits for each owner and in total.

    FOLDER/file-<32 hexadecimal digits>.data     content
    FOLDER/file-<32 hexadecimal digits>.json     metadata; written last, so that a file exists completely or not at all

Paths are built from ids that this module generates, never from input of clients.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import orjson

from ...engine.whole_file import open_private
from ...tenancy.tenant_shares import TenantShares
from ..errors import HTTPError
from .steady_clock import STEADY_CLOCK

logger = logging.getLogger(__name__)

# Largest number of files of one owner.
MAX_FILES = 10_000
DEFAULT_EXPIRY = 30 * 86400
# Number of uploads of the largest size that may run at the same time.
MOST_UPLOADS = 4
# Largest number of bytes of a form in addition to its file.
FORM_BYTES = 64 << 10
_OWNERS_SHARE = 0.5
_RETRY = {"retry-after": "5", "connection": "close"}
_Record = TypeVar("_Record")
_NAME = re.compile(r"file-[0-9a-f]{32}\.(data|json|part)")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Metadata of a file. ``owner`` is the tenant ("" without keys), and times are seconds since 1970."""

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int

    def body(self) -> dict[str, Any]:
        """Return the file in OpenAI's format."""
        fields = {name: value for name, value in asdict(self).items() if name != "owner"}
        return {**fields, "object": "file", "status": "processed", "status_details": None}


class FileStore:
    """Stores files in a folder. The index belongs to one event loop; ``write`` may run on any thread.

    Args:
        folder: folder of the files; created if missing. No other process may use it.
        max_bytes: largest size of all files together in bytes. With keys, each owner may use half of it.
        max_upload: largest size of a file, in bytes.
        is_read: returns whether a file is in use, so that it is kept even after its expiry.
        clock: returns seconds since 1970.

    Attributes:
        uploads: shares of the bytes of uploads in progress.
        answers: shares of the bytes of answers of unfinished batches, which will become files.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        max_upload: int = 200 << 20,
        is_read: Callable[[StoredFile], bool] = lambda file: False,
        clock: Callable[[], float] = STEADY_CLOCK,
    ) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._max_bytes = max_bytes
        self._is_read = is_read
        self._clock = clock
        self._files: dict[str, StoredFile] = {}
        # Numbers and sizes of the files by owner. They are kept as sums, because the room is checked for each piece of
        # an upload.
        self._num_files: Counter[str] = Counter()
        self._num_bytes: Counter[str] = Counter()
        self._total = 0
        # Files past their expiry that are in use, and the time at which the next other file expires.
        self._overdue: list[StoredFile] = []
        self._next_expiry = math.inf
        self.uploads = TenantShares(MOST_UPLOADS * max_upload)
        self.answers = TenantShares(max_bytes)
        self._load()

    @property
    def num_bytes(self) -> int:
        return self._total

    def check_room(self, owner: str, size: int) -> None:
        """Raise HTTPError 413 if a file of this size exceeds a limit, counting uploads and answers in progress."""
        self._forget_expired()
        limit = self._max_bytes * (_OWNERS_SHARE if owner else 1)
        if self._num_files[owner] >= MAX_FILES:
            raise HTTPError(413, f"There are already {MAX_FILES} files: delete some.", code="storage_full")
        own = self._num_bytes[owner] + self.uploads.held(owner) + self.answers.held(owner)
        of_all = self._total + self.uploads.total + self.answers.total
        if own + size > limit or of_all + size > self._max_bytes:
            raise HTTPError(413, "There is no space for this file: delete others.", code="storage_full")

    def begin_upload(self, owner: str) -> Upload:
        """Begin an upload. Its bytes count from their arrival until the upload's end."""
        return Upload(self, owner)

    def new(
        self, owner: str, filename: str, purpose: str, size: int, expiry: int | None, file_id: str | None = None
    ) -> StoredFile:
        """Return the metadata of a new file, which is not written yet."""
        now = int(self._clock())
        expires_at = now + (expiry or DEFAULT_EXPIRY)
        return StoredFile(file_id or new_file_id(), owner, filename[:255], purpose, size, now, expires_at)

    def write(self, file: StoredFile, chunks: Iterable[bytes]) -> StoredFile:
        """Write content and metadata durably. Returns the metadata with the size. After an OSError, no file exists."""
        size = 0

        def counted() -> Iterator[bytes]:
            nonlocal size
            for chunk in chunks:
                size += len(chunk)
                yield chunk

        _write(self.path(file), counted())
        metadata = {**asdict(file), "bytes": size}
        try:
            write_json(self._folder / f"{file.id}.json", metadata)
        except OSError:
            self.path(file).unlink(missing_ok=True)
            raise
        return StoredFile(**metadata)

    def add(self, file: StoredFile) -> None:
        """Add a written file to the index. It replaces a file with the same id."""
        self._drop(file.id)
        self._files[file.id] = file
        self._num_files[file.owner] += 1
        self._num_bytes[file.owner] += file.bytes
        self._total += file.bytes
        self._next_expiry = min(self._next_expiry, file.expires_at)

    def _drop(self, file_id: str) -> None:
        file = self._files.pop(file_id, None)
        if file is None:
            return
        self._total -= file.bytes
        self._num_bytes[file.owner] -= file.bytes
        self._num_files[file.owner] -= 1
        if not self._num_files[file.owner]:
            del self._num_files[file.owner], self._num_bytes[file.owner]

    def get(self, owner: str, file_id: str) -> StoredFile | None:
        """Return the file of this id if it belongs to the owner."""
        self._forget_expired()
        file = self._files.get(file_id)
        return file if file is not None and file.owner == owner else None

    def of(self, owner: str) -> list[StoredFile]:
        """Return all files of an owner, the oldest first."""
        self._forget_expired()
        return [file for file in self._files.values() if file.owner == owner]

    def path(self, file: StoredFile) -> Path:
        return self._folder / f"{file.id}.data"

    def delete(self, file: StoredFile) -> None:
        """Delete a file and its metadata."""
        self._drop(file.id)
        for suffix in ("json", "data"):
            (self._folder / f"{file.id}.{suffix}").unlink(missing_ok=True)

    def _forget_expired(self) -> None:
        now = self._clock()
        if now >= self._next_expiry:
            self._overdue = [file for file in self._files.values() if file.expires_at <= now]
            later = (file.expires_at for file in self._files.values() if file.expires_at > now)
            self._next_expiry = min(later, default=math.inf)
        if self._overdue:
            # A file with the same id may have replaced an overdue one.
            self._overdue = [file for file in self._overdue if self._files.get(file.id) is file]
            for file in self._overdue:
                if not self._is_read(file):
                    self.delete(file)

    def _load(self) -> None:
        """Load the index, and delete partly written files."""
        loaded, unread = read_records(self._folder, "file-*.json", lambda fields: StoredFile(**fields))
        for file in sorted(loaded, key=lambda file: (file.created_at, file.id)):
            if self.path(file).exists():
                self.add(file)
        kept = self._files.keys() | {path.stem for path in unread}
        for path in self._folder.iterdir():
            is_store_file = _NAME.fullmatch(path.name) is not None
            if is_store_file and (path.stem not in kept or path.suffix == ".part"):
                path.unlink()


class Upload:
    """An upload in progress. It reserves room for bytes before they are spooled; ``close`` releases the room."""

    def __init__(self, store: FileStore, owner: str) -> None:
        self._store = store
        self._owner = owner
        self._num_bytes = 0

    def expect(self, size: int) -> None:
        """Check that ``size`` bytes fit now. Raises HTTPError: 413 for the file limits, 503 or 429 for uploads."""
        uploads = self._store.uploads
        self._store.check_room(self._owner, size - FORM_BYTES)
        if size > uploads.most - uploads.total:
            text = f"Running uploads have {uploads.total} bytes; the limit is {uploads.most}: try again later."
            raise HTTPError(503, text, code="server_overloaded", headers=_RETRY)
        if size > uploads.left_for(self._owner):
            text = (
                f"Running uploads of your tenant have {uploads.held(self._owner)} bytes: wait until some of them end."
            )
            raise HTTPError(429, text, code="rate_limit_exceeded", headers=_RETRY)

    def take(self, size: int) -> None:
        """Reserve bytes that have arrived. Raises like ``expect``."""
        self.expect(size)
        self._store.uploads.take(self._owner, size)
        self._num_bytes += size

    def settle(self, size: int) -> None:
        """Reserve only the bytes of the file itself, and check that they fit. Raises HTTPError 413."""
        self.close()
        self._store.check_room(self._owner, size)
        self._store.uploads.take(self._owner, size)
        self._num_bytes = size

    def close(self) -> None:
        self._store.uploads.give_back(self._owner, self._num_bytes)
        self._num_bytes = 0


def new_file_id() -> str:
    return f"file-{uuid4().hex}"


def read_records(
    folder: Path, pattern: str, make: Callable[[dict[str, Any]], _Record]
) -> tuple[list[_Record], list[Path]]:
    """Read the records that a folder has as JSON files.

    Args:
        make: converts the fields in a file to a record.

    Returns:
        The records, and the files without a valid record, for example from another version of the server. Such files
        are logged and kept.
    """
    records: list[_Record] = []
    unread: list[Path] = []
    for path in sorted(folder.glob(pattern)):
        try:
            records.append(make(orjson.loads(path.read_bytes())))
        except (ValueError, TypeError, LookupError) as error:
            logger.warning("ignoring %s: it is not a record of this version (%r).", path, error)
            unread.append(path)
    return records, unread


def write_json(path: Path, value: Any) -> None:
    """Write JSON to a file, durably and atomically. After an OSError, the file is unchanged."""
    _write(path, [orjson.dumps(value)])


def _write(path: Path, chunks: Iterable[bytes]) -> None:
    part = path.with_suffix(".part")
    try:
        with open(part, "wb", opener=open_private) as out:
            out.writelines(chunks)
            out.flush()
            os.fsync(out.fileno())
        part.replace(path)
    except BaseException:
        # The unfinished file would occupy space, of which there is too little.
        part.unlink(missing_ok=True)
        raise
