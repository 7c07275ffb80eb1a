"""Malformed frames and messages, generated with a seed: each is answered or ends its own connection, nobody else's."""

from __future__ import annotations

import base64
import json
import os
import random
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from support.api.api_live import Live
from support.api.socket_asks import hear, hear_ends, socket_of, tell
from support.machine.waits import HANG_SECONDS, wait_until
from websockets.sync.client import ClientConnection

PATHS = ("/v1/responses", "/v1/stream")
COUNTS = [pytest.param(60, marks=pytest.mark.sample), pytest.param(500, marks=pytest.mark.heavy)]
_ENDS = ("done", "error", "response.completed")
_VALUES: tuple[Any, ...] = (None, True, -1, 1e308, "", "x" * 300, [], {}, [[]], {"a": []}, "\u0000", 2**70)
_GOOD: dict[str, dict[str, Any]] = {
    "/v1/responses": {"type": "response.create", "model": "tiny", "input": "hi", "stream_id": "a"},
    "/v1/stream": {"type": "generate", "id": "a", "model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
}


def _mutated(rng: random.Random, path: str) -> str | bytes:
    """A message that is almost right: a field of another kind, a cut, other bytes, deep nesting."""
    message = dict(_GOOD[path])
    match rng.randrange(6):
        case 0 | 1:
            names = [
                *message,
                "after",
                "stream",
                "background",
                "generate",
                "store",
                "n",
                "tools",
                "previous_response_id",
            ]
            message[rng.choice(names)] = rng.choice(_VALUES)
            return json.dumps(message)
        case 2:
            text = json.dumps(message)
            return text[: rng.randrange(len(text))]
        case 3:
            return rng.randbytes(rng.randrange(40))
        case 4:
            return "[" * rng.randrange(1, 3000)
        case _:
            del message[rng.choice(list(message))]
            message["type"] = rng.choice(("cancel", "response.steer", "response.create", "generate", "token", 3))
            return json.dumps(message)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("path", PATHS)
def test_messages_that_are_almost_right(live: Live, path: str, count: int) -> None:
    """What is wrong is an error of its own: a request behind it on the same connection is answered."""
    rng = random.Random(56)
    name = "id" if path == "/v1/stream" else "stream_id"
    found: list[dict[str, Any]] = []
    with socket_of(live, path) as sock:
        for _ in range(-(-count // 50)):
            for _ in range(50):
                tell(sock, _mutated(rng, path))
            found += _answered(sock, {**_GOOD[path], name: "last"}, name)
    errors = [each for each in found if each["type"] == "error"]
    assert len(errors) > count / 3 and all(400 <= each["status"] < 500 and each["error"]["message"] for each in errors)
    wait_until(lambda: live.state.limits.active == 0 and live.state.sockets.connections.total == 0)


def _answered(sock: ClientConnection, message: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Send a message, again where too many others still wait, and return what comes until its answer has ended."""
    found: list[dict[str, Any]] = []
    while True:
        tell(sock, message)
        while not found or found[-1].get(name) != message[name] or found[-1]["type"] not in _ENDS:
            found.append(hear(sock))
        if found[-1]["type"] != "error":
            return found
        assert found.pop()["error"]["code"] == "rate_limit_exceeded"


def _frames(rng: random.Random) -> bytes:
    """Frames of a client with a fault: opcodes, lengths, masks, fragments, closes."""
    payload = rng.randbytes(rng.randrange(130))
    first = rng.randrange(256)
    length = rng.choice((len(payload), 126, 127))
    head = bytes([first, rng.choice((0, 128)) | min(length, 127)])
    extra = rng.choice((b"", struct.pack("!H", rng.randrange(1 << 16)), struct.pack("!Q", rng.getrandbits(64))))
    return b"".join(rng.choice((head + extra + payload, payload, head)) for _ in range(rng.randrange(1, 4)))


def _handshake(live: Live, path: str, **headers: str) -> socket.socket:
    host, port = live.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)), timeout=HANG_SECONDS)
    lines = {
        "Host": "localhost",
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": base64.b64encode(os.urandom(16)).decode(),
        **headers,
    }
    sock.sendall("\r\n".join([f"GET {path} HTTP/1.1", *(f"{n}: {v}" for n, v in lines.items()), "", ""]).encode())
    return sock


def _all_of(sock: socket.socket) -> Iterator[bytes]:
    while data := sock.recv(65536):
        yield data


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("path", PATHS)
def test_frames_that_no_client_sends(live: Live, path: str, count: int) -> None:
    """While they come, another connection's answers are those of an undisturbed one."""
    rng = random.Random(8)
    with socket_of(live, "/v1/stream") as neighbour:
        for number in range(count):
            with _handshake(live, path) as sock:
                assert sock.recv(12) == b"HTTP/1.1 101"
                sock.sendall(_frames(rng))
                if rng.random() < 0.5:
                    sock.shutdown(socket.SHUT_WR)
            if number % 10 == 0:
                tell(neighbour, {**_GOOD["/v1/stream"], "id": str(number)})
                found = hear_ends(neighbour, 1)
                assert "".join(each.get("text", "") for each in found) == "answer 0"
    wait_until(lambda: live.state.limits.active == 0 and live.state.sockets.connections.total == 0)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-WebSocket-Version": "8"}, b"400"),
        ({"Sec-WebSocket-Key": "short"}, b"400"),
        ({"X-Long": "v" * 9000}, b"405"),
        ({"Content-Length": "3"}, b"405"),
        ({"Upgrade": "h2c"}, b"405"),
    ],
)
def test_handshakes_with_a_fault(live: Live, headers: dict[str, str], status: bytes) -> None:
    with _handshake(live, "/v1/stream", **headers) as sock:
        if "Content-Length" in headers:
            sock.sendall(b"{}\n")
        sock.shutdown(socket.SHUT_WR)
        answer = b"".join(_all_of(sock))
    assert answer.startswith(b"HTTP/1.1 " + (b"404" if status == b"405" else status)), answer[:200]


def test_a_message_that_is_too_long_closes_its_connection(live: Live) -> None:
    """Before it has come: the head of its frame tells its length."""
    for length, code in (((4 << 20) + 1, 1009), (4 << 20, None)):
        with _handshake(live, "/v1/stream") as sock:
            assert _read_head(sock).startswith(b"HTTP/1.1 101")
            sock.sendall(b"\x81\xff" + struct.pack("!Q", length) + bytes(4))
            if code is None:
                sock.sendall(b"\x20" * length)
                kind, data = _read_frame(sock)
                assert kind == 0x81 and json.loads(data)["error"]["code"] == "invalid_json"
            else:
                kind, data = _read_frame(sock)
                assert (kind, struct.unpack("!H", data[:2])) == (0x88, (code,))


def _read_head(sock: socket.socket) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += sock.recv(1)
    return head


def _read_frame(sock: socket.socket) -> tuple[int, bytes]:
    """The first byte of a short frame of the server, and its data."""
    file = sock.makefile("rb")
    kind, length = file.read(2)
    if length == 126:
        (length,) = struct.unpack("!H", file.read(2))
    return kind, file.read(length)


def test_pings_are_answered_and_those_of_who_reads_nothing_are_not_kept(live: Live) -> None:
    with socket_of(live, "/v1/stream") as sock:
        assert sock.ping(b"x").wait(HANG_SECONDS)
    with _handshake(live, "/v1/stream") as raw:
        assert raw.recv(12) == b"HTTP/1.1 101"
        raw.settimeout(1.0)
        ping = b"\x89\xfd" + b"\0\0\0\0" + b"p" * 125
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 256 << 20:
                sent += raw.send(ping * 500)
    wait_until(lambda: live.state.sockets.connections.total == 0)
