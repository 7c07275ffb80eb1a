"""Run records: each running server writes a file that says which models it serves, at which URL, and how busy it is.

`rootgraft ps` reads these files. They are in systemd's ``RuntimeDirectory``, in the runtime folder of the login
session, or in a folder in ``/tmp``. All users can read a record, as they can read the process's command line.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
import time
from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from glob import iglob
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from ..printable import printable

_NAME = "rootgraft"
_EVERYONES = ("/run/rootgraft", "/run/user/*/rootgraft", "/tmp/rootgraft-*")
_LEAST_SECONDS = 1.0  # Shortest time in seconds between two writes.
_MOST_FILES = 1000
_MOST_BYTES = 1 << 16
_MOST_COUNT = 1 << 31
# Largest number of characters of a text that are shown.
_MOST_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The content of a server's run record.

    Attributes:
        pid: process id of the API process.
        started: start of the process, in seconds since 1970, as the system reports it.
        url: URL at which the server is reached.
        models: names of the base model; empty while it is being loaded.
        adapters: number of adapters that are loaded.
        status: loading, ready or draining.
        running: sequences that take part in steps.
        waiting: sequences in the queue.
        kv_usage: fraction of the KV pool that running sequences hold, 0 to 1.
        version: version of rootgraft.
        path: path of the model's files, without symbolic links; empty while the files are being located.
        more_paths: the same kind of path for each of the other base models.
    """

    pid: int
    started: float
    url: str
    models: tuple[str, ...] = ()
    adapters: int = 0
    status: str = "loading"
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    version: str = ""
    path: str = ""
    more_paths: tuple[str, ...] = ()

    @property
    def identity(self) -> tuple[str, str, tuple[str, ...]]:
        """The part of the record that is written at once when it changes."""
        return self.status, self.path, self.more_paths


class RunRecordFile:
    """Writes the run record of this process when it changes, at most once a second. Errors are ignored.

    Attributes:
        started: start of this process, as in ``RunRecord.started``.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{os.getpid()}.json"
        self.started = started_at(os.getpid())
        self._written: RunRecord | None = None
        self._at = float("-inf")

    def write(self, record: RunRecord) -> None:
        """Write the record if it has changed.

        A change of ``identity`` is written at once, others at most once a second.
        """
        now = time.monotonic()
        before = self._written
        is_same = before is not None and record.identity == before.identity
        if record == before or (is_same and now < self._at + _LEAST_SECONDS):
            return
        with suppress(OSError):
            _make_folder(self._path.parent)
            if before is None:
                _remove_ended(self._path)
            handle, name = tempfile.mkstemp(prefix=".record-", dir=self._path.parent)
            try:
                with os.fdopen(handle, "w") as out:
                    json.dump(asdict(record), out)
                os.chmod(name, 0o644)
                os.replace(name, self._path)
            except OSError:
                os.unlink(name)
                raise
            # If writing the record has failed, the next call tries again, even with an equal record.
            self._written, self._at = record, now

    def remove(self) -> None:
        with suppress(OSError):
            self._path.unlink()


def run_folder() -> Path:
    """Return the folder for this process's record."""
    if folder := os.environ.get("RUNTIME_DIRECTORY"):
        return Path(folder.split(":")[0])
    if session := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(session) / _NAME
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        # No temporary folder is writable, so the record will not be written either.
        folder = "/tmp"
    return Path(folder) / f"{_NAME}-{os.getuid()}"


def started_at(pid: int) -> float:
    """Return the start of a process in seconds since 1970. Raises psutil.Error if the process does not exist."""
    return float(psutil.Process(pid).create_time())


def running_servers(owners: Container[int] | None = None) -> list[RunRecord]:
    """Return the records of the servers that run on this machine, the oldest first.

    Args:
        owners: ids of the users whose records are returned; None for all users. Records of other users may be shown,
            but must not be trusted.
    """
    found = {record.pid: record for path in _paths() for record in _read(path, owners)}
    return sorted(found.values(), key=lambda record: record.started)


def _paths() -> Iterator[Path]:
    """Yield paths of possible records.

    Anybody can create such folders in /tmp, so links are not followed and few files are read.
    """
    others = (Path(found) for pattern in _EVERYONES for found in islice(iglob(pattern), _MOST_FILES))
    for folder in (run_folder(), *(each for each in others if not each.is_symlink())):
        with suppress(OSError), os.scandir(folder) as entries:
            yield from (Path(each.path) for each in islice(entries, _MOST_FILES) if each.name.endswith(".json"))


def _read(path: Path, owners: Container[int] | None) -> Iterator[RunRecord]:
    """Yield the record of a file if its process runs and belongs to the file's owner."""
    with suppress(OSError, ValueError, TypeError, OverflowError, RecursionError, psutil.Error):
        content, owner = _content(path)
        if owners is not None and owner not in owners:
            return
        record = _record(json.loads(content))
        process = psutil.Process(record.pid)
        if abs(process.create_time() - record.started) < 1 and process.uids().real == owner:
            yield record


def _content(path: Path) -> tuple[bytes, int]:
    """Return the bytes and the owner of a small regular file, without blocking. Raises OSError for any other file."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
            raise PermissionError(f"{path} is not a record")
        return file.read(_MOST_BYTES), status.st_uid


def _record(content: Any) -> RunRecord:
    """Return a record whose fields have the right types. Raises TypeError or ValueError for other content."""
    if not isinstance(content, dict):
        raise TypeError("a record is a JSON object")
    names = {spec.name for spec in fields(RunRecord)}
    given = {name: value for name, value in content.items() if name in names}
    record = RunRecord(**given | {"models": tuple(map(_shown, given.get("models", ())))})
    numbers = (record.pid, record.adapters, record.running, record.waiting, record.kv_usage)
    if not all(0 <= number <= _MOST_COUNT for number in numbers):
        raise ValueError("a number is out of range")
    return RunRecord(
        int(record.pid),
        float(record.started),
        _shown(record.url),
        record.models,
        int(record.adapters),
        _shown(record.status),
        int(record.running),
        int(record.waiting),
        float(record.kv_usage),
        _shown(record.version),
        str(record.path),
        tuple(map(str, record.more_paths)),
    )


def _shown(text: Any) -> str:
    """Return a text without characters that control the terminal, because another user may have written it."""
    return printable(str(text)[:_MOST_CHARACTERS])


def _remove_ended(own: Path) -> None:
    """Remove the records of killed servers in the folder of this one. Raises OSError if the folder cannot be read."""
    for path in own.parent.glob("*.json"):
        if path != own and path.stem.isdecimal() and not any(_read(path, {os.getuid()})):
            with suppress(OSError):
                path.unlink()


def _make_folder(folder: Path) -> None:
    """Create the folder. Raises OSError if it belongs to another user, because anybody may create it in /tmp."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(f"{folder} is not ours")
