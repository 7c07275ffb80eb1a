"""Usage ledger: counts requests and tokens by day, key and model in a SQLite file, correctly even after a crash.

    loop      put --> queue (bounded) --> thread: one transaction for the whole queue --> future done

A response ends only when the future of its record is done, so a response that a client has read to its end is counted
even if this process is killed a moment later. If the file cannot be written, only the first responses wait for it.
Records then stay in the bounded queue, and writing is tried again every second. The counts of a day and the ids of the
counted requests change in one transaction, so a record that is written twice, because the first result was unclear,
counts once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from queue import Full, Queue
from typing import Protocol

from ...engine.errors import ConfigError
from ...engine.whole_file import open_private

MAX_WAITING = 10_000
MAX_BATCH = 1000
WAIT_SECONDS = 2.0
_RETRY_SECONDS = 1.0
# Size of SQLite's page cache. The ids are random, so a larger cache has hardly more hits.
_CACHE_KIB = 256
_DAYS_OF_IDS = 2  # Number of days for which ids are kept, to recognise a repeated write.
_APPLICATION_ID = 0x52475547

_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS usage (
    day TEXT NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL,
    requests INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    PRIMARY KEY (day, key, model)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counted (id TEXT PRIMARY KEY, day TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS counted_by_day ON counted (day);
PRAGMA application_id = {_APPLICATION_ID};
"""
_COUNT = """
INSERT INTO usage VALUES (?, ?, ?, 1, ?, ?, ?)
ON CONFLICT (day, key, model) DO UPDATE SET
    requests = requests + 1,
    prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    cached_tokens = cached_tokens + excluded.cached_tokens,
    completion_tokens = completion_tokens + excluded.completion_tokens
"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """One request that has ended.

    Attributes:
        id: id that the server generates. If clients chose the ids, a client could repeat one so that several requests
            count once.
        ended: time of the request's end in seconds since 1970; it determines the day, in UTC.
        key: name of the key; "" if no keys are in use.
        model: name of the adapter or base model in the response.
        cached_tokens: number of tokens of the prompt that were cached.
    """

    id: str
    ended: float
    key: str
    model: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def day(self) -> str:
        """The day in UTC, such as ``2026-11-21``."""
        return datetime.fromtimestamp(self.ended, UTC).date().isoformat()


class LedgerFile:
    """The SQLite file of a ledger. Only one thread may use the object at a time; several processes may share the file.

    Raises:
        ConfigError: the file cannot be opened, or belongs to another application.
    """

    def __init__(self, path: Path) -> None:
        # Only the owner may read the names of keys and their usage. SQLite gives its journal files the same mode.
        with suppress(OSError):
            os.close(open_private(str(path), os.O_CREAT | os.O_EXCL))
        try:
            self._db = sqlite3.connect(path, timeout=10.0, isolation_level=None, check_same_thread=False)
            try:
                self._open()
            except BaseException:
                self._db.close()
                raise
        except sqlite3.Error as error:
            raise ConfigError(
                f"--usage-ledger: {path} cannot be used: {error}. Try: ls -ld {shlex.quote(str(path.parent))}"
            ) from error

    def _open(self) -> None:
        owner = self._db.execute("PRAGMA application_id").fetchone()[0]
        tables = self._db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if owner != _APPLICATION_ID and tables:
            raise sqlite3.DatabaseError("it is a database of another application")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        self._db.executescript(_SCHEMA)

    def add(self, records: Iterable[UsageRecord]) -> None:
        """Add all records or none. A record with a known id changes nothing. Raises sqlite3.Error."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for record in records:
                self._add(record)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _add(self, record: UsageRecord) -> None:
        known = self._db.execute("INSERT OR IGNORE INTO counted VALUES (?, ?)", (record.id, record.day)).rowcount == 0
        if not known:
            counts = (record.prompt_tokens, record.cached_tokens, record.completion_tokens)
            self._db.execute(_COUNT, (record.day, record.key, record.model, *counts))

    def forget_ids(self, now: float) -> None:
        """Delete the ids of past days, except those of the last ``_DAYS_OF_IDS`` days."""
        oldest = datetime.fromtimestamp(now, UTC).date() - timedelta(days=_DAYS_OF_IDS)
        self._db.execute("DELETE FROM counted WHERE day < ?", (oldest.isoformat(),))

    def close(self) -> None:
        self._db.close()


@dataclass(frozen=True, slots=True)
class DailyUsage:
    """The usage of one model with one API key on one day, in UTC.

    Attributes:
        day: the day, such as ``2026-11-21``.
        key: name of the key; "" if no keys are in use.
        model: name of the adapter or base model.
        cached_tokens: number of tokens of the prompts that were cached.
    """

    day: str
    key: str
    model: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


