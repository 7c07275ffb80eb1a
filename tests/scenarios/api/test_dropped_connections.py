"""Peers that come and go or stay half-open, by WebSocket, gRPC and events: nothing of them stays."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import logging
import re
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import grpc
import psutil
import pytest
from google.protobuf.json_format import MessageToJson
from support.api.api_live import Live, ask
from support.api.rpc_live import GENERATION, RpcClient, chat_request, rpc_of
from support.api.socket_asks import hear_ends, socket_of, tell
from support.machine.waits import HANG_SECONDS, wait_until

from rootgraft.api.http import connection

HI: list[Any] = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"type": "generate", "id": "a", "messages": HI}
CHANGING = re.compile(r'"(id|response_id)": ?"[^"]*"')
METHOD = f"{GENERATION}/Generate"
CHANNEL = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
WAVE = 25
"""Connections that are open at a time."""
COUNTS = [pytest.param(2, marks=pytest.mark.sample), pytest.param(40, marks=pytest.mark.heavy)]
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS = {
    ":method": "POST",
    ":scheme": "http",
    ":path": METHOD,
    ":authority": "localhost",
    "content-type": "application/grpc",
    "te": "trailers",
}


def connected(port: int, *parts: bytes) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), HANG_SECONDS)
    sock.sendall(b"".join(parts))
    return sock


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2."""
    return struct.pack("!I", len(payload))[1:] + struct.pack("!BBI", kind, flags, stream) + payload


def head() -> bytes:
    """The headers of a call as literals that no table keeps."""
    texts = [each.encode() for pair in HEADERS.items() for each in pair]
    fields = [bytes([len(each)]) + each for each in texts]
    block = b"".join(b"\0" + name + value for name, value in zip(fields[::2], fields[1::2], strict=True))
    return frame(1, 4, 1, block)


def call() -> bytes:
    """All that a client sends for a call."""
    data = chat_request("hi").SerializeToString()
    return PREFACE + frame(4, 0, 0) + head() + frame(0, 1, 1, struct.pack("!BI", 0, len(data)) + data)


def socket_frame(message: dict[str, Any]) -> bytes:
    """A short message of a WebSocket's client, masked by zeros."""
    data = json.dumps(message).encode()
    return b"\x81" + bytes([0x80 | len(data)]) + bytes(4) + data


def upgrade() -> bytes:
    lines = ["GET /v1/stream HTTP/1.1", "Host: localhost", "Connection: Upgrade", "Upgrade: websocket"]
    key = base64.b64encode(bytes(16)).decode()
    return "\r\n".join([*lines, "Sec-WebSocket-Version: 13", f"Sec-WebSocket-Key: {key}", "", ""]).encode()


def upgraded(live: Live, *parts: bytes) -> socket.socket:
    """A WebSocket without a client's library, whose handshake is done."""
    sock = connected(urlsplit(live.url).port or 0, upgrade())
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):
        answer += sock.recv(1)
    assert answer.startswith(b"HTTP/1.1 101")
    sock.sendall(b"".join(parts))
    return sock


def reset(sock: socket.socket) -> None:
    """Drop a connection without a word of goodbye."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


Answers = Callable[[], list[str]]


@contextmanager
def neighbours(live: Live, rpc: RpcClient) -> Iterator[Answers]:
    """Connections that were there before; asks on each of them, and returns what they are told."""
    with socket_of(live, "/v1/stream") as sock, live.http() as http:

        def answers() -> list[Any]:
            tell(sock, ASKED)
            pieces = list(rpc.stream(METHOD, chat_request("hi"), "rootgraft.v1.GenerateChunk"))
            events = http.post("/generate_stream", json={"inputs": "hi"})
            found = [json.dumps(hear_ends(sock, 1)), *map(MessageToJson, pieces), events.text]
            return [CHANGING.sub("", each) for each in found]

        yield answers


def of_sockets(live: Live, rpc: RpcClient) -> socket.socket:
    return upgraded(live, socket_frame(ASKED))


def of_events(live: Live, rpc: RpcClient) -> socket.socket:
    return ask(live, "/v1/chat/completions", {"messages": HI, "stream": True})


def of_calls(live: Live, rpc: RpcClient) -> socket.socket:
    return connected(rpc.server.port, call())


def kept(live: Live) -> tuple[int, int, int]:
    """Descriptors and objects of this process, and its memory in bytes, without what the fake engine remembers."""
    for each in (live.async_engine.seen, live.async_engine.aborted, live.async_engine.checked):
        each.clear()
    gc.collect()
    process = psutil.Process()
    return process.num_fds(), len(gc.get_objects()), process.memory_info().rss


@pytest.fixture
def without_records() -> Iterator[None]:
    """No line of a log is kept, as pytest keeps them all for its report."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("without_records")
