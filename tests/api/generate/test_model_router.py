"""Several base models behind one door, on fakes: routing by ``model``, one list, metrics apart, one removed."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.api.api_fakes import FakeClient, FakeFrontend
from support.api.api_live import make_state

from rootgraft.api.config import ServerConfig
from rootgraft.api.generate.model_router import ModelRouter
from rootgraft.api.generate.server_state import ServerState
from rootgraft.api.http.app import create_app
from rootgraft.api.observe.engine_facts import EngineFacts
from rootgraft.api.observe.metrics import Metrics
from rootgraft.api.observe.usage_ledger import UsageLedger
from rootgraft.engine.types import AdapterInfo

CHAT = [{"role": "user", "content": "a"}]
ASKS = {
    "/v1/completions": {"prompt": "a", "max_tokens": 3},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 3},
    "/v1/responses": {"input": "a", "max_output_tokens": 3},
    "/v1/messages": {"messages": CHAT, "max_tokens": 3},
}


class Door:
    """Two models, tiny and big, with a client for the door."""

    def __init__(self, options: ServerConfig | None = None) -> None:
        self.tiny: Any = make_state(options)
        self.big: Any = ServerState.beside(self.tiny, self.tiny.options)
        client: Any = FakeClient()
        self.big.begin_loading(("big", "org/big"), client, finds_adapters=False)
        self.big.begin_serving(FakeFrontend(), client, EngineFacts(), "b" * 32)
        self.router = ModelRouter([self.tiny, self.big])
        transport = httpx.ASGITransport(create_app(self.router))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test")

    async def ask(self, model: str | None, path: str = "/v1/completions", **more: Any) -> httpx.Response:
        body = {**ASKS[path], **more} | ({} if model is None else {"model": model})
        return await self.http.post(path, json=body)

    def counts(self) -> tuple[int, int]:
        return len(self.tiny.engine.async_engine.seen), len(self.big.engine.async_engine.seen)


@pytest.mark.parametrize("path", ASKS)
def test_a_request_reaches_the_model_that_it_names(path: str) -> None:
    async def job() -> None:
        door = Door()
        for model, counts in (("big", (0, 1)), ("tiny", (1, 1)), ("org/big", (1, 2))):
            reply = await door.ask(model, path)
            assert (reply.status_code, reply.json()["model"], door.counts()) == (200, model, counts)
        assert (await door.ask("other", path)).status_code == 404
        assert door.counts() == (1, 2)

    asyncio.run(job())


def test_without_a_name_the_first_model_answers() -> None:
    async def job() -> None:
        door = Door()
        assert (await door.ask(None)).json()["model"] == "tiny"
        assert (await door.http.post("/tokenize", json={"prompt": "a", "model": "big"})).status_code == 200
        broken = await door.http.post("/v1/completions", content="{", headers={"content-type": "application/json"})
        assert broken.status_code == 400
        odd = await door.http.post("/v1/completions", json={"prompt": "a", "model": ["big"]})
        assert (odd.status_code, odd.json()["error"]["param"]) == (400, "model")

    asyncio.run(job())


def test_one_list_has_all_models_and_their_adapters() -> None:
    async def job() -> None:
        door = Door()
        door.big.engine.client.adapters = {"sql": AdapterInfo("sql", "sql", "ready", "host")}
        cards = (await door.http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [
            ("tiny", None), ("org/alias", None), ("big", None), ("org/big", None), ("sql", "big")
        ]  # fmt: skip
        assert (await door.http.get("/v1/models/sql")).json()["parent"] == "big"
        assert (await door.ask("sql")).status_code == 200
        assert (await door.ask("big:sql")).status_code == 200
        assert [seen.adapter for seen in door.big.engine.async_engine.seen] == ["sql", "sql"]
        assert (await door.ask("tiny:sql")).status_code == 404

    asyncio.run(job())


def test_an_adapter_is_loaded_into_the_base_model_that_the_call_names() -> None:
    async def job() -> None:
        door = Door()
        loaded: list[tuple[str, str]] = []
        for state in (door.tiny, door.big):
            state.engine.finds_adapters = True

            async def load(name: str, path: str, *, base: str = state.models.names[0], **_: object) -> None:
                loaded.append((base, name))

            state.engine.client.load_adapter = load

        async def post(**more: str) -> httpx.Response:
            body = {"lora_name": "sql", "lora_path": "sql", **more}
            return await door.http.post("/v1/load_lora_adapter", json=body)

        assert (await post(base_model_name="big")).status_code == 200
        assert (await post()).status_code == 200
        assert loaded == [("big", "sql"), ("tiny", "sql")]
        unknown = (await post(base_model_name="other")).json()["error"]
        assert unknown["param"] == "base_model_name"
        door.big.engine.client.adapters = {"sql": AdapterInfo("sql", "sql", "ready", "host")}
        taken = (await post(base_model_name="tiny")).json()["error"]
        assert taken["param"] == "lora_name"
        assert len(loaded) == 2

    asyncio.run(job())


def test_metrics_are_apart_by_model_and_those_of_the_server_are_told_once() -> None:
    async def job() -> None:
        door = Door()
        for model in ("tiny", "big", "big"):
            await door.ask(model)
        await door.ask("big", max_tokens=-1)
        text = (await door.http.get("/metrics")).text
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert text.count("# TYPE http_requests_total ") == 1
        requests = families["rootgraft:key_requests"].samples
        assert {each.labels["model_name"]: each.value for each in requests} == {"tiny": 1, "big": 2}
        errors = [each for each in families["rootgraft:request_errors"].samples if each.value]
        assert {each.labels["model_name"] for each in errors} == {"big"}
        for number, state in enumerate((door.tiny, door.big), 1):
            facts = EngineFacts(max_loras=number, cache={"num_gpu_blocks": str(10 * number)})
            state.observers.metrics = Metrics(state.models.names[0], dict, facts=facts)
        families = {
            family.name: family for family in text_string_to_metric_families((await door.http.get("/metrics")).text)
        }
        for info, label, values in (
            ("cache_config_info", "num_gpu_blocks", {"tiny": "10", "big": "20"}),
            ("lora_requests_info", "max_lora", {"tiny": "1", "big": "2"}),
        ):
            samples = families[f"rootgraft:{info}"].samples
            assert {each.labels["model_name"]: each.labels[label] for each in samples} == values
        for family in families.values():
            keys = [(each.name, *sorted(each.labels.items())) for each in family.samples]
            assert len(keys) == len(set(keys)), family.name

    asyncio.run(job())


def test_a_removed_model_ends_its_streams_and_leaves_the_others_alone() -> None:
    async def job() -> None:
        door = Door()
        ended: list[str] = []
        door.router.on_removed = lambda state: ended.append(state.models.names[0])
        gates = [asyncio.Event(), asyncio.Event()]
        door.tiny.engine.async_engine.gate, door.big.engine.async_engine.gate = gates
        running = [asyncio.create_task(door.ask(model)) for model in ("tiny", "big")]
        while door.counts() != (1, 1):
            await asyncio.sleep(0.001)
        removed = await door.http.post("/v1/admin/models/org/big/remove", json={})
        assert (removed.status_code, removed.json()["removed"], ended) == (200, ["b" * 32], ["big"])
        assert (await door.ask("big")).status_code == 404
        assert [card["id"] for card in (await door.http.get("/v1/models")).json()["data"]] == ["tiny", "org/alias"]
        for gate in gates:
            gate.set()
        assert [(await task).json()["model"] for task in running] == ["tiny", "big"]
        last = (await door.http.post("/v1/admin/models/tiny/remove", json={})).json()["error"]
        assert (last["param"], last["code"]) == ("name", "last_model")
        assert (await door.http.get("/health")).status_code == 200
        assert 'model_name="big"' not in (await door.http.get("/metrics")).text

    asyncio.run(job())


def test_the_first_model_can_be_removed_too() -> None:
    async def job() -> None:
        door = Door()
        assert (await door.http.post("/v1/admin/models/tiny/remove", json={})).status_code == 200
        assert (await door.ask(None)).json()["model"] == "big"
        assert (await door.ask("tiny")).status_code == 404
        assert "http_requests_total" in (await door.http.get("/metrics")).text

    asyncio.run(job())


def test_the_server_is_ready_once_all_models_are() -> None:
    async def job() -> None:
        door = Door()
        door.big.engine.async_engine = None
        assert (await door.http.get("/ready")).status_code == 503
        assert (await door.ask("tiny")).status_code == 200
        assert (await door.ask("big")).status_code == 503

    asyncio.run(job())


def test_usage_counts_by_model_and_limits_of_keys_are_shared(tmp_path: Path) -> None:
    async def job() -> None:
        door = Door()
        ledger = door.tiny.stores.ledger = UsageLedger(tmp_path / "usage.db")
        assert (
            door.tiny.limits.admission.limits is door.big.limits.admission.limits
            and door.tiny.limits.keys is door.big.limits.keys
        )
        assert door.tiny.limits.admission.queue_limits is not door.big.limits.admission.queue_limits
        for model in ("tiny", "big", "big"):
            await door.ask(model)
        await ledger.close()

    asyncio.run(job())
    with closing(sqlite3.connect(tmp_path / "usage.db")) as db:
        assert sorted(db.execute("SELECT model, requests FROM usage")) == [("big", 2), ("tiny", 1)]


def test_the_catalogue_lists_base_models_by_digest() -> None:
    async def job() -> None:
        data = (await Door().http.get("/v1/admin/models")).json()["data"]
        assert [(each["id"], each["versions"][0]["digest"]) for each in data] == [("tiny", ""), ("big", "b" * 32)]

    asyncio.run(job())
