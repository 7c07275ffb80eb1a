"""What takes long with a long request is done on other threads: the event loop serves the others meanwhile."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from support.api.api_live import Live
from support.api.reply_checks import check_error
from support.machine.import_graph import ROOT

from rootgraft.api.errors import MAX_FAULTS
from rootgraft.api.generate import build_request
from rootgraft.api.large_bodies import LARGE_BODY, beside_loop, note_body
from rootgraft.api.structured import output_format

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
LONG = "x" * 60_000


def call(arguments: str) -> list[dict[str, Any]]:
    function = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "assistant", "tool_calls": [function]}, {"role": "tool", "tool_call_id": "a", "content": "1"}]


def tool(description: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "description": description, "parameters": {}}}]


SAID = [{"role": "user", "content": "hi" * 20}]
SMALL, LARGE = {"description": "a"}, {"description": "x" * (64 << 10)}


async def _own_thread() -> int:
    return threading.get_ident()


@pytest.fixture
def threads(live: Live, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each rendering and decoding was on the event loop's thread."""
    loop = asyncio.run_coroutine_threadsafe(_own_thread(), live.loop).result()
    seen: list[bool] = []
    tokenizer = live.async_engine.tokenizer

    def noting(work: Callable[..., Any], *args: Any, **options: Any) -> Any:
        seen.append(threading.get_ident() == loop)
        return work(*args, **options)

    for name in ("render_chat", "decode"):
        monkeypatch.setattr(tokenizer, name, partial(noting, getattr(tokenizer, name)))
    return seen


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": LONG}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
        {"messages": HI * 65},
        {"messages": [*HI, {"role": "assistant", "content": "", "reasoning_content": LONG}]},
        {"messages": [*HI, *call(f'{{"a": "{LONG}"}}')]},
        {"messages": HI, "tools": tool(LONG)},
        {"messages": HI, "chat_template_kwargs": {"date": LONG}},
    ],
    ids=["text", "parts", "messages", "reasoning", "call", "tools", "kwargs"],
)
def test_long_conversations_are_rendered_on_another_thread(
    live: Live, threads: list[bool], fields: dict[str, Any]
) -> None:
    live.async_engine.set_max_len(1 << 20)
    with live.http() as http:
        http.post("/tokenize", json={"messages": HI, "tools": tool("")})  # the probe of the template is done with
        threads.clear()
        assert http.post("/tokenize", json=fields).status_code == 200
    assert threads == [False]


def test_short_conversations_are_rendered_at_once(live: Live, threads: list[bool]) -> None:
    with live.http() as http:
        http.post("/tokenize", json={"messages": HI, "tools": tool("")})
        threads.clear()
        body = {"messages": [*HI, *call('{"a": 123456789012345678901234567890}')], "tools": tool("short")}
        assert http.post("/tokenize", json=body).status_code == 200
        assert http.post("/tokenize", json={"messages": HI * 64}).status_code == 200
    assert threads == [True, True]


@pytest.mark.parametrize(
    ("path", "fields", "module"),
    [
        (CHAT, {"messages": HI}, build_request),
        ("/v1/completions", {"prompt": "hi"}, output_format),
        ("/api/generate", {"model": "tiny", "prompt": "hi", "raw": True, "stream": False}, output_format),
    ],
    ids=["chat", "completion", "ollama"],
)
def test_the_format_of_a_large_body_is_checked_on_another_thread(
    live: Live, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], module: Any
) -> None:
    loop = asyncio.run_coroutine_threadsafe(_own_thread(), live.loop).result()
    seen: list[bool] = []
    name = "plan_chat" if module is build_request else "requested_format"
    check = getattr(module, name)

    def noting(*args: Any) -> Any:
        seen.append(threading.get_ident() == loop)
        return check(*args)

    monkeypatch.setattr(module, name, noting)
    with live.http() as http:
        for schema in (SMALL, LARGE):
            form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema | {"type": "boolean"}}}
            asked = {"format": form["json_schema"]["schema"]} if path[:5] == "/api/" else {"response_format": form}
            http.post(path, json=fields | asked)
    assert seen == [True, False]


def turns(count: int) -> list[dict[str, Any]]:
    """Messages of Anthropic's protocol, with parts."""
    text = [{"type": "text", "text": "hi" * 20}]
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number in range(count)]


def items(count: int) -> list[dict[str, Any]]:
    """Items of a response's input."""
    said = [{"type": "input_text", "text": "hi"}]
    return [{"type": "message", "role": "user", "content": said} for _ in range(count)]


def triton(parameters: dict[str, Any], data: list[str]) -> dict[str, Any]:
    text = {"name": "text_input", "datatype": "BYTES", "shape": [len(data)], "data": data}
    return {"inputs": [text], "parameters": parameters}


BODIES: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "chat": (CHAT, lambda count: {"messages": SAID * count, "max_tokens": 1}),
    "messages": ("/v1/messages", lambda count: {"model": "tiny", "messages": turns(count), "max_tokens": 1}),
    "responses": ("/v1/responses", lambda count: {"input": items(count), "max_output_tokens": 1}),
    "Ollama's chat": ("/api/chat", lambda count: {"model": "tiny", "messages": SAID * count, "stream": False}),
    "Triton's unknown parameters": (
        "/v2/models/tiny/infer", lambda count: triton({f"p{number}": 1 for number in range(count)}, ["hi"])
    ),
    "Triton's unknown fields": (
        "/v2/models/tiny/infer", lambda count: triton({}, ["hi"]) | {f"f{number}": 1 for number in range(count)}
    ),
}  # fmt: skip


