"""Ids of another tenant: every door that takes one answers as for an id that nobody has, and nothing of it changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.api.api_live import Live, make_state, serve
from support.api.key_files import entry, write
from support.api.rpc_live import GENERATION, RpcClient, generate_request, rpc_of
from support.api.socket_asks import hear, hear_ends, socket_of, tell
from support.machine.waits import HANG_SECONDS, wait_until

from rootgraft.api.batches.batch_service import BatchService
from rootgraft.api.config import ServerConfig

HI = [{"role": "user", "content": "hi"}]
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": HI}}
OWNER, OTHER = "alice", "bob"
RESPONSE, RUNNING, ITEM, FILE, BATCH = "response", "running", "item", "file", "batch"
PREFIXES = {RESPONSE: "resp_", RUNNING: "resp_", ITEM: "msg_", FILE: "file-", BATCH: "batch_"}

Ask = Callable[[httpx.Client, str], httpx.Response]


def get(path: str) -> Ask:
    return lambda http, an_id: http.get(path.format(an_id))


def post(path: str, body: Callable[[str], dict[str, Any]] | None = None) -> Ask:
    return lambda http, an_id: http.post(path.format(an_id), json=None if body is None else body(an_id))


DOORS: dict[str, tuple[str, Ask]] = {
    "get a response": (RESPONSE, get("/v1/responses/{}")),
    "resume a stream": (RESPONSE, get("/v1/responses/{}?stream=true&starting_after=1")),
    "resume one that runs": (RUNNING, get("/v1/responses/{}?stream=true")),
    "list input items": (RESPONSE, get("/v1/responses/{}/input_items")),
    "cancel a response": (RUNNING, post("/v1/responses/{}/cancel")),
    "delete a response": (RESPONSE, lambda http, an_id: http.delete(f"/v1/responses/{an_id}")),
    "delete one that runs": (RUNNING, lambda http, an_id: http.delete(f"/v1/responses/{an_id}")),
    "go on from a response": (RESPONSE, post("/v1/responses", lambda i: {"input": "x", "previous_response_id": i})),
    "count behind a response": (
        RESPONSE,
        post("/v1/responses/input_tokens", lambda i: {"input": "x", "previous_response_id": i}),
    ),
    "refer to an item": (
        ITEM,
        post("/v1/responses", lambda i: {"input": [{"type": "item_reference", "id": i}, *HI]}),
    ),
    "get a file": (FILE, get("/v1/files/{}")),
    "read a file": (FILE, get("/v1/files/{}/content")),
    "delete a file": (FILE, lambda http, an_id: http.delete(f"/v1/files/{an_id}")),
    "list files after one": (FILE, get("/v1/files?after={}")),
    "make a batch of a file": (
        FILE,
        post(
            "/v1/batches",
            lambda i: {"input_file_id": i, "endpoint": "/v1/chat/completions", "completion_window": "24h"},
        ),
    ),
    "get a batch": (BATCH, get("/v1/batches/{}")),
    "cancel a batch": (BATCH, post("/v1/batches/{}/cancel")),
    "list batches after one": (BATCH, get("/v1/batches?after={}")),
}


@dataclass
class Scene:
    """A server of two tenants, and the ids of what the first one has."""

    live: Live
    ids: dict[str, str]

    def http(self, key: str) -> httpx.Client:
        return self.live.http(headers={"authorization": f"Bearer {key}"})

    def has_begun(self, count: int) -> bool:
        return len(self.live.async_engine.seen) == count

    def belongings(self) -> list[Any]:
        """All that the first tenant has, as it reads it."""
        with self.http(OWNER) as http:
            paths = [f"/v1/responses/{self.ids[RESPONSE]}", f"/v1/responses/{self.ids[RUNNING]}"]
            paths += [f"/v1/responses/{self.ids[RESPONSE]}?stream=true", f"/v1/files/{self.ids[FILE]}/content"]
            replies = [http.get(path) for path in [*paths, "/v1/files", "/v1/batches"]]
        assert [reply.status_code for reply in replies] == [200] * len(replies)
        return [reply.content for reply in replies]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder: Path = tmp_path_factory.mktemp("tenants")
    write(folder / "keys.json", entry(OWNER), entry(OTHER))
    options = ServerConfig(api_key_file=str(folder / "keys.json"), batch_dir=str(folder / "batches"))
    state = make_state(options)
    state.stores.batches = BatchService(folder / "batches", 1 << 20, state.limits.caller_named)
    for live in serve(state):
        made = Scene(live, {})
        with made.http(OWNER) as http:
            first = http.post("/v1/responses", json={"input": "my secret", "stream": True}).text
            created = json.loads(first.split("\n\n")[0].split("data: ")[1])["response"]["id"]
            [item] = http.get(f"/v1/responses/{created}").json()["output"]
            upload = {"file": ("in.jsonl", json.dumps(LINE))}
            file = http.post("/v1/files", files=upload, data={"purpose": "batch"}).json()["id"]
            asked = {"input_file_id": file, "endpoint": LINE["url"], "completion_window": "24h"}
            # The batch service is not resumed here: the batch waits as long as the tests run.
            batch = http.post("/v1/batches", json=asked).json()["id"]
            live.async_engine.gate = asyncio.Event()
            running = http.post("/v1/responses", json={"input": "x", "background": True}).json()["id"]
            wait_until(partial(made.has_begun, 2))
            live.async_engine.gate, gate = None, live.async_engine.gate
            made.ids |= {RESPONSE: created, RUNNING: running, ITEM: item["id"], FILE: file, BATCH: batch}
        yield made
        live.loop.call_soon_threadsafe(gate.set)
        asyncio.run_coroutine_threadsafe(state.stores.batches.close(), live.loop).result(HANG_SECONDS)


def without_id(reply: httpx.Response, an_id: str) -> tuple[int, str, set[str]]:
    """Status, text and names of headers, without the id that was asked for."""
    return reply.status_code, reply.text.replace(an_id, "ID"), set(reply.headers)


@pytest.mark.parametrize("name", DOORS)
def test_an_id_of_another_tenant_is_one_that_nobody_has(scene: Scene, name: str) -> None:
    kind, ask = DOORS[name]
    foreign, before = scene.ids[kind], scene.belongings()
    nobodys = PREFIXES[kind] + "0" * (len(foreign) - len(PREFIXES[kind]))
    with scene.http(OTHER) as http:
        told, wanted = ask(http, foreign), ask(http, nobodys)
    assert told.status_code in (400, 404) and "secret" not in told.text, told.text
    assert without_id(told, foreign) == without_id(wanted, nobodys)
    assert scene.belongings() == before


def test_lists_hold_ones_own_alone(scene: Scene) -> None:
    with scene.http(OTHER) as http:
        assert [http.get(path).json()["data"] for path in ("/v1/files", "/v1/batches")] == [[], []]


def test_a_conversation_over_a_websocket_does_not_go_on_from_anothers_response(scene: Scene) -> None:
    before = scene.belongings()
    found = []
    for an_id in (scene.ids[RESPONSE], "resp_" + "0" * 48):
        with socket_of(scene.live, "/v1/responses", key=OTHER) as sock:
            tell(sock, {"type": "response.create", "input": "x", "previous_response_id": an_id})
            found.append(hear(sock))
    assert found[0]["error"]["code"] == found[1]["error"]["code"] == "previous_response_not_found"
    assert found[0]["error"]["message"].replace(scene.ids[RESPONSE], "") == found[1]["error"]["message"].replace(
        "resp_" + "0" * 48, ""
    )
    assert scene.belongings() == before


def test_a_response_of_a_connection_is_its_own_even_for_the_same_tenant(scene: Scene) -> None:
    with socket_of(scene.live, "/v1/responses", key=OWNER) as sock:
        tell(sock, {"type": "response.create", "input": "x", "store": False})
        ends = ("response.completed", "error")
        an_id = hear_ends(sock, 1, ends)[-1]["response"]["id"]
        for key in (OTHER, OWNER):
            with scene.http(key) as http:
                assert http.get(f"/v1/responses/{an_id}").status_code == 404
                assert http.delete(f"/v1/responses/{an_id}").status_code == 404
        tell(sock, {"type": "response.create", "input": "x", "previous_response_id": an_id})
        assert hear_ends(sock, 1, ends)[-1]["type"] == "response.completed"


def test_requests_of_another_connection_are_neither_cancelled_nor_gone_on_from(scene: Scene) -> None:
    """Names of requests are those of one connection, whoever else has the same."""
    engine = scene.live.async_engine
    with (
        socket_of(scene.live, "/v1/stream", key=OWNER) as own,
        socket_of(scene.live, "/v1/stream", key=OTHER) as other,
        socket_of(scene.live, "/v1/stream", key=OWNER) as second,
    ):
        tell(own, {"type": "generate", "id": "past", "messages": [{"role": "user", "content": "secret"}]})
        assert hear_ends(own, 1)[-1]["type"] == "done"
        engine.gate = gate = asyncio.Event()
        seen, aborted = len(engine.seen), len(engine.aborted)
        tell(own, {"type": "generate", "id": "now", "messages": HI})
        wait_until(lambda: len(engine.seen) > seen)
        for sock in (other, second):
            tell(sock, {"type": "cancel", "id": "now"})
            assert hear(sock)["error"]["code"] == "request_not_found"
            tell(sock, {"type": "generate", "id": "x", "after": "past", "messages": HI})
            assert hear(sock)["error"]["code"] == "conversation_not_found"
        assert len(engine.aborted) == aborted
        engine.gate = None
        scene.live.loop.call_soon_threadsafe(gate.set)
        assert hear_ends(own, 1)[-1]["finish_reason"] == "stop"


def test_sessions_of_one_name_are_each_tenants_own(scene: Scene) -> None:
    sessions = scene.live.client.sessions
    sessions.update({(OWNER, "s"): b"mine", (OTHER, "t"): b"theirs"})
    with scene.http(OTHER) as http:
        for name, released in (("s", False), ("none", False), ("t", True)):
            reply = http.post("/v1/sessions/release", json={"prompt_cache_key": name})
            assert reply.json()["released"] is released
        for tenant in (OWNER, OTHER, ""):
            told = http.post("/v1/cache/sessions/export", json={"prompt_cache_key": "s", "tenant": tenant})
            assert told.status_code == 403 and "mine" not in told.text
        assert http.post("/v1/cache/sessions/import", content=b"known").status_code == 403
    assert sessions == {(OWNER, "s"): b"mine"}


@pytest.mark.parametrize("path", ["/v1/decisions", "/v1/chat/completions", "/v1/responses", "/v1/completions"])
def test_a_sessions_name_means_the_callers_own(scene: Scene, path: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/decisions": {"input": "x", "questions": [{"type": "predicate", "instructions": "y"}]},
        "/v1/responses": {"input": "x"},
        "/v1/completions": {"prompt": "x", "max_tokens": 3},
    }
    body = bodies.get(path, {"messages": HI, "max_tokens": 3}) | {"prompt_cache_key": "s"}
    owners = []
    for key in (OWNER, OTHER):
        with scene.http(key) as http:
            assert http.post(path, json=body).status_code == 200
        owners.append((scene.live.async_engine.seen[-1].tenant, scene.live.async_engine.seen[-1].session))
    assert owners == [(OWNER, "s"), (OTHER, "s")]


def test_a_cache_key_over_grpc_means_the_callers_own(scene: Scene) -> None:
    with rpc_of(scene.live) as rpc:
        for key in (OWNER, OTHER):
            _unary(rpc, generate_request(prompt="x", cache_key="s"), key)
            seen = scene.live.async_engine.seen[-1]
            assert (seen.tenant, seen.session) == (key, "s")


def _unary(rpc: RpcClient, request: Any, key: str) -> Any:
    metadata = (("authorization", f"Bearer {key}"),)
    return rpc.unary(f"{GENERATION}/GenerateUnary", request, "rootgraft.v1.GenerateResponse", metadata=metadata)
