"""A signal while the server closes ends the process, whatever it waits for."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from support.machine.waits import HANG_SECONDS

from rootgraft.api.config import ServerConfig
from rootgraft.api.http import model_service, server
from rootgraft.engine.adapter_sources.adapter_fetcher import AdapterFetcher
from rootgraft.engine.config import EngineConfig


def test_a_signal_while_it_closes_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is never started: the first signal comes while the model is looked for."""
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(server, "set_up_log", lambda *_, **__: None)
    monkeypatch.setattr(server.process_memory, "share_heap", lambda: None)
    closing, exits = threading.Event(), []

    def look_for_model(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        closing.wait(HANG_SECONDS)

    def close(_: AdapterFetcher) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        closing.wait(HANG_SECONDS)

    def leave(code: int) -> None:
        exits.append((code, (tmp_path / "socket").exists(), list((tmp_path / "run").iterdir())))
        closing.set()

    monkeypatch.setattr(model_service, "resolve_served_model", look_for_model)
    monkeypatch.setattr(AdapterFetcher, "close", close)
    monkeypatch.setattr(os, "_exit", leave)
    options = ServerConfig(uds=str(tmp_path / "socket"))
    assert server.serve(EngineConfig(model="tiny", enable_lora=True), options) == 0
    assert exits == [(0, False, [])]
