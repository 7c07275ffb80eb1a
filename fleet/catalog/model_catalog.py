"""Model catalogue: names, versions and weights in a SQLite file, with the history of every change.

    add --> loading --verified--> ready <--weights-- promote, canary, rollback
               |                    |
               +----- retire -------+--> retired

A version is identified by the SHA-256 of its content. A name points only to versions that are ready. The last revision
of a name defines to which versions it points. Revisions are added and never changed, so a crash during a change leaves
either the old or the new revision as the last one. Many processes may read the file; only the process that holds the
lock file beside it may write.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Self

from ...engine.errors import ConfigError, RequestError, UnknownModel, quoted
from ...engine.whole_file import open_private
from ..errors import CatalogUnavailable
from .traffic_split import FULL_WEIGHT, shares

MAX_NAME = 64
MIN_PREFIX = 6
"""Least number of digits of a digest with which a version may be named."""
MAX_HISTORY = 1000
_APPLICATION_ID = 0x52474D43
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PREFIX = re.compile(rf"[0-9a-f]{{{MIN_PREFIX},64}}")

_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS versions (
    name TEXT NOT NULL, digest TEXT NOT NULL, source TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('loading', 'ready', 'retired')), added REAL NOT NULL,
    place INTEGER NOT NULL,
    PRIMARY KEY (name, digest)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS revisions (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, at REAL NOT NULL, action TEXT NOT NULL,
    by TEXT NOT NULL, weights TEXT NOT NULL, before INTEGER REFERENCES revisions (id)
);
CREATE INDEX IF NOT EXISTS revisions_by_name ON revisions (name, id);
PRAGMA application_id = {_APPLICATION_ID};
"""


class VersionState(StrEnum):
    """State of a version under a name."""

    LOADING = "loading"
    READY = "ready"
    RETIRED = "retired"


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """A version of a name.

    Attributes:
        digest: SHA-256 of the content, in hexadecimal.
        source: place from which the content comes, with its exact revision.
        added: time of the addition, in seconds since 1970.
        weight: percentage of new requests that go to the version.
    """

    name: str
    digest: str
    source: str
    state: VersionState
    added: float
    weight: int = 0


@dataclass(frozen=True, slots=True)
class Revision:
    """A change of the versions to which a name points.

    Attributes:
        at: time of the change, in seconds since 1970.
        action: kind of the change: promote, canary, rollback or remove.
        by: name of the API key that requested the change; "" without keys.
        weights: weights of the digests after the change, in percent, the oldest version first; empty if the name is not
            served.
    """

    id: int
    name: str
    at: float
    action: str
    by: str
    weights: Mapping[str, int]


