"""The fake server in a thread of its own, for commands that run their own event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from aiohttp import web

from support.api.fake_openai import FakeServer
from support.machine.waits import HANG_SECONDS


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    server = FakeServer()
    ready = threading.Event()
    end = asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", server.models)
        app.router.add_post("/v1/chat/completions", server.answer)
        app.router.add_post("/v1/completions", server.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        ready.set()
        await end.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(HANG_SECONDS)
    yield server
    loop.call_soon_threadsafe(end.set)
    thread.join()
    loop.close()
