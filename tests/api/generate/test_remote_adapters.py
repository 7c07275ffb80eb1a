"""Adapters by name over HTTP: ``model: org/name``, ``load_lora_adapter`` with a source, tenants, waiting, errors.

The engine is a fake that keeps names; the Hub is the stub, the cache and the downloads are real.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from support.adapter_sources.hub_stub import HubStub
from support.adapter_sources.source_files import CONFIG, WEIGHTS, adapter_files
from support.api.api_fakes import FakeClient
from support.api.api_live import make_state
from support.api.key_files import entry, write
from support.machine.waits import HANG_SECONDS, until

from rootgraft.api.config import ServerConfig
from rootgraft.api.generate import remote_adapters
from rootgraft.api.generate.remote_adapters import RemoteAdapters
from rootgraft.api.generate.server_state import ServerState
from rootgraft.api.http.app import create_app
from rootgraft.api.http.server import _Service
from rootgraft.engine.adapter_sources import adapter_fetcher
from rootgraft.engine.adapter_sources.adapter_fetcher import AdapterFetcher
from rootgraft.engine.errors import AdapterUnavailable, RequestError, UnknownModel
from rootgraft.engine.types import AdapterInfo

Make = Callable[..., AdapterFetcher]
NAME = "acme/support"
FILES = adapter_files()
LOCAL = "127.0.0.0/8"
LFS = f"/lfs/{hashlib.sha256(FILES[WEIGHTS]).hexdigest()}"


class Engine(FakeClient):
    """Keeps names of adapters, and refuses those whose config says that they are of another base model."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.loads: list[tuple[str, bool]] = []

    async def load_adapter(
        self, name: str, path: str, *, replace: bool = False, trusted: bool = False, num_tokens: int = 0
    ) -> None:
        assert trusted and not (name in self.adapters and not replace)
        if name not in self.adapters and len(self.adapters) >= self.most:
            raise AdapterUnavailable(f"{self.most} adapters are loaded, which is the limit (--max-adapters).")
        self.loads.append((name, replace))
        config = (Path(path) / CONFIG).read_bytes()
        assert (Path(path) / WEIGHTS).is_file()
        if b'"lora_alpha": 15' in config:
            raise RequestError("The tensor q has shape [8, 4]; the base model's has 16.", param="q")
        self.adapters[name] = AdapterInfo(name, path, "ready", "host")

    async def unload_adapter(self, name: str) -> None:
        if name not in self.adapters:
            raise UnknownModel(name)
        del self.adapters[name]

    async def list_adapters(self) -> tuple[AdapterInfo, ...]:
        return tuple(self.adapters.values())


@dataclass
class Server:
    """The application in this process, with keys ``a`` and ``b`` of two tenants, ``narrow`` and ``admin``."""

    state: ServerState
    engine: Engine
    http: httpx.AsyncClient
    now: list[float] = field(default_factory=lambda: [0.0])

    async def ask(self, model: str, key: str = "a", **headers: str) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
        headers = {"Authorization": f"Bearer {key}", **headers}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)

    async def load(self, name: str, path: str, **fields: Any) -> httpx.Response:
        body = {"lora_name": name, "lora_path": path, **fields}
        return await self.http.post("/v1/load_lora_adapter", json=body, headers={"Authorization": "Bearer admin"})

    async def listed(self) -> dict[str, dict[str, Any]]:
        answer = await self.http.get("/v1/adapters", headers={"Authorization": "Bearer admin"})
        return {each["name"]: each for each in answer.json()["data"]}


