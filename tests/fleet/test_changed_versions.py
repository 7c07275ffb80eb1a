"""Versions of a name are changed under load on a real server: the short form of ``benchmarks/fleet/rolling.py``."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.api.real_server import start

from benchmarks.fleet import rolling

pytestmark = pytest.mark.heavy


def test_no_request_fails_and_no_answer_is_of_two_versions(tmp_path: Path) -> None:
    server = start(
        *("--enable-lora", "--adapter-sources", f"file://{rolling.ADAPTERS}", "--kv-cache-memory", "0.25"),
        *("--model-catalog", str(tmp_path / "models.db"), "--adapter-cache-dir", str(tmp_path / "adapters")),
    )
    try:
        load = asyncio.run(rolling.run(f"{server.http.base_url}/v1", 2, 8, 0.5))
    finally:
        server.close()
    assert (load.failed, load.wrong) == ([], [])
    assert len(load.counts) == 2 and [change["verb"] for change in load.changes[2:]] == [
        "promote", "canary", "promote", "rollback", "rollback"
    ]  # fmt: skip
