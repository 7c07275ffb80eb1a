"""Answers to HTTP/1.0, which knows no chunks: a stream ends with the connection."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from support.api.api_live import Live
from support.machine.waits import HANG_SECONDS

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}


def answer(
    live: Live, version: str, path: str, body: dict[str, Any] | None, *, method: str = "POST"
) -> tuple[bytes, bytes]:
    """Head and rest of what the server sends until it closes the connection."""
    host, port = live.url.removeprefix("http://").split(":")
    data = b"" if body is None else json.dumps(body).encode()
    lines = [
        f"{method} {path} HTTP/{version}",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    ]
    with socket.create_connection((host, int(port)), timeout=HANG_SECONDS) as sock:
        sock.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode() + data)
        received = b""
        while piece := sock.recv(65536):
            received += piece
    head, _, rest = received.partition(b"\r\n\r\n")
    return head.lower(), rest


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, BODY),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 9, **BODY}),
    ],
)
def test_a_stream_is_not_in_chunks(live: Live, path: str, body: dict[str, Any]) -> None:
    live.async_engine.say = lambda request, index: "word " * 40
    head, rest = answer(live, "1.0", path, {**body, "stream": True})
    assert b" 200 " in head and b"connection: close" in head
    assert b"transfer-encoding" not in head and b"content-length" not in head
    assert rest.startswith((b"data: ", b"event: ")) and rest.endswith(b"\n\n") and b"0\r\n\r\n" not in rest
    chunked, coded = answer(live, "1.1", path, {**body, "stream": True})
    assert b"transfer-encoding: chunked" in chunked and coded.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", CHAT, BODY, 200),
        ("POST", CHAT, {}, 400),
        ("GET", "/v1/models", None, 200),
        ("GET", "/metrics", None, 200),
        ("GET", "/none", None, 404),
        ("HEAD", "/health", None, 200),
    ],
)
def test_whole_answers_have_their_length(live: Live, method: str, path: str, body: Any, status: int) -> None:
    head, rest = answer(live, "1.0", path, body, method=method)
    assert f" {status} ".encode() in head and b"transfer-encoding" not in head
    length = int(head.partition(b"content-length: ")[2].partition(b"\r")[0])
    assert len(rest) == (0 if method == "HEAD" else length)
