"""Versions of a name are changed under load on a real server: the short form of ``benchmarks/fleet/rolling.py``."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.api.real_server import start

from benchmarks.fleet import rolling
from benchmarks.fleet.fleet_harness import serve_command, wait_ready
from benchmarks.serve.server import Server

pytestmark = pytest.mark.heavy


def check(load: rolling.Load) -> None:
    assert (load.failed, load.wrong) == ([], [])
    assert len(load.counts) == 2 and [change["verb"] for change in load.changes[2:]] == [
        "promote", "canary", "promote", "rollback", "rollback"
    ]  # fmt: skip


def test_no_request_fails_and_no_answer_is_of_two_versions(tmp_path: Path) -> None:
    catalog = str(tmp_path / "models.db")
    server = start(*rolling.options_of(tmp_path), "--kv-cache-memory", "0.25", "--model-catalog", catalog)
    try:
        load = asyncio.run(rolling.run(f"{server.http.base_url}/v1", None, 2, 8, 0.1))
    finally:
        server.close()
    check(load)


@pytest.mark.timeout(600)
def test_so_it_is_with_replicas_of_two_base_models(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(rolling.file_of(tmp_path, 2, 2))
    command = serve_command("--config", str(tmp_path / "fleet.yaml"), *rolling.options_of(tmp_path))
    with Server(command).running() as (url, process):
        wait_ready(url, process)
        loads = asyncio.run(rolling.run_all(url, rolling.BASES[:2], 2, 8, 0.1))
    assert [load.name for load in loads] == ["assistant-first", "assistant-second"]
    for load in loads:
        check(load)
