"""A gateway's state and the main process's side of it, over a real socketpair in one event loop."""

from __future__ import annotations

import asyncio
import os
import socket
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.api.api_live import make_state
from support.api.key_files import entry, write
from support.engine.core_client import CoreClient

from rootgraft.api.access.caller import Caller, RequestFacts
from rootgraft.api.config import ServerConfig
from rootgraft.api.errors import HTTPError, Rejection
from rootgraft.api.gateways.engine_multiplexer import EngineMultiplexer
from rootgraft.api.gateways.gateway_client import GatewayClient
from rootgraft.api.gateways.gateway_state import GatewayState
from rootgraft.api.gateways.main_connection import MainConnection
from rootgraft.api.gateways.process_link import ProcessLink
from rootgraft.api.generate.model_directory import ModelTarget
from rootgraft.api.observe.token_usage import TokenCounts
from rootgraft.api.observe.usage_ledger import UsageLedger, UsageRecord
from rootgraft.engine.errors import AdapterUnavailable, EngineDead, GrammarRefused, UnknownModel
from rootgraft.engine.messages import Submit, TokenOut
from rootgraft.engine.serving.request import TextRequest
from rootgraft.engine.types import AdapterInfo, Priority, SamplingParams, SequenceStats, Usage


class Pair:
    """A main process's state with one gateway, both in this process."""

    def __init__(self, folder: Path, **options: Any) -> None:
        keys = folder / "keys.json"
        write(keys, entry("ann", requests_per_minute=3, tokens_per_minute=1000), entry("bob", adapters=["sql"]))
        self.options = ServerConfig(api_key_file=str(keys), usage_ledger=str(folder / "usage.sqlite"), **options)
        self.main = make_state(self.options)
        self.main.stores.ledger = UsageLedger(folder / "usage.sqlite")
        self.core = CoreClient()
        self.multiplexer = EngineMultiplexer(self.core)
        self.lost: list[MainConnection] = []

    async def connect(self) -> None:
        ours, theirs = socket.socketpair()
        self.link, link = ProcessLink(), ProcessLink()
        loop = asyncio.get_running_loop()
        process: Any = SimpleNamespace(pid=os.getpid())
        self.connection = MainConnection("gateway-1", process, self.link, self.main, self.lost.append)
        self.client = GatewayClient(link)
        self.client.settings.set_result({})
        await loop.create_connection(lambda: self.link, sock=ours)
        await loop.create_connection(lambda: link, sock=theirs)
        self.connection.serve({}, self.multiplexer)
        self.gateway = GatewayState(self.options, self.client, "1.2.3", enable_lora=True)
        self.gateway.serve(self.main.models.names, self.main.engine.async_engine)  # type: ignore[arg-type]
        self.kill = link.close

    def caller(self, name: str) -> Caller:
        key = self.gateway.limits.keys.named(name)
        assert key is not None
        return Caller(key, key.tenant, None, RequestFacts(model="tiny"))

    async def settled(self) -> None:
        """Wait until what was told has arrived."""
        await self.gateway.limits.limit_headers(self.caller("ann").key)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    made = Pair(tmp_path)
    await made.connect()
    yield made
    made.kill()
    assert made.main.stores.ledger is not None
    await made.main.stores.ledger.close()


def names_of(target: ModelTarget) -> tuple[str, str | None]:
    return target.name, target.adapter


def request(num_tokens: int = 10, most: int = 100, n: int = 1) -> TextRequest:
    return TextRequest(array("i", range(num_tokens)), SamplingParams(max_tokens=most), n=n)


async def test_limits_are_those_of_the_main_process(pair: Pair) -> None:
    ann = pair.caller("ann")
    first = await pair.gateway.limits.admit(ann, [request()])
    queue = pair.main.limits.admission.queue_limits
    assert (queue.sequences, queue.tokens) == (1, 10)
    first.take((0, 0), 1)
    first.take((0, 0), 4)
    first.close()
    await pair.settled()
    assert (queue.sequences, queue.tokens) == (0, 0)
    # Beside the gateway's, the main process's own requests count: batches, and stored responses.
    await pair.main.limits.admit(ann, [request()])
    headers = await pair.gateway.limits.limit_headers(ann.key)
    assert headers["x-ratelimit-remaining-requests"] == "1"
    assert headers["x-ratelimit-remaining-tokens"] == str(1000 - 15 - 110)
    await pair.gateway.limits.admit(ann, [request()])
    with pytest.raises(Rejection) as refused:
        await pair.gateway.limits.admit(ann, [request()])
    assert (refused.value.status_code, refused.value.reason, refused.value.kind) == (
        429,
        "requests_per_minute",
        "requests",
    )
    assert refused.value.headers and int(refused.value.headers["retry-after"]) >= 1


