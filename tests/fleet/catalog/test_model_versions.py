"""Versions of the catalogue over HTTP: weights, promote, canary, rollback and remove, on fakes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.api.api_live import make_state
from support.api.folder_fetcher import FolderFetcher, adapter_folder
from support.machine.waits import until

from rootgraft.api.generate.server_state import ServerState
from rootgraft.api.http.app import create_app
from rootgraft.engine.adapter_sources.remote_files import WEIGHTS, content_digest
from rootgraft.engine.adapter_sources.source_uri import AdapterSource, parse_source
from rootgraft.engine.errors import ConfigError, EngineDead, RequestError, UnknownModel
from rootgraft.engine.types import AdapterInfo
from rootgraft.fleet.catalog import model_versions
from rootgraft.fleet.catalog.model_catalog import ModelCatalog
from rootgraft.fleet.catalog.model_versions import ModelVersions

OPENED: list[ModelCatalog] = []


class Remote:
    """Takes every source."""

    def source_of(self, path: str) -> AdapterSource | None:
        return parse_source(path, "lora_path") if "://" in path else None

    def may_name(self, name: str) -> bool:
        return False

    def touch(self, name: str) -> None:
        pass

    def origin(self, info: AdapterInfo) -> None:
        return None


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


def make(path: Path) -> ServerState:
    state = make_state()
    client: Any = state.engine.client

    async def load(name: str, path: str, *, replace: bool = False, trusted: bool = False) -> None:
        if "broken" in path:
            raise RequestError("It is no adapter of this model.", param="path")
        client.adapters = {**client.adapters, name: AdapterInfo(name, path, "ready", "host")}

    async def unload(name: str) -> None:
        if name not in client.adapters:
            raise UnknownModel(name)
        client.adapters = {key: info for key, info in client.adapters.items() if key != name}

    client.load_adapter, client.unload_adapter = load, unload
    state.models.remote = Remote()  # type: ignore[assignment]
    points = iter([number / 100 for number in range(100)] * 100)
    fetcher: Any = FolderFetcher()
    OPENED.append(ModelCatalog.open(path / "models.db"))
    state.models.versions = ModelVersions(OPENED[-1], fetcher, client, draw=lambda: next(points))
    return state


class Admin:
    def __init__(self, state: ServerState) -> None:
        transport = httpx.ASGITransport(create_app(state))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test")

    async def add(self, source: str, **more: str) -> str:
        reply = await self.http.post("/v1/admin/models", json={"name": "sql", "source": source, **more})
        assert reply.status_code == 200, reply.text
        return str(reply.json()["versions"][-1]["digest"])

    async def call(self, verb: str, **body: Any) -> httpx.Response:
        return await self.http.post(f"/v1/admin/models/sql/{verb}", json=body)

    async def ask(self, model: str = "sql", **more: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": model, "prompt": "a", "max_tokens": 3, **more})

    async def answered(self, count: int = 100) -> Counter[str]:
        replies = [await self.ask() for _ in range(count)]
        return Counter(reply.headers["x-model-version"] for reply in replies)


def run(job: Any) -> None:
    asyncio.run(job)


def test_canary_promote_and_rollback_move_new_requests_at_once(tmp_path: Path) -> None:
    async def job() -> None:
        state = make(tmp_path)
        admin = Admin(state)
        one, two = [await admin.add(adapter_folder(tmp_path, name)) for name in ("one", "two")]
        assert (await admin.ask()).status_code == 404
        assert (await admin.call("promote", version=one[:12])).json()["weights"] == {one: 100}
        assert await admin.answered() == {one: 100}
        await admin.call("canary", version=two, weight=10)
        assert await admin.answered() == {one: 90, two: 10}
        await admin.call("promote", version=two)
        assert await admin.answered() == {two: 100}
        assert (await admin.call("rollback")).json()["weights"] == {one: 90, two: 10}
        assert (await admin.call("rollback")).json()["weights"] == {one: 100}
        assert await admin.answered() == {one: 100}
        reply = (await admin.call("rollback")).json()["error"]
        assert (reply["param"], reply["code"]) == ("name", "nothing_to_roll_back")

    run(job())


def test_promote_and_rollback_under_load_lose_and_mix_nothing(tmp_path: Path) -> None:
    """Streams run on over each change; every answer names the version that the engine was asked for."""

    async def job() -> None:
        state = make(tmp_path)
        admin, engine = Admin(state), state.engine.async_engine
        engine.gate = asyncio.Event()  # type: ignore[union-attr]
        one, two = [await admin.add(adapter_folder(tmp_path, name)) for name in ("one", "two")]
        await admin.call("promote", version=one)
        asked, expected = [], []
        for turn in range(12):
            asked += [asyncio.create_task(admin.ask()) for _ in range(8)]
            while len(engine.seen) < len(asked):  # type: ignore[union-attr]
                await asyncio.sleep(0)
            expected += [(one, two)[turn % 2]] * 8
            reply = await (admin.call("rollback") if turn % 2 else admin.call("promote", version=two))
            assert reply.status_code == 200
        engine.gate.set()  # type: ignore[union-attr]
        replies = await asyncio.gather(*asked)
        assert {reply.status_code for reply in replies} == {200}
        assert [reply.headers["x-model-version"] for reply in replies] == expected
        adapters = Counter(request.adapter for request in engine.seen)  # type: ignore[union-attr]
        assert adapters == {f"sql@{one[:12]}": 48, f"sql@{two[:12]}": 48}

    run(job())


def test_an_answer_names_its_version_and_the_engine_gets_that_one(tmp_path: Path) -> None:
    async def job() -> None:
        state = make(tmp_path)
        admin, engine = Admin(state), state.engine.async_engine
        one, two = [await admin.add(adapter_folder(tmp_path, name)) for name in ("one", "two")]
        await admin.call("promote", version=one)
        first = await admin.ask(n=2)
        assert first.json()["model"] == "sql"
        assert engine.seen[-1].adapter == f"sql@{one[:12]}"  # type: ignore[union-attr]
        pinned = await admin.ask(f"sql@{two[:12]}")
        assert pinned.headers["x-model-version"] == two
        assert pinned.json()["system_fingerprint"] != first.json()["system_fingerprint"]
        assert "x-model-version" not in (await admin.ask("tiny")).headers
        names = [card["id"] for card in (await admin.http.get("/v1/models")).json()["data"]]
        assert names == ["tiny", "org/alias", "sql"]
        assert (await admin.http.get("/v1/models/sql")).json()["parent"] == "tiny"

    run(job())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
def test_a_session_keeps_its_version(tmp_path: Path, path: str) -> None:
    said: dict[str, Any] = (
        {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    )

    async def job() -> None:
        admin = Admin(make(tmp_path))
        one, two = [await admin.add(adapter_folder(tmp_path, name)) for name in ("one", "two")]
        await admin.call("promote", version=one)
        await admin.call("canary", version=two, weight=50)
        seen = set()
        for session in range(12):
            asked = {"model": "sql", "max_tokens": 3, "prompt_cache_key": str(session), **said}
            replies = [await admin.http.post(path, json=asked) for _ in range(4)]
            (version,) = {reply.headers["x-model-version"] for reply in replies}
            seen.add(version)
        assert seen == {one, two}

    run(job())


def test_a_digest_that_does_not_match_is_told_and_nothing_is_added(tmp_path: Path) -> None:
    async def job() -> None:
        state = make(tmp_path)
        admin = Admin(state)
        source = adapter_folder(tmp_path, "one")
        body = {"name": "sql", "source": source, "digest": "0" * 64}
        reply = await admin.http.post("/v1/admin/models", json=body)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["code"]) == (400, "digest", "digest_mismatch")
        assert content_digest(tmp_path / "one") in error["message"]
        broken = {"name": "sql", "source": adapter_folder(tmp_path, "broken")}
        assert (await admin.http.post("/v1/admin/models", json=broken)).status_code == 400
        assert [each["id"] for each in (await admin.http.get("/v1/admin/models")).json()["data"]] == ["tiny"]
        assert not state.models.adapters
        assert len(state.models.versions._fetcher.released) == 2  # type: ignore[union-attr]

    run(job())


@pytest.mark.parametrize(
    ("verb", "body", "status", "param"),
    [
        ("promote", {"version": "123456"}, 400, "version"),
        ("promote", {}, 400, "version"),
        ("canary", {"version": "123456", "weight": 0}, 400, "weight"),
        ("canary", {"version": "123456", "weight": 100}, 400, "weight"),
        ("remove", {"version": "123456"}, 400, "version"),
        ("rollback", {"to": 1}, 400, "to"),
    ],
)
def test_wrong_input_names_its_field(tmp_path: Path, verb: str, body: dict[str, Any], status: int, param: str) -> None:
    async def job() -> None:
        admin = Admin(make(tmp_path))
        await admin.add(adapter_folder(tmp_path, "one"))
        reply = await admin.call(verb, **body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)

    run(job())


def test_a_removed_version_is_unloaded_later_and_the_name_is_gone_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def job() -> None:
        monkeypatch.setattr(model_versions, "UNLOAD_SECONDS", 0.01)
        state = make(tmp_path)
        admin = Admin(state)
        one = await admin.add(adapter_folder(tmp_path, "one"))
        await admin.call("promote", version=one)
        assert (await admin.call("remove", version=one)).json()["error"]["code"] == "version_in_use"
        unload = await admin.http.post("/v1/unload_lora_adapter", json={"lora_name": f"sql@{one[:12]}"})
        assert unload.status_code == 400
        assert (await admin.call("remove")).json()["removed"] == [one]
        assert (await admin.ask()).status_code == 404
        await until(lambda: not state.models.adapters)

    run(job())


def test_a_restart_serves_what_the_catalogue_says(tmp_path: Path) -> None:
    async def job() -> None:
        state = make(tmp_path)
        admin = Admin(state)
        one, two = [await admin.add(adapter_folder(tmp_path, name)) for name in ("one", "two")]
        await admin.call("promote", version=one)
        state.models.versions.catalog.close()  # type: ignore[union-attr]
        (tmp_path / "two" / WEIGHTS).write_text("changed")
        state = make(tmp_path)
        assert state.models.versions is not None
        await state.models.versions.restore()
        assert await Admin(state).answered(3) == {one: 3}
        assert [each.digest for each in state.models.versions.catalog.versions("sql")] == [one]
        state.models.versions.catalog.close()
        (tmp_path / "one" / WEIGHTS).write_text("changed")
        state = make(tmp_path)
        assert state.models.versions is not None
        with pytest.raises(ConfigError, match=f"{one[:12]} of sql gets requests"):
            await state.models.versions.restore()
        assert two not in state.models.adapters

    run(job())


def test_a_version_that_was_removed_is_refused_at_once_and_can_be_added_again(tmp_path: Path) -> None:
    async def job() -> None:
        state = make(tmp_path)
        admin, versions = Admin(state), state.models.versions
        assert versions is not None
        source = adapter_folder(tmp_path, "one")
        one = await admin.add(source)
        own = f"sql@{one[:12]}"
        assert (await admin.ask(own)).status_code == 200
        await admin.call("remove", version=one)
        assert own in state.models.adapters and (await admin.ask(own)).status_code == 404
        assert await admin.add(source) == one
        assert (await admin.ask(own)).status_code == 200
        assert len(versions._fetcher.released) == 1  # type: ignore[attr-defined]
        assert not versions._unloads

    run(job())


def test_a_version_is_offered_again_if_its_unload_is_cancelled_before_its_first_step(tmp_path: Path) -> None:
    async def job() -> None:
        state = make(tmp_path)
        versions = state.models.versions
        assert versions is not None
        one = await Admin(state).add(adapter_folder(tmp_path, "one"))
        own = f"sql@{one[:12]}"
        versions.remove("sql", one, "admin")
        assert not versions.is_offered(own)
        unload = versions._unloads[own]
        unload.cancel()
        await asyncio.wait({unload})
        assert versions.is_offered(own)

    run(job())


def test_a_version_is_loaded_anew_if_its_unload_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def job() -> None:
        monkeypatch.setattr(model_versions, "UNLOAD_SECONDS", 0.0)
        state = make(tmp_path)
        admin, client, begun, gate = Admin(state), state.engine.client, asyncio.Event(), asyncio.Event()
        assert client is not None
        source = adapter_folder(tmp_path, "one")
        one = await admin.add(source)
        unload = client.unload_adapter

        async def slow(name: str) -> None:
            begun.set()
            await gate.wait()
            await unload(name)

        client.unload_adapter = slow  # type: ignore[method-assign]
        await admin.call("remove", version=one)
        await begun.wait()
        again = asyncio.create_task(admin.add(source))
        await asyncio.sleep(0.01)
        gate.set()
        assert await again == one
        assert f"sql@{one[:12]}" in state.models.adapters

    run(job())


def test_other_content_under_the_name_of_a_version_is_never_served(tmp_path: Path) -> None:
    async def job() -> None:
        state = make(tmp_path)
        admin = Admin(state)
        source = adapter_folder(tmp_path, "one")
        own = f"sql@{content_digest(tmp_path / 'one')[:12]}"
        assert state.engine.client is not None
        await state.engine.client.load_adapter(own, "elsewhere")
        reply = await admin.http.post("/v1/admin/models", json={"name": "sql", "source": source})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "name")
        assert (await admin.call("promote", version=own[4:])).status_code == 404

    run(job())


def test_a_restart_refuses_a_name_that_stands_for_something_else(tmp_path: Path) -> None:
    async def job() -> None:
        state = make(tmp_path)
        await Admin(state).add(adapter_folder(tmp_path, "one"))
        assert state.models.versions is not None and state.engine.client is not None
        with pytest.raises(ConfigError, match="the base model also has the name sql"):
            await state.models.versions.restore(["sql"])
        await state.engine.client.load_adapter("sql", "elsewhere")
        with pytest.raises(ConfigError, match="an adapter of --lora-modules also has the name sql"):
            await state.models.versions.restore()

    run(job())


def test_an_engine_that_dies_while_versions_are_restored_retires_none(tmp_path: Path) -> None:
    async def job() -> None:
        state = make(tmp_path)
        one = await Admin(state).add(adapter_folder(tmp_path, "one"))
        state.models.versions.catalog.close()  # type: ignore[union-attr]
        state = make(tmp_path)
        versions = state.models.versions
        assert versions is not None

        async def dead(*_: Any, **__: Any) -> None:
            raise EngineDead("The engine process has ended.")

        state.engine.client.load_adapter = dead  # type: ignore[union-attr]
        with pytest.raises(EngineDead):
            await versions.restore()
        assert [each.digest for each in versions.catalog.versions("sql")] == [one]

    run(job())