class ModelCatalog:
    """The catalogue's file, for one thread at a time. ``open`` opens it for writing, ``read`` for reading.

    Methods that change the catalogue are atomic, and the change is durable when they return.
    """

    def __init__(self, db: sqlite3.Connection, lock: IO[bytes] | None) -> None:
        self._db = db
        self._lock = lock

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the file for writing, or create it.

        Versions that were still loading when the last writer ended are retired.

        Raises:
            ConfigError: the file cannot be opened, another process has it open for writing, or it is not a catalogue.
        """
        try:
            lock = os.fdopen(open_private(f"{path}.lock", os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")
        except OSError as error:
            raise _unusable(path, error.strerror or str(error)) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # SQLite gives its journal files the same mode.
            with suppress(OSError):
                os.close(open_private(str(path), os.O_CREAT | os.O_EXCL))
            db = sqlite3.connect(path, timeout=10.0, isolation_level=None, check_same_thread=False)
            with _closed_on_error(db):
                _check_owner(db)
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("PRAGMA synchronous = FULL")
                db.executescript(_SCHEMA)
                db.execute("UPDATE versions SET state = 'retired' WHERE state = 'loading'")
        except BlockingIOError as error:
            lock.close()
            raise ConfigError(
                f"--model-catalog: another server is using {path}: give each server its own file, or stop the other "
                "server."
            ) from error
        except sqlite3.Error as error:
            lock.close()
            raise _unusable(path, str(error)) from error
        return cls(db, lock)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Open an existing file for reading. Raises ConfigError."""
        try:
            db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None)
            with _closed_on_error(db):
                _check_owner(db)
        except sqlite3.Error as error:
            raise _unusable(path, str(error)) from error
        return cls(db, None)

    def close(self) -> None:
        """Close the file, and let another process write it."""
        self._db.close()
        if self._lock is not None:
            self._lock.close()

    def names(self) -> tuple[str, ...]:
        """Return all names that have a version which is not retired, in alphabetical order."""
        rows = self._db.execute("SELECT DISTINCT name FROM versions WHERE state <> 'retired' ORDER BY name")
        return tuple(name for (name,) in rows)

    def weights(self, name: str) -> dict[str, int]:
        """Return the weights of a name's digests, the oldest version first; empty if the name is not served."""
        last = self._last(name)
        return {} if last is None else dict(last.weights)

    def versions(self, name: str, *, retired: bool = False) -> tuple[ModelVersion, ...]:
        """Return the versions of a name, the oldest first."""
        weights = self.weights(name)
        rows = self._db.execute(
            "SELECT digest, source, state, added FROM versions WHERE name = ? AND (? OR state <> 'retired') "
            "ORDER BY place",
            (name, retired),
        )
        return tuple(
            ModelVersion(name, digest, source, VersionState(state), added, weights.get(digest, 0))
            for digest, source, state, added in rows
        )

    def history(self, name: str) -> tuple[Revision, ...]:
        """Return the last revisions of a name, the newest first."""
        query = (
            "SELECT id, name, at, action, by, weights FROM revisions WHERE name = ? ORDER BY id DESC "
            f"LIMIT {MAX_HISTORY}"
        )
        return tuple(_revision(row) for row in self._db.execute(query, (name,)))

    def find(self, name: str, version: str) -> ModelVersion:
        """Return the ready version of a name whose digest begins with ``version``.

        Raises:
            UnknownModel: the name has no version.
            RequestError: no digest or several digests begin with ``version``, or the version is not ready.
        """
        known = self.versions(name)
        if not known:
            raise UnknownModel(name)
        wanted = version.removeprefix("sha256:").lower()
        found = [each for each in known if each.digest.startswith(wanted)] if _PREFIX.fullmatch(wanted) else []
        if len(found) == 1 and found[0].state is VersionState.READY:
            return found[0]
        ready = ", ".join(each.digest[:12] for each in known[-8:] if each.state is VersionState.READY) or "none"
        what = "is not ready" if len(found) == 1 else "stands for several" if found else "is unknown"
        raise RequestError(
            f"The version {quoted(version)} of {quoted(name)} {what}. Give the SHA-256 of a version, or at least its "
            f"first {MIN_PREFIX} digits; ready: {ready}.",
            param="version",
            code="unknown_version",
        )

    def begin(self, name: str, digest: str, source: str) -> bool:
        """Record that a version is being loaded. Returns whether it was not ready yet.

        Raises:
            RequestError: the name or the digest is malformed.
        """
        check_name(name)
        if not _DIGEST.fullmatch(digest):
            raise RequestError(
                f"A digest must have 64 hexadecimal digits: {quoted(digest)}.", param="digest", code="invalid_digest"
            )
        with self._transaction():
            row = self._db.execute("SELECT state FROM versions WHERE name = ? AND digest = ?", (name, digest))
            if (row.fetchone() or ("",))[0] == VersionState.READY:
                return False
            place = self._db.execute("SELECT coalesce(max(place), 0) + 1 FROM versions").fetchone()[0]
            self._db.execute(
                "INSERT INTO versions VALUES (?, ?, ?, 'loading', ?, ?) ON CONFLICT (name, digest) DO UPDATE SET "
                "source = excluded.source, state = 'loading', added = excluded.added, place = excluded.place",
                (name, digest, source, time.time(), place),
            )
        return True

    def finish(self, name: str, digest: str, *, verified: bool) -> None:
        """Record that a load has ended: the version is ready, or retired if its content was not verified."""
        state = VersionState.READY if verified else VersionState.RETIRED
        with self._transaction():
            changed = self._db.execute(
                "UPDATE versions SET state = ? WHERE name = ? AND digest = ? AND state = 'loading'",
                (state, name, digest),
            ).rowcount
            if not changed:
                raise ValueError(f"{name} {digest} is not being loaded")

    def promote(self, name: str, version: str, by: str = "") -> Revision:
        """Send all new requests of a name to a version. Raises as ``find``."""
        with self._transaction():
            return self._revise(name, "promote", by, {self.find(name, version).digest: FULL_WEIGHT})

    def canary(self, name: str, version: str, weight: int, by: str = "") -> Revision:
        """Send ``weight`` percent of new requests to a version; the others share the rest in the old proportions.

        Raises:
            UnknownModel, RequestError: as for ``find``; or the weight is not from 1 to 99, or no other version has a
                weight.
        """
        if not 0 < weight < FULL_WEIGHT:
            raise RequestError(f"'weight' must be a percentage from 1 to 99, not {weight}.", param="weight")
        with self._transaction():
            digest = self.find(name, version).digest
            others = {each: share for each, share in self.weights(name).items() if each != digest}
            if not others:
                raise RequestError(
                    f"{quoted(name)} has no other version that gets requests: promote one first.",
                    param="version",
                    code="no_stable_version",
                )
            return self._revise(name, "canary", by, {**shares(others, FULL_WEIGHT - weight), digest: weight})

    def rollback(self, name: str, by: str = "") -> Revision:
        """Undo a name's last promote or canary; the next rollback undoes the change before that.

        Raises:
            UnknownModel: the name has no version.
            RequestError: there is no earlier revision, or one of its versions is no longer ready.
        """
        with self._transaction():
            if not self.versions(name):
                raise UnknownModel(name)
            target, before = self._before(name)
            ready = {each.digest for each in self.versions(name) if each.state is VersionState.READY}
            if target is None or not target.weights.keys() <= ready or not target.weights:
                raise RequestError(
                    f"{quoted(name)} has nothing to roll back to: no other version that served it is ready.",
                    param="name",
                    code="nothing_to_roll_back",
                )
            return self._revise(name, "rollback", by, target.weights, before)

    def remove(self, name: str, version: str | None = None, by: str = "") -> tuple[str, ...]:
        """Retire a version that gets no requests, or a name with all its versions. Returns their digests.

        Raises:
            UnknownModel, RequestError: as for ``find``, or the version gets requests.
        """
        with self._transaction():
            if version is not None:
                found = self.find(name, version)
                if found.weight:
                    raise RequestError(
                        f"The version {found.digest[:12]} of {quoted(name)} gets {found.weight} % of the requests: "
                        "promote another one first.",
                        param="version",
                        code="version_in_use",
                    )
                gone: tuple[str, ...] = (found.digest,)
            else:
                gone = tuple(each.digest for each in self.versions(name) if each.state is VersionState.READY)
                if not gone:
                    raise UnknownModel(name)
                self._revise(name, "remove", by, {}, None)
            marks = ((name, digest) for digest in gone)
            self._db.executemany("UPDATE versions SET state = 'retired' WHERE name = ? AND digest = ?", marks)
            return gone

    def check(self) -> None:
        """Raise AssertionError if a name points to a version that is not ready, or its weights do not add up."""
        for (name,) in self._db.execute("SELECT DISTINCT name FROM revisions").fetchall():
            weights = self.weights(name)
            ready = {each.digest for each in self.versions(name) if each.state is VersionState.READY}
            assert weights.keys() <= ready, f"{name} points to {weights.keys() - ready}"
            assert not weights or sum(weights.values()) == FULL_WEIGHT, f"{name}: {weights}"
            assert all(weight > 0 for weight in weights.values()), f"{name}: {weights}"

    def _last(self, name: str) -> Revision | None:
        query = "SELECT id, name, at, action, by, weights FROM revisions WHERE name = ? ORDER BY id DESC LIMIT 1"
        row = self._db.execute(query, (name,)).fetchone()
        return None if row is None else _revision(row)

    def _before(self, name: str) -> tuple[Revision | None, int | None]:
        """Return the revision that a rollback restores, and the number of the revision before that."""
        last = self._last(name)
        query = (
            "SELECT id, name, at, action, by, weights, before FROM revisions "
            "WHERE id = (SELECT before FROM revisions WHERE id = ?)"
        )
        row = None if last is None else self._db.execute(query, (last.id,)).fetchone()
        return (None, None) if row is None else (_revision(row[:6]), row[6])

    def _revise(self, name: str, action: str, by: str, weights: Mapping[str, int], before: int | None = -1) -> Revision:
        """Add a revision. ``before`` is the revision that a rollback of it restores; by default the last one."""
        if before == -1:
            last = self._last(name)
            before = None if last is None else last.id
        at, order = time.time(), [each.digest for each in self.versions(name)]
        kept = {digest: weights[digest] for digest in order if digest in weights}
        row = (name, at, action, by, json.dumps(kept), before)
        number = self._db.execute(
            "INSERT INTO revisions (name, at, action, by, weights, before) VALUES (?, ?, ?, ?, ?, ?)", row
        ).lastrowid
        assert number is not None
        return Revision(number, name, at, action, by, kept)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.OperationalError):
                raise _unwritable(error) from error
            raise


