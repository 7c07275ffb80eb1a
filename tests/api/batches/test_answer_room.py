"""Answers of batches count in their owner's share of the files while they are written, and wait for room."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from support.api.api_live import Live, make_state, serve
from support.machine.waits import HANG_SECONDS, wait_until

from rootgraft.api.batches import answer_room
from rootgraft.api.batches.batch_service import BatchService
from rootgraft.api.config import ServerConfig

SHARE = 50_000  # bytes of each of two tenants
ROOM, COUNT = 2000, 12  # bytes that are left for answers, of which more come


@contextmanager
def service(folder: Path) -> Iterator[tuple[Live, BatchService]]:
    state = make_state(ServerConfig(batch_dir=str(folder), api_key=("one", "two"), max_stored_file_bytes=2 * SHARE))
    batches = BatchService(folder, state.options.max_stored_file_bytes, state.limits.caller_named)
    state.stores.batches = batches
    for live in serve(state):
        live.loop.call_soon_threadsafe(batches.resume, state.stores.internal_client)
        try:
            yield live, batches
        finally:
            asyncio.run_coroutine_threadsafe(batches.close(), live.loop).result(HANG_SECONDS)


def upload(client: openai.OpenAI, data: bytes) -> Any:
    return client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch")


def requests(count: int = COUNT) -> bytes:
    body = {"messages": [{"role": "user", "content": "x"}]}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    return b"".join(json.dumps({"custom_id": f"r{number}", **line}).encode() + b"\n" for number in range(count))


def begin(client: openai.OpenAI, file: Any) -> Any:
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={}
    )


def waits(client: openai.OpenAI, batch: Any) -> bool:
    errors = client.batches.retrieve(batch.id).errors
    return errors is not None and errors.data is not None and errors.data[0].code == "storage_full"


def ended(client: openai.OpenAI, batch: Any) -> Any:
    wait_until(lambda: client.batches.retrieve(batch.id).status in ("completed", "cancelled", "failed"))
    return client.batches.retrieve(batch.id)


def test_answers_wait_for_room_and_take_none_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_room, "RETRY_SECONDS", 0.01)
    with (
        service(tmp_path / "b") as (live, batches),
        live.openai(api_key="one") as mine,
        live.openai(api_key="two") as other,
    ):
        source = upload(mine, requests())
        filler = upload(mine, b"x" * (SHARE - source.bytes - ROOM))
        batch = begin(mine, source)
        wait_until(lambda: waits(mine, batch))
        told = mine.batches.retrieve(batch.id)
        assert told.status == "in_progress" and "must free" in told.errors.data[0].message
        owner = live.state.limits.keys.find(b"one").tenant
        assert 0 < batches.files.answers.held(owner) <= ROOM
        with pytest.raises(openai.APIStatusError) as refused:
            upload(mine, b"x" * ROOM)
        assert refused.value.status_code == 413
        assert upload(other, b"x" * SHARE).bytes == SHARE, "the other tenant has its half"
        mine.files.delete(filler.id)
        done = ended(mine, batch)
        assert (done.status, done.errors, done.request_counts.completed) == ("completed", None, COUNT)
        assert batches.files.answers.total == 0
        assert len(mine.files.content(done.output_file_id).text.splitlines()) == COUNT


def test_the_lines_of_a_cancelled_batch_ask_for_room_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one who begins and cancels fills the disk with lines that say so."""
    monkeypatch.setattr(answer_room, "RETRY_SECONDS", 0.01)
    with service(tmp_path / "b") as (live, batches), live.openai(api_key="one") as mine:
        source = upload(mine, requests(50))
        filler = upload(mine, b"x" * (SHARE - source.bytes - 5000))
        live.async_engine.gate = asyncio.Event()
        batch = begin(mine, source)
        wait_until(lambda: mine.batches.retrieve(batch.id).status == "in_progress")
        mine.batches.cancel(batch.id)
        wait_until(lambda: waits(mine, batch))
        assert mine.batches.retrieve(batch.id).status == "cancelling"
        mine.files.delete(filler.id)
        done = ended(mine, batch)
        assert (done.status, done.errors) == ("cancelled", None) and batches.files.answers.total == 0
        assert len(mine.files.content(done.error_file_id).text.splitlines()) == 50


def test_a_batch_is_refused_where_its_owner_has_no_room(tmp_path: Path) -> None:
    with service(tmp_path / "b") as (live, _), live.openai(api_key="one") as mine:
        source = upload(mine, requests())
        filler = upload(mine, b"x" * (SHARE - source.bytes))
        with pytest.raises(openai.APIStatusError) as refused:
            begin(mine, source)
        assert (refused.value.status_code, refused.value.code) == (413, "storage_full")
        assert not list(mine.batches.list())
        mine.files.delete(filler.id)
        assert ended(mine, begin(mine, source)).status == "completed"
