"""The usage ledger: exact after kill -9, once for each id, patient with a file that cannot be written."""

from __future__ import annotations

import _sqlite3
import asyncio
import ctypes
import gc
import multiprocessing
import random
import sqlite3
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.api.children.ledger_child import record, write

from rootgraft.api.observe import usage_ledger
from rootgraft.api.observe.usage_ledger import LedgerFile, UsageLedger, UsageRecord
from rootgraft.engine.errors import ConfigError

# Writers are forked from a process that has imported what they need, and this program's main module: imports by each
# of a hundred would take most of a minute.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pytest", usage_ledger.__name__])
Sums = dict[tuple[str, str, str], list[int]]


def sums(records: Iterable[UsageRecord]) -> Sums:
    found: Sums = {}
    for one in records:
        row = found.setdefault((one.day, one.key, one.model), [0, 0, 0, 0])
        for index, amount in enumerate((1, one.prompt_tokens, one.cached_tokens, one.completion_tokens)):
            row[index] += amount
    return found


def read(path: Path, query: str) -> list[Any]:
    db = sqlite3.connect(path)
    try:
        return db.execute(query).fetchall()
    finally:
        db.close()


def stored(path: Path) -> Sums:
    rows = read(path, "SELECT day, key, model, requests, prompt_tokens, cached_tokens, completion_tokens FROM usage")
    return {tuple(row[:3]): list(row[3:]) for row in rows}  # type: ignore[misc]


def kill_in_the_middle(path: Path, round_: int, after: int) -> set[int]:
    """Run a writer, kill it after it told of so many records; the records that it was told to be written."""
    ours, theirs = FORKS.Pipe(duplex=False)
    child = FORKS.Process(target=write, args=(path, round_, theirs))
    child.start()
    theirs.close()
    told = {ours.recv() for _ in range(after)}
    child.kill()
    with ours, suppress(EOFError):
        while True:
            told.add(ours.recv())
    child.join()
    child.close()
    return told


def check_kills(path: Path, rounds: int) -> None:
    rng = random.Random(rounds)
    for round_ in range(rounds):
        told = kill_in_the_middle(path, round_, rng.randint(1, 60))
        assert read(path, "PRAGMA integrity_check") == [("ok",)]
        ids = {tuple(map(int, name.split("-"))) for (name,) in read(path, "SELECT id FROM counted")}
        there = {number for at, number in ids if at == round_}
        assert told <= there, "a write returned, and its record is not in the file"
        assert stored(path) == sums(record(*one) for one in ids)
        # Nobody knows which of the last ones were written: all are written again.
        file = LedgerFile(path)
        file.add(record(round_, number) for number in range(max(there) + 5))
        file.close()
        everything = [record(at, number) for at, number in ids if at != round_]
        everything += [record(round_, number) for number in range(max(there) + 5)]
        assert stored(path) == sums(everything)


@pytest.mark.sample
def test_nothing_is_lost_or_doubled_by_kill_9(tmp_path: Path) -> None:
    check_kills(tmp_path / "usage.db", 3)


@pytest.mark.heavy
def test_nothing_is_lost_or_doubled_by_forty_kills(tmp_path: Path) -> None:
    check_kills(tmp_path / "usage.db", 40)


async def test_writes_at_a_time_share_transactions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "usage.db"
    batches: list[int] = []
    add = LedgerFile.add

    def counted(self: LedgerFile, records: Any) -> None:
        batches.append(len(records))
        add(self, records)

    monkeypatch.setattr(LedgerFile, "add", counted)
    book = UsageLedger(path)
    records = [record(0, number) for number in range(1000)]
    await asyncio.gather(*(book.until_written(book.put(one)) for one in records))
    await book.close()
    assert stored(path) == sums(records) and sum(batches) == 1000 and max(batches) > 1


async def test_an_id_counts_once(tmp_path: Path) -> None:
    book = UsageLedger(tmp_path / "usage.db")
    for _ in range(3):
        await book.until_written(book.put(record(0, 9)))
    await book.close()
    assert stored(tmp_path / "usage.db") == sums([record(0, 9)])


async def test_ids_of_days_long_over_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    book = UsageLedger(path)
    days = [replace(record(0, day), ended=1.7e9 + 86400 * day) for day in range(6)]
    for one in days:
        await book.until_written(book.put(one))
    await book.close()
    assert Counter(day for (day,) in read(path, "SELECT day FROM counted")) == Counter(one.day for one in days[3:])
    assert stored(path) == sums(days)


async def test_a_full_disk_delays_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = 5
    add = LedgerFile.add

    def failing(self: LedgerFile, records: Any) -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise sqlite3.OperationalError("database or disk is full")
        add(self, records)

    monkeypatch.setattr(LedgerFile, "add", failing)
    monkeypatch.setattr(usage_ledger, "_RETRY_SECONDS", 0.001)
    book = UsageLedger(tmp_path / "usage.db")
    records = [record(0, number) for number in range(20)]
    written = [book.put(one) for one in records]
    await asyncio.gather(*map(book.until_written, written))
    await asyncio.wait(written)  # while a disk is full, nobody is held up
    await book.close()
    assert stored(tmp_path / "usage.db") == sums(records) and book.num_lost == 0


async def test_a_disk_that_stays_full_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: LedgerFile, records: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(LedgerFile, "add", failing)
    monkeypatch.setattr(usage_ledger, "WAIT_SECONDS", 0.01)
    monkeypatch.setattr(usage_ledger, "MAX_WAITING", 4)
    book = UsageLedger(tmp_path / "usage.db")
    await asyncio.gather(*(book.until_written(book.put(record(0, number))) for number in range(40)))
    assert book.num_lost >= 30
    await book.close()
    assert book.num_lost == 40


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    library = ctypes.CDLL(_sqlite3.__file__)  # the symbols of SQLite's own library are found through it
    if not hasattr(library, "sqlite3_memory_used"):
        pytest.skip("this Python has SQLite linked in without its symbols")
    library.sqlite3_memory_used.restype = ctypes.c_int64
    gc.collect()  # of what other tests have left
    before = library.sqlite3_memory_used()
    file = LedgerFile(tmp_path / "usage.db")
    rng = random.Random(7)
    for _ in range(20):
        file.add(replace(record(0, number), id=rng.randbytes(16).hex()) for number in range(500))
    held = library.sqlite3_memory_used() - before
    file.close()
    assert 0 < held < 500_000 < (tmp_path / "usage.db").stat().st_size


def test_files_that_are_no_ledger(tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    db = sqlite3.connect(other)
    db.execute("CREATE TABLE t (x)")
    db.close()
    text = tmp_path / "text.db"
    text.write_text("no database at all, and longer than a header of one would be " * 20)
    for path in (other, text, tmp_path / "none" / "usage.db"):
        with pytest.raises(ConfigError, match="--usage-ledger"):
            LedgerFile(path)


async def test_the_files_are_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    book = UsageLedger(path)
    await book.until_written(book.put(record(0, 9)))
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}
    await book.close()
