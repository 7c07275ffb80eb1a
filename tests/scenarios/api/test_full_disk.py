"""A disk without space: under uploads, batches, their results, the usage ledger, keys and run records.

It is told, and nothing is lost.
"""

from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from support.api.api_live import Live, make_state, serve
from support.api.children.ledger_child import record
from support.api.small_disk import SmallDisk, mounted
from support.machine.waits import HANG_SECONDS, wait_until

from rootgraft.api.access.api_keys import read_entries
from rootgraft.api.access.key_file import add_key, rotate_key
from rootgraft.api.batches import batch_service as service_module
from rootgraft.api.batches.batch_files import BatchOutput, BatchRequest, BatchResponse, answer_line
from rootgraft.api.batches.batch_service import BatchService
from rootgraft.api.config import ServerConfig
from rootgraft.api.http.run_record import RunRecord, RunRecordFile
from rootgraft.api.observe import usage_ledger
from rootgraft.api.observe.usage_ledger import UsageLedger
from rootgraft.api.storage import file_store
from rootgraft.engine.errors import ConfigError

CHAT = "/v1/chat/completions"
LINES = 60


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with mounted(tmp_path / "disk", 1 << 20) as small:
        if small is None:
            pytest.skip("this user may not mount a file system")
        yield small


@contextmanager
def start(folder: Path, ledger: Path | None = None) -> Iterator[Live]:
    state = make_state(ServerConfig(batch_dir=str(folder)))
    state.stores.batches = BatchService(folder, 1 << 30, state.limits.caller_named)
    state.stores.ledger = None if ledger is None else UsageLedger(ledger)
    for live in serve(state):
        live.loop.call_soon_threadsafe(state.stores.batches.resume, state.stores.internal_client)
        try:
            yield live
        finally:
            for ending in (state.stores.batches, state.stores.ledger):
                if ending is not None:
                    asyncio.run_coroutine_threadsafe(ending.close(), live.loop).result(HANG_SECONDS)


def line(number: int) -> str:
    body = {"messages": [{"role": "user", "content": str(number)}]}
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": body})


def begin(client: openai.OpenAI, count: int) -> Any:
    data = io.BytesIO("\n".join(map(line, range(count))).encode())
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


def ended(client: openai.OpenAI, batch: Any) -> Any:
    wait_until(lambda: client.batches.retrieve(batch.id).status in ("completed", "failed", "cancelled", "expired"))
    return client.batches.retrieve(batch.id)


def requests_in(ledger: Path) -> int:
    db = sqlite3.connect(ledger)
    try:
        return int(db.execute("SELECT coalesce(sum(requests), 0) FROM usage").fetchone()[0])
    finally:
        db.close()


def check_full(reply: Any) -> None:
    assert reply.status_code == 507, reply.text
    error = reply.json()["error"]
    assert error.items() >= {"code": "storage_full", "type": "server_error", "param": None}.items()
    assert "disk has no space" in error["message"]


def test_an_upload_without_space(disk: SmallDisk, caplog: pytest.LogCaptureFixture) -> None:
    with start(disk.path / "batches") as live, live.http() as http:
        form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": b"x" * 300_000}}
        assert http.post("/v1/files", **form).status_code == 200
        disk.fill(leave=20)
        before = disk.names
        with caplog.at_level(logging.ERROR):
            for _ in range(3):
                check_full(http.post("/v1/files", **form))
        assert disk.names == before, "what was written of a file takes the space that there is not"
        assert "Traceback" not in caplog.text and "no space is left" in caplog.text
        disk.free()
        assert http.post("/v1/files", **form).status_code == 200
        assert len(http.get("/v1/files").json()["data"]) == 2


