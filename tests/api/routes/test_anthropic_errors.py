"""Errors of /v1/messages in Anthropic's shape: as its client's exceptions, from the routes and from before them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import orjson
import pytest
from support.api.api_live import Live
from support.api.bad.bad_fields import STRANGERS, wrong_for
from support.api.bad.bad_inputs import RAW
from support.api.key_files import entry, write
from support.api.messages_asks import ASKED, COUNT, HI, PATH, client_of, error_of, post, prompt
from support.api.reply_checks import scrape, value

from rootgraft.api.config import ServerConfig
from rootgraft.engine.errors import CapacityError, EngineDead, RequestError, UnknownModel

Start = Callable[[ServerConfig], Live]


def test_keys_in_either_header(serve_with: Start) -> None:
    live = serve_with(ServerConfig(api_key=("first-key", "other")))
    for headers in (
        {"x-api-key": "first-key"},
        {"authorization": "Bearer other"},
        {"x-api-key": "first-key", "authorization": "Bearer wrong"},
        {"x-api-key": "wrong", "authorization": "Bearer other"},
    ):
        with live.http(headers={"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", **headers}) as http:
            assert http.post(PATH, json=ASKED, params={"beta": "true"}).status_code == 200
            assert http.get("/v1/models").status_code == 200
    for headers in ({}, {"x-api-key": ""}, {"x-api-key": "Bearer first-key"}, {"x-api-key": "first-ke"}):
        with live.http(headers=headers) as http:
            for path in (PATH, COUNT):
                message = error_of(http.post(path, json=ASKED), 401, "authentication_error")
                assert "x-api-key" in message and "first" not in message
            assert http.get("/v1/models").json()["error"]["code"] == "invalid_api_key"
    with client_of(live.url, api_key="first-key") as client:
        assert client.messages.create(**ASKED).content
    with client_of(live.url, api_key="wrong") as client, pytest.raises(anthropic.AuthenticationError) as caught:
        client.messages.create(**ASKED)
    assert caught.value.type == "authentication_error" and caught.value.request_id


@pytest.mark.parametrize(
    ("error", "kind", "name"),
    [
        (UnknownModel("x"), anthropic.NotFoundError, "not_found_error"),
        (RequestError("No."), anthropic.BadRequestError, "invalid_request_error"),
        (CapacityError("Full."), anthropic.APIStatusError, "overloaded_error"),
        (EngineDead("Gone."), anthropic.InternalServerError, "overloaded_error"),
        (ValueError("a bug"), anthropic.InternalServerError, "api_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_the_engine(
    live: Live, caplog: pytest.LogCaptureFixture, error: Exception, kind: Any, name: str, stream: bool
) -> None:
    live.async_engine.fail_after = (0, error)
    with caplog.at_level(logging.CRITICAL), client_of(live.url) as client, pytest.raises(kind) as caught:
        client.messages.create(**ASKED, stream=stream)
    assert caught.value.type == name and caught.value.request_id == caught.value.body["request_id"]
    assert "a bug" not in caught.value.message


def test_overload_has_a_status_of_its_own(live: Live) -> None:
    live.state.engine.draining = True
    with live.http() as http:
        for path, body in ((PATH, ASKED), (COUNT, {"model": "tiny", "messages": HI})):
            reply = http.post(path, json=body)
            error_of(reply, 529, "overloaded_error")
            assert reply.headers["retry-after"] == "1"
        assert http.post("/v1/chat/completions", json={"messages": HI}).status_code == 503
    live.state.engine.draining = False
    live.client.hang()
    with live.http() as http:
        error_of(http.post(PATH, json=ASKED), 503, "overloaded_error")


def test_before_the_route(live: Live, serve_with: Start) -> None:
    small = serve_with(ServerConfig(max_request_bytes=1024))
    with client_of(small.url) as client, pytest.raises(anthropic.ContentTooLargeError):
        client.messages.create(**ASKED, system="x" * 2000)
    with small.http() as http:
        body = (b"x" * 500 for _ in range(10))
        reply = http.post(PATH, content=body, headers={"content-type": "application/json"})
        error_of(reply, 413, "request_too_large")
    with live.http() as http:
        error_of(http.post(PATH, content=b"{}", headers={"content-type": "text/plain"}), 415, "invalid_request_error")
        error_of(http.post(PATH, content=b"", headers={"content-encoding": "gzip"}), 415, "invalid_request_error")
        error_of(http.post(PATH, json=ASKED, headers={"x-request-timeout": "0"}), 400, "invalid_request_error")
        error_of(http.get(PATH), 405, "invalid_request_error")
        error_of(http.post(PATH + "/batches", json={}), 404, "not_found_error")
        error_of(
            http.post(PATH, content=b"{", headers={"content-type": "application/json"}), 400, "invalid_request_error"
        )
        assert http.post(PATH + "s").json()["error"]["code"] == "unknown_url"
        mine = http.post(PATH, json=ASKED, headers={"x-request-id": "mine"})
        assert mine.headers["request-id"] == mine.headers["x-request-id"] == "mine"
        assert "request-id" not in http.get("/health").headers


def test_models_and_lengths(live: Live) -> None:
    with client_of(live.url) as client:
        with pytest.raises(anthropic.NotFoundError, match="gpt-9"):
            client.messages.create(**{**ASKED, "model": "gpt-9"})  # type: ignore[dict-item]
        with pytest.raises(anthropic.NotFoundError, match="gpt-9"):
            client.messages.count_tokens(model="gpt-9", messages=HI)  # type: ignore[arg-type]
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)"):
            client.messages.create(**{**ASKED, "messages": [{"role": "user", "content": "x" * 3000}]})  # type: ignore


def test_limits_of_a_key(tmp_path: Path, serve_with: Start) -> None:
    write(tmp_path / "keys.json", entry("a", requests_per_minute=1), entry("b", priority="batch"))
    live = serve_with(ServerConfig(api_key_file=str(tmp_path / "keys.json")))
    with client_of(live.url, api_key="a") as client:
        client.messages.create(**ASKED)
        with pytest.raises(anthropic.RateLimitError) as caught:
            client.messages.create(**ASKED)
        assert caught.value.type == "rate_limit_error"
        assert int(caught.value.response.headers["retry-after"]) >= 1
    with client_of(live.url, api_key="b") as client:
        client.messages.create(**ASKED)
        with pytest.raises(anthropic.PermissionDeniedError) as denied:
            client.messages.create(**ASKED, extra_body={"priority": "realtime"})
    assert denied.value.type == "permission_error"  # type: ignore[union-attr]
    assert [request.tenant for request in live.async_engine.seen] == ["a", "b"]
    assert live.async_engine.seen[1].priority.name == "BATCH"


def test_a_full_queue(serve_with: Start) -> None:
    live = serve_with(ServerConfig(max_queued_requests=1))
    live.async_engine.gate = asyncio.Event()

    async def ask() -> list[Any]:
        async with anthropic.AsyncAnthropic(base_url=live.url, api_key="none", max_retries=0) as client:
            asks = [asyncio.create_task(client.messages.create(**ASKED)) for _ in range(2)]
            done, _ = await asyncio.wait(asks, return_when=asyncio.FIRST_COMPLETED)
            live.loop.call_soon_threadsafe(live.async_engine.gate.set)
            assert len(done) == 1
            return await asyncio.gather(*asks, return_exceptions=True)

    answers = asyncio.run(ask())
    [refused] = [answer for answer in answers if isinstance(answer, Exception)]
    assert isinstance(refused, anthropic.APIStatusError) and (refused.status_code, refused.type) == (
        529,
        "overloaded_error",
    )


def test_log_and_metrics(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="rootgraft.access"):
        answer = post(live)
        post(live, stream=False, system="x")
    lines = [record.getMessage() for record in caplog.records if record.name == "rootgraft.access"]
    assert any(answer["id"] in line and '"completion_tokens":8' in line for line in lines)
    assert value(scrape(live), "request_success", "_total", finished_reason="stop") >= 2


Row = tuple[dict[str, Any], str]
TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}
RESULT = {"type": "tool_result", "tool_use_id": "t"}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
MARK = {"type": "ephemeral"}
LONG: dict[str, Any] = {"properties": {"a": {"pattern": "a" * 3_000}}}  # more than is taken


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"messages": [*HI, {"role": "assistant", "content": list(blocks)}, *HI]}


def marks(count: int) -> list[dict[str, Any]]:
    return [{"type": "text", "text": "x", "cache_control": MARK}] * count


def calls(count: int) -> list[dict[str, Any]]:
    return [{**USE, "id": str(number)} for number in range(count)]


# Fields that make a good request wrong, and the path that the error names. Numbers: beyond each limit.
WRONG: list[Row] = [
    *(({name: None}, name) for name in ("model", "messages", "max_tokens")),
    *(({"max_tokens": value}, "max_tokens") for value in (-1, 1.5, "5", True, 1 << 70)),
    *(({"temperature": value}, "temperature") for value in (-0.001, 1.001, 2, "1", True)),
    *(({"top_p": value}, "top_p") for value in (0, -0.1, 1.001, "1")),
    *(({"top_k": value}, "top_k") for value in (-2, (1 << 20) + 1, 1.5)),
    ({"max_tokens": 1 << 63}, "max_tokens"),
    *(({"seed": value}, "seed") for value in (1 << 63, "1")),
    *(({"stop_sequences": value}, "stop_sequences") for value in ("x", [""], ["x" * 257], ["x"] * 17)),
    ({"stop_sequences": [5]}, "stop_sequences[0]"),
    ({"stream": 1}, "stream"),
    ({"model": "x" * 257}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": HI * 4097}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "name": "a"}]}, "messages[0].name"),
    ({"messages": [{"role": "system", "content": [RESULT]}]}, "messages[0].content[0].type"),
    (user("x"), "messages[0].content[0]"),
    (user({"text": "x"}), "messages[0].content[0]"),
    (user({"type": "text"}), "messages[0].content[0].text"),
    (user({"type": "text", "text": "x", "y": 1}), "messages[0].content[0].y"),
    *(
        (user({"type": kind}), "messages[0].content[0].type")
        for kind in ("image", "document", "search_result", "thinking", "tool_use", "web_search_tool_result", "x", "")
    ),
    (user({"type": "text", "text": "x", "citations": 5}), "messages[0].content[0].citations"),
    (user(RESULT), "messages[0].content[0].tool_use_id"),
    (user({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
    (user({**RESULT, "content": [{"type": "image"}]}), "messages[0].content[0].content[0].type"),
    (user({**RESULT, "content": 5}), "messages[0].content[0].content"),
    (user({**RESULT, "is_error": "no"}), "messages[0].content[0].is_error"),
    (user({**RESULT, "tool_use_id": "x" * 257}), "messages[0].content[0].tool_use_id"),
    (user(*[{"type": "text", "text": "x"}] * 1025), "messages[0].content"),
    (assistant({**USE, "input": "{}"}), "messages[1].content[0].input"),
    (assistant({**USE, "name": None}), "messages[1].content[0].name"),
    (assistant({"type": "container_upload"}), "messages[1].content[0].type"),
    (assistant({"type": "thinking"}), "messages[1].content[0].thinking"),
    (assistant(*calls(129)), "messages[1].content"),
    ({"messages": [*HI, {"role": "assistant", "content": [USE]}]}, "messages[1]"),
    ({"messages": [*HI, {"role": "assistant", "content": ""}]}, "messages[1].content"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"system": marks(5)}, "cache_control"),
    ({"system": marks(4), "cache_control": MARK}, "cache_control"),
    ({"cache_control": {"type": "x"}}, "cache_control.type"),
    *(({"cache_control": {**MARK, "ttl": ttl}}, "cache_control.ttl") for ttl in ("0s", "25h", "86401s", "5", "")),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**TOOL, "name": "x" * 129}]}, "tools[0].name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [{**TOOL, "name": f"f{number}"} for number in range(257)]}, "tools"),
    ({"tools": [{"type": 5, "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{**TOOL, "input_schema": {"type": "string"}}]}, "tools[0].input_schema.type"),
    ({"tools": [{**TOOL, "input_schema": {"type": "object", **LONG}}]}, "tools[0].input_schema"),
    ({"tools": [{**TOOL, "input_examples": [{}]}]}, "tools[0].input_examples"),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": [{**TOOL, "allowed_callers": ["code_execution_20250825"]}]}, "tools[0].allowed_callers"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "x"}}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice.name"),
    ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "tool_choice"),
    ({"thinking": {"type": "x"}}, "thinking.type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "budget_tokens": 5}}, "thinking.budget_tokens"),
    *(({"thinking": {"type": "enabled", "budget_tokens": n}}, "thinking.budget_tokens") for n in (0, -1, 100, 1.5)),
    (
        {"thinking": {"type": "enabled", "budget_tokens": (1 << 20) + 1}, "max_tokens": 1 << 30},
        "thinking.budget_tokens",
    ),
    ({"thinking": {"type": "enabled", "budget_tokens": 99, "display": "x"}}, "thinking.display"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"format": {"type": "json_schema", "schema": LONG}}}, "output_config.format"),
    ({"output_format": {"type": "json_schema", "schema": LONG}}, "output_format"),
    (
        {
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
            "output_format": {"type": "json_schema", "schema": {}},
        },
        "output_format",
    ),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 129}, "cache_salt"),
    ({"prompt_cache_key": "x" * 257}, "prompt_cache_key"),
    ({"priority": "high"}, "priority"),
    ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs.tools"),
    *(({name: [{"a": 1}]}, name) for name in ("fallbacks",)),
    *(({name: {"type": "x"}}, name) for name in ("container", "compaction")),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    *(({name: 1}, name) for name in ("foo", "n", "stop", "max_completion_tokens", "logprobs")),
]


def test_threads_are_refused_in_a_way_that_the_client_knows(live: Live) -> None:
    error = post(live, 400, thread={"type": "create"})["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": []}


FIELDS = {
    **dict.fromkeys(("model", "cache_salt", "prompt_cache_key"), ("string",)),
    **dict.fromkeys(("messages", "tools", "stop_sequences"), ("list",)),
    **dict.fromkeys(("thinking", "output_config", "output_format", "cache_control", "tool_choice"), ("object",)),
    **dict.fromkeys(("max_tokens", "top_k", "seed"), ("integer",)),
    **dict.fromkeys(("temperature", "top_p"), ("integer", "number")),
    "system": ("string", "list"),
    "chat_template_kwargs": ("object",),
    "stream": ("boolean",),
}
FAMILIES: list[Row] = [
    *(({name: value}, name) for name, right in FIELDS.items() for value in wrong_for(*right)),
    *(({name: 1}, name) for name in STRANGERS if len(name) < 300),
]


def test_calls_that_are_nested_too_deeply(live: Live) -> None:
    for depth, status in ((10, 200), (200, 200), (1005, 400)):
        use = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": "DEEP"}}
        messages = [*HI, {"role": "assistant", "content": [use]}, *HI]
        for path, more in ((PATH, {"max_tokens": 5}), (COUNT, {})):
            body = orjson.dumps({"model": "tiny", "messages": messages, **more})
            body = body.replace(b'"DEEP"', b"[" * depth + b"]" * depth)
            with live.http(headers={"content-type": "application/json"}) as http:
                reply = http.post(path, content=body)
            assert reply.status_code == status, (depth, reply.text)
            if status == 400:
                # From Python 3.12 on deeper values can be written, and the prompt is too long.
                message = error_of(reply, 400, "invalid_request_error")
                assert "nested too deeply" in message or "prompt is too long" in message


def test_bodies_that_are_no_json(live: Live) -> None:
    with live.http(headers={"content-type": "application/json"}) as http:
        for path in (PATH, COUNT):
            for body, _ in RAW:
                error_of(http.post(path, content=body), 400, "invalid_request_error")


@pytest.mark.parametrize("part", range(4))
def test_types_and_strangers(live: Live, part: int) -> None:
    with live.http() as http:
        for fields, path in FAMILIES[part::4]:
            for url in (PATH, COUNT):
                asked = ASKED if url == PATH else {name: ASKED[name] for name in ("model", "messages")}
                message = error_of(http.post(url, json={**asked, **fields}), 400, "invalid_request_error")
                assert path in message, (fields, message)
    assert not live.async_engine.seen


@pytest.mark.parametrize("part", range(4))
def test_what_is_wrong_is_named(live: Live, part: int) -> None:
    with live.http() as http:
        for fields, path in WRONG[part::4]:
            try:
                message = error_of(http.post(PATH, json={**ASKED, **fields}), 400, "invalid_request_error")
                assert path in message and "response_format" not in message and "function" not in message, message
                assert message.endswith(".") and len(message) < 500
            except AssertionError as error:
                raise AssertionError(f"{str(fields)[:200]}: {error}") from error
    assert not live.async_engine.seen


RIGHT: list[dict[str, Any]] = [
    *({"max_tokens": value} for value in (0, 1, (1 << 63) - 1)),
    *({"temperature": value} for value in (0, 1, 0.5, None)),
    *({"top_p": value} for value in (0.001, 1)),
    *({"top_k": value} for value in (-1, 0, 1 << 20)),
    *({"seed": value} for value in (-(1 << 63), (1 << 63) - 1)),
    *({"stop_sequences": value} for value in ([], ["x" * 256], ["x"] * 16)),
    {"messages": [{"role": "user", "content": ""}] * 64},
    {"messages": [*HI, {"role": "assistant", "content": calls(128)}, *HI]},
    user(*[{"type": "text", "text": ""}] * 1024),
    {"system": marks(4)},
    {"system": marks(3), "cache_control": {**MARK, "ttl": "24h"}},
    *({"cache_control": {**MARK, "ttl": ttl}} for ttl in ("1s", "5m", "1h", "24h", "86400s")),
    {"tools": [{**TOOL, "name": f"{number:0128}"} for number in range(128)]},
    {"tools": [{**TOOL, "type": "custom", "strict": True, "eager_input_streaming": True, "defer_loading": False}]},
    {"tools": [{**TOOL, "allowed_callers": ["direct"], "input_examples": [], "cache_control": None}]},
    {"tools": [], "tool_choice": {"type": "none"}},
    {"thinking": {"type": "disabled"}},
    {"thinking": {"type": "adaptive", "display": "summarized"}},
    {"output_config": {"effort": "max", "format": None}},
    {"context_management": {"edits": []}, "mcp_servers": [], "container": None, "fallbacks": []},
    {"metadata": {"user_id": "u"}, "service_tier": "auto", "speed": "fast", "inference_geo": "eu", "diagnostics": {}},
    {"cache_salt": "x" * 128, "prompt_cache_key": "x" * 256, "priority": "batch"},
]


@pytest.mark.parametrize("part", range(2))
def test_what_is_at_its_limit_is_taken(live: Live, part: int) -> None:
    live.async_engine.set_max_len(1 << 16)
    with live.http() as http:
        for fields in RIGHT[part::2]:
            reply = http.post(PATH, json={**ASKED, **fields})
            assert reply.status_code == 200, (str(fields)[:200], reply.text)


def test_budgets_at_their_limits(live: Live) -> None:
    live.async_engine.tokenizer.thinks = "qwen3"
    for budget, most in ((1, 2), (99, 100), (1 << 20, (1 << 20) + 1), (5, 0)):
        post(live, thinking={"type": "enabled", "budget_tokens": budget}, max_tokens=most)
    assert prompt(live).endswith("<assistant>")


def test_counts_take_no_fields_of_answers(live: Live) -> None:
    for name in ("max_tokens", "stream", "temperature", "stop_sequences"):
        assert name in post(live, 400, COUNT, **{name: 1})["error"]["message"]
