"""Requests that are answered before their body has come: ordinary clients read the answer, slow ones hold nothing."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import pytest
import requests
from support.api.api_live import Live, make_state, serve
from support.machine.waits import HANG_SECONDS

from rootgraft.api.config import ServerConfig
from rootgraft.api.http import connection

PATH = "/v1/completions"
LIMIT = 1 << 20
SIZE = 24 << 20  # more than the socket buffers of both sides hold
BLOCK = b"x" * 65536
HEADERS = {"content-type": "application/json", "authorization": "Bearer right"}
Answer = tuple[int, Any]
Ask = Callable[[str, int, bool], Answer]


@pytest.fixture(scope="module")
def strict() -> Iterator[Live]:
    yield from serve(make_state(ServerConfig(max_request_bytes=LIMIT, api_key=("right",))))


def blocks(size: int) -> Iterator[bytes]:
    return (BLOCK for _ in range(size // len(BLOCK)))


def by_httpx(url: str, size: int, chunked: bool) -> Answer:
    with httpx.Client(trust_env=False, timeout=HANG_SECONDS) as http:
        reply = http.post(url, content=blocks(size) if chunked else b"x" * size, headers=HEADERS)
    return reply.status_code, reply.json()


def by_requests(url: str, size: int, chunked: bool) -> Answer:
    with requests.Session() as session:
        session.trust_env = False
        reply = session.post(url, data=blocks(size) if chunked else b"x" * size, headers=HEADERS, timeout=HANG_SECONDS)
        return reply.status_code, reply.json()


def by_urllib(url: str, size: int, chunked: bool) -> Answer:
    """Sends all of a body before it looks at the answer, and gives up where it cannot."""
    headers = {**HEADERS, "transfer-encoding": "chunked"} if chunked else HEADERS
    request = urllib.request.Request(url, blocks(size) if chunked else b"x" * size, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with pytest.raises(urllib.error.HTTPError) as told:
        opener.open(request, timeout=HANG_SECONDS)
    with told.value as reply:
        return reply.code, json.loads(reply.read())


def by_aiohttp(url: str, size: int, chunked: bool) -> Answer:
    async def body() -> Any:
        for block in blocks(size):
            yield block

    async def ask() -> Answer:
        answer = await post()
        await asyncio.sleep(0.25)  # as aiohttp advises: its transports close later than their session
        return answer

    async def post() -> Answer:
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, data=body() if chunked else io.BytesIO(b"x" * size), headers=HEADERS) as reply,
        ):
            return reply.status, await reply.json()

    return asyncio.run(ask())


def by_curl(url: str, size: int, chunked: bool) -> Answer:
    command = ["curl", "-sS", "--noproxy", "*", "-w", "\n%{http_code}", "--data-binary", "@-", "-H", "Expect:", url]
    for name, value in ({**HEADERS, "transfer-encoding": "chunked"} if chunked else HEADERS).items():
        command += ["-H", f"{name}: {value}"]
    done = subprocess.run(command, input=b"x" * size, capture_output=True, timeout=HANG_SECONDS, check=True)
    body, _, status = done.stdout.decode().rpartition("\n")
    return int(status), json.loads(body)


def by_curl_that_asks_first(url: str, size: int, chunked: bool) -> Answer:
    """With ``Expect: 100-continue``, as curl sends large bodies by itself."""
    command = ["curl", "-sS", "--noproxy", "*", "-w", "\n%{http_code}", "--data-binary", "@-", url]
    for name, value in ({**HEADERS, "transfer-encoding": "chunked"} if chunked else HEADERS).items():
        command += ["-H", f"{name}: {value}"]
    done = subprocess.run(
        [*command, "-H", "Expect: 100-continue"],
        input=b"x" * size,
        capture_output=True,
        timeout=HANG_SECONDS,
        check=True,
    )
    body, _, status = done.stdout.decode().rpartition("\n")
    return int(status), json.loads(body)


BY_CURL = pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
CLIENTS = [
    *(by_httpx, by_requests, by_urllib, by_aiohttp),
    *(pytest.param(each, marks=BY_CURL) for each in (by_curl, by_curl_that_asks_first)),
]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("ask", CLIENTS)
def test_clients_read_the_413(strict: Live, ask: Ask, chunked: bool) -> None:
    status, body = ask(strict.url + PATH, SIZE, chunked)
    assert status == 413 and f"the limit is {LIMIT} bytes" in body["error"]["message"]


@pytest.mark.parametrize("path", ["/nope", "/health", "/v1/models"])
def test_clients_read_answers_of_routes_without_a_body(strict: Live, path: str) -> None:
    status, body = by_httpx(strict.url + path, LIMIT, False)
    assert status in (404, 405) and body["error"]["message"]


def test_the_openai_client_reads_it(strict: Live) -> None:
    with strict.openai(api_key="right") as client:
        with pytest.raises(openai.APIStatusError, match=f"the limit is {LIMIT} bytes") as told:
            client.completions.create(model="tiny", prompt="x" * SIZE)
        assert told.value.status_code == 413
        assert client.completions.create(model="tiny", prompt="x").choices[0].text == "answer 0"


def connect(live: Live) -> socket.socket:
    host, port = live.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=HANG_SECONDS)


def head(size: int | None, *, key: str = "right", more: str = "") -> bytes:
    length = "Transfer-Encoding: chunked" if size is None else f"Content-Length: {size}"
    lines = [
        f"POST {PATH} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Authorization: Bearer {key}",
    ]
    return "\r\n".join([*lines, length, *([more] if more else []), "", ""]).encode()


def answer(sock: socket.socket) -> tuple[int, bytes]:
    """Read one response with a Content-Length; its status, and its head."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += sock.recv(1)
    size = int(data.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while size:
        size -= len(sock.recv(size))
    return int(data.split(b" ")[1]), data


def drip(sock: socket.socket, piece: bytes) -> int:
    """Send again and again until the other side is gone; the bytes sent."""
    sent, end = 0, time.monotonic() + HANG_SECONDS
    try:
        while sent < 1 << 30 and time.monotonic() < end:
            sock.sendall(piece)
            sent += len(piece)
            if len(piece) < 100:
                time.sleep(0.005)
    except (ConnectionResetError, BrokenPipeError):
        return sent
    raise AssertionError("the connection takes bytes for ever")


@pytest.mark.parametrize(
    ("size", "key", "more", "status"),
    [
        (1 << 40, "right", "", 413),
        (900_000, "wrong", "", 401),
        (900_000, "wrong", "Connection: close", 401),
        (900_000, "right", "Content-Encoding: gzip", 415),
        (None, "wrong", "", 401),
    ],
)
def test_a_slow_client_does_not_hold_a_connection(
    strict: Live, monkeypatch: pytest.MonkeyPatch, size: int | None, key: str, more: str, status: int
) -> None:
    monkeypatch.setattr(connection, "DRAIN_SECONDS", 0.2)
    with connect(strict) as sock:
        sock.sendall(head(size, key=key, more=more))
        assert answer(sock)[0] == status
        drip(sock, b"x" if size else b"1\r\nx\r\n")


def test_a_slow_body_is_answered_and_not_waited_for(strict: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rootgraft.api.http.guard.BODY_TIMEOUT", 0.05)
    monkeypatch.setattr(connection, "DRAIN_SECONDS", 0.2)
    with connect(strict) as sock:
        sock.sendall(head(1000) + b"{")
        assert answer(sock)[0] == 408
        drip(sock, b"x")


@pytest.mark.parametrize("size", [1 << 40, None])
def test_what_is_drained_is_bounded_in_bytes(strict: Live, monkeypatch: pytest.MonkeyPatch, size: int | None) -> None:
    monkeypatch.setattr(connection, "DRAIN_BYTES", 2 << 20)
    with connect(strict) as sock:
        sock.sendall(head(size))
        piece = BLOCK if size else b"%x\r\n%b\r\n" % (len(BLOCK), BLOCK)
        sent = drip(sock, piece)
    assert 2 << 20 < sent < 64 << 20  # socket buffers hold some


def test_a_connection_whose_body_was_drained_goes_on(strict: Live) -> None:
    with connect(strict) as sock:
        for _ in range(3):
            sock.sendall(head(500_000, key="wrong") + b"x" * 10)
            assert answer(sock)[0] == 401
            sock.sendall(b"x" * (500_000 - 10))
        body = json.dumps({"prompt": "x"}).encode()
        sock.sendall(head(len(body)) + body)
        assert answer(sock)[0] == 200


def test_a_connection_to_be_closed_ends_with_its_body(strict: Live) -> None:
    with connect(strict) as sock:
        size = 2 * LIMIT
        sock.sendall(head(size))
        status, told = answer(sock)
        assert status == 413 and b"connection: close" in told
        sock.sendall(b"x" * size)
        assert sock.recv(1) == b""


def test_malformed_chunks_after_the_answer_end_the_connection(strict: Live) -> None:
    with connect(strict) as sock:
        sock.sendall(head(None, key="wrong"))
        assert answer(sock)[0] == 401
        sock.sendall(b"nonsense\r\n")
        assert sock.recv(100) == b""


def test_an_idle_connection_with_a_drained_body_is_closed(strict: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the body has ended uvicorn's own wait for the next request."""
    made: list[connection.Connection] = []
    begin = connection.Connection.connection_made

    def noted(self: connection.Connection, transport: Any) -> None:
        begin(self, transport)
        self.timeout_keep_alive = 0.2
        made.append(self)

    monkeypatch.setattr(connection.Connection, "connection_made", noted)
    with connect(strict) as sock:
        sock.sendall(head(100, key="wrong"))
        assert answer(sock)[0] == 401
        sock.sendall(b"x" * 100)
        assert sock.recv(1) == b"" and len(made) == 1


def test_uploads_that_are_too_large_are_told(tmp_path: Path) -> None:
    options = ServerConfig(batch_dir=str(tmp_path), max_file_bytes=LIMIT)
    for live in serve(make_state(options)):
        with live.http() as http:
            reply = http.post("/v1/files", data={"purpose": "batch"}, files={"file": b"x" * SIZE})
        assert reply.status_code == 413