def test_an_upload_that_finds_no_space_before_it_is_whole(
    disk: SmallDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large form lies in the folder of temporary files first."""
    monkeypatch.setattr(tempfile, "tempdir", str(disk.path))
    with start(tmp_path / "batches") as live, live.http() as http:
        form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": b"x" * (3 << 20)}}
        check_full(http.post("/v1/files", **form))
        assert not disk.names


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", [0, 1])
def test_any_call_may_find_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: int) -> None:
    """The file's own, and that of its description."""
    sync, calls = os.fsync, iter(range(100))

    def full(fd: int) -> None:
        if next(calls) == call:
            raise OSError(number, os.strerror(number))
        sync(fd)

    with start(tmp_path / "batches") as live, live.http() as http:
        monkeypatch.setattr(file_store.os, "fsync", full)
        form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": line(1).encode()}}
        check_full(http.post("/v1/files", **form))
        assert not list((tmp_path / "batches" / "files").iterdir())
        kept = http.post("/v1/files", **form)
        assert kept.status_code == 200
        calls = iter([call])
        asked = {"input_file_id": kept.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
        check_full(http.post("/v1/batches", json=asked))
        assert (
            http.get("/v1/batches").json()["data"] == []
            and live.state.stores.batches.stats()["batches_unfinished"] == 0
        )
        assert not list((tmp_path / "batches" / "batches").iterdir())


def test_another_error_of_the_disk_is_a_500(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with start(tmp_path / "batches") as live, live.http() as http:
        monkeypatch.setattr(file_store.os, "fsync", broken)
        reply = http.post("/v1/files", data={"purpose": "batch"}, files={"file": line(1).encode()})
    assert reply.status_code == 500 and reply.json()["error"]["code"] == "internal_error"


def fill_under_a_batch(live: Live, client: openai.OpenAI, disk: SmallDisk, caplog: pytest.LogCaptureFixture) -> Any:
    """A batch whose disk is full after some of its answers, once all of its workers wait."""
    gate = live.async_engine.gate = asyncio.Event()
    batch = begin(client, LINES)
    wait_until(lambda: len(live.async_engine.seen) == service_module.WORKERS)
    disk.fill(leave=1)
    with caplog.at_level(logging.ERROR):
        live.loop.call_soon_threadsafe(gate.set)
        wait_until(lambda: caplog.text.count("holds an answer") == service_module.WORKERS)
    assert client.batches.retrieve(batch.id).status == "in_progress"
    return batch


def test_each_line_of_a_batch_counts_once(
    disk: SmallDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers that find no space are kept: nothing is asked again."""
    monkeypatch.setattr(service_module, "_RETRY_SECONDS", 0.02)
    ledger = tmp_path / "usage.db"
    with start(disk.path / "batches", ledger) as live, live.openai() as client:
        batch = fill_under_a_batch(live, client, disk, caplog)
        disk.free()
        done = ended(client, batch)
        assert done.status == "completed" and done.request_counts.completed == LINES
        assert len({entry["custom_id"] for entry in output(client, done)}) == len(output(client, done)) == LINES
        assert len(live.async_engine.seen) == LINES
    assert requests_in(ledger) == LINES


def output(client: openai.OpenAI, batch: Any) -> list[dict[str, Any]]:
    return [json.loads(each) for each in client.files.content(batch.output_file_id).text.splitlines()]


def test_each_line_counts_once_even_after_a_restart(
    disk: SmallDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the first server had answered and could not write, and what it was answering, is asked again."""
    monkeypatch.setattr(service_module, "_RETRY_SECONDS", 0.02)
    ledger = tmp_path / "usage.db"
    with start(disk.path / "batches", ledger) as live, live.openai() as client:
        batch = fill_under_a_batch(live, client, disk, caplog)
        first = len(live.async_engine.seen)
    disk.free()
    assert 0 < requests_in(ledger) <= first
    with start(disk.path / "batches", ledger) as live, live.openai() as client:
        done = ended(client, batch)
        assert done.status == "completed" and len(output(client, done)) == LINES
        assert first + len(live.async_engine.seen) > LINES
    assert requests_in(ledger) == LINES


def test_a_line_that_is_cut_off_counts_when_it_is_answered(tmp_path: Path) -> None:
    ledger = tmp_path / "usage.db"
    with start(tmp_path / "batches", ledger) as live, live.openai() as client:
        tokens = asyncio.Event()
        live.async_engine.say = lambda request, index: "x" * 9
        frames = live.async_engine._frames

        async def held(requests: Any) -> Any:
            async for frame in frames(requests):
                yield frame
                await tokens.wait()

        live.async_engine._frames = held
        batch = begin(client, 3)
        wait_until(lambda: len(live.async_engine.seen) == 3)
    assert requests_in(ledger) == 0
    with start(tmp_path / "batches", ledger) as live, live.openai() as client:
        assert ended(client, batch).status == "completed"
    assert requests_in(ledger) == 3


def test_a_batch_is_cancelled_on_a_full_disk(disk: SmallDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "_RETRY_SECONDS", 0.02)
    with start(disk.path / "batches") as live, live.openai() as client:
        live.async_engine.gate = asyncio.Event()
        batch = begin(client, 3)
        wait_until(lambda: len(live.async_engine.seen) == 3)
        disk.fill()
        assert client.batches.cancel(batch.id).status == "cancelling"
        assert client.batches.retrieve(batch.id).status == "cancelling"
        disk.free()
        assert ended(client, batch).status == "cancelled"


def test_a_batch_that_fails_on_a_full_disk_ends_when_it_can(
    disk: SmallDisk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service_module, "_RETRY_SECONDS", 0.02)
    with start(disk.path / "batches") as live, live.openai() as client:

        def broken(record: Any, *_: Any) -> Any:
            disk.fill()
            raise ValueError("a bug")

        monkeypatch.setattr(live.state.stores.batches, "_validate", broken)
        batch = begin(client, 1)
        wait_until(lambda: caplog.text.count("a bug") >= 3)
        monkeypatch.setattr(
            live.state.stores.batches, "_validate", lambda *_: (_ for _ in ()).throw(ValueError("a bug"))
        )
        disk.free()
        done = ended(client, batch)
        assert done.status == "failed" and done.errors.data[0].code == "internal_error"


def test_a_line_that_is_written_in_part_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def add(out: BatchOutput, custom_id: str, response: BatchResponse) -> None:
        request = BatchRequest(custom_id, CHAT, {})
        out.add(request, response, answer_line(request, response))

    with BatchOutput(tmp_path / "out") as out:
        add(out, "a", BatchResponse(200, "", "first"))

        def half(fd: int, data: Any) -> int:
            if len(data) > 40:
                return write(fd, bytes(data[:40]))
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("rootgraft.api.batches.batch_files.os.write", half)
            for _ in range(2):
                with pytest.raises(ConfigError, match="No space left"):
                    add(out, "b", BatchResponse(200, "", "x" * 19))
        add(out, "c", BatchResponse(500, "", "third"))
        assert (out.done, out.failed) == ({"a", "c"}, 1)
    with BatchOutput(tmp_path / "out") as again:
        assert (again.done, again.failed) == ({"a", "c"}, 1)


async def test_only_the_first_answers_wait_for_a_ledger_on_a_full_disk(
    disk: SmallDisk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(usage_ledger, "_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(usage_ledger, "WAIT_SECONDS", 0.05)
    waits = 0
    wait = asyncio.wait

    async def counted(*args: Any, **options: Any) -> Any:
        nonlocal waits
        waits += 1
        return await wait(*args, **options)

    ledger = UsageLedger(disk.path / "usage.db")
    await ledger.put(record(0, 0))
    disk.fill()
    monkeypatch.setattr(usage_ledger.asyncio, "wait", counted)
    await ledger.until_written(ledger.put(record(0, 1)))
    assert ledger.is_stalled and waits == 1
    written = [ledger.put(record(0, number)) for number in range(2, 200)]
    for each in written:
        await ledger.until_written(each)
    assert waits == 1 and ledger.num_waiting == 199 and not any(each.done() for each in written)
    disk.free()
    await wait(written)
    assert not ledger.is_stalled and ledger.num_waiting == ledger.num_lost == 0
    await ledger.until_written(ledger.put(record(0, 200)))
    assert waits == 2
    await ledger.close()
    assert requests_in(disk.path / "usage.db") == 201
    assert caplog.text.count("cannot be written") == 1 and caplog.text.count("can be written again") == 1


async def test_a_ledger_that_is_only_slow_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process holds the file's lock: nothing fails, and nothing comes back."""
    monkeypatch.setattr(usage_ledger, "WAIT_SECONDS", 0.05)
    ledger = UsageLedger(tmp_path / "usage.db")
    other = sqlite3.connect(tmp_path / "usage.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    written = [ledger.put(record(0, number)) for number in range(3)]
    await ledger.until_written(written[0])
    assert ledger.is_stalled
    for each in written:
        await ledger.until_written(each)
    assert not any(each.done() for each in written) and ledger.num_waiting == 3
    other.execute("ROLLBACK")
    other.close()
    await asyncio.wait(written)
    assert not ledger.is_stalled and ledger.num_waiting == 0
    await ledger.close()


def test_metrics_tell_what_waits(disk: SmallDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_ledger, "_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(usage_ledger, "WAIT_SECONDS", 0.05)
    with start(tmp_path / "batches", disk.path / "usage.db") as live, live.http() as http:
        disk.fill()
        for _ in range(5):
            assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
        stats = live.state.stats()
        assert (stats["ledger_waiting"], stats["ledger_lost"]) == (5, 0)
        disk.free()
        wait_until(lambda: live.state.stats()["ledger_waiting"] == 0)
    assert requests_in(disk.path / "usage.db") == 5


@pytest.mark.parametrize("name", ["keys.toml", "keys.json"])
def test_a_change_of_the_keys_is_made_whole_or_not_at_all(disk: SmallDisk, name: str) -> None:
    path = disk.path / name
    add_key(path, "first", {})
    before = path.read_bytes()
    disk.fill()
    changes = [
        lambda: add_key(path, "second", {"adapters": ["a" * 60] * 90}),
        lambda: rotate_key(path, "first"),
    ]
    for change in changes:
        with pytest.raises(ConfigError, match=f"{name} cannot be written: No space left on device"):
            change()
        assert path.read_bytes() == before and disk.names == {name}
    disk.free()
    add_key(path, "second", {})
    assert [entry.name for entry in read_entries(path)] == ["first", "second"]


def test_a_server_without_space_for_its_record_goes_on(disk: SmallDisk) -> None:
    """``rootgraft ps`` does not see it, and shows it once there is space again."""
    record, later = (RunRecord(os.getpid(), 0.0, f"http://127.0.0.1:{port}") for port in (1, 2))
    file = RunRecordFile(disk.path / "run")
    disk.fill()
    file.write(record)
    assert not disk.names
    disk.free()
    file.write(later)
    assert disk.names == {f"{os.getpid()}.json"}
