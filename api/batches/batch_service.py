"""Batch service: accepts batches, answers them in parallel with live traffic, and resumes them after a crash.

Each worker appends an answer to the batch's answer file before it sends its next request. After a crash, the requests
without a line in this file are answered. If the disk has no space for an answer, the answer is kept in memory, and its
worker waits until there is space. So a request is answered twice only if the server ended after the answer was
generated and before its line was written. Even then its usage counts once.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from ...engine.errors import ConfigError
from ...tenancy.tenant_threads import TenantThreads
from ...tenancy.thread_calls import NoThread
from ..access.caller import Caller
from ..errors import HTTPError, reply_to
from ..storage.batch_store import BatchRecord, BatchRecords
from ..storage.file_store import FileStore, StoredFile, new_file_id
from .answer_room import AnswerRoom
from .batch_files import (
    BatchOutput,
    BatchRequest,
    BatchResponse,
    WrongLine,
    answer_line,
    answer_lines,
    read_requests,
    sum_usage,
    unanswered_lines,
)
from .batch_work import answer_all
from .fair_slots import FairSlots, OwnerTurns
from .internal_client import InternalClient

MAX_UNFINISHED = 100  # Largest number of unfinished batches of one owner.
# Largest number of all batches of one owner.
MAX_RECORDS = 10_000
MAX_AT_ONCE = 4  # Largest number of batches in progress of one owner.
WORKERS = 16  # Largest number of requests in flight of one batch.
MAX_IN_FLIGHT = 64  # Largest number of requests in flight of all batches. They are shared evenly by the owners.
MAX_FILE_CALLS = 4  # Largest number of concurrent calls that read or write files. One tenant may use half of them.
# Number of requests in flight that an owner may have even if other owners use all of ``MAX_IN_FLIGHT``.
LEAST_IN_FLIGHT = 4
_POLL_SECONDS = 0.5
_RETRY_SECONDS = 30.0  # Seconds between two attempts to write to the folder.

logger = logging.getLogger(__name__)

T = TypeVar("T")

FindCaller = Callable[[str, str, str], Caller | None]
"""Type of a function that returns the caller of a request from the owner, the name of the owner's key and the path.