@pytest.fixture
async def serve(tmp_path: Path, fetcher: Make) -> AsyncIterator[Callable[..., Server]]:
    """Starts servers with these sources."""
    clients: list[httpx.AsyncClient] = []
    keys = [entry("a"), entry("b"), entry("narrow", adapters=["acme/only"]), entry("admin", scopes=["admin"])]
    file = tmp_path / "keys.json"
    write(file, *keys)

    def start(
        *entries: str, most_names: int = 8, most_adapters: int = 64, lora_dir: str | None = None, **options: Any
    ) -> Server:
        engine, now = Engine(most_adapters), [0.0]
        state = make_state(ServerConfig(api_key_file=str(file)))
        state.engine.client = engine  # type: ignore[assignment]
        state.engine.finds_adapters = lora_dir is not None
        state.models.remote = RemoteAdapters(
            fetcher(*entries, **options),
            engine,  # type: ignore[arg-type]
            lora_dir=lora_dir,
            most_names=most_names,
            most_adapters=most_adapters,
            clock=lambda: now[0],
        )
        transport = httpx.ASGITransport(app=create_app(state))
        clients.append(httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=HANG_SECONDS))
        return Server(state, engine, clients[-1], now)

    yield start
    for client in clients:
        await client.aclose()


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    return answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["param"]


async def test_a_request_brings_the_adapter_that_it_names(hub: HubStub, serve: Any) -> None:
    commit = hub.add(NAME, FILES)
    server = serve("hf", LOCAL)
    answers = await asyncio.gather(*(server.ask(NAME) for _ in range(8)))
    assert {(each.status_code, each.json()["model"]) for each in answers} == {(200, NAME)}
    assert server.engine.loads == [(NAME, False)] and len(hub.storage.gets(LFS)) == 1
    seen = server.state.engine.async_engine.seen
    assert {each.adapter for each in seen} == {NAME}
    card = await server.http.get(f"/v1/models/{NAME}", headers={"Authorization": "Bearer a"})
    assert card.json()["root"] == f"hf://{NAME}@{commit}" and card.json()["parent"] == "tiny"
    hub.server.asked.clear()
    assert (await server.ask(NAME, "b")).status_code == 200 and not hub.server.asked

    assert (await server.ask(f"{NAME}@{commit}")).json()["model"] == f"{NAME}@{commit}"
    assert set(server.engine.adapters) == {NAME, f"{NAME}@{commit}"} and len(hub.storage.gets(LFS)) == 1


async def test_all_routes_that_generate_bring_it_and_those_that_count_do_not(hub: HubStub, serve: Any) -> None:
    hub.add(NAME, FILES)
    message = {"role": "user", "content": "hi"}
    for path, body in {
        "/v1/completions": {"prompt": "hi"},
        "/v1/responses": {"input": "hi"},
        "/v1/messages": {"messages": [message], "max_tokens": 5},
    }.items():
        server = serve("hf", LOCAL)
        answer = await server.http.post(path, json={"model": NAME, **body}, headers={"Authorization": "Bearer a"})
        assert answer.status_code == 200 and answer.json()["model"] == NAME, answer.text
        assert NAME in server.engine.adapters
    server = serve("hf", LOCAL)
    answer = await server.http.post(
        "/tokenize", json={"model": NAME, "prompt": "hi"}, headers={"Authorization": "Bearer a"}
    )
    assert answer.status_code == 200 and not server.engine.adapters


@pytest.mark.parametrize(
    "entries, name, key",
    [
        ((), NAME, "a"),
        (("hf://other",), NAME, "a"),
        (("hf",), f"{NAME}@refs/pr/1", "a"),
        (("hf",), "s3://bucket/a", "a"),
        (("hf", "file:///"), "file:///tmp", "a"),
        (("hf",), NAME, "narrow"),
        (("hf",), "acme/only@main", "narrow"),
    ],
)
async def test_what_may_not_be_loaded_does_not_exist_and_nobody_is_asked(
    hub: HubStub, serve: Any, entries: tuple[str, ...], name: str, key: str
) -> None:
    hub.add(NAME, FILES)
    hub.add("acme/only", FILES)
    answer = await serve(*entries, LOCAL).ask(name, key)
    assert error_of(answer) == (404, "model_not_found", "model") and "does not exist" in answer.text
    assert not hub.server.asked


