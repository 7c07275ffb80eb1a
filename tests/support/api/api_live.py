"""A server over real HTTP on a free port, with a fake frontend behind it, on a thread of the test's process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import uvicorn

from rootgraft.api.access.rate_limits import RateLimits
from rootgraft.api.config import ServerConfig
from rootgraft.api.generate.model_engine import ModelEngine
from rootgraft.api.generate.server_state import ServerState
from rootgraft.api.http.app import create_app
from rootgraft.api.http.connection import uvicorn_options
from rootgraft.api.observe.engine_facts import EngineFacts
from rootgraft.api.observe.metrics import Metrics
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.messages import Ready
from support.api.api_fakes import MAX_LEN, VOCAB, FakeClient, FakeFrontend
from support.api.fake_nvml import fake_gpus
from support.machine.waits import HANG_SECONDS
from support.machine.waits import wait_until as wait_until


@dataclass
class Live:
    """A running server and what is behind it."""

    url: str
    state: Any
    async_engine: Any
    client: Any
    loop: asyncio.AbstractEventLoop

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=HANG_SECONDS, trust_env=False, **options)

    def openai(self, **options: Any) -> openai.OpenAI:
        """OpenAI's client; close it, or use it in a ``with``."""
        settings = {"api_key": "none", "max_retries": 0, "http_client": httpx.Client(trust_env=False), **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **settings)

    def reset(self) -> None:
        """As if the server had just started."""
        for fake in (self.async_engine, self.client):
            vars(fake).clear()
            fake.__init__()
        fresh = _with_rates_at_rest(
            ServerState(self.state.options, self.state.observers.metrics, engine=self.state.engine)
        )
        self.state.engine.draining = False
        self.state.limits = fresh.limits
        self.state.stores.responses = fresh.stores.responses
        self.state.stores.events = fresh.stores.events
        self.state.sockets = fresh.sockets
        self.state.observers.watch = fresh.observers.watch


def make_state(options: ServerConfig | None = None) -> ServerState:
    client = FakeClient()
    options = options or ServerConfig()
    config = EngineConfig(enable_lora=True, speculative_config='{"num_speculative_tokens": 4}')
    facts = EngineFacts.of(config, Ready(MAX_LEN, VOCAB, num_pages=100, page_size=16, summary=()))
    return _with_rates_at_rest(
        ServerState(
            options,
            Metrics("tiny", lambda: client.stats, prefix=options.metrics_prefix, facts=facts, gpus=fake_gpus()),
            names=("tiny", "org/alias"),
            engine=ModelEngine(options, client, FakeFrontend()),  # type: ignore[arg-type]
            version="1.2.3",
        )
    )


def _with_rates_at_rest(state: ServerState) -> ServerState:
    """Return the state with buckets of rate limits that do not fill: what is left does not depend on a test's speed."""
    state.limits.admission.limits = RateLimits(lambda: 0.0)
    return state


class _Server(uvicorn.Server):
    """uvicorn on a thread of its own: no signals, and an event for the test that waits."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = threading.Event()

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets=sockets)
        self.loop = asyncio.get_running_loop()
        self.up.set()


@contextlib.contextmanager
def run_app(app: Any, sock: socket.socket) -> Iterator[asyncio.AbstractEventLoop]:
    """Answer on a listening socket within the block, which gets the event loop."""
    server = _Server(uvicorn.Config(app, **uvicorn_options(), timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, args=([sock],))
    thread.start()
    try:
        assert server.up.wait(HANG_SECONDS)
        yield server.loop
    finally:
        server.should_exit = True
        thread.join(HANG_SECONDS)


def serve(state: ServerState) -> Iterator[Live]:
    with socket.create_server(("127.0.0.1", 0)) as sock, run_app(create_app(state), sock) as loop:
        yield Live(
            f"http://127.0.0.1:{sock.getsockname()[1]}", state, state.engine.async_engine, state.engine.client, loop
        )


def ask(
    live: Live, path: str, body: dict[str, Any], key: str = "none", *, receive_buffer: int | None = None
) -> socket.socket:
    """Send a request and leave the answer unread: a client that leaves when it is told to, and not by the clock."""
    host, port = live.url.removeprefix("http://").split(":")
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(HANG_SECONDS)
    sock.connect((host, int(port)))
    data = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer {key}",
        "Content-Type: application/json",
    ]
    sock.sendall("\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data)
    return sock