@pytest.mark.parametrize("waves", COUNTS)
@pytest.mark.parametrize("way", [of_sockets, of_events, of_calls])
def test_those_that_are_dropped_in_the_middle(live: Live, way: Any, waves: int) -> None:
    """A thousand of them leave descriptors, objects and memory as they were, and neighbours with the same bytes."""
    with rpc_of(live) as rpc, neighbours(live, rpc) as answers:
        wanted = answers()

        def wave() -> None:
            live.async_engine.gate = asyncio.Event()
            going = [way(live, rpc) for _ in range(WAVE)]
            wait_until(lambda: live.state.limits.active == WAVE)
            for number, each in enumerate(going):
                reset(each) if number % 2 else each.close()
            wait_until(lambda: live.state.limits.active == 0 and live.state.sockets.connections.total == 1)
            live.async_engine.gate = None
            assert answers() == wanted

        for _ in range(max(2, waves // 4)):
            wave()  # what is made once is there now
        descriptors, objects, memory = kept(live)
        for _ in range(waves):
            wave()
        # Both ends are in this process, and gRPC closes its own a little later.
        wait_until(lambda: psutil.Process().num_fds() <= descriptors + 2)
        now = kept(live)
    count = waves * WAVE
    # A connection has a hundred of them; the fake engine and pytest keep a few for each request.
    assert now[1] - objects < 1000 + 4 * count, f"{now[1] - objects} objects are left of {count} connections"
    assert now[2] - memory < 16 << 20, f"{now[2] - memory} bytes are left of {count} connections"


def test_half_open_peers_keep_nobody_waiting(live: Live) -> None:
    """They say nothing, a part of a handshake, or a part of a message; a request of theirs ends with the connection."""
    masked = socket_frame(ASKED)
    grpc_parts = (b"", PREFACE[:9], PREFACE, PREFACE + frame(4, 0, 0), PREFACE + frame(4, 0, 0) + head(), call()[:-5])
    with rpc_of(live) as rpc, neighbours(live, rpc) as answers:
        wanted = answers()
        descriptors = psutil.Process().num_fds()
        with ExitStack() as stack:
            for _ in range(8):
                for part in grpc_parts:
                    stack.enter_context(connected(rpc.server.port, part))
                for part in (b"", b"\x81", masked[:1] + b"\xfe\x10", masked[:9], masked[:-1], b"\x01\x81" + bytes(5)):
                    stack.enter_context(upgraded(live, part))
                stack.enter_context(connected(urlsplit(live.url).port or 0, upgrade()[:-2]))
            assert answers() == wanted
        wait_until(lambda: live.state.limits.active == 0 and live.state.sockets.connections.total == 1)
        wait_until(lambda: psutil.Process().num_fds() <= descriptors + 2)
        assert answers() == wanted


def test_a_peer_that_answers_no_ping_is_taken_for_gone(serve_with: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a cable that was drawn: its request does not go on for nobody."""
    monkeypatch.setattr(connection, "PING_SECONDS", 0.1)
    live: Live = serve_with(None)
    live.async_engine.gate = asyncio.Event()
    with upgraded(live, socket_frame(ASKED)):
        wait_until(lambda: len(live.async_engine.aborted) == 1)
        wait_until(lambda: live.state.limits.active == 0 and live.state.sockets.connections.total == 0)


def test_a_method_that_is_no_text_closes_the_port_for_nobody(live: Live) -> None:
    """The library's own server would end at it: it is unknown as others are, and a call that runs goes on."""
    with rpc_of(live) as rpc:
        live.async_engine.gate = gate = asyncio.Event()
        going = rpc.stream(METHOD, chat_request("hi"), "rootgraft.v1.GenerateChunk")
        wait_until(lambda: live.state.limits.active == 1)
        for _ in range(20):
            with connected(rpc.server.port, call().replace(b"Generation/", b"Generati\xf2n/")) as sock:
                told = b""
                while b"Method not found" not in told:
                    told += (part := sock.recv(4096))
                    assert part, "the server has closed the connection"
        live.async_engine.gate = None
        with grpc.insecure_channel(rpc.address, CHANNEL) as channel:
            later = RpcClient(channel, live, rpc.address, rpc.server)
            texts = [each.text for each in later.stream(METHOD, chat_request("hi"), "rootgraft.v1.GenerateChunk")]
        live.loop.call_soon_threadsafe(gate.set)
        assert "".join(texts) == "".join(each.text for each in going) == "answer 0"