async def test_commits_of_pull_requests_are_not_for_requests(hub: HubStub, serve: Any) -> None:
    old = hub.add(NAME, FILES)
    repository = hub.repositories[NAME]
    repository.push(adapter_files(1))
    foreign = repository.push(adapter_files(2), "refs/pr/1")
    beside = repository.push(adapter_files(0), "v2")
    server = serve("hf", LOCAL)
    for _ in range(2):
        answer = await server.ask(f"{NAME}@{foreign}")
        assert error_of(answer) == (404, "model_not_found", "model") and "branches and tags" in answer.text
        assert (await server.load("looked-at", f"{NAME}@{foreign}", load_inplace=True)).status_code == 200
        server.now[0] += remote_adapters.REMEMBERED_SECONDS  # now it is in the cache
    for revision in (old, beside, "v2"):
        assert (await server.ask(f"{NAME}@{revision}")).status_code == 200
    hub.server.statuses[f"/api/models/{NAME}/refs"] = 404  # a mirror, which does not tell
    fresh = serve("hf", LOCAL)
    assert (await fresh.ask(f"{NAME}@v2")).status_code == 200
    assert (await fresh.ask(f"{NAME}@{old}")).status_code == 200  # as it was found on a branch before
    newest = repository.push(adapter_files(3))
    assert error_of(await fresh.ask(f"{NAME}@{newest}")) == (404, "model_not_found", "model")


async def test_errors_say_what_is_wrong_and_are_remembered_for_a_while(hub: HubStub, serve: Any) -> None:
    server = serve("hf", LOCAL, most_bytes=len(FILES[WEIGHTS]))
    hub.add("acme/large", {**FILES, WEIGHTS: FILES[WEIGHTS] + b"x"})
    hub.add("acme/foreign", adapter_files(7))
    hub.add("acme/model", {"config.json": b"{}"})
    hub.add("acme/gated", FILES)
    hub.repositories["acme/gated"].readers, hub.repositories["acme/gated"].is_gated = frozenset({"x"}), True
    expected = {
        "acme/none": (404, "model_not_found", "has no repository"),
        "acme/gated": (404, "model_not_found", "is gated"),
        "acme/model": (404, "model_not_found", "no adapter_config.json"),
        "acme/large": (400, "adapter_too_large", "--max-adapter-bytes"),
        "acme/foreign": (400, "adapter_not_supported", "cannot be served: The tensor q"),
    }
    for name, (status, code, text) in expected.items():
        answer = await server.ask(name)
        assert error_of(answer) == (status, code, "model") and text in answer.text, answer.text
    hub.server.asked.clear()
    for name, (status, code, _) in expected.items():
        assert error_of(await server.ask(name)) == (status, code, "model")
    assert not hub.server.asked
    hub.repositories["acme/none"] = hub.repositories["acme/gated"]
    hub.repositories["acme/none"].readers = frozenset()
    server.now[0] += remote_adapters.REMEMBERED_SECONDS - 1
    assert (await server.ask("acme/none")).status_code == 404
    server.now[0] += 1
    assert (await server.ask("acme/none")).status_code == 200


async def test_a_silent_hub_is_a_503_that_may_be_asked_again(hub: HubStub, serve: Any) -> None:
    hub.server.statuses[f"/{NAME}/resolve/main/{CONFIG}"] = 502
    answer = await serve("hf", LOCAL).ask(NAME)
    assert error_of(answer) == (503, "adapter_unavailable", None) and answer.headers["retry-after"] == "5"


async def test_a_full_engine_is_a_503_that_passes_as_soon_as_there_is_room(hub: HubStub, serve: Any) -> None:
    hub.add(NAME, FILES)
    hub.add("acme/other", adapter_files(2))
    server = serve("hf", LOCAL, most_names=1, most_adapters=1)
    assert (await server.load("mine", "acme/other")).status_code == 200
    hub.server.asked.clear()
    for _ in range(2):
        answer = await server.ask(NAME)
        assert error_of(answer) == (503, "adapter_unavailable", None) and "--max-adapters" in answer.text
    assert not hub.server.asked and [name for name, _ in server.engine.loads] == ["mine"]
    await server.engine.unload_adapter("mine")  # by another server's admin, say: this one is not told
    assert (await server.ask(NAME)).status_code == 200


