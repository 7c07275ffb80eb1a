"""The models of a server process, on fake engines: all loaded, changed and removed ones replaced while requests run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from support.api.api_fakes import FakeClient, FakeFrontend
from support.api.folder_fetcher import FolderFetcher, adapter_folder

from rootgraft.api.config import ServerConfig
from rootgraft.api.generate.model_engine import ModelEngine
from rootgraft.api.generate.remote_adapters import RemoteAdapters
from rootgraft.api.generate.server_state import ServerState
from rootgraft.api.http import model_service
from rootgraft.api.http.app import create_app
from rootgraft.api.http.model_services import ModelServices
from rootgraft.api.models_file import ModelEntry, ServedModel
from rootgraft.engine.adapter_sources.remote_files import WEIGHTS
from rootgraft.engine.adapter_sources.source_uri import parse_source
from rootgraft.engine.checkpoint.locate import ModelFiles
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError, ModelError, RequestError
from rootgraft.engine.messages import Ready
from rootgraft.engine.text.tokenizer import Tokenizer
from rootgraft.engine.types import AdapterInfo, SamplingDefaults


class Engine(FakeClient):
    """An engine that is started and closed."""

    def __init__(self, path: Path, digest: str, starting: asyncio.Event | None) -> None:
        super().__init__()
        self.starting = starting
        self.path, self.digest, self.closed = path, digest, False

    async def start(self) -> Ready:
        if self.starting is not None:
            await self.starting.wait()
        if self.path.name == "broken":
            raise ModelError("The model is broken.")
        return Ready(2048, 260, 10, 16, (), base_digest=self.digest)

    async def close(self) -> None:
        self.closed = True

    async def load_adapter(
        self, name: str, path: str, *, replace: bool = False, trusted: bool = False, num_tokens: int = 0
    ) -> None:
        if f"no adapter of {self.digest}" in Path(path, WEIGHTS).read_text():
            raise RequestError("It is no adapter of this model.", param="path")
        self.adapters = {**self.adapters, name: AdapterInfo(name, path, "ready", "host")}


class World:
    """Files by name with their digests, the engines that were made, and what the models file says."""

    def __init__(self, *models: ServedModel) -> None:
        self.digests: dict[str, str] = {}
        self.engines: list[Engine] = []
        self.frontends: dict[str, FakeFrontend] = {}
        self.file: Sequence[ServedModel] = models
        self.fault: Exception | None = None
        self.starting: asyncio.Event | None = None  # that engines wait for
        self.main = ServerState.open(ServerConfig(), "1")

    def digest(self, path: Path, *, dummy: bool = False) -> str:
        return self.digests.get(path.name, f"digest of {path.name}")

    def engine(self, _config: EngineConfig, path: Path, _options: ServerConfig, *_: object) -> Engine:
        self.engines.append(Engine(path, self.digest(path), self.starting))
        return self.engines[-1]

    def frontend(self, client: Engine, *_: Any) -> FakeFrontend:
        made: Any = FakeFrontend()
        made.served = None
        self.frontends[client.digest] = made
        made.say = lambda request, index: client.digest
        return made

    def read(self) -> Sequence[ServedModel]:
        if self.fault is not None:
            raise self.fault
        return self.file

    async def begin(self) -> ModelServices:
        self.services = ModelServices(self.file, self.main, self.read)
        await self.services.load(lambda: None)
        transport = httpx.ASGITransport(create_app(self.services.router))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test")
        return self.services

    async def ask(self, name: str) -> str:
        reply = await self.http.post("/v1/completions", json={"model": name, "prompt": "a", "max_tokens": 100})
        return str(reply.json()["choices"][0]["text"]) if reply.status_code == 200 else str(reply.status_code)

    async def reload(self, *models: ServedModel) -> None:
        self.file = models or self.file
        self.services.begin_reload()
        await asyncio.gather(*[job for job in self.services._jobs if "_reloaded" in repr(job)])

    async def idle(self) -> None:
        while self.services._jobs:
            await asyncio.sleep(0.005)


def catalog_of(model: ServedModel) -> dict[str, Any]:
    return {"model_catalog": model.server.model_catalog}


def model(name: str, *, enable_lora: bool = False, **options: Any) -> ServedModel:
    engine = EngineConfig(model=name, enable_lora=enable_lora)
    return ServedModel(ModelEntry("models[0]", {"model": name}), engine, ServerConfig(**options))


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def make(*models: ServedModel) -> World:
        world = World(*models)
        monkeypatch.setattr(
            model_service,
            "resolve_served_model",
            lambda config: ModelFiles(Path(str(config.model)), str(config.model)),
        )
        monkeypatch.setattr(model_service, "base_digest", world.digest)
        monkeypatch.setattr(model_service, "engine_of", world.engine)
        monkeypatch.setattr(model_service, "AsyncEngine", world.frontend)
        monkeypatch.setattr(Tokenizer, "load", lambda *_, **__: None)
        nothing = SimpleNamespace(defaults=SamplingDefaults(), applied="", ignored=())
        monkeypatch.setattr(model_service, "read_sampling_defaults", lambda *_: nothing)
        monkeypatch.setattr(model_service, "_GRACE_SECONDS", 0.005)
        monkeypatch.setattr(model_service, "_IDLE_SECONDS", 0.001)
        return world

    yield make


def test_a_changed_model_takes_its_name_and_running_requests_end_with_the_old_one(worlds: Any) -> None:
    async def job() -> None:
        world = worlds(model("small"), model("big"))
        await world.begin()
        assert [await world.ask(name) for name in ("small", "big")] == ["digest of small", "digest of big"]
        gate = world.frontends["digest of small"].gate = asyncio.Event()
        running = asyncio.create_task(world.ask("small"))
        while not world.frontends["digest of small"].seen[1:]:
            await asyncio.sleep(0.001)
        world.digests["small"] = "new digest of small"
        await world.reload()
        assert [await world.ask(name) for name in ("small", "big")] == ["new digest of small", "digest of big"]
        old, big, new = world.engines
        assert not old.closed
        gate.set()
        assert await running == "digest of small"
        await world.idle()
        assert (old.closed, big.closed, new.closed) == (True, False, False)
        metrics = (await world.http.get("/metrics")).text
        assert metrics.count('rootgraft:num_requests_running{engine="0",model_name="small"}') == 1
        series = [line.rpartition(" ")[0] for line in metrics.splitlines() if not line.startswith("#")]
        assert len(series) == len(set(series))
        await world.services.close_engines("end")
        assert new.closed and big.closed

    asyncio.run(job())


async def nothing(*_: object) -> None:
    """Check no tokenizers."""


def test_a_changed_model_takes_its_catalogue_over(
    worlds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def job() -> None:
        monkeypatch.setattr(model_service, "_open_fetcher", lambda _: FolderFetcher())
        monkeypatch.setattr(ModelEngine, "open_tokenizers", nothing)
        monkeypatch.setattr(RemoteAdapters, "source_of", lambda _, uri: parse_source(uri))
        small = model("small", enable_lora=True, model_catalog=str(tmp_path / "models.db"))
        world = worlds(small, model("big"))
        await world.begin()

        async def call(path: str, **body: str) -> int:
            return (await world.http.post(f"/v1/admin/models{path}", json=body)).status_code

        async def version(name: str, source: str) -> str:
            assert await call("", name="sql", source=source, model="small") == 200
            listed = (await world.http.get("/v1/admin/models")).json()["data"]
            return str(next(each for each in listed if each["id"] == "sql")["versions"][-1]["digest"])

        first = await version("sql", adapter_folder(tmp_path, "first"))
        assert await call("/sql/promote", version=first) == 200
        assert await world.ask("sql") == "digest of small"
        # One that is broken leaves the old one, which changes its catalogue again.
        await world.reload(model("broken", enable_lora=True, served_model_name=("small",), **catalog_of(small)))
        second = await version("sql", adapter_folder(tmp_path, "no adapter of third small"))
        # While the new one is loaded, nothing changes.
        world.digests["small"], world.starting = "second small", asyncio.Event()
        reload = asyncio.create_task(world.reload(small, model("big")))
        while len(world.engines) < 4:
            await asyncio.sleep(0.001)
        assert await call("/sql/promote", version=second) == 503
        assert await world.ask("sql") == "digest of small"
        world.starting.set()
        await reload
        assert await world.ask("sql") == "second small"
        assert await call("/sql/promote", version=second) == 200
        await world.idle()
        assert (await world.http.get("/v1/admin/models")).json()["data"][1]["weights"] == {second: 100}
        # A version that gets requests and does not fit keeps the old one in its place.
        world.digests["small"] = "third small"
        await world.reload()
        assert await world.ask("sql") == "second small"
        assert await call("/sql/promote", version=first) == 200
        await world.reload()
        assert await world.ask("sql") == "third small"
        await world.idle()
        await world.services.close_engines("end")
        await world.services.close_files()

    with caplog.at_level(logging.ERROR):
        asyncio.run(job())
    told = [record.getMessage().removeprefix("cannot serve a model of the file: ") for record in caplog.records]
    assert told[0] == "models[0]: The model is broken." and len(told) == 2
    assert "sql gets requests but cannot be loaded: It is no adapter of this model." in told[1]


def test_a_reload_of_the_same_models_changes_nothing(worlds: Any) -> None:
    async def job() -> None:
        world = worlds(model("small"), model("big"))
        await world.begin()
        await world.reload()
        await world.reload(model("small", port=1), model("big", port=1))  # of the whole server: at the next start
        assert len(world.engines) == 2 and not any(each.closed for each in world.engines)

    asyncio.run(job())


def test_models_come_and_go_with_the_file(worlds: Any) -> None:
    async def job() -> None:
        world = worlds(model("small"), model("big"))
        await world.begin()
        await world.reload(model("big"), model("third"))
        await world.idle()
        assert [await world.ask(name) for name in ("small", "big", "third")] == [
            "404", "digest of big", "digest of third"
        ]  # fmt: skip
        assert [each.closed for each in world.engines] == [True, False, False]
        assert [state.is_main for state in world.services.router.states] == [True, False]

    asyncio.run(job())


def test_what_is_wrong_leaves_the_models_as_they_are(worlds: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def job() -> None:
        world = worlds(model("small"), model("big"))
        await world.begin()
        world.fault = ConfigError("models[0]: unknown option --thread.")
        await world.reload()
        world.fault = None
        await world.reload(model("broken", served_model_name=("small",)), model("big"))
        plain = ServedModel(ModelEntry(), EngineConfig(model="small"), ServerConfig())
        await world.reload(plain)
        assert [await world.ask(name) for name in ("small", "big")] == ["digest of small", "digest of big"]
        assert [each.closed for each in world.engines] == [False, False, True]

    with caplog.at_level(logging.ERROR):
        asyncio.run(job())
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "the models are not changed: models[0]: unknown option --thread.",
        "cannot serve a model of the file: models[0]: The model is broken.",
        "the models are not changed: the file no longer has a list of models.",
    ]


def test_requests_that_had_found_a_removed_model_are_answered(worlds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def job() -> None:
        monkeypatch.setattr(model_service, "_GRACE_SECONDS", 0.05)
        world = worlds(model("small"), model("big"))
        services = await world.begin()
        state = services.router.of("small")
        services.router.remove("small")
        assert state.engine.serving() is world.frontends["digest of small"]  # found a moment before
        await world.idle()
        state.engine.client.is_alive = False
        with pytest.raises(Exception, match="small"):
            state.engine.serving()

    asyncio.run(job())


def test_a_load_that_fails_ends_the_others(worlds: Any) -> None:
    async def job() -> None:
        world = worlds(model("small"), model("broken"))
        with pytest.raises(ModelError, match="broken"):
            await world.begin()
        await world.services.close_engines("end")
        assert all(each.closed for each in world.engines)

    asyncio.run(job())
