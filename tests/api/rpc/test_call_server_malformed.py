"""Malformed HTTP/2 frames and gRPC messages, generated with a seed: they end their own connection or call, no other."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

import grpc
import pytest
from support.api.rpc_live import GENERATION, RpcClient, chat_request
from support.machine.waits import HANG_SECONDS, wait_until

COUNTS = [pytest.param(60, marks=pytest.mark.sample), pytest.param(500, marks=pytest.mark.heavy)]
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, END_HEADERS = 1, 4
METHOD = f"{GENERATION}/GenerateUnary".encode()
ANSWER = "".join(f"{number:04d}" for number in range(450))


def frame(kind: int, flags: int, stream: int, payload: bytes = b"", length: int | None = None) -> bytes:
    size = len(payload) if length is None else length
    return struct.pack("!I", size)[1:] + bytes([kind, flags]) + struct.pack("!I", stream) + payload


def field(name: bytes, value: bytes, first: int = 0) -> bytes:
    """A field of HPACK under a name of its own, without Huffman coding; kept in the dynamic table with 64."""
    return bytes([first]) + integer(len(name), 7) + name + integer(len(value), 7) + value


def integer(value: int, bits: int, first: int = 0) -> bytes:
    most = (1 << bits) - 1
    if value < most:
        return bytes([first | value])
    value -= most
    rest = bytearray()
    while value >= 128:
        rest.append(value & 127 | 128)
        value >>= 7
    return bytes([first | most, *rest, value])


def call(stream: int, *more: bytes, flags: int = END_HEADERS, **changed: bytes | None) -> bytes:
    """The headers of a call; ``changed`` ones by their names, None for those that are left out."""
    fields = {
        b":method": b"POST", b":scheme": b"http", b":path": METHOD, b":authority": b"localhost",
        b"te": b"trailers", b"content-type": b"application/grpc",
    }  # fmt: skip
    fields |= {(name if name in ("te",) else f":{name}").encode(): value for name, value in changed.items()}
    block = b"".join(field(name, value) for name, value in fields.items() if value is not None)
    return frame(HEADERS, flags, stream, block + b"".join(more))


def sent(data: bytes, flag: int = 0, length: int | None = None) -> bytes:
    """A message of gRPC."""
    return bytes([flag]) + struct.pack("!I", len(data) if length is None else length) + data


def nested(depth: int) -> bytes:
    """Groups and messages within each other, which a parser may follow by recursion."""
    data = b""
    for number in range(depth):
        data = b"\x0b" + data + b"\x0c" if number % 2 else b"\x0a" + integer(len(data), 7) + data
        if len(data) > 60_000:
            break
    return data


def no_preface(rng: random.Random) -> bytes:
    return rng.choice((
        rng.randbytes(rng.randrange(1, 200)),
        PREFACE[: rng.randrange(len(PREFACE))],
        PREFACE.replace(b"SM", b"XX"),
        b"POST " + METHOD + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200),
    ))  # fmt: skip


def any_frames(rng: random.Random) -> bytes:
    """Frames of any kind, flags, stream and length."""
    frames = (
        frame(
            rng.randrange(12), rng.randrange(256), rng.choice((0, 1, 2, 3, 1 << 31)), rng.randbytes(rng.randrange(40))
        )
        for _ in range(rng.randrange(1, 8))
    )
    return b"".join(frames)


def wrong_lengths(rng: random.Random) -> bytes:
    payload = rng.randbytes(rng.randrange(40))
    length = rng.choice((0, 1, len(payload) + 5, 16_385, (1 << 24) - 1))
    return frame(rng.choice((DATA, HEADERS, SETTINGS, PING, RESET, WINDOW, GOAWAY)), END_HEADERS, 1, payload, length)


def wrong_settings(rng: random.Random) -> bytes:
    pairs = [(4, 1 << 31), (5, 0), (5, 1 << 24), (2, 7), (1, (1 << 32) - 1), (3, 0), (6, 0), (9, 1)]
    payload = b"".join(struct.pack("!HI", *pair) for pair in rng.sample(pairs, rng.randrange(1, 5)))
    return frame(SETTINGS, rng.choice((0, 0, 1)), rng.choice((0, 0, 1)), payload + rng.choice((b"", b"x")))


def floods(rng: random.Random) -> bytes:
    """Many frames that each want an answer, or that begin and leave a call."""
    many = rng.randrange(200, 2000)
    match rng.randrange(5):
        case 0:
            return frame(SETTINGS, 0, 0, struct.pack("!HI", 4, 65_535)) * many
        case 1:
            return frame(PING, 0, 0, bytes(8)) * many
        case 2:
            numbers = range(1, many, 2)
            return b"".join(call(each) + frame(RESET, 0, each, struct.pack("!I", 8)) for each in numbers)
        case 3:
            return call(1) + frame(DATA, 0, 1) * many
        case _:
            return frame(PRIORITY, 0, 1, struct.pack("!IB", 1, 9)) * many + frame(WINDOW, 0, 0, b"\0\0\0\1") * many


def continuations(rng: random.Random) -> bytes:
    parts = frame(CONTINUATION, 0, 1, field(b"x-more", b"v" * rng.randrange(2000))) * rng.randrange(1, 300)
    begun = call(1, flags=0)
    return rng.choice((begun + parts, begun + parts + frame(PING, 0, 0, bytes(8)), parts, begun + call(3)))


def header_bombs(rng: random.Random) -> bytes:
    """A field of the dynamic table again and again, integers without an end, indices that are not there."""
    kept = field(b"x-bomb", b"v" * 3900, 64)
    return rng.choice((
        call(1, kept, integer(62, 7, 128) * rng.randrange(1000, 12_000)),
        call(1, kept, kept, kept),
        call(1, integer(rng.randrange(63, 1 << 30), 7, 128)),
        call(1, b"\xff" + b"\x80" * rng.randrange(1, 40) + b"\x01"),
        call(1, integer(1 << 30, 5, 32)),
        call(1, b"\x00\x83" + rng.randbytes(3) + b"\x85" + rng.randbytes(5)),
        call(1, field(b"X-Upper", b"v"), field(b"x\0", b"a\r\nb"), field(b"", b"")),
        call(1, *(field(b"x-%d" % number, b"v") for number in range(rng.randrange(600)))),
    ))  # fmt: skip


def wrong_calls(rng: random.Random) -> bytes:
    """Headers that are no call's, then a message and the end of the stream."""
    begun = rng.choice((
        call(1, path=None), call(1, path=rng.randbytes(9)), call(1, path=b"/" * 5000), call(1, method=b"GET"),
        call(1, method=None), call(1, scheme=b"gopher"), call(1, te=None), call(1, field(b":late", b"v")),
        call(1, field(b"grpc-timeout", rng.choice((b"0n", b"-1S", b"9" * 20 + b"H", b"x")))),
        call(1, field(b"grpc-encoding", rng.choice((b"gzip", b"nope", rng.randbytes(5))))),
        call(1, field(b"content-length", b"7")), call(1, field(b"x-bin", rng.randbytes(9))), call(0), call(2),
    ))  # fmt: skip
    return begun + frame(DATA, END_STREAM, 1, sent(b"\x12\x02hi"))


