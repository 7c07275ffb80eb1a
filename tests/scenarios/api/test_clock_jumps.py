"""The system's clock is set while a server runs: nothing that is kept goes, nothing that waits ends or hangs."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.api.api_live import Live, make_state, serve
from support.api.key_files import entry, write
from support.machine.waits import HANG_SECONDS, wait_until

from rootgraft.api.access.rate_limits import RateLimits
from rootgraft.api.batches.batch_service import BatchService
from rootgraft.api.config import ServerConfig

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
YEARS = 40 * 365 * 86400.0
HEADERS = {"Authorization": "Bearer a"}


@pytest.fixture(params=[YEARS, -YEARS], ids=["forward", "back"])
def jump(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sets the system's clock."""
    wall = time.time
    yield lambda: monkeypatch.setattr(time, "time", lambda: wall() + request.param)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    write(file := tmp_path / "keys.json", entry("a"), entry("few", requests_per_minute=1))
    state = make_state(ServerConfig(api_key_file=str(file), batch_dir=str(tmp_path / "batches")))
    state.limits.admission.limits = RateLimits()  # by its own clock
    largest = state.options.max_stored_file_bytes
    state.stores.batches = BatchService(tmp_path / "batches", largest, state.limits.caller_named)
    for live in serve(state):
        live.loop.call_soon_threadsafe(state.stores.batches.resume, state.stores.internal_client)
        yield live
        asyncio.run_coroutine_threadsafe(state.stores.batches.close(), live.loop).result(HANG_SECONDS)


def test_what_is_kept_stays_and_limits_hold(live: Live, jump: Any) -> None:
    line = json.dumps({"custom_id": "r", "method": "POST", "url": CHAT, "body": BODY}).encode()
    with live.http() as http:
        http.headers.update(HEADERS)
        file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", io.BytesIO(line))}).json()
        stored = http.post("/v1/responses", json={"model": "tiny", "input": "hi"}).json()
        few = {"Authorization": "Bearer few"}
        assert http.post(CHAT, json=BODY, headers=few).status_code == 200
        jump()
        assert http.get(f"/v1/files/{file['id']}").status_code == 200
        assert http.get(f"/v1/responses/{stored['id']}").status_code == 200
        refused = http.post(CHAT, json=BODY, headers=few)
        assert refused.status_code == 429, "the limit of a minute does not begin anew"
        assert 0 < int(refused.headers["retry-after"]) <= 60


def test_a_batch_goes_on_and_ends(live: Live, jump: Any) -> None:
    lines = [json.dumps({"custom_id": f"r{n}", "method": "POST", "url": CHAT, "body": BODY}) for n in range(2)]
    live.async_engine.gate = gate = asyncio.Event()
    with live.http() as http:
        http.headers.update(HEADERS)
        data = io.BytesIO("\n".join(lines).encode())
        file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", data)}).json()
        asked = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        batch = http.post("/v1/batches", json=asked).json()
        wait_until(lambda: bool(live.async_engine.seen))
        jump()
        live.loop.call_soon_threadsafe(gate.set)
        ended = ("completed", "failed", "expired", "cancelled")
        wait_until(lambda: http.get(f"/v1/batches/{batch['id']}").json()["status"] in ended)
        found = http.get(f"/v1/batches/{batch['id']}").json()
    assert (found["status"], found["request_counts"]["completed"]) == ("completed", 2)
