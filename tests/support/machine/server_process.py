"""A whole server process in the test's own: a fake engine, real signals, a real socket, a script beside it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rootgraft.api.config import ServerConfig
from rootgraft.api.http import model_service, server
from rootgraft.engine.checkpoint.locate import ModelFiles
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import EngineDead
from rootgraft.engine.messages import Ready
from rootgraft.engine.text.tokenizer import Tokenizer
from rootgraft.engine.types import SamplingDefaults
from support.api.api_fakes import FakeClient, FakeFrontend
from support.api.real_server import free_port
from support.machine.waits import HANG_SECONDS, wait_until


class Engine:
    """What the server finds in place of the real engine, and what has become of it."""

    def __init__(self) -> None:
        self.model = Path("model.gguf")
        self.client: Any = None
        self.async_engine = FakeFrontend()
        self.closed = False
        self.loaded = threading.Event()
        self.start_error: Exception | None = None

    def make_client(self, config: EngineConfig, path: Path, **watched: float) -> Any:
        self.client = FakeClient()
        self.client.config, self.client.path, self.client.watched = config, path, watched
        self.client.start, self.client.close, self.client.on_death = self._start, self._close, self._on_death
        return self.client

    def make_async_engine(self, client: Any, tokenizer: Any, ready: Any, defaults: SamplingDefaults) -> Any:
        self.async_engine.defaults = defaults
        return self.async_engine

    async def _start(self) -> Any:
        while not self.loaded.is_set():
            await asyncio.sleep(0.002)
        if self.start_error is not None:
            raise self.start_error
        return Ready(100, 420, 10, 16, ("a line of the engine's",))

    async def _close(self) -> None:
        self.closed = True

    def _on_death(self, error: EngineDead) -> None:
        self.async_engine.fail_after = (0, error)
        if self.async_engine.gate is not None:
            self.async_engine.gate.set()


def replace_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """What a fixture yields: the engine that a server in this process finds."""
    fake = Engine()
    monkeypatch.setattr(model_service, "resolve_served_model", lambda config: ModelFiles(fake.model, "org/small"))
    monkeypatch.setattr(model_service, "EngineClient", fake.make_client)
    monkeypatch.setattr(Tokenizer, "load", lambda *args, **options: fake.async_engine.tokenizer)
    monkeypatch.setattr(model_service, "AsyncEngine", fake.make_async_engine)
    yield fake
    fake.loaded.set()


class Script:
    """What happens on another thread while ``serve`` holds the main one. An error in it ends the server."""

    def __init__(self, steps: Callable[[httpx.Client], None], client: httpx.Client) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(steps, client))
        self._thread.start()

    def _run(self, steps: Callable[[httpx.Client], None], client: httpx.Client) -> None:
        with client as http:
            try:
                wait_until(lambda: responds(http))
                steps(http)
            except BaseException as error:
                self._error = error
                interrupt()
                interrupt()

    def finish(self) -> None:
        self._thread.join(HANG_SECONDS)
        if self._error is not None:
            raise self._error


def responds(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code in (200, 503)
    except httpx.TransportError:
        return False


def interrupt(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def run(
    steps: Callable[[httpx.Client], None],
    *,
    engine: EngineConfig | None = None,
    scheme: str = "http",
    connection: dict[str, Any] | None = None,
    **options: Any,
) -> int:
    """Serve while ``steps`` happen, with a client of this ``connection``; the exit code."""
    port = free_port()
    url = f"{scheme}://127.0.0.1:{port}"
    script = Script(steps, httpx.Client(base_url=url, timeout=HANG_SECONDS, trust_env=False, **(connection or {})))
    try:
        return server.serve(engine or EngineConfig(model="m"), ServerConfig(port=port, **options))
    finally:
        script.finish()
