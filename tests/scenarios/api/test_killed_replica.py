"""A replica dies under streams of every door: none is lost, and each has the tokens that it has undisturbed."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.api.api_live import Live, make_state, serve
from support.api.core_live import in_loop, put_engine, tokenizer_folder
from support.api.rpc_live import GENERATION, INFERENCE, RpcClient, generate_request, rpc_of
from support.api.socket_asks import hear, socket_of, tell
from support.engine.core_client import CoreClient
from support.machine.waits import HANG_SECONDS, wait_until

from rootgraft.api.rpc.messages import message
from rootgraft.fleet.dispatcher import DispatcherLimits
from rootgraft.fleet.fleet import Fleet
from rootgraft.fleet.replica_launcher import ProcessLauncher

TOKENS, HELD_AFTER = 24, 12
"""Of an answer; steps after which a replica rests, so that no stream has ended before it dies."""
SAMPLED = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0, "seed": 3}


@dataclass
class Scene:
    """A server over two replicas.

    Attributes:
        holds: whether replicas rest once they have done their steps.
        clients: of the replicas, in the order in which they were made.
    """

    live: Live
    rpc: RpcClient
    holds: bool = False
    clients: list[CoreClient] = field(default_factory=list)

    def add(self, vocab_size: int) -> CoreClient:
        """Make a replica."""
        steps = itertools.count()

        def rests() -> bool:
            return self.holds and next(steps) >= HELD_AFTER

        self.clients.append(CoreClient(vocab_size=vocab_size, step_seconds=0.001, rests=rests))
        return self.clients[-1]

    def num_submitted(self) -> int:
        """Return how many sequences were handed to replicas."""
        return sum(len(each.submits) for each in self.clients)


Begun = Callable[[], None]
"""Called at each piece of an answer."""


def plain_socket(scene: Scene, prompt: str, begun: Begun) -> Any:
    ids: list[int] = []
    with socket_of(scene.live, "/v1/stream") as sock:
        tell(sock, {"type": "generate", "id": "a", "prompt": prompt, **SAMPLED})
        while (event := hear(sock))["type"] == "token":
            ids += event.get("token_ids", ())
            begun()
    return ids, event["finish_reason"], event["usage"]["completion_tokens"]


def response_socket(scene: Scene, prompt: str, begun: Begun) -> Any:
    text = ""
    asked = {"type": "response.create", "input": prompt, "max_output_tokens": TOKENS, "ignore_eos": True, "seed": 3}
    with socket_of(scene.live, "/v1/responses") as sock:
        tell(sock, asked)
        while (event := hear(sock))["type"] not in ("response.incomplete", "response.completed", "error"):
            if event["type"] == "response.output_text.delta":
                text += event["delta"]
                begun()
    assert event["response"]["output"][0]["content"][0]["text"] == text
    return text, event["type"], event["response"]["usage"]["output_tokens"]


def event_stream(scene: Scene, prompt: str, begun: Begun) -> Any:
    """Of a background response, whose client leaves after some events and comes back."""
    asked = {"input": prompt, "max_output_tokens": TOKENS, "ignore_eos": True, "seed": 3}
    events: list[dict[str, Any]] = []
    with scene.live.http() as http:
        with http.stream("POST", "/v1/responses", json={**asked, "background": True, "stream": True}) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: "):
                    events.append(json.loads(line[6:]))
                if len(events) == 8:
                    break
        begun()
        query = {"stream": True, "starting_after": events[-1]["sequence_number"]}
        with http.stream("GET", f"/v1/responses/{events[0]['response']['id']}", params=query) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: "):
                    events.append(json.loads(line[6:]))
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    text = "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta")
    return text, events[-1]["type"], events[-1]["response"]["usage"]["output_tokens"]


def typed_call(scene: Scene, prompt: str, begun: Begun) -> Any:
    request = generate_request(prompt=prompt, sampling=SAMPLED)
    ids: list[int] = []
    for piece in scene.rpc.stream(
        f"{GENERATION}/Generate", request, "rootgraft.v1.GenerateChunk", timeout=HANG_SECONDS
    ):
        ids += piece.token_ids
        begun()
    return ids, piece.finish_reason, piece.usage.completion_tokens


def inference_call(scene: Scene, prompt: str, begun: Begun) -> Any:
    request: Any = message("inference.ModelInferRequest")(model_name="tiny")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(prompt.encode())
    request.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    for name in ("max_tokens", "seed"):
        request.parameters[name].int64_param = SAMPLED[name]
    request.parameters["ignore_eos"].bool_param = True
    texts = []
    answer = "inference.ModelStreamInferResponse"
    method = f"{INFERENCE}/ModelStreamInfer"
    for each in scene.rpc.both(method, iter([request]), answer, timeout=HANG_SECONDS):
        assert not each.error_message
        texts.append(each.infer_response.outputs[0].contents.bytes_contents[0])
        begun()
    assert each.infer_response.parameters["triton_final_response"].bool_param
    return b"".join(texts)


DOORS = (plain_socket, response_socket, event_stream, typed_call, inference_call)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder, size = tokenizer_folder(tmp_path_factory.mktemp("model"))
    state = make_state()
    for live in serve(state):
        with rpc_of(live) as rpc:
            made = Scene(live, rpc)
            yield from started(made, folder, size)


def started(scene: Scene, folder: Path, size: int) -> Iterator[Scene]:
    """Put a fleet in the place of the server's engine."""

    make: Any = partial(scene.add, size)
    fleet = Fleet(ProcessLauncher(make), 2, DispatcherLimits(heartbeat_seconds=HANG_SECONDS))
    put_engine(scene.live, fleet, folder)
    yield scene
    in_loop(scene.live, fleet.close())


def test_streams_of_all_doors_go_on(scene: Scene) -> None:
    asked = [(door, f"{door.__name__} {number}") for number in range(2) for door in DOORS]
    fleet = scene.live.state.engine.client
    with ThreadPoolExecutor(len(asked)) as pool:

        def answers(begun: Begun) -> list[Future[Any]]:
            return [pool.submit(door, scene, prompt, begun) for door, prompt in asked]

        plain = [each.result(HANG_SECONDS) for each in answers(lambda: None)]
        begun = threading.Event()
        scene.holds = True
        before = scene.num_submitted()
        going = answers(begun.set)
        # All have come, some have tokens, and others wait for a row: none can have ended.
        wait_until(lambda: begun.is_set() and scene.num_submitted() == before + len(asked))
        victim = max(fleet.replicas.values(), key=lambda each: len(each.submits))
        scene.live.loop.call_soon_threadsafe(victim.die)
        wait_until(lambda: len(scene.clients) == 3)
        scene.holds = False
        assert [each.result(HANG_SECONDS) for each in going] == plain
    assert fleet.num_replays > 0
    wait_until(lambda: scene.live.state.limits.active == 0)
