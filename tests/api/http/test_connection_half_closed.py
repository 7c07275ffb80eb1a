"""Clients that send no more and wait, clients that leave, and connections beyond the descriptors that there are."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from types import SimpleNamespace

import pytest
from support.api.api_live import Live
from support.machine.waits import HANG_SECONDS, wait_until

from rootgraft.api.http import connection, descriptors


def connect(live: Live) -> socket.socket:
    host, port = live.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=HANG_SECONDS)


def read_all(sock: socket.socket) -> bytes:
    data = b""
    while part := sock.recv(65536):
        data += part
    return data


def head_of(path: str, body: bytes = b"", version: str = "1.1") -> bytes:
    method = "POST" if body else "GET"
    lines = [f"{method} {path} HTTP/{version}", "Host: localhost", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body)}"] if body else []
    return "\r\n".join([*lines, "", ""]).encode() + body


ASKED = json.dumps({"prompt": "x", "max_tokens": 3}).encode()


@pytest.mark.parametrize("sent", [head_of("/version"), head_of("/v1/completions", ASKED), head_of("/version") * 3])
def test_a_client_that_sends_no_more_is_answered(live: Live, sent: bytes) -> None:
    with connect(live) as sock:
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)
        assert read_all(sock).count(b"HTTP/1.1 200 ") == sent.count(b"Host:")


@pytest.mark.parametrize("sent", [b"GET /ver", head_of("/v1/completions", ASKED)[:-3], b""])
def test_what_is_half_a_request_ends_the_connection(live: Live, sent: bytes) -> None:
    with connect(live) as sock:
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)
        assert b" 200 " not in read_all(sock)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_leaves_before_its_answer_begins_is_noticed(live: Live, version: str) -> None:
    """Nothing is generated, so nothing but the probes is ever written to it."""
    gate = live.async_engine.gate = asyncio.Event()
    with connect(live) as sock:
        sock.sendall(head_of("/v1/completions", ASKED, version))
        wait_until(lambda: bool(live.async_engine.seen))
    wait_until(lambda: bool(live.async_engine.aborted))
    live.loop.call_soon_threadsafe(gate.set)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "most_connections", lambda: 4)


def test_an_idle_connection_makes_room_for_a_new_one(live: Live, few: None) -> None:
    first = [connect(live) for _ in range(40)]
    with connect(live) as sock:
        sock.sendall(head_of("/health"))
        assert sock.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert first[0].recv(1) == b"", "the one that was idle for the longest time is closed"
    for each in first:
        each.close()


def test_the_limit_on_descriptors_leaves_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    used = 37
    files = {"/proc/self/fd": [str(number) for number in range(used)]}
    monkeypatch.setattr(descriptors, "os", SimpleNamespace(listdir=files.__getitem__))
    for soft, reserve in ((1024, 64), (used + 128, min(64, (used + 128) // 4)), (8, None)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        expected = 1 if reserve is None else soft - used - reserve
        assert descriptors.connection_room.__wrapped__() == expected


def test_connections_of_grpc_take_a_quarter_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "connection_room", lambda: 400)
    assert [(descriptors.set_aside(wanted), descriptors.most_connections()) for wanted in (2000, 50, 0)] == [
        (100, 300),
        (50, 350),
        (0, 400),
    ]