async def test_a_refusal_of_the_engine_for_want_of_room_is_not_remembered(hub: HubStub, serve: Any) -> None:
    """The engine counts loads that are not seen here yet: what it says holds for the moment."""
    hub.add(NAME, FILES)
    server = serve("hf", LOCAL)
    server.engine.most = 0
    answer = await server.ask(NAME)
    assert error_of(answer) == (503, "adapter_unavailable", None) and "--max-adapters" in answer.text
    server.engine.most = 1
    assert (await server.ask(NAME)).status_code == 200


async def test_names_of_requests_make_room_where_admins_have_taken_more_than_their_half(
    hub: HubStub, serve: Any
) -> None:
    for number, name in enumerate(("acme/a", "acme/b", "acme/c")):
        hub.add(name, adapter_files(number + 1))
    server = serve("hf", LOCAL, most_names=2, most_adapters=3)
    for name in ("acme/a", "acme/b"):
        assert (await server.ask(name)).status_code == 200
    assert (await server.load("mine", "acme/a")).status_code == 200
    assert (await server.ask("acme/c")).status_code == 200
    assert sorted(server.engine.adapters) == ["acme/b", "acme/c", "mine"]
    for name in ("acme/b", "acme/c"):
        loaded = await server.load(name, "acme/a", load_inplace=True)
        assert loaded.status_code == 200  # and the name is the admin's from now on
    assert error_of(await server.ask("acme/a")) == (503, "adapter_unavailable", None)
    assert sorted(server.engine.adapters) == ["acme/b", "acme/c", "mine"]


async def test_what_an_admin_loads_under_the_name_meanwhile_is_not_remembered_either(hub: HubStub, serve: Any) -> None:
    hub.add(NAME, FILES)
    event = hub.storage.holds[LFS] = threading.Event()
    server = serve("hf", LOCAL)
    load = asyncio.create_task(server.load(NAME, NAME))
    await until(lambda: bool(server.state.models.remote.downloads()))
    assert error_of(await server.ask(NAME)) == (503, "adapter_unavailable", None)
    event.set()
    assert (await load).status_code == 200
    assert (await server.ask(NAME)).status_code == 200


async def test_waiting_is_bounded_and_the_download_goes_on(
    hub: HubStub, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, FILES)
    event = hub.storage.holds[LFS] = threading.Event()
    server = serve("hf", LOCAL)
    late = await server.ask(NAME, **{"x-request-timeout": "0.05"})
    assert error_of(late) == (504, "timeout", None)
    monkeypatch.setattr(remote_adapters, "WAIT_SECONDS", 0.05)
    await until(lambda: server.state.models.remote.downloads()[0]["bytes_here"] > 0)
    busy = await server.ask(NAME)
    assert error_of(busy) == (503, "adapter_unavailable", None) and "downloading, 0.0 of 0.2 MB" in busy.text
    row = (await server.listed())[NAME]
    assert row["state"] == "downloading" and 0 < row["bytes_here"] < row["bytes"] == len(FILES[WEIGHTS])
    assert row["path"] == f"hf://{NAME}"
    again = await server.load(NAME, "acme/support")
    assert error_of(again) == (503, "adapter_unavailable", None)
    event.set()
    monkeypatch.setattr(remote_adapters, "WAIT_SECONDS", HANG_SECONDS)
    assert (await server.ask(NAME)).status_code == 200
    assert len(hub.storage.gets(LFS)) == 1 and (await server.listed())[NAME]["state"] == "ready"


async def test_a_request_has_what_its_adapter_left_of_its_time(hub: HubStub, serve: Any) -> None:
    hub.add(NAME, FILES)
    server = serve("hf", LOCAL)
    assert (await server.ask(NAME, **{"x-request-timeout": "30"})).status_code == 200
    assert (await server.ask(NAME, **{"x-request-timeout": "30"})).status_code == 200
    first, second = (each.timeout for each in server.state.engine.async_engine.seen)
    assert first < 30 == second


