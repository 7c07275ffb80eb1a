"""Download cache: adapters on disk by their content, shared by processes and bounded in bytes.

    content/DIGEST/         whole adapters: adapter_config.json and adapter_model.safetensors
    versions/KEY.json       which content a source had at a version: a commit, an ETag
    partial/KEY/            an unfinished download, which is resumed; locked by KEY.lock
    users/ID/N/             hard links of a process to the content it uses; the process holds ID.lock while it runs

Content gets its name by one rename, once it is complete. Content with links in ``users`` is not evicted. Eviction never
removes files that a process uses, because the process has links of its own. All names are changed under ``cache.lock``.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import shutil
import uuid
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..errors import AdapterUnavailable
from .remote_files import CONFIG, WEIGHTS, content_digest

_FOLDERS = ("content", "versions", "partial", "users")
_MOST_VERIFIED = 10_000
UNCHECKED = " unchecked"
"""Behind a source in a note: its revision may be a pull request's, as the operator or an admin has named it."""
_RESERVED = "reserved"  # file in a folder of ``partial`` with the bytes that the download will have


class CacheFull(AdapterUnavailable):
    """Error: there is no room for a download, because adapters in use fill the cache.

    Args:
        message: the error.
        missing: bytes that are missing after all unused content is evicted.
    """

    def __init__(self, message: str, missing: int) -> None:
        super().__init__(message)
        self.missing = missing


@dataclass(slots=True)
class _Entry:
    """A folder of ``content`` or ``partial``."""

    path: Path
    num_bytes: int
    used: float
    is_free: bool