It returns None if the key no longer exists.
"""


class BatchService:
    """Stores and processes files and batches in a folder, which is locked against other processes.

    Belongs to one event loop.

    Args:
        folder: folder of the files and batches; created if missing.
        max_bytes: largest size of all files together in bytes.
        find_caller: see ``FindCaller``.
        max_upload: largest size of one file in bytes.
        max_line: largest size of one request in a file in bytes.

    Raises:
        ConfigError: the folder cannot be used, or another server uses it.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        find_caller: FindCaller,
        max_upload: int = 200 << 20,
        max_line: int = 4 << 20,
    ) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.files = FileStore(
                folder / "files", max_bytes, max_upload, is_read=lambda file: self.reader_of(file) is not None
            )
            self.records = BatchRecords(folder / "batches")
        except BlockingIOError:
            raise ConfigError(f"--batch-dir: another server uses {folder}. Try: rootgraft ps") from None
        except OSError as error:
            raise ConfigError(
                f"--batch-dir: {folder} cannot be used: {error}. Try: ls -ld {shlex.quote(str(folder.parent))}"
            ) from error
        self._room = AnswerRoom(self.files)
        self._find_caller = find_caller
        self._max_line = max_line
        self._client: InternalClient | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slots = FairSlots(MAX_IN_FLIGHT, LEAST_IN_FLIGHT)
        self._turns = OwnerTurns(MAX_AT_ONCE)
        self._threads = TenantThreads(MAX_FILE_CALLS, "batch-files")

    async def on_thread(self, owner: str, call: Callable[[], T], discard: Callable[[T], object] | None = None) -> T:
        """Run a call on files of the owner on another thread.

        Returns its result, or raises its exception or NoThread. ``discard`` is as in ``TenantThreads.call``.
        """
        return await self._threads.call(owner, call, discard)

    def resume(self, client: InternalClient) -> None:
        """Resume all unfinished batches; ``client`` sends their requests. Must be called once the server is ready."""
        self._client = client
        for record in self.records.running:
            self._start(record)

    def stop(self) -> None:
        """Cancel the requests in flight. ``resume`` sends them again."""
        for task in self._tasks.values():
            task.cancel()

    async def close(self) -> None:
        """Stop all batches, and unlock the folder."""
        self.stop()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        os.close(self._lock)

    def stats(self) -> dict[str, float]:
        return {"files_stored_bytes": self.files.num_bytes, "batches_unfinished": len(self.records.running)}

    def create(self, caller: Caller, source: StoredFile, endpoint: str, **fields: Any) -> BatchRecord:
        """Create a batch and start it.

        Raises:
            HTTPError: 429 if the owner has ``MAX_UNFINISHED`` unfinished batches, 413 if the owner has no room for
                answers.
            OSError: the record cannot be written. No batch is then created.
        """
        owner = caller.key.tenant
        own = self.records.of(owner)
        unfinished = sum(not record.has_ended for record in own)
        if unfinished >= MAX_UNFINISHED:
            text = f"{unfinished} batches are still running: wait until some end, or cancel them."
            raise HTTPError(429, text, code="rate_limit_exceeded", headers={"retry-after": "60"})
        self.files.check_room(owner, 1)
        record = self.records.new(
            owner=owner, key=caller.key.name, endpoint=endpoint, input_file_id=source.id, **fields
        )
        if len(own) >= MAX_RECORDS:
            self.records.forget(next(old for old in reversed(own) if old.has_ended))
        self._start(record)
        return record

    def cancel(self, record: BatchRecord) -> None:
        """End a batch with the answers so far. A batch that is being finalized or has ended is not changed."""
        if record.status not in ("validating", "in_progress"):
            return
        record.outcome = "cancelled"
        self.records.mark(record, "cancelling")
        try:
            self.records.save(record)
        except OSError as error:  # `_advance` saves the record again before it ends the batch.
            logger.error("batch %s is cancelled, and waits for its folder: %s", record.id, error)
        if (task := self._tasks.get(record.id)) is not None:
            task.cancel()
        self._start(record)

    def reader_of(self, file: StoredFile) -> BatchRecord | None:
        return next((record for record in self.records.running if record.input_file_id == file.id), None)

    def _start(self, record: BatchRecord) -> None:
        previous = self._tasks.get(record.id)
        self._tasks[record.id] = asyncio.get_running_loop().create_task(self._run(record, previous))

    async def _run(self, record: BatchRecord, previous: asyncio.Task[None] | None) -> None:
        """Process a batch from its current state to its end, after its ``previous`` task has ended."""
        if previous is not None:
            await asyncio.gather(previous, return_exceptions=True)
        try:
            while not await self._attempt(record):
                await asyncio.sleep(_RETRY_SECONDS)
        finally:
            if self._tasks.get(record.id) is asyncio.current_task():
                del self._tasks[record.id]

    async def _attempt(self, record: BatchRecord) -> bool:
        """Try to process a batch.

        Returns whether it has ended; False if the folder cannot be written, as on a full disk.
        """
        try:
            await self._advance(record)
        except (OSError, ConfigError, NoThread) as error:
            logger.error("batch %s waits for its folder: %s", record.id, error)
            return False
        except Exception:
            logger.exception("batch %s failed", record.id)
            with suppress(OSError):
                self._fail(record, "Internal server error; the server's log has the details.", "internal_error")
                return True
            return False
        return True

    async def _advance(self, record: BatchRecord) -> None:
        record.errors = []
        source = self.files.get(record.owner, record.input_file_id)
        if source is None:
            return self._fail(record, "The input file was deleted.", "file_not_found")
        path = self.files.path(source)
        if record.status == "cancelling":
            self.records.save(record)
        if record.status == "validating":
            if not await self._validate(record, path):
                return None
            self.records.move(record, "in_progress")
        if record.status == "in_progress":
            await self._answer(record, path)
        self._room.hold(record, await self.on_thread(record.owner, partial(self._recount, record)))
        await self._finalise(record, path)
        return None

    async def _validate(self, record: BatchRecord, path: Path) -> bool:
        """Return whether the input is a valid batch file. If it is not valid, the batch fails with the reason."""
        try:
            record.counts.total = await self.on_thread(
                record.owner, lambda: sum(1 for _ in read_requests(path, record.endpoint, self._max_line))
            )
        except WrongLine as error:
            self._fail(record, f"Line {error.line}: {error.reason}", error.code, error.line)
            return False
        if not record.counts.total:
            self._fail(record, "The input file has no requests.", "empty_file")
        return record.counts.total > 0

    async def _answer(self, record: BatchRecord, path: Path) -> None:
        """Answer the requests that have no answer yet, until all have one or the batch expires.

        A batch that waits for its turn keeps no file open, because there may be more batches than the files that a
        process can open.
        """

        async def post(request: BatchRequest) -> tuple[int, Mapping[str, str], bytes]:
            async with self._slots.hold(record.owner):
                return await ask(request)

        async def ask(request: BatchRequest) -> tuple[int, Mapping[str, str], bytes]:
            assert self._client is not None
            caller = self._find_caller(record.owner, record.key, request.url)
            if caller is None:
                reply = reply_to(HTTPError(401, "The key of this batch is no longer valid.", code="invalid_api_key"))
                return reply.status, {}, reply.body()
            caller = replace(caller, usage_id=_usage_id(record, request))
            return await self._client.post(request.url, request.body, caller)

        async def answer() -> None:
            async with self._turns.hold(record.owner):
                opened = partial(BatchOutput, self.records.answers_path(record))
                with await self.on_thread(record.owner, opened, BatchOutput.close) as output:
                    self._room.hold(record, output.size)
                    remaining = (request for request in read_requests(path) if request.custom_id not in output.done)
                    # A thread reads the next request, because many answered requests may precede it, and a line may be
                    # long.
                    next_request = partial(self.on_thread, record.owner, partial(next, remaining, None))
                    keep = partial(self._write, record, output)
                    await answer_all(post, next_request, keep, concurrency=WORKERS, fields={})

        work = asyncio.ensure_future(answer())
        try:
            while not work.done() and not self.records.is_over(record):
                await asyncio.wait([work], timeout=_POLL_SECONDS)
            if work.done():
                work.result()
            else:
                record.outcome = "expired"
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _write(
        self, record: BatchRecord, output: BatchOutput, request: BatchRequest, response: BatchResponse
    ) -> None:
        """Write an answer. If the owner or the disk has no room for it, wait and try again."""
        line, failed = answer_line(request, response), False
        await self._room.take(record, len(line))
        while True:
            try:
                output.add(request, response, line)
                break
            except ConfigError as error:
                if not failed:
                    logger.error("batch %s holds an answer until there is disk space: %s", record.id, error)
                failed = True
            await asyncio.sleep(_RETRY_SECONDS)
        self._count(record, output)

    def _recount(self, record: BatchRecord) -> int:
        """Count the answers in the batch's file.

        Returns the file's size in bytes. Creates the file if the batch had no turn.
        """
        with BatchOutput(self.records.answers_path(record)) as output:
            self._count(record, output)
            return output.size

    def _count(self, record: BatchRecord, output: BatchOutput) -> None:
        record.counts.completed, record.counts.failed = len(output.done) - output.failed, output.failed

    async def _finalise(self, record: BatchRecord, path: Path) -> None:
        """Write the output file and the error file. After a crash this is repeated with the same file ids."""
        answers = self.records.answers_path(record)
        for file_id in (record.output_file_id, record.error_file_id):
            # The file of an earlier attempt is deleted, because its bytes would count in addition to those of the
            # answers.
            if (file := self.files.get(record.owner, file_id or "")) is not None:
                self.files.delete(file)
        if record.output_file_id is None:
            record.output_file_id, record.error_file_id = new_file_id(), new_file_id()
        if record.status == "cancelling":
            self.records.save(record)
        else:
            self.records.move(record, "finalizing")
        ended_early = record.counts.total and record.outcome != "completed"
        record.counts.usage = await self.on_thread(record.owner, partial(sum_usage, answers))
        unfinished: Callable[[], Iterable[bytes]] = tuple
        if ended_early:
            unfinished = partial(unanswered_lines, path, answers, record.outcome)
            await self._room.take(record, await self.on_thread(record.owner, lambda: sum(map(len, unfinished()))))
        record.output_file_id = await self._store(record, "output", answer_lines(answers, failed=False))
        failed = chain(answer_lines(answers, failed=True), unfinished())
        record.error_file_id = await self._store(record, "error", failed)
        self._room.hold(record, 0)
        self.records.move(record, record.outcome)
        answers.unlink(missing_ok=True)

    async def _store(self, record: BatchRecord, kind: str, lines: Iterable[bytes]) -> str | None:
        """Store lines as a file. Returns the file's id; None, without a file, if there are no lines."""
        file_id = record.output_file_id if kind == "output" else record.error_file_id
        name = f"{record.id}_{kind}.jsonl"
        facts = self.files.new(record.owner, name, "batch_output", 0, record.output_expiry, file_id)
        written = await self.on_thread(record.owner, partial(self.files.write, facts, lines))
        if not written.bytes:
            self.files.delete(written)
            return None
        self.files.add(written)
        return written.id

    def _fail(self, record: BatchRecord, message: str, code: str, line: int | None = None) -> None:
        record.errors = [{"code": code, "message": message, "line": line, "param": None}]
        record.output_file_id = record.error_file_id = None
        self._room.hold(record, 0)
        self.records.move(record, "failed")
        self.records.answers_path(record).unlink(missing_ok=True)


def _usage_id(record: BatchRecord, request: BatchRequest) -> str:
    """Return the id under which the usage of a line is counted. It is the same when the line is sent again."""
    return hashlib.sha256(f"{record.id}\0{request.custom_id}".encode()).hexdigest()[:32]