async def test_a_tenant_has_few_downloads_and_waiting_requests_at_a_time(
    hub: HubStub, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_adapters, "MOST_LOADS", 1)
    monkeypatch.setattr(remote_adapters, "MOST_WAITING", 2)
    for name in (NAME, "acme/second"):
        hub.add(name, FILES)
    event = hub.storage.holds[LFS] = threading.Event()
    server = serve("hf", LOCAL)
    waiting = [asyncio.create_task(server.ask(NAME)) for _ in range(2)]
    await until(lambda: bool(server.state.models.remote.downloads()))
    assert "1 adapters are already being downloaded" in (await server.ask("acme/second")).text
    assert "2 requests already wait for adapters" in (await server.ask(NAME)).text
    other = asyncio.create_task(server.ask("acme/second", "b"))  # another tenant is not held up
    await until(lambda: len(server.state.models.remote.downloads()) == 2)
    event.set()
    assert {each.status_code for each in await asyncio.gather(*waiting, other)} == {200}


async def test_a_tenant_loads_as_many_as_it_leaves(hub: HubStub, serve: Any) -> None:
    names = [f"acme/n{index}" for index in range(5)]
    for name in names:
        hub.add(name, FILES)
    event = hub.storage.holds[LFS] = threading.Event()
    server = serve("hf", LOCAL, most_names=4)
    of_a = [asyncio.create_task(server.ask(name)) for name in names[:2]]
    await until(lambda: len(server.state.models.remote.downloads()) == 2)
    assert "2 adapters are already being downloaded" in (await server.ask(names[2])).text
    of_b = asyncio.create_task(server.ask(names[3], "b"))
    await until(lambda: len(server.state.models.remote.downloads()) == 3)
    assert "1 adapters are already being downloaded" in (await server.ask(names[4], "b")).text
    event.set()
    assert {each.status_code for each in await asyncio.gather(*of_a, of_b)} == {200}


async def test_requests_leave_slots_of_downloads_to_admins(
    hub: HubStub, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_fetcher, "_MOST_DOWNLOADS", 2)
    monkeypatch.setattr(adapter_fetcher, "_RESERVED_DOWNLOADS", 1)
    for number in range(3):
        hub.add(f"acme/{number}", adapter_files(number))
    held = f"/lfs/{hashlib.sha256(adapter_files(0)[WEIGHTS]).hexdigest()}"
    event = hub.storage.holds[held] = threading.Event()
    server = serve("hf", LOCAL)
    first = asyncio.create_task(server.ask("acme/0"))
    await until(lambda: any(row["bytes_here"] for row in server.state.models.remote.downloads()))
    second = asyncio.create_task(server.ask("acme/1", "b"))
    await until(lambda: "waiting for other" in server.state.models.remote._state("acme/1"))
    assert (await server.load("mine", "acme/2")).status_code == 200
    assert (await server.load("again", "acme/1")).status_code == 200  # also what a request waits to download
    assert not first.done()
    event.set()
    assert {each.status_code for each in await asyncio.gather(first, second)} == {200}


async def test_names_that_requests_brought_make_room_fairly(hub: HubStub, serve: Any) -> None:
    for number in range(6):
        hub.add(f"acme/{number}", adapter_files(number % 3))
    server = serve("hf", LOCAL, most_names=3)
    assert (await server.load("mine", "acme/0")).status_code == 200
    assert (await server.ask("acme/5", "b")).status_code == 200
    for number in (0, 1, 0, 2):
        assert (await server.ask(f"acme/{number}")).status_code == 200
    # The one that was used longest ago is b's; but a has brought more, and its own least recent one goes.
    assert set(server.engine.adapters) == {"mine", "acme/5", "acme/0", "acme/2"}
    assert (await server.ask("acme/1")).status_code == 200  # from the cache, without a download
    assert set(server.engine.adapters) == {"mine", "acme/5", "acme/2", "acme/1"}
    assert (await server.load("acme/2", "acme/2", load_inplace=True)).status_code == 200  # now an admin's
    for number in (3, 4):
        await server.ask(f"acme/{number}")
    assert {"mine", "acme/5", "acme/2"} <= set(server.engine.adapters) and len(server.engine.adapters) == 5


