"""A client that leaves takes its sequences with it, at once and in every state of its request."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.api.api_live import Live, ask, make_state, serve
from support.machine.waits import HANG_SECONDS, wait_until
from uvicorn import Config
from uvicorn.server import ServerState

from rootgraft.api.batches.batch_service import BatchService
from rootgraft.api.config import ServerConfig
from rootgraft.api.http.connection import uvicorn_options


@pytest.fixture
def gate(live: Live) -> Iterator[asyncio.Event]:
    """Nothing comes out of the frontend before it is set."""
    live.async_engine.gate = asyncio.Event()
    yield live.async_engine.gate
    live.loop.call_soon_threadsafe(live.async_engine.gate.set)


BODIES = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, 1),
    ("/v1/completions", {"prompt": "x", "n": 3}, 1),
    ("/v1/completions", {"prompt": ["x"] * 5}, 5),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "count"), BODIES)
def test_before_the_first_token(
    live: Live, gate: asyncio.Event, path: str, body: dict[str, Any], count: int, stream: bool
) -> None:
    with ask(live, path, {**body, "stream": stream}):
        wait_until(lambda: len(live.async_engine.seen) == count)
        assert live.state.limits.active == 1 and not live.async_engine.aborted
    wait_until(lambda: len(live.async_engine.aborted) == count)
    wait_until(lambda: live.state.limits.active == 0)


FORM = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}'


@pytest.mark.parametrize(
    ("path", "kind", "part"),
    [
        ("/v1/chat/completions", "application/json", b'{"messages": ['),
        ("/v1/files", "multipart/form-data; boundary=x", FORM),
    ],
)
def test_in_the_middle_of_its_body(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, path: str, kind: str, part: bytes
) -> None:
    """It is no error of the server's."""
    state = make_state(ServerConfig(batch_dir=str(tmp_path)))
    state.stores.batches = BatchService(tmp_path, 1 << 30, state.limits.caller_named)
    with caplog.at_level(logging.INFO):
        for live in serve(state):
            host, port = live.url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port)), timeout=HANG_SECONDS) as sock:
                head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: 999\r\n\r\n"
                sock.sendall(head.encode() + part)
            wait_until(lambda: any(path in record.getMessage() for record in caplog.records))
            asyncio.run_coroutine_threadsafe(state.stores.batches.close(), live.loop).result(HANG_SECONDS)
    [line] = [json.loads(text) for text in caplog.messages if path in text]
    assert line["status"] == 499 and not [each for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["x", "y", "z"]}),
        ("/v1/score", {"query": "x", "items": ["y", "z"], "label_token_ids": [1, 2]}),
        ("/v1/rerank", {"query": "x", "documents": ["y", "z"]}),
    ],
)
def test_before_what_is_no_text(live: Live, gate: asyncio.Event, path: str, body: dict[str, Any]) -> None:
    with ask(live, path, body):
        wait_until(lambda: bool(live.async_engine.seen))
        assert live.state.limits.active == 1 and not live.async_engine.aborted
    wait_until(lambda: len(live.async_engine.aborted) == len(live.async_engine.seen))
    wait_until(lambda: live.state.limits.active == 0)


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_in_the_middle_of_a_stream(live: Live, num_chunks: int) -> None:
    live.async_engine.say = lambda request, index: "x" * 2000
    with ask(live, "/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 2000}) as sock:
        data = b""
        while data.count(b"data: ") < num_chunks:
            data += sock.recv(4096)
    wait_until(lambda: len(live.async_engine.aborted) == 1 or live.state.limits.active == 0)
    wait_until(lambda: live.state.limits.active == 0)


def test_a_client_that_closes_its_half_still_gets_its_answer(live: Live, gate: asyncio.Event) -> None:
    with ask(live, "/v1/completions", {"prompt": "x"}) as sock:
        wait_until(lambda: bool(live.async_engine.seen))
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(65536).startswith(b"HTTP/1.1 102 "), "asked whether it is still there"
        live.loop.call_soon_threadsafe(gate.set)
        reply = b""
        while b"answer 0" not in reply:
            reply += sock.recv(65536)
    assert not live.async_engine.aborted


def test_others_go_on(live: Live, gate: asyncio.Event) -> None:
    with ask(live, "/v1/completions", {"prompt": "a"}), ask(live, "/v1/completions", {"prompt": "b"}) as other:
        wait_until(lambda: len(live.async_engine.seen) == 2)
        with ask(live, "/v1/completions", {"prompt": "c"}):
            wait_until(lambda: len(live.async_engine.seen) == 3)
        wait_until(lambda: len(live.async_engine.aborted) == 1)
        live.loop.call_soon_threadsafe(gate.set)
        reply = b""
        while b"answer 0" not in reply:
            reply += other.recv(4096)
    assert [chr(request.tokens[-1]) for request in live.async_engine.aborted] == ["c"]


def test_one_failing_prompt_ends_the_others(live: Live) -> None:
    """The request fails as a whole, and nothing of it goes on."""
    say = live.async_engine.say

    def fail(request: Any, index: int) -> str:
        if request.tokens[-1] == ord("!"):
            raise ValueError("broken")
        return say(request, index)

    live.async_engine.say = fail
    with live.http() as http:
        body = {"prompt": ["a", "b", "!", "c"]}
        assert http.post("/v1/completions", json=body).status_code == 500
        stream = http.post("/v1/completions", json={**body, "stream": True}).text
        assert "internal_error" in stream and "[DONE]" not in stream
    assert live.state.limits.active == 0
    assert len(live.async_engine.aborted) == len(live.async_engine.seen)


class ClosedTransport(asyncio.Transport):
    """As uvloop's, between the end of a connection, once there is a request, and the call that tells of it."""

    closed = False

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: Any) -> None:
        raise RuntimeError("unable to perform operation, the handler is closed")


async def test_an_answer_whose_client_has_just_left_is_no_error() -> None:
    answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"late"})
            answered.set_result(None)
        except Exception as error:
            answered.set_exception(error)

    config = Config(app, **uvicorn_options())
    config.load()
    connection = uvicorn_options()["http"](config, ServerState(), {})
    transport = ClosedTransport()
    connection.connection_made(transport)
    connection.data_received(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    transport.closed = True
    await asyncio.wait_for(answered, HANG_SECONDS)
    connection.connection_lost(None)
