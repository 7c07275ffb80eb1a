"""Peers that are dropped in the middle of an answer, by WebSocket, events and gRPC, without a client's library."""

from __future__ import annotations

import base64
import json
import re
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from google.protobuf.json_format import MessageToJson

from support.api.api_live import Live, ask
from support.api.rpc_live import GENERATION, RpcClient, chat_request
from support.api.socket_asks import hear_ends, socket_of, tell
from support.machine.waits import HANG_SECONDS

HI: list[Any] = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"type": "generate", "id": "a", "messages": HI}
CHANGING = re.compile(r'"(id|response_id)": ?"[^"]*"')
METHOD = f"{GENERATION}/Generate"
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


WAYS = {"sockets": of_sockets, "events": of_events, "calls": of_calls}