async def test_names_that_are_being_loaded_count(hub: HubStub, serve: Any) -> None:
    for number in range(2):
        hub.add(f"acme/{number}", adapter_files(number))
    held = f"/lfs/{hashlib.sha256(adapter_files(0)[WEIGHTS]).hexdigest()}"
    event = hub.storage.holds[held] = threading.Event()
    server = serve("hf", LOCAL, most_names=1)
    first = asyncio.create_task(server.ask("acme/0"))
    await until(lambda: bool(server.state.models.remote.downloads()))
    answer = await server.ask("acme/1", "b")
    assert error_of(answer) == (503, "adapter_unavailable", None) and "--max-adapters" in answer.text
    assert answer.headers["retry-after"] == "5"
    event.set()
    assert (await first).status_code == 200 and set(server.engine.adapters) == {"acme/0"}
    assert (await server.ask("acme/1", "b")).status_code == 200 and set(server.engine.adapters) == {"acme/1"}


async def test_a_full_cache_takes_room_from_names_of_requests(hub: HubStub, serve: Any) -> None:
    size = sum(map(len, FILES.values()))
    for number in range(3):
        hub.add(f"acme/{number}", adapter_files(number))
    server = serve("hf", LOCAL, most_cache_bytes=2 * size + 100)
    for number in range(3):
        assert (await server.ask(f"acme/{number}")).status_code == 200
    assert set(server.engine.adapters) == {"acme/1", "acme/2"}
    for name in ("one", "two"):
        await server.load(name, f"acme/{(name == 'two' and 2) or 1}")
    answer = await server.ask("acme/0")
    assert error_of(answer) == (503, "adapter_unavailable", None) and "--max-adapter-cache-bytes" in answer.text
    for name in ("one", "two"):
        await server.http.post(
            "/v1/unload_lora_adapter", json={"lora_name": name}, headers={"Authorization": "Bearer admin"}
        )
    assert (await server.ask("acme/0")).status_code == 200


async def test_a_full_cache_takes_no_room_where_that_does_not_suffice(hub: HubStub, serve: Any) -> None:
    size = sum(map(len, FILES.values()))
    large = {**FILES, WEIGHTS: FILES[WEIGHTS] + bytes(2 * size)}
    for number in range(3):
        hub.add(f"acme/{number}", adapter_files(number))
    hub.add("acme/large", large)
    server = serve("hf", LOCAL, most_cache_bytes=3 * size + 100)
    assert (await server.load("mine", "acme/0")).status_code == 200
    for number in (1, 2):
        assert (await server.ask(f"acme/{number}")).status_code == 200
    answer = await server.ask("acme/large")  # would fit only without the admin's, too
    assert error_of(answer) == (503, "adapter_unavailable", None)
    assert set(server.engine.adapters) == {"mine", "acme/1", "acme/2"}

    server.engine.adapters["acme/1"] = replace(server.engine.adapters["acme/1"], pins=1)  # which frees nothing
    hub.add("acme/3", adapter_files(3))
    assert (await server.ask("acme/3")).status_code == 200
    assert set(server.engine.adapters) == {"mine", "acme/1", "acme/3"}


async def test_a_request_never_replaces_what_a_name_stands_for(hub: HubStub, serve: Any, tmp_path: Path) -> None:
    hub.add(NAME, FILES)
    hub.add("acme/other", adapter_files(1))
    server = serve("hf", LOCAL, lora_dir=str(tmp_path / "folders"))
    assert (await server.load(NAME, "acme/other")).status_code == 200
    assert (await server.ask(NAME)).status_code == 200
    assert server.engine.loads == [(NAME, False)]
    assert (await server.listed())[NAME]["path"].startswith("hf://acme/other@")
    (tmp_path / "folders" / "acme" / "local").mkdir(parents=True)
    hub.add("acme/local", FILES)
    await server.ask("acme/local")  # the engine itself loads it from --lora-dir
    assert len(server.engine.loads) == 1