def wrong_messages(rng: random.Random) -> bytes:
    data = chat_request("hi").SerializeToString()
    message = rng.choice((
        sent(data, length=len(data) + rng.randrange(1, 9)),
        sent(data, length=rng.randrange(len(data))),
        sent(data, length=(1 << 32) - 1),
        sent(data, flag=rng.randrange(1, 256)),
        sent(data[: rng.randrange(1, len(data))]),
        sent(rng.randbytes(rng.randrange(1, 60))),
        sent(nested(rng.randrange(90, 3000)))[:16_000],
        sent(data) * rng.randrange(2, 9),
        b"",
    ))  # fmt: skip
    path = rng.choice((METHOD, b"/inference.GRPCInferenceService/ModelStreamInfer", f"{GENERATION}/Generate".encode()))
    return call(1, path=path) + frame(DATA, rng.choice((0, END_STREAM)), 1, message)


def wrong_streams(rng: random.Random) -> bytes:
    """Frames for streams that have ended, or have not begun, and windows beyond their limit."""
    ended = call(1, flags=END_HEADERS | END_STREAM)
    return rng.choice((
        ended + frame(DATA, 0, 1, sent(b"x")), ended + ended, frame(DATA, 0, 7, b"x"), call(5) + call(3),
        call(1) + frame(WINDOW, 0, 1, b"\x7f\xff\xff\xff") * 2, call(1) + frame(WINDOW, 0, 1, bytes(4)),
        frame(PUSH, END_HEADERS, 1, b"\0\0\0\2"), frame(GOAWAY, 0, 0, bytes(8)) + call(1),
        call(1) + frame(PRIORITY, 0, 1, struct.pack("!IB", 1, 0)), call(1) + frame(RESET, 0, 3, bytes(4)),
        call(1) + frame(DATA, 8, 1, b"\xff\0"), frame(HEADERS, END_HEADERS | 8 | 32, 1, b"\xff\0\0\0\1"),
    ))  # fmt: skip


