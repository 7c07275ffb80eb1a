"""Another model answers by a rule, or in place of one that cannot: of ours or a provider's, and how it is told."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from support.api.api_fakes import FakeClient, FakeFrontend
from support.api.api_live import make_state

from rootgraft.api.config import ServerConfig
from rootgraft.api.fallback_plan import FallbackPlan, ModelRoute, Provider
from rootgraft.api.generate.model_router import ModelRouter
from rootgraft.api.generate.server_state import ServerState
from rootgraft.api.http import provider_client
from rootgraft.api.http.app import create_app
from rootgraft.api.http.model_fallback import PATHS, ROUTED_HEADER
from rootgraft.api.observe.engine_facts import EngineFacts
from rootgraft.api.observe.usage_ledger import UsageLedger, read_ledger
from rootgraft.engine.errors import EngineDead, EngineError
from rootgraft.engine.types import Priority

CHAT = [{"role": "user", "content": "Hello there"}]
CHATS = "/v1/chat/completions"
ASKS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 3},
    CHATS: {"messages": CHAT, "max_tokens": 3},
    "/v1/responses": {"input": "a", "max_output_tokens": 3},
    "/v1/messages": {"messages": CHAT, "max_tokens": 3},
}
KEY = "sk-secret-of-the-provider"
TO_TINY = FallbackPlan(("tiny",))
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}


def taken(door: Door) -> dict[tuple[str, str], float]:
    """Return how many requests of the model big another one took, by reason and target."""
    families = door.big.observers.metrics.registry.collect()
    samples = (sample for family in families for sample in family.samples)
    wanted = (each for each in samples if each.name == "rootgraft:fallback_requests_total")
    return {(each.labels["reason"], each.labels["target"]): each.value for each in wanted}


class Door:
    """The models tiny and big, the second of which has a plan and may be made to fail."""

    def __init__(self, plan: FallbackPlan, options: ServerConfig | None = None) -> None:
        self.tiny: Any = make_state(options)
        self.big: Any = ServerState.beside(self.tiny, self.tiny.options)
        client: Any = FakeClient()
        self.big.begin_loading(("big", "org/big"), client, finds_adapters=False)
        self.big.begin_serving(FakeFrontend(), client, EngineFacts(), "b" * 32)
        self.big.plan = plan
        transport = httpx.ASGITransport(create_app(ModelRouter([self.tiny, self.big])), raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test")

    def fail(self, error: Exception | None = None, after: int = 0) -> None:
        """Let the model big fail."""
        self.big.engine.async_engine.fail_after = (after, error or EngineDead("The engine has ended."))

    async def ask(self, path: str = CHATS, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
        return await self.http.post(path, json={"model": "big", **ASKS[path], **more}, headers=headers)

    @property
    def counts(self) -> tuple[int, int]:
        return len(self.tiny.engine.async_engine.seen), len(self.big.engine.async_engine.seen)


def test_every_route_of_the_middleware_is_asked_here() -> None:
    assert ASKS.keys() == PATHS


@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_model_has_its_fallback_answer(path: str, stream: bool, tmp_path: Path) -> None:
    async def job() -> None:
        door = Door(TO_TINY)
        door.tiny.stores.ledger = UsageLedger(tmp_path / "usage.db")
        whole = await door.ask(path, stream=stream)
        assert whole.status_code == 200 and ROUTED_HEADER not in whole.headers and taken(door) == {}
        door.fail()
        routed = await door.ask(path, stream=stream)
        assert routed.status_code == 200 and routed.headers[ROUTED_HEADER] == "tiny; reason=failure"
        assert door.counts == (1, 2) and (stream or routed.json()["model"] == "tiny")
        assert taken(door) == {("failure", "tiny"): 1}
        await door.tiny.stores.ledger.close()
        assert {each.model for each in read_ledger(tmp_path / "usage.db")} == {"big", "tiny (for big)"}

    asyncio.run(job())


@pytest.mark.parametrize("stream", [False, True])
def test_an_overloaded_model_has_its_fallback_answer_and_one_that_was_removed_is_passed_over(stream: bool) -> None:
    async def job() -> None:
        door = Door(FallbackPlan(("gone", "tiny")), ServerConfig(max_queued_requests=1))
        door.big.engine.async_engine.gate = asyncio.Event()
        first = asyncio.create_task(door.ask())
        while not door.counts[1]:
            await asyncio.sleep(0)
        routed = await door.ask(stream=stream)
        assert routed.status_code == 200 and routed.headers[ROUTED_HEADER] == "tiny; reason=overload"
        assert taken(door) == {("overload", "tiny"): 1}
        door.big.engine.async_engine.gate.set()
        assert ROUTED_HEADER not in (await first).headers

    asyncio.run(job())


@pytest.mark.parametrize(
    ("path", "headers", "more"),
    [
        (CHATS, {"x-model": "strict"}, {}),
        (CHATS, {}, {"logit_bias": {"1": 5}}),
        (CHATS, {}, {"stop_token_ids": [1]}),
        (CHATS, {}, {"return_token_ids": True}),
        ("/v1/completions", {}, {"prompt": [1, 2]}),
        ("/v1/completions", {}, {"prompt": [[1, 2]]}),
    ],
)
def test_a_strict_request_and_one_of_a_vocabulary_have_no_other_model(path: str, headers: Any, more: Any) -> None:
    async def job() -> None:
        door = Door(FallbackPlan(("tiny",), (ModelRoute("tiny", 1000),)))
        assert (await door.ask(path, headers, **more)).status_code == 200 and door.counts == (0, 1)
        door.fail()
        reply = await door.ask(path, headers, **more)
        assert reply.status_code == 503 and door.counts == (0, 2) and ROUTED_HEADER not in reply.headers

    asyncio.run(job())


def test_what_the_client_is_to_blame_for_is_no_failure() -> None:
    async def job() -> None:
        door = Door(TO_TINY)
        for path, more, status in (
            (CHATS, {"max_tokens": -1}, 400),
            (CHATS, {"messages": [{"role": "user", "content": "a" * 5000}]}, 400),
            (CHATS, {"model": "nobody"}, 404),
            (CHATS, {"model": ["big"]}, 400),
        ):
            assert (await door.ask(path, **more)).status_code == status
        for content in (b"{", b"[]", b'{"model": "big"}', b""):
            reply = await door.http.post(CHATS, content=content, headers={"content-type": "application/json"})
            assert reply.status_code == 400
        wrong = await door.ask(headers={"x-model": "no"})
        assert wrong.status_code == 400 and wrong.json()["error"]["code"] == "invalid_header"
        assert door.counts == (0, 0)

    asyncio.run(job())


def test_a_failure_behind_the_first_byte_stays_one() -> None:
    async def job() -> None:
        door = Door(TO_TINY)
        door.fail(after=1)
        reply = await door.ask(stream=True)
        assert reply.status_code == 200 and "engine_dead" in reply.text and door.counts == (0, 1)

    asyncio.run(job())


def test_the_first_error_is_told_where_nobody_can_answer() -> None:
    async def job() -> None:
        door = Door(TO_TINY)
        door.fail(EngineError("The step has failed."))
        door.tiny.engine.async_engine.fail_after = (0, EngineDead("The other one has ended."))
        for stream in (False, True):
            reply = await door.ask(stream=stream)
            assert reply.status_code == 500 and reply.json()["error"]["message"] == "The step has failed."
        assert door.counts == (2, 2) and taken(door) == {}

    asyncio.run(job())


def test_rules_by_length_and_priority_pick_a_model_at_once() -> None:
    rules = (ModelRoute("tiny", 20), ModelRoute("tiny", 40, frozenset((Priority.BATCH,))))

    async def job() -> None:
        door = Door(FallbackPlan((), rules))
        for length, priority, name in (
            (20, None, "tiny"), (21, None, "big"), (21, "batch", "tiny"), (40, "batch", "tiny"), (41, "batch", "big"),
            (21, "interactive", "big"),
        ):  # fmt: skip
            more = {} if priority is None else {"priority": priority}
            reply = await door.ask(messages=[{"role": "user", "content": "a" * (length - len("user"))}], **more)
            assert reply.json()["model"] == name
            assert reply.headers.get(ROUTED_HEADER) == (None if name == "big" else "tiny; reason=rule")
        door.tiny.engine.async_engine.fail_after = (0, EngineDead("The other one has ended."))
        reply = await door.ask(messages=[{"role": "user", "content": "a"}])
        assert reply.json()["model"] == "big" and ROUTED_HEADER not in reply.headers
        assert taken(door) == {("rule", "tiny"): 3}

    asyncio.run(job())


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def provider(handler: Handler, timeout: float = 60.0) -> AsyncIterator[FallbackPlan]:
    """A server elsewhere, and a plan that names it."""
    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/v1/{rest:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield FallbackPlan(
        ("cloud",), (), {"cloud": Provider("cloud", f"http://127.0.0.1:{port}/v1", "mini", KEY, timeout)}
    )
    await runner.cleanup()


def chunk(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode() + b"\n\n"


@pytest.mark.parametrize("path", [CHATS, "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wants_usage", [False, True])
def test_a_provider_answers_with_its_own_key_and_model(
    path: str, stream: bool, wants_usage: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[str, dict[str, Any], dict[str, str]]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append((request.path, await request.json(), dict(request.headers)))
        if not stream:
            return web.json_response({"model": "mini", "choices": [{"text": "hi"}], "usage": USAGE})
        reply = web.StreamResponse(headers={"content-type": "text/event-stream", "x-of-provider": "1"})
        await reply.prepare(request)
        usage = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode()
        for piece in (chunk("h"), chunk("i"), usage[:9], usage[9:], b"\r\n\r\n", b"data: [DO", b"NE]\n\n"):
            await reply.write(piece)
        return reply

    async def job() -> None:
        async with provider(handler) as plan:
            door = Door(plan)
            door.tiny.stores.ledger = UsageLedger(tmp_path / "usage.db")
            door.fail()
            more = {"stream_options": {"include_usage": True}} if wants_usage and stream else {}
            secret = {"authorization": "Bearer of-the-client", "x-other": "1", "cookie": "a=b"}
            reply = await door.ask(path, secret, stream=stream, user="me", **more)
            assert reply.status_code == 200 and reply.headers[ROUTED_HEADER] == "cloud; reason=failure"
            assert taken(door) == {("failure", "cloud"): 1}
            assert "x-of-provider" not in reply.headers
            if stream:
                assert reply.text.endswith("data: [DONE]\n\n") and reply.text.count('"delta"') == 2
                assert ('"usage"' in reply.text) == wants_usage
            else:
                assert reply.json()["choices"] == [{"text": "hi"}]
            await door.tiny.stores.ledger.close()
        [(asked, body, headers)] = seen
        assert (asked, body["model"], headers["Authorization"]) == (path, "mini", f"Bearer {KEY}")
        assert "user" not in body and not {"x-other", "Cookie", "cookie"} & headers.keys()
        [told] = [each for each in read_ledger(tmp_path / "usage.db") if each.model == "cloud (for big)"]
        assert (told.prompt_tokens, told.cached_tokens, told.completion_tokens) == (7, 4, 2)
        assert KEY not in caplog.text and KEY not in repr(plan)

    with caplog.at_level(logging.DEBUG):
        asyncio.run(job())


async def redirects(request: web.Request) -> web.StreamResponse:
    raise web.HTTPTemporaryRedirect("http://127.0.0.1:1/v1/elsewhere")


async def refuses(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": KEY}}, status=429)


async def is_no_json(request: web.Request) -> web.StreamResponse:
    return web.Response(text="<html>")


async def hangs(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(300)
    raise AssertionError


async def is_too_long(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b"[" + b"0," * 600 + b"0]")


async def closes(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@pytest.mark.parametrize("handler", [redirects, refuses, is_no_json, hangs, is_too_long, closes])
@pytest.mark.parametrize("stream", [False, True])
def test_a_provider_that_fails_leaves_the_first_error(
    handler: Handler, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_client, "MAX_ANSWER_BYTES", 1000)

    async def job() -> None:
        async with provider(handler, timeout=0.2) as plan:
            door = Door(plan)
            door.fail()
            reply = await door.ask(stream=stream)
            assert reply.status_code == 503 and reply.json()["error"]["code"] == "engine_dead"
            assert KEY not in reply.text and ROUTED_HEADER not in reply.headers

    asyncio.run(job())


def test_a_provider_is_asked_for_nothing_that_it_would_not_do_exactly() -> None:
    async def job() -> None:
        async with provider(is_no_json) as plan:
            door = Door(plan)
            door.fail()
            for path, more in (
                (CHATS, {"structured_outputs": {"regex": "a"}}),
                (CHATS, {"top_k": 5}),
                ("/v1/responses", {}),
                ("/v1/messages", {}),
            ):
                assert (await door.ask(path, **more)).status_code in (503, 529)

    asyncio.run(job())


def test_a_stream_that_a_provider_breaks_off_ends_with_an_error() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        await reply.write(chunk("h"))
        return reply

    async def job() -> None:
        async with provider(handler) as plan:
            door = Door(plan)
            door.fail()
            reply = await door.ask(stream=True)
            assert reply.status_code == 200 and reply.text.startswith(chunk("h").decode())
            assert "provider_failed" in reply.text and "[DONE]" not in reply.text

    asyncio.run(job())