def read_ledger(path: Path, since: str | None = None, until: str | None = None) -> list[DailyUsage]:
    """Return the rows of a ledger for a range of days, including both ends. A server may be writing to the ledger.

    Raises:
        ConfigError: the file does not exist, or is not a ledger.
    """
    try:
        path.open("rb").close()
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=10.0)) as database:
            if database.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION_ID:
                raise ConfigError(f"--usage-ledger: {path} is not a usage ledger.")
            rows = database.execute(
                "SELECT day, key, model, requests, prompt_tokens, cached_tokens, completion_tokens FROM usage "
                "WHERE day >= ? AND day <= ? ORDER BY day, key, model",
                (since or "", until or "~"),
            ).fetchall()
    except OSError as error:
        raise ConfigError(f"--usage-ledger: {path} cannot be read: {error.strerror}.") from error
    except sqlite3.Error as error:
        raise ConfigError(f"--usage-ledger: {path} cannot be read: {error}.") from error
    return [DailyUsage(*row) for row in rows]


class UsageRecorder(Protocol):
    """Interface of an object that records usage, in this process or in another one; see ``UsageLedger``."""

    def put(self, record: UsageRecord) -> asyncio.Future[None]: ...

    async def until_written(self, written: asyncio.Future[None]) -> None: ...


class UsageLedger:
    """Writes records from an event loop on a separate thread. Raises ConfigError like ``LedgerFile``.

    Attributes:
        num_lost: number of records that were dropped because the file could not be written.
        is_stalled: whether writes to the file have failed recently. Requests then do not wait for writes.
    """

    def __init__(self, path: Path) -> None:
        self._file = LedgerFile(path)
        self._queue: Queue[tuple[UsageRecord, asyncio.Future[None]] | None] = Queue(MAX_WAITING)
        self._closing = threading.Event()
        self._day = ""
        self.num_lost = 0
        self.is_stalled = False
        self._num_put = 0  # Number of records given to ``put``; the loop counts it.
        self._num_settled = 0  # Number of records that were written or dropped; the thread counts it.
        self._thread = threading.Thread(target=self._run, name="usage-ledger", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Number of records that are neither in the file nor dropped."""
        return self._num_put - self._num_settled

    def put(self, record: UsageRecord) -> asyncio.Future[None]:
        """Queue a record. Returns a future, which is done when the record is in the file or dropped."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            self._queue.put_nowait((record, written))
            self._num_put += 1
        except Full:
            self.num_lost += 1
            logger.error("the usage ledger cannot be written: request %s of key %r is lost", record.id, record.key)
            written.set_result(None)
        return written

    async def until_written(self, written: asyncio.Future[None]) -> None:
        """Wait for a future of ``put``, at most ``WAIT_SECONDS``, and not at all while the ledger is stalled."""
        if self.is_stalled:
            return
        await asyncio.wait((written,), timeout=WAIT_SECONDS)
        if not written.done():
            self.is_stalled = True

    async def close(self) -> None:
        """Write the queue, and close the file. If the file cannot be written, the records are dropped."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._closing.set()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        going = True
        while going:
            batch = [self._queue.get()]
            while len(batch) < MAX_BATCH and not self._queue.empty():
                batch.append(self._queue.get())
            entries = [entry for entry in batch if entry is not None]
            going = len(entries) == len(batch)
            self._save([record for record, _ in entries])
            self._num_settled += len(entries)
            _resolve_all(future for _, future in entries)
        self._file.close()

    def _save(self, records: Sequence[UsageRecord]) -> None:
        """Write records, and retry until it succeeds. While closing, retry at most once."""
        failed = False
        while records:
            last = self._closing.is_set()
            try:
                self._file.add(records)
                self._forget(records[-1])
                if failed:
                    logger.warning("the usage ledger can be written again: no waiting request was lost")
                self.is_stalled = False
                return
            except sqlite3.Error as error:
                if not failed:
                    text = "the usage ledger cannot be written; answers continue, and the write is retried: %s"
                    logger.error(text, error)
                failed = self.is_stalled = True
            if last:
                self.num_lost += len(records)
                logger.error("the usage ledger cannot be written: %d requests are lost", len(records))
                return
            self._closing.wait(_RETRY_SECONDS)

    def _forget(self, record: UsageRecord) -> None:
        if record.day != self._day:
            self._file.forget_ids(record.ended)
            self._day = record.day


def _resolve_all(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        try:
            future.get_loop().call_soon_threadsafe(_resolve, future)
        except RuntimeError:  # The loop is closed.
            return


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