KINDS: tuple[Callable[[random.Random], bytes], ...] = (
    no_preface, any_frames, wrong_lengths, wrong_settings, floods, continuations, header_bombs, wrong_calls,
    wrong_messages, wrong_streams,
)  # fmt: skip


def strike(address: str, kind: Callable[[random.Random], bytes], rng: random.Random) -> None:
    """Send one connection's bytes, and read what comes until the server has closed it or there is enough of it."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), HANG_SECONDS) as sock, suppress(OSError):
        data = kind(rng)
        if kind is not no_preface:
            data = PREFACE + frame(SETTINGS, 0, 0) + data
        sock.setblocking(False)  # a server that answers much is not read while this is sent
        sock.send(data)
        sock.settimeout(HANG_SECONDS)
        sock.shutdown(socket.SHUT_WR)
        while rng.random() < 0.9 and sock.recv(65_536):
            pass


def test_a_method_whose_name_is_no_utf8_is_unknown(rpc: RpcClient) -> None:
    """The library's own task of calls would end at it, and with it the port."""
    health = rpc.channel.unary_unary("/grpc.health.v1.Health/Check")
    health(b"", timeout=HANG_SECONDS)
    host, port = rpc.address.split(":")
    for _ in range(3):
        with socket.create_connection((host, int(port)), HANG_SECONDS) as sock:
            asked = call(1, path=b"/\xff", flags=END_HEADERS | END_STREAM)
            sock.sendall(PREFACE + frame(SETTINGS, 0, 0) + asked)
            told = b""
            while b"Method not found" not in told:
                told += (part := sock.recv(65_536))
                assert part, "the server has closed the connection"
        assert health(b"", timeout=HANG_SECONDS)


@pytest.mark.parametrize("count", COUNTS)
def test_frames_that_no_client_sends(rpc: RpcClient, count: int) -> None:
    """While they come, the stream of another connection is what it is alone; afterwards nothing of them is left."""
    live, rng = rpc.live, random.Random(count)
    live.async_engine.say = lambda request, index: ANSWER
    tasks, files = _held(rpc)
    stream = rpc.stream(
        f"{GENERATION}/Generate", chat_request("hi"), "rootgraft.v1.GenerateChunk", timeout=HANG_SECONDS
    )
    texts = [next(stream).text]
    for number in range(count):
        strike(rpc.address, KINDS[number % len(KINDS)], rng)
        if number % 10 == 0:
            texts.append(next(stream).text)
    assert "".join(texts) + "".join(each.text for each in stream) == ANSWER
    wait_until(lambda: live.state.limits.active == 0 and rpc.server.shares.calls.total == 0)
    wait_until(lambda: all(now <= before for now, before in zip(_held(rpc), (tasks, files), strict=True)))
    wait_until(lambda: _is_answered(rpc))


def _is_answered(rpc: RpcClient) -> bool:
    """Whether a call is answered. Of more than a thousand that wait to be taken the library cancels some at random."""
    try:
        told = rpc.unary(f"{GENERATION}/GenerateUnary", chat_request("hi"), "rootgraft.v1.GenerateResponse")
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.CANCELLED
        return False
    return bool(told.text == ANSWER)


def _held(rpc: RpcClient) -> tuple[int, int]:
    """Tasks of the event loop and descriptors."""

    async def tasks() -> int:
        return len(asyncio.all_tasks())

    found = asyncio.run_coroutine_threadsafe(tasks(), rpc.live.loop).result(HANG_SECONDS)
    return found, len(os.listdir("/proc/self/fd"))
