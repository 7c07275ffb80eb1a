"""The model directory before a fleet: a folder of ``--lora-dir`` is one adapter, the same on all replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.api.api_fakes import FakeClient
from support.api.api_live import make_state

from rootgraft.api.generate.remote_adapters import RemoteAdapters
from rootgraft.api.http.app import create_app
from rootgraft.engine.adapter_sources.adapter_fetcher import AdapterFetcher
from rootgraft.engine.errors import RequestError
from rootgraft.engine.serving.replica_status import FleetStatus
from rootgraft.engine.types import AdapterInfo


class FolderEngine(FakeClient):
    """Has loaded what it was told to load; a folder of the name "bad" is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []

    async def load_adapter(self, name: str, path: str, **_: Any) -> None:
        await asyncio.sleep(0)
        self.loads.append(name)
        if name == "bad":
            raise RequestError("r must give a rank of at least 1, not 0.", param="r")
        self.adapters[name] = AdapterInfo(name, path, "ready", "host")


class FolderFleet(FolderEngine):
    """The same as a fleet."""

    def status(self) -> FleetStatus:
        return FleetStatus(())

    def engine_stats(self) -> dict[int, dict[str, float]]:
        return {}


class NoTokenizers:
    """Tokenizers of adapters whose folders have none: all use the model's."""

    def __init__(self, served: object) -> None:
        self._served = served

    def known(self, name: str | None, info: AdapterInfo | None) -> object:
        return self._served

    async def read_own_off_loop(self, name: str, path: str) -> int:
        return 0


@pytest.mark.parametrize("engine", [FolderEngine(), FolderFleet()], ids=["engine", "fleet"])
async def test_replicas_of_a_fleet_do_not_load_folders_by_themselves(
    tmp_path: Path, fetcher: Callable[..., AdapterFetcher], engine: FolderEngine
) -> None:
    """A single engine does; replicas could read what a folder holds at different times."""
    for name in ("sql", "bad"):
        (tmp_path / name).mkdir()
    state: Any = make_state()
    state.engine.client, state.engine.finds_adapters = engine, True
    state.engine.async_engine.served = object()
    state.engine.tokenizers = NoTokenizers(state.engine.async_engine.served)
    state.models.remote = RemoteAdapters(
        fetcher(),
        engine,  # type: ignore[arg-type]
        lora_dir=str(tmp_path),
        most_names=8,
        most_adapters=8,
    )
    is_fleet = isinstance(engine, FolderFleet)

    async def ask(model: str) -> httpx.Response:
        return await http.post("/v1/completions", json={"model": model, "prompt": "a", "max_tokens": 1})

    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(state)), base_url="http://test") as http:
        answers = await asyncio.gather(*(ask("sql") for _ in range(4)))
        assert {each.status_code for each in answers} == {200}
        assert engine.loads == (["sql"] if is_fleet else [])
        refused = await ask("bad")
        assert refused.status_code == (400 if is_fleet else 200)
        if is_fleet:
            assert refused.json()["error"]["param"] == "model" and "rank" in refused.json()["error"]["message"]
        await ask("nobody")  # the engine refuses it
        assert "nobody" not in engine.loads
        counted = await http.post("/tokenize", json={"model": "sql", "prompt": "a"})
        assert counted.status_code == 200
