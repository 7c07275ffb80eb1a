"""Almost right bodies and messages for Ollama's, TGI's, Triton's and our gRPC doors: errors, and nothing that stays."""

from __future__ import annotations

import copy
import json
import random
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
from google.protobuf.message import Message
from support.api.api_live import Live
from support.api.rpc_live import GENERATION, INFERENCE, RpcClient, rpc_of
from support.machine.waits import HANG_SECONDS, wait_until

from rootgraft.api.rpc.messages import message

HI = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {
    "/api/chat": {"model": "tiny", "messages": HI, "options": {"num_predict": 4}, "format": "", "stream": False},
    "/api/generate": {"model": "tiny", "prompt": "hi", "raw": True, "options": {"stop": ["a"]}, "think": False},
    "/api/embed": {"model": "tiny", "input": ["a", "b"], "dimensions": 2, "truncate": True},
    "/api/show": {"model": "tiny", "verbose": True},
    "/generate": {"inputs": "hi", "parameters": {"max_new_tokens": 4, "grammar": {"type": "regex", "value": "a+"}}},
    "/generate_stream": {"inputs": "hi", "parameters": {"max_new_tokens": 4, "top_n_tokens": 2, "truncate": 1}},
    "/": {"inputs": "hi", "stream": True, "parameters": {"details": True, "stop": ["a"]}},
    "/v2/models/tiny/infer": {
        "id": "1",
        "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}],
        "outputs": [{"name": "text_output"}],
        "parameters": {"max_tokens": 4},
    },
    "/v2/repository/index": {"ready": True},
}
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1e308, 2**70, "", "x" * 300, "\u0000", "\ud7ff", [], {}, [[]], {"a": []}, [None]),
    *({"$ref": "#"}, {"type": "object", "properties": {"a": {"$ref": "#"}}}, "(((a?){64}){64}){64}"),
)
METHODS = {
    f"{GENERATION}/GenerateUnary": ("rootgraft.v1.GenerateRequest", "rootgraft.v1.GenerateResponse"),
    f"{GENERATION}/Generate": ("rootgraft.v1.GenerateRequest", "rootgraft.v1.GenerateChunk"),
    f"{INFERENCE}/ModelInfer": ("inference.ModelInferRequest", "inference.ModelInferResponse"),
    f"{INFERENCE}/ModelStreamInfer": ("inference.ModelInferRequest", "inference.ModelStreamInferResponse"),
}
COUNTS = [pytest.param(20, marks=pytest.mark.sample), pytest.param(500, marks=pytest.mark.heavy)]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a body with each of its keys."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


def mutated(rng: random.Random, good: dict[str, Any]) -> bytes:
    """A body that is almost right."""
    body = copy.deepcopy(good)
    owner, key = rng.choice(list(places(body)))
    match rng.randrange(7):
        case 0 | 1 | 2:
            owner[key] = rng.choice(ODD)
        case 3:
            del owner[key]
        case 4:
            body[rng.choice(("n", "best_of", "context", "images", "suffix", "watermark", "no such field"))] = 1
        case 5:
            return rng.choice((rng.randbytes(40), b"[" * 3000, b"", b"null", b'{"a":' * 2000))
        case _:
            text = json.dumps(body).encode()
            return text[: rng.randrange(len(text))]
    return json.dumps(body).encode()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("path", GOOD)
def test_bodies_that_are_almost_right(live: Live, path: str, count: int) -> None:
    rng = random.Random(path)
    with live.http(headers={"content-type": "application/json"}) as http:
        before = http.post(path, content=json.dumps(GOOD[path]))
        assert before.status_code == 200, before.text
        refused = 0
        for _ in range(count):
            body = mutated(rng, GOOD[path])
            reply = http.post(path, content=body)
            assert reply.status_code < 500, (body[:300], reply.text)
            if reply.status_code >= 400:
                refused += 1
                assert reply.json()["error"], reply.text
        after = http.post(path, content=json.dumps(GOOD[path]))
    assert after.status_code == 200 and refused > count / 4
    wait_until(lambda: live.state.limits.active == 0)


def good_request(kind: str) -> Message:
    if kind.startswith("rootgraft"):
        request: Any = message(kind)(model="tiny", prompt="hi", regex="a+")
        request.sampling.max_tokens = 4
        return request  # type: ignore[no-any-return]
    request = message(kind)(model_name="tiny", id="1")
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(b"hi")
    request.parameters["max_tokens"].int64_param = 4
    return request  # type: ignore[no-any-return]


def ask(client: RpcClient, method: str, data: bytes | Message, answer: str) -> grpc.StatusCode:
    """The status of a call, whose answers are read to the end."""
    try:
        if method.endswith("ModelStreamInfer"):
            list(client.both(method, iter([data]), answer, timeout=HANG_SECONDS))
        elif method.endswith("Generate"):
            list(client.stream(method, data, answer, timeout=HANG_SECONDS))
        else:
            client.unary(method, data, answer, timeout=HANG_SECONDS)
    except grpc.RpcError as error:
        return error.code()  # type: ignore[no-any-return]
    return grpc.StatusCode.OK


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("method", METHODS)
def test_messages_that_are_almost_right(live: Live, method: str, count: int) -> None:
    rng = random.Random(method)
    kind, answer = METHODS[method]
    good = good_request(kind)
    whole = good.SerializeToString()
    with rpc_of(live) as client:
        assert ask(client, method, good, answer) is grpc.StatusCode.OK
        for _ in range(count):
            data = bytearray(whole)
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            sent = bytes(data[: rng.randrange(len(data))] if rng.random() < 0.3 else data)
            code = ask(client, method, sent, answer)
            assert code not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN), (sent, code)
        assert ask(client, method, good, answer) is grpc.StatusCode.OK
    wait_until(lambda: live.state.limits.active == 0)


def test_half_open_peers_and_those_that_break_off_keep_nobody_waiting(live: Live) -> None:
    """Heads and bodies that never end, and streams whose client resets the connection in the middle."""
    host = urlsplit(live.url)
    body = json.dumps({"model": "tiny", "messages": HI})
    head = f"POST /api/chat HTTP/1.1\r\nhost: {host.netloc}\r\ncontent-type: application/json\r\n"
    with ExitStack() as stack:
        for part in (head, f"{head}content-length: {len(body)}\r\n\r\n{body[:9]}", "G", ""):
            for _ in range(20):
                sock = stack.enter_context(socket.create_connection((host.hostname, host.port), HANG_SECONDS))
                sock.sendall(part.encode())
        for _ in range(20):
            sock = socket.create_connection((host.hostname, host.port), HANG_SECONDS)
            sock.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
            assert sock.recv(12) == b"HTTP/1.1 200"
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        with live.http() as http:
            assert http.post("/generate", json={"inputs": "hi"}).json() == {"generated_text": "answer 0"}
        wait_until(lambda: live.state.limits.active == 0)
