"""Rows of requests that end early, at every door: free within two steps, as the metrics tell."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.api.api_live import Live, ask, make_state, serve
from support.api.core_live import in_loop, put_engine, tokenizer_folder
from support.api.rpc_live import GENERATION, generate_request, rpc_of
from support.api.socket_asks import hear, socket_of, tell
from support.engine.core_client import CoreClient
from support.machine.waits import wait_until

from rootgraft.engine.messages import Heartbeat

LONG: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True}
ASKED = {"prompt": "hello", **LONG}


@dataclass
class Scene:
    """A server over one engine core.

    Attributes:
        holds: whether it rests between two steps.
        running: after each step, how many sequences had a row.
        aborts: for each abort, how many steps had been done.
    """

    live: Live
    client: CoreClient
    holds: threading.Event
    running: list[float] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)

    def watch(self) -> None:
        """Note every step and every abort."""
        abort = self.client.abort

        def noted(ids: Any) -> None:
            self.aborts.append(len(self.running))
            abort(ids)

        def stepped(heartbeat: Heartbeat) -> None:
            self.running.append(heartbeat.stats["running"])
            self.live.client.stats = heartbeat.stats  # where the metrics read them

        self.client.abort = noted  # type: ignore[method-assign]
        self.client.on_heartbeat = stepped

    def metric(self) -> float:
        with self.live.http() as http:
            found = re.search(r"^rootgraft:num_requests_running\S* ([0-9.]+)$", http.get("/metrics").text, re.MULTILINE)
        assert found is not None
        return float(found[1])


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder: Path
    folder, size = tokenizer_folder(tmp_path_factory.mktemp("model"))
    for live in serve(make_state()):
        holds = threading.Event()
        made = Scene(live, CoreClient(vocab_size=size, step_seconds=0.01, rests=holds.is_set), holds)
        put_engine(live, made.client, folder)
        made.watch()
        yield made
        in_loop(live, made.client.close())


Stop = Callable[[], None]


@contextmanager
def cancelled(live: Live) -> Iterator[Stop]:
    with socket_of(live, "/v1/stream") as sock:
        tell(sock, {"type": "generate", "id": "a", **ASKED})
        assert hear(sock)["type"] == "token"
        yield lambda: tell(sock, {"type": "cancel", "id": "a"})


@contextmanager
def left_socket(live: Live) -> Iterator[Stop]:
    with socket_of(live, "/v1/responses") as sock:
        tell(sock, {"type": "response.create", "input": "hello", "max_output_tokens": 900, "ignore_eos": True})
        while hear(sock)["type"] != "response.output_text.delta":
            pass
        yield lambda: sock.socket.shutdown(socket.SHUT_RDWR)


@contextmanager
def left_call(live: Live) -> Iterator[Stop]:
    with rpc_of(live) as rpc:
        request = generate_request(prompt="hello", sampling=LONG)
        stream = rpc.stream(f"{GENERATION}/Generate", request, "rootgraft.v1.GenerateChunk")
        next(stream)
        yield stream.cancel


@contextmanager
def left_stream(live: Live) -> Iterator[Stop]:
    with ask(live, "/v1/completions", {**ASKED, "stream": True}) as sock:
        assert sock.recv(12) == b"HTTP/1.1 200"
        yield sock.close


@contextmanager
def deleted(live: Live) -> Iterator[Stop]:
    body = {"input": "hello", "max_output_tokens": 900, "ignore_eos": True, "background": True}
    with live.http() as http:
        an_id = http.post("/v1/responses", json=body).json()["id"]
        yield lambda: http.post(f"/v1/responses/{an_id}/cancel").raise_for_status() and None


WAYS = (cancelled, left_socket, left_call, left_stream, deleted)


@pytest.mark.parametrize("way", WAYS)
def test_a_row_is_free_within_two_steps(scene: Scene, way: Callable[[Live], AbstractContextManager[Stop]]) -> None:
    """Beside a stream that goes on, so that steps do."""
    with cancelled(scene.live) as end_other:
        with way(scene.live) as stop:
            wait_until(lambda: scene.running[-1] == 2)
            scene.holds.set()  # or both might end by themselves
            aborts = len(scene.aborts)
            stop()
            wait_until(lambda: len(scene.aborts) > aborts)
            scene.holds.clear()
            at = scene.aborts[aborts]
            wait_until(lambda: len(scene.running) > at + 1)
            assert scene.running[at + 1] == 1, scene.running[at - 1 : at + 2]
            assert scene.metric() == 1
        end_other()
    wait_until(lambda: scene.live.state.limits.active == 0)