async def _counted(counts: list[int] | None) -> None:
    """Count the calls of functions in Python on the event loop's thread, from now on, or no longer for None."""

    def count(_frame: object, event: str, _of: object) -> None:
        counts[0] += event == "call"

    sys.setprofile(None if counts is None else count)


def calls_on_loop(live: Live, path: str, body: dict[str, Any], status: int = 200) -> int:
    """Return how many calls of functions the event loop makes for a request, none for those on other threads."""
    counts = [0]
    with live.http() as http:
        asyncio.run_coroutine_threadsafe(_counted(counts), live.loop).result()
        try:
            assert http.post(path, json=body).status_code == status
        finally:
            asyncio.run_coroutine_threadsafe(_counted(None), live.loop).result()
    return counts[0]


@pytest.mark.parametrize("name", BODIES)
def test_the_work_of_the_loop_does_not_grow_with_a_large_body(live: Live, name: str) -> None:
    live.async_engine.set_max_len(1 << 20)
    path, body = BODIES[name]
    sizes = [1_000 * LARGE_BODY // len(json.dumps(body(1_000))) * times + 100 for times in (1, 3)]
    status = 400 if "unknown" in name else 200
    calls_on_loop(live, path, body(1), status)
    few, many = (calls_on_loop(live, path, body(size), status) for size in sizes)
    assert many < few + sizes[1] / 4, "a part of a call for each element of the larger body"


def test_so_it_is_with_a_stored_conversation(live: Live) -> None:
    live.async_engine.set_max_len(1 << 20)
    calls = []
    with live.http() as http:
        for size in (700, 2800):
            told = http.post("/v1/responses", json={"input": items(size), "max_output_tokens": 1}).json()
            following = {"input": "hi", "previous_response_id": told["id"], "max_output_tokens": 1}
            calls.append(calls_on_loop(live, "/v1/responses", following))
    assert calls[1] < calls[0] + 700


@pytest.mark.parametrize(("num_bytes", "is_on_loop"), [(LARGE_BODY, True), (LARGE_BODY + 1, False)])
async def test_what_is_proportional_to_a_large_body_runs_on_another_thread(num_bytes: int, is_on_loop: bool) -> None:
    note_body(num_bytes)
    assert (await beside_loop(threading.get_ident) == threading.get_ident()) == is_on_loop


# Modules that use the threads of the event loop: for the server's own work, and once for an adapter or a model.
OWN_WORK = """
    api/gateways/main_supervisor.py api/generate/model_engine.py api/generate/remote_adapters.py
    api/http/gateway_process.py api/http/model_service.py api/http/model_services.py api/http/server.py
    api/observe/gpu_usage.py api/observe/usage_ledger.py engine/adapter_sources/hub_client.py
    engine/adapter_sources/object_store_client.py engine/serving/engine_client.py fleet/catalog/model_versions.py
    fleet/on_ray/ray_cluster.py fleet/on_ray/ray_launcher.py fleet/on_ray/ray_replica.py
"""


def test_requests_use_threads_of_which_tenants_have_shares() -> None:
    """Those of the event loop are a handful for all, without shares: ``on_request_thread`` and the like have them."""
    found = {
        str(path.relative_to(ROOT))
        for folder in ("api", "engine", "fleet")
        for path in (ROOT / folder).rglob("*.py")
        if "asyncio.to_thread(" in (text := path.read_text()) or ".run_in_executor(None" in text
    }
    assert found == set(OWN_WORK.split())


def test_faults_of_a_body_are_named_up_to_a_number(live: Live) -> None:
    with live.http() as http:
        for more in (0, 1):
            body = {"messages": HI, **{f"f{number}": 1 for number in range(MAX_FAULTS + more)}}
            reply = http.post(CHAT, json=body)
            check_error(reply, 400, None if more else "f0", "invalid_value" if more else "unknown_parameter")
            assert not more or f"has {MAX_FAULTS + 1} errors" in reply.json()["error"]["message"]


def test_of_a_long_value_the_beginning_is_quoted(live: Live) -> None:
    messages = [{"role": "user", "content": "x"}] * 5_000
    with live.http() as http:
        message = http.post(CHAT, json={"messages": messages}).json()["error"]["message"]
    assert message == f"'messages' must be a list of at most 4096 items, not {json.dumps(messages)[:40]}...."


def test_many_tokens_are_decoded_on_another_thread(live: Live, threads: list[bool]) -> None:
    with live.http() as http:
        http.post("/tokenize", json={"messages": HI})  # the probe of the template is done with
        threads.clear()
        for count in (4_096, 4_097):
            assert http.post("/detokenize", json={"tokens": [65] * count}).json()["prompt"] == "A" * count
    assert threads == [True, False]


def test_a_prompt_that_is_too_long_is_refused_before_its_ids_are_looked_at(live: Live) -> None:
    limit = live.async_engine.max_model_len
    with live.http() as http:
        check_error(http.post("/v1/completions", json={"prompt": [-1] * limit}), 400, "prompt", "invalid_value")
        reply = http.post("/v1/completions", json={"prompt": [-1] * (limit + 1)})
        check_error(reply, 400, "prompt", "context_length_exceeded")


def test_a_large_bias_is_refused_by_its_size(live: Live) -> None:
    with live.http() as http:
        for bias in (
            {str(token): 1 for token in range(301)},
            {"no token": 1} | {str(token): 1 for token in range(300)},
        ):
            message = check_error(
                http.post(CHAT, json={"messages": HI, "logit_bias": bias}), 400, "logit_bias", "invalid_value"
            )
            assert "at most 300 entries" in message