def check_name(name: str) -> None:
    """Raise RequestError unless a text can name a model in the catalogue."""
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise RequestError(
            f"{quoted(name)} is not a name for a model of the catalogue: use 1 to {MAX_NAME} letters, digits and "
            "'_', after the first also '.' and '-'.",
            param="name",
        )


def _revision(row: tuple[int, str, float, str, str, str]) -> Revision:
    *first, weights = row
    return Revision(*first, json.loads(weights))  # type: ignore[call-arg, arg-type]


def _check_owner(db: sqlite3.Connection) -> None:
    owner = db.execute("PRAGMA application_id").fetchone()[0]
    tables = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    if owner != _APPLICATION_ID and tables:
        raise sqlite3.DatabaseError("it is a database of another application")


@contextmanager
def _closed_on_error(db: sqlite3.Connection) -> Iterator[None]:
    """Context manager: close a database if the block fails, which would otherwise stay open until it is collected."""
    try:
        yield
    except BaseException:
        db.close()
        raise


def _unwritable(error: sqlite3.OperationalError) -> CatalogUnavailable:
    """Return the error for a change that could not be written to disk; the file is unchanged."""
    if error.sqlite_errorname == "SQLITE_FULL":
        return CatalogUnavailable("The server's disk has no space for the catalogue of models.", is_full=True)
    return CatalogUnavailable(f"The catalogue of models cannot be written: {error}.", is_full=False)


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError(f"--model-catalog: {path} cannot be used: {why}. Try: ls -ld {shlex.quote(str(path.parent))}")