async def test_a_key_that_was_removed_is_refused_by_the_main_process(pair: Pair, tmp_path: Path) -> None:
    ann = pair.caller("ann")
    write(tmp_path / "keys.json", entry("bob"))
    pair.main.limits.keys._looked_at = -1e9
    with pytest.raises(HTTPError) as refused:
        await pair.gateway.limits.admit(ann, [request()])
    assert refused.value.status_code == 401
    assert await pair.gateway.limits.limit_headers(ann.key) == {}


async def test_a_cancelled_admission_holds_nothing(pair: Pair) -> None:
    admission = asyncio.ensure_future(pair.gateway.limits.admit(pair.caller("bob"), [request()]))
    await asyncio.sleep(0)
    admission.cancel()
    await asyncio.gather(admission, return_exceptions=True)
    await pair.settled()
    assert pair.main.limits.admission.queue_limits.sequences == 0


async def test_a_draining_server_admits_nothing(pair: Pair) -> None:
    pair.main.engine.draining = True
    with pytest.raises(HTTPError) as refused:
        await pair.gateway.limits.admit(pair.caller("bob"), [request()])
    assert (refused.value.status_code, refused.value.code) == (503, "shutting_down")
    assert refused.value.headers == {"retry-after": "1", "connection": "close"}


async def test_adapters_are_those_that_the_main_process_has_now(pair: Pair) -> None:
    bob = pair.caller("bob")
    assert names_of(await pair.gateway.models.find("tiny", bob)) == ("tiny", None)
    with pytest.raises(UnknownModel):
        await pair.gateway.models.find("sql", bob)
    info = AdapterInfo("sql", "adapters/sql", "ready", "host", digest="d1")
    pair.main.engine.client.adapters["sql"] = info  # type: ignore[union-attr, index]
    assert names_of(await pair.gateway.models.find("sql", bob)) == ("sql", "sql")
    assert pair.gateway.models.adapters["sql"] == info
    del pair.main.engine.client.adapters["sql"]  # type: ignore[union-attr, attr-defined]
    with pytest.raises(UnknownModel, match="'sql' does not exist"):
        await pair.gateway.models.find("sql", bob)