class DownloadCache:
    """Cache of one process. Its methods may be called from any thread.

    Args:
        root: folder of the cache, created if missing.
        most_bytes: largest size of content and of downloads in progress, together.

    Raises:
        AdapterUnavailable: the folder is not writable.
    """

    def __init__(self, root: Path, most_bytes: int) -> None:
        self._root = root
        self._most_bytes = most_bytes
        self._numbers = itertools.count()
        self._verified: OrderedDict[str, None] = OrderedDict()
        try:
            for name in _FOLDERS:
                (root / name).mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked():
                self._drop_dead_users()
                self._drop_stale_notes()
                self._drop_idle_locks()
                self._own = root / "users" / uuid.uuid4().hex
                self._own.mkdir(mode=0o700)
                self._alive = _lock_file(self._own.with_suffix(".lock"))
        except OSError as error:
            raise AdapterUnavailable(
                f"The cache of adapters (--adapter-cache-dir) cannot be written: {error.strerror}."
            ) from error

    def find(self, source: str, version: str | None) -> tuple[str, str] | None:
        """Return digest and version of the content that a source had when it was last seen.

        Args:
            version: version of the content; None for the version seen last.
        """
        try:
            found = json.loads(self._note_of(source).read_bytes())
            digest, seen = str(found["digest"]), str(found["version"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return (digest, seen) if version in (None, seen) and self.holds(digest) else None

    def holds(self, digest: str) -> bool:
        return (self._content(digest) / WEIGHTS).is_file()

    def use(self, digest: str) -> Path | None:
        """Return a folder with this content, kept until ``release``; None if the content is missing or damaged."""
        with self._locked():
            folder = self._linked(digest)
        if folder is None or digest in self._verified:
            return folder
        if content_digest(folder) == digest:
            self._note_verified(digest)
            return folder
        with self._locked():
            shutil.rmtree(self._content(digest), ignore_errors=True)
        self.release(folder)
        return None

    def release(self, folder: Path) -> None:
        """Release a folder of ``use`` or ``publish``: its content may be evicted, unless it is used otherwise."""
        shutil.rmtree(folder, ignore_errors=True)

    def bytes_freed(self, folders: Iterable[Path]) -> int:
        """Return the bytes freed by releasing these folders of ``use`` or ``publish``: content without other users."""
        links: Counter[int] = Counter()
        found: dict[int, os.stat_result] = {}
        for folder in folders:
            for name in (CONFIG, WEIGHTS):
                with suppress(OSError):
                    stat = (folder / name).stat()
                    links[stat.st_ino] += 1
                    found[stat.st_ino] = stat
        return sum(stat.st_size for inode, stat in found.items() if links[inode] >= stat.st_nlink - 1)

    def remove(self, digest: str) -> bool:
        """Remove content and all records about it; return False if a process uses it."""
        with self._locked():
            self._drop_dead_users()
            if any(not entry.is_free for entry in self._entries() if entry.path == self._content(digest)):
                return False
            shutil.rmtree(self._content(digest), ignore_errors=True)
            self._drop_stale_notes()
            return True

    def note(self, source: str, version: str, digest: str) -> None:
        """Record which content a source has at a version."""
        note = {"source": source, "version": version, "digest": digest}
        target = self._note_of(source)
        made = target.with_suffix(".new")
        with self._locked():
            made.write_text(json.dumps(note), "utf-8")
            os.replace(made, target)

    @contextmanager
    def partial(self, key: str) -> Iterator[Path | None]:
        """Lock the folder of a download inside the block; None if another download has it, also in other processes."""
        path = self._root / "partial" / key
        lock = _try_lock(path.with_suffix(".lock"))
        if lock is None:
            yield None
            return
        with lock:
            try:
                path.mkdir(mode=0o700, exist_ok=True)
                yield path
            finally:
                # The download was published, or cannot be resumed.
                if not path.exists():
                    path.with_suffix(".lock").unlink(missing_ok=True)

    def reserve(self, partial: Path, num_bytes: int) -> None:
        """Free space for a download. Raises CacheFull if content in use leaves too little."""
        with self._locked():
            (partial / _RESERVED).write_text(str(num_bytes))
            self._evict()

    def publish(self, partial: Path, digest: str) -> Path:
        """Turn a complete download into content, and return a folder with it as ``use`` does."""
        for name in (CONFIG, WEIGHTS):
            with (partial / name).open("rb") as file:
                os.fsync(file.fileno())
        with self._locked():
            (partial / _RESERVED).unlink(missing_ok=True)
            if not self.holds(digest):
                shutil.rmtree(self._content(digest), ignore_errors=True)
                os.replace(partial, self._content(digest))
            else:
                shutil.rmtree(partial)
            self._note_verified(digest)
            folder = self._linked(digest)
            assert folder is not None
            return folder

    def close(self) -> None:
        """Release all folders of this process."""
        with self._locked():
            shutil.rmtree(self._own, ignore_errors=True)
            self._own.with_suffix(".lock").unlink(missing_ok=True)
            self._alive.close()

    def _note_verified(self, digest: str) -> None:
        """Record that a content matches its digest, so that it need not be read again; only for recent contents."""
        self._verified[digest] = None
        while len(self._verified) > _MOST_VERIFIED:
            self._verified.popitem(last=False)

    def _content(self, digest: str) -> Path:
        return self._root / "content" / digest

    def _note_of(self, source: str) -> Path:
        return self._root / "versions" / f"{hashlib.sha256(source.encode()).hexdigest()}.json"

    def _linked(self, digest: str) -> Path | None:
        """Link content to a folder of this process, and mark it as used."""
        folder = self._own / str(next(self._numbers))
        folder.mkdir(mode=0o700)
        try:
            for name in (CONFIG, WEIGHTS):
                _link(self._content(digest) / name, folder / name)
            os.utime(self._content(digest))
        except FileNotFoundError:
            shutil.rmtree(folder)
            return None
        return folder

    def _evict(self) -> None:
        """Remove the content that was unused for longest, until the cache is within its limit; keep content in use."""
        self._drop_dead_users()
        entries = sorted(self._entries(), key=lambda entry: entry.used)
        excess = sum(entry.num_bytes for entry in entries) - self._most_bytes
        free = [entry for entry in entries if entry.is_free]
        if excess > sum(entry.num_bytes for entry in free):
            used = sum(entry.num_bytes for entry in entries if not entry.is_free)
            raise CacheFull(
                f"The cache of adapters is full: {used:,} bytes are in use or being downloaded; the limit is "
                f"{self._most_bytes:,} (--max-adapter-cache-bytes).",
                excess - sum(entry.num_bytes for entry in free),
            )
        if excess <= 0:
            return
        for entry in free:
            if excess <= 0:
                break
            if self._removed(entry.path):
                excess -= entry.num_bytes
        self._drop_stale_notes()

    def _removed(self, path: Path) -> bool:
        """Remove a folder; in ``partial`` only if no download has begun to resume from it."""
        if path.parent.name != "partial":
            shutil.rmtree(path, ignore_errors=True)
            return True
        lock = _try_lock(path.with_suffix(".lock"))
        if lock is None:
            return False
        with lock:
            shutil.rmtree(path, ignore_errors=True)
            path.with_suffix(".lock").unlink(missing_ok=True)
        return True

    def _entries(self) -> Iterator[_Entry]:
        for path in (self._root / "content").iterdir():
            with suppress(OSError):
                found = [(path / name).stat() for name in (CONFIG, WEIGHTS)]
                is_free = all(each.st_nlink == 1 for each in found)
                yield _Entry(path, sum(each.st_size for each in found), path.stat().st_mtime, is_free)
        for path in (self._root / "partial").iterdir():
            if path.is_dir():
                with suppress(OSError):
                    yield _Entry(path, _partial_bytes(path), path.stat().st_mtime, not _is_locked(path))

    def _drop_dead_users(self) -> None:
        """Remove the links of processes that have ended without ``close``."""
        for path in (self._root / "users").glob("*.lock"):
            lock = _try_lock(path)
            if lock is not None:
                with lock:
                    shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                    path.unlink(missing_ok=True)

    def _drop_stale_notes(self) -> None:
        """Remove the records of content that is gone, and records that a process did not write completely."""
        for path in (self._root / "versions").iterdir():
            try:
                digest = str(json.loads(path.read_bytes())["digest"])
                is_stale = path.suffix != ".json" or not self.holds(digest)
            except (OSError, ValueError, KeyError, TypeError):
                is_stale = True
            if is_stale:
                path.unlink(missing_ok=True)

    def _drop_idle_locks(self) -> None:
        """Remove the locks of downloads whose folders are gone."""
        for path in (self._root / "partial").glob("*.lock"):
            if not path.with_suffix("").exists() and (lock := _try_lock(path)) is not None:
                with lock:
                    if not path.with_suffix("").exists():
                        path.unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with _lock_file(self._root / "cache.lock"):
            yield


def _lock_file(path: Path) -> IO[bytes]:
    """Open a file and wait for its lock, which is released when the file is closed or the process ends."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        file.close()
        raise
    return file


def _try_lock(path: Path) -> IO[bytes] | None:
    """Open and lock a file; None if it is locked, or was removed meanwhile."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    file.close()
    return None


def _is_locked(partial: Path) -> bool:
    lock = _try_lock(partial.with_suffix(".lock"))
    if lock is None:
        return True
    lock.close()
    return False


def _partial_bytes(path: Path) -> int:
    """Return the present size of a download in bytes, or its expected size if that is larger."""
    there = sum(file.stat().st_size for file in path.iterdir())
    try:
        return max(there, int((path / _RESERVED).read_text()))
    except (OSError, ValueError):
        return there


def _link(source: Path, target: Path) -> None:
    """Link a file, or copy it if the file system has no hard links."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)
