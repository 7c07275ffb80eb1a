"""Clients that ask for much and read nothing, at every door that streams.

What waits for them is bounded, the request of who does not read for too long is ended, and a neighbour at the same door
has the bytes that it has without them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.json_format import MessageToJson
from support.api.api_live import Live, ask
from support.api.rpc_live import GENERATION, INFERENCE, RpcClient, generate_request, rpc_of
from support.api.socket_asks import hear_ends, socket_of, tell
from support.machine.waits import HANG_SECONDS, wait_until
from websockets.sync.client import ClientConnection

from rootgraft.api.config import ServerConfig
from rootgraft.api.generate import sse
from rootgraft.api.rpc.messages import message

LONG = 8 << 20
"""Bytes of the answer that nobody reads, a frame of which is 16 KiB: far more than sockets and buffers hold."""
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "www"}]}
MOST: dict[str, Any] = {"max_tokens": LONG}
DOORS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**CHAT, **MOST, "stream": True},
    "/v1/completions": {"prompt": "www", **MOST, "stream": True},
    "/v1/messages": {"model": "tiny", **CHAT, **MOST, "stream": True},
    "/v1/responses": {"input": "www", "stream": True, "store": False},
    "/api/chat": {"model": "tiny", **CHAT, "options": {"num_predict": LONG}},
    "/api/generate": {"model": "tiny", "prompt": "www", "options": {"num_predict": LONG}},
    "/generate_stream": {"inputs": "www", "parameters": {"max_new_tokens": LONG}},
}
CHANGING = re.compile(r'"(created|created_at|completed_at|id|item_id|response_id|\w+_duration)": ?("[^"]*"|[0-9.]+)')


@dataclass
class Scene:
    """A server, and how long it lets a client read nothing."""

    live: Live
    set_patience: Callable[[float], None]

    def wait_given_up(self) -> None:
        """Wait until the slow request has ended, and it alone: the others have as long as a busy machine needs."""
        self.set_patience(0.05)
        wait_until(lambda: self.live.state.limits.active == 0)
        self.set_patience(HANG_SECONDS)
        # It was left before its end: so much of it was never made.
        assert len(self.live.async_engine.aborted) == 1


@pytest.fixture
def scene(serve_with: Callable[[ServerConfig], Live], monkeypatch: pytest.MonkeyPatch) -> Scene:
    live = serve_with(ServerConfig(stream_heartbeat=0.05))  # at each heartbeat it looks at the time too
    engine = live.async_engine
    engine.set_max_len(2 * LONG)
    engine.step_tokens = 1 << 14
    engine.say = lambda request, index: "x" * LONG if ord("w") in request.tokens else "answer"
    made = Scene(live, lambda seconds: monkeypatch.setattr(sse, "_SEND_TIMEOUT", seconds))
    made.set_patience(HANG_SECONDS)
    return made


def text(http: httpx.Client, path: str) -> str:
    """A neighbour's answer, without what changes from one to the next."""
    reply = http.post(path, json=json.loads(json.dumps(DOORS[path]).replace("www", "hi")))
    assert reply.status_code == 200, reply.text
    return CHANGING.sub("", reply.text)


@pytest.mark.parametrize("path", DOORS)
def test_a_stream_that_nobody_reads(scene: Scene, path: str) -> None:
    live = scene.live
    with live.http() as http, ask(live, path, DOORS[path], receive_buffer=4096):
        wait_until(lambda: bool(live.async_engine.seen))
        beside = text(http, path)
        scene.wait_given_up()
        assert beside == text(http, path)


ASKED: dict[str, dict[str, Any]] = {
    "/v1/stream": {"type": "generate", "id": "a", **CHAT, **MOST},
    "/v1/responses": {"type": "response.create", "input": "www", "store": False},
}


@pytest.mark.parametrize("path", ASKED)
def test_messages_of_a_websocket_that_nobody_reads(scene: Scene, path: str) -> None:
    live = scene.live
    ends = ("done", "response.completed", "error")
    short = json.loads(json.dumps(ASKED[path]).replace("www", "hi"))

    def messages(sock: ClientConnection) -> str:
        tell(sock, short)
        return CHANGING.sub("", json.dumps(hear_ends(sock, 1, ends)))

    with socket_of(live, path) as neighbour:
        assert messages(neighbour)  # the connection is open: it has the patience of before
        live.state.sockets.send_seconds = 0.05
        with socket_of(live, path, max_queue=1, close_timeout=0.1) as slow:
            tell(slow, ASKED[path])
            wait_until(lambda: len(live.async_engine.seen) == 2)
            beside = messages(neighbour)
            wait_until(lambda: live.state.sockets.connections.total == 1 and live.state.limits.active == 0)
            assert beside == messages(neighbour) and len(live.async_engine.aborted) == 1


def infer_request(prompt: str) -> Any:
    request: Any = message("inference.ModelInferRequest")(model_name="tiny")
    text_input = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    text_input.contents.bytes_contents.append(prompt.encode())
    request.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    request.parameters["max_tokens"].int64_param = LONG
    return request


def generate(rpc: RpcClient, prompt: str) -> Iterator[Any]:
    request = generate_request(prompt=prompt, sampling={"max_tokens": LONG})
    return rpc.stream(f"{GENERATION}/Generate", request, "rootgraft.v1.GenerateChunk")  # type: ignore[no-any-return]


def infer(rpc: RpcClient, prompt: str) -> Iterator[Any]:
    answer = "inference.ModelStreamInferResponse"
    return rpc.both(f"{INFERENCE}/ModelStreamInfer", iter([infer_request(prompt)]), answer)  # type: ignore[no-any-return]


@pytest.mark.parametrize("ask_for", [generate, infer])
def test_messages_of_a_call_that_nobody_reads(scene: Scene, ask_for: Callable[[RpcClient, str], Iterator[Any]]) -> None:
    """It is told that its answer is not whole, however late it reads on."""
    with rpc_of(scene.live) as rpc:
        slow = ask_for(rpc, "www")
        next(slow)
        beside = [CHANGING.sub("", MessageToJson(each)) for each in ask_for(rpc, "hi")]
        scene.wait_given_up()
        assert beside == [CHANGING.sub("", MessageToJson(each)) for each in ask_for(rpc, "hi")]
        if ask_for is infer:
            *_, last = slow
            assert "was aborted" in last.error_message
        else:
            with pytest.raises(grpc.RpcError) as caught:
                list(slow)
            assert caught.value.code() is grpc.StatusCode.ABORTED