async def test_admins_load_from_listed_sources(hub: HubStub, serve: Any, tmp_path: Path) -> None:
    commit = hub.add(NAME, FILES)
    newer = adapter_files(1)
    server = serve("hf://acme", LOCAL)
    loaded = await server.load("support", NAME)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'support' added successfully.")
    assert (await server.listed())["support"]["path"] == f"hf://{NAME}@{commit}"
    second = hub.repositories[NAME].push(newer)
    assert error_of(await server.load("support", NAME)) == (400, "invalid_value", "lora_name")
    assert (await server.load("support", f"hf://{NAME}", load_inplace=True)).status_code == 200
    assert (await server.listed())["support"]["path"] == f"hf://{NAME}@{second}"
    assert (await server.ask("support")).status_code == 200
    folders = list((tmp_path / "cache" / "users").glob("*/*"))
    assert len(folders) == 2
    await server.load("back", f"{NAME}@{commit}")
    assert len(list((tmp_path / "cache" / "users").glob("*/*"))) == 2  # what nobody uses is given back


@pytest.mark.parametrize(
    "path, status, code",
    [
        ("other/name", 400, "invalid_value"),
        ("s3://bucket/a", 400, "adapter_source_not_allowed"),
        ("https://127.0.0.1/a", 400, "adapter_source_not_allowed"),
        ("https://169.254.169.254/latest", 400, "adapter_source_not_allowed"),
        ("file:///etc", 400, "adapter_source_not_allowed"),
        ("http://host/a", 400, "invalid_value"),
        ("s3://bucket", 400, "invalid_value"),
        ("hf://acme/a/b", 400, "invalid_value"),
        ("acme/support@refs/pr/1", 400, "invalid_value"),
        ("hf://acme/support@refs/pr/1", 400, "adapter_source_not_allowed"),
        ("acme/none", 404, "model_not_found"),
        ("acme/foreign", 400, "adapter_not_supported"),
    ],
)
async def test_what_admins_may_not_load(hub: HubStub, serve: Any, path: str, status: int, code: str) -> None:
    hub.add("acme/foreign", adapter_files(7))
    server = serve("hf://acme", LOCAL)
    answer = await server.load("x", path)
    assert error_of(answer) == (status, code, "lora_path")
    assert not server.engine.adapters


async def test_what_an_admin_loads_again_or_unloads_is_no_longer_a_requests(hub: HubStub, serve: Any) -> None:
    for number in range(3):
        hub.add(f"acme/{number}", adapter_files(number))
    server = serve("hf", LOCAL, most_names=1)
    admin = {"Authorization": "Bearer admin"}
    assert (await server.ask("acme/0")).status_code == 200
    await server.http.post("/v1/unload_lora_adapter", json={"lora_name": "acme/0"}, headers=admin)
    assert (await server.load("acme/0", "acme/2")).status_code == 200
    assert (await server.ask("acme/1")).status_code == 200
    assert set(server.engine.adapters) == {"acme/0", "acme/1"}
    await server.http.post("/v1/unload_lora_adapter", json={"lora_name": "acme/1"}, headers=admin)
    assert not server.state.models.remote._brought


async def test_requests_that_wait_for_an_adapter_are_told_that_the_server_ends(
    hub: HubStub, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, FILES)
    hub.storage.holds[LFS] = threading.Event()
    server = serve("hf", LOCAL)
    service = SimpleNamespace(
        _closing=False,
        _gateways=None,
        _num_active=0,
        _state=server.state,
        _models=SimpleNamespace(
            num_active=0,
            drain=lambda: setattr(server.state.engine, "draining", True),
            stop_downloads=server.state.models.remote._fetcher.stop,
        ),
        _signalled=asyncio.Event(),
        _options=SimpleNamespace(shutdown_timeout=30.0),
    )
    waiting = asyncio.create_task(server.ask(NAME))
    await until(lambda: bool(server.state.models.remote.downloads()))
    _Service._on_signal(service)  # type: ignore[arg-type]
    answer = await waiting
    assert error_of(answer) == (503, "shutting_down", None) and answer.headers["connection"] == "close"