@pytest.mark.parametrize(
    "error",
    [
        UnknownModel("x"),
        AdapterUnavailable("being downloaded"),
        GrammarRefused("pattern", "/a", "too long", param="response_format"),
        HTTPError(403, "no", code="priority_not_allowed", headers={"a": "b"}),
        Rejection(503, "busy", "queue_slow", 7.2),
    ],
)
async def test_errors_arrive_as_they_were_raised(pair: Pair, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    async def fail(*_args: Any) -> Any:
        raise error

    monkeypatch.setattr(type(pair.main.models), "find", fail)
    with pytest.raises(type(error)) as raised:
        await pair.client.call("find_model", "bob", "x", None, None, None)
    assert str(raised.value) == str(error)
    for name in ("param", "code", "keyword", "pointer", "reason", "status_code", "headers", "kind"):
        assert getattr(raised.value, name, None) == getattr(error, name, None)


async def test_metrics_are_added_to_those_of_the_main_process(pair: Pair) -> None:
    usage, stats = Usage(10, 4, 6), SequenceStats(0.25, 0.5, 2.0, 1, 3.5, 7)
    direct = make_state(pair.options)
    for metrics in (pair.gateway.observers.metrics, direct.observers.metrics):
        metrics.observe_prompt(10, 2, 100)
        metrics.observe_first(0.3)
        metrics.observe_between(0.04)
        metrics.observe_end(1.5, usage, stats)
        metrics.observe_end(1.5, usage, None)
        metrics.observe_longest(6)
        metrics.count_end("stop")
        metrics.count_rejection("queue_slow")
        metrics.count_http("/v1/completions", "POST", 200)
        metrics.count_error("timeout")
        metrics.count_structured("json_schema")
        metrics.count_broken(2)
        metrics.count_reasoning(3)
        metrics.count_usage("ann", None, TokenCounts(10, 4, 6), ())
    pair.client.tell("alive", 1, 0, pair.gateway.relayed.take(), [])
    await pair.settled()

    def told(state: Any) -> list[str]:
        lines = state.observers.metrics.exposition("")[0].decode().splitlines()
        return [line for line in lines if not line.startswith(("process_", "#", "rootgraft:lora_requests_info"))]

    assert told(pair.main) == told(direct)
    assert pair.gateway.relayed.take() == []


def rows(pair: Pair) -> list[Any]:
    assert pair.main.stores.ledger is not None
    return pair.main.stores.ledger._file._db.execute(
        "SELECT key, model, requests, prompt_tokens, completion_tokens FROM usage ORDER BY key"
    ).fetchall()


async def test_usage_is_written_before_an_answer_ends(pair: Pair) -> None:
    recorder = pair.gateway.stores.recorder
    assert recorder is not None
    record = UsageRecord("id-1", 1e9, "ann", "tiny", 10, 4, 6)
    for _ in range(2):  # a repeated one counts once
        await recorder.until_written(recorder.put(record))
    assert rows(pair) == [("ann", "tiny", 1, 10, 6)]


async def test_a_request_that_has_ended_counts_once_though_its_gateway_ends_with_it(pair: Pair) -> None:
    recorder = pair.gateway.stores.recorder
    assert recorder is not None
    ticket = await pair.gateway.limits.admit(pair.caller("ann"), [request(10)])
    ticket.take((0, 0), 6)
    ticket.close()
    recorder.put(UsageRecord("id-2", 1e9, "ann", "tiny", 10, 0, 6)).add_done_callback(lambda reply: reply.exception())
    await asyncio.sleep(0)  # the link sends what was told
    pair.kill()
    while not pair.lost:
        await asyncio.sleep(0.001)
    while pair.main.stores.ledger and pair.main.stores.ledger.num_waiting:
        await asyncio.sleep(0.001)
    assert rows(pair) == [("ann", "tiny", 1, 10, 6)]


async def test_what_a_killed_gateway_leaves_is_ended_given_back_and_counted(pair: Pair) -> None:
    ann, heard = pair.caller("ann"), []
    ticket = await pair.gateway.limits.admit(ann, [request(10), request(20, n=2)])
    waiting = await pair.gateway.limits.admit(ann, [request(5)])
    pair.client.on_frame = heard.extend
    pair.client.submit([Submit(1, array("i", [1, 2, 3]), SamplingParams(max_tokens=10**3, ignore_eos=True))])
    while not any(isinstance(message, TokenOut) for message in heard):
        await asyncio.sleep(0)
    ticket.take((1, 0), 3)
    ticket.take((1, 0), 4)
    pair.client.tell("alive", 1, 2, [], pair.gateway.main_limits.progress())
    await pair.settled()
    assert pair.connection.num_active == 2 and pair.main.limits.admission.queue_limits.sequences == 3
    pair.kill()
    while not pair.lost:
        await asyncio.sleep(0.001)
    while pair.core.core.has_work:
        await asyncio.sleep(0)
    assert pair.core.stats["running"] == 0
    assert pair.main.limits.admission.queue_limits.sequences == 0
    headers = pair.main.limits.admission.limits.headers(ann.key)
    assert headers["x-ratelimit-remaining-tokens"] == str(1000 - 30 - 7)
    while pair.main.stores.ledger and pair.main.stores.ledger.num_waiting:
        await asyncio.sleep(0.001)
    assert rows(pair) == [("ann", "tiny", 2, 20, 7)]  # of the prompts, the one that had begun
    assert waiting is not ticket


async def test_a_gateway_without_its_main_process_says_so(pair: Pair) -> None:
    deaths: list[EngineDead] = []
    pair.client.on_death = deaths.append
    call = asyncio.ensure_future(pair.client.call("find_model", "bob", "sql", None, None, None))
    pair.link.close()
    with pytest.raises(EngineDead, match="main process has ended"):
        await call
    while not deaths:
        await asyncio.sleep(0.001)
    assert not pair.gateway.engine.is_healthy
    with pytest.raises(EngineDead):
        await pair.gateway.limits.admit(pair.caller("bob"), [request()])
    with pytest.raises(EngineDead):
        pair.client.submit([])


async def test_a_refused_sequence_fails_as_by_the_engine(pair: Pair) -> None:
    heard: list[Any] = []
    pair.client.on_frame = heard.extend
    pair.core.die()
    pair.client.submit([Submit(4, array("i", [1]), SamplingParams(max_tokens=1))])
    while not heard:
        await asyncio.sleep(0.001)
    [failed] = heard
    assert (failed.id, failed.kind) == (4, "EngineDead")


async def test_priorities_are_kept(pair: Pair) -> None:
    late = TextRequest(array("i", [1]), SamplingParams(max_tokens=1), priority=Priority.BATCH)
    await pair.gateway.limits.admit(pair.caller("bob"), [late])
    assert pair.main.limits.admission.queue_limits.waiting(Priority.BATCH) == 1
