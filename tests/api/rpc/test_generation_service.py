"""``rootgraft.v1.Generation``: answers and token ids of the HTTP routes, deadlines, cancellation, statuses."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import grpc
import pytest
from support.api.messages_asks import prompt, say
from support.api.rpc_live import GENERATION, RpcClient, chat_request, generate_request, rpc_of
from support.api.tool_asks import ONE, TOOLS
from support.machine.waits import wait_until

from rootgraft.api.config import ServerConfig
from rootgraft.engine.errors import CapacityError, EngineDead
from rootgraft.engine.types import AdapterInfo
from rootgraft.grammar.spec import GrammarSpec

UNARY, STREAM = f"{GENERATION}/GenerateUnary", f"{GENERATION}/Generate"
HI = [{"role": "user", "content": "hi"}]
SAMPLING: dict[str, Any] = {
    "max_tokens": 5,
    "min_tokens": 1,
    "temperature": 0.25,
    "top_k": 7,
    "top_p": 0.5,
    "min_p": 0.125,
    "seed": 11,
    "stop": ["zz"],
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "ignore_eos": True,
}


def whole(rpc: RpcClient, request: Any, **options: Any) -> Any:
    return rpc.unary(UNARY, request, "rootgraft.v1.GenerateResponse", **options)


def pieces(rpc: RpcClient, request: Any, **options: Any) -> Any:
    return rpc.stream(STREAM, request, "rootgraft.v1.GenerateChunk", **options)


def same_request(rpc: RpcClient, path: str, **fields: Any) -> None:
    """The last request of the engine is the one that a route makes of these fields."""
    asked = rpc.live.async_engine.seen[-1]
    with rpc.live.http() as http:
        assert http.post(path, json=fields).status_code == 200
    assert replace(asked, timeout=None) == rpc.live.async_engine.seen[-1]


def refused(call: Any) -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


def test_a_conversation(rpc: RpcClient) -> None:
    answer = whole(rpc, chat_request("hi", model="tiny"))
    assert (answer.text, answer.model, answer.finish_reason) == ("answer 0", "tiny", "stop")
    assert bytes(answer.token_ids).decode() == "answer 0" and answer.id.startswith("chatcmpl-")
    num_prompt = len(rpc.live.async_engine.seen[-1].tokens)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, 8)
    assert answer.usage.cached_tokens == num_prompt // 2
    same_request(rpc, "/v1/chat/completions", messages=HI)


def test_a_stream(rpc: RpcClient) -> None:
    found = list(pieces(rpc, chat_request("hi")))
    assert "".join(piece.text for piece in found) == "answer 0"
    assert [token for piece in found for token in piece.token_ids] == list(b"answer 0")
    assert [piece.finish_reason for piece in found] == [""] * (len(found) - 1) + ["stop"]
    assert found[-1].usage.completion_tokens == 8 and not found[0].HasField("usage")
    assert len(found) >= 8 and len({piece.id for piece in found}) == 1


@pytest.mark.parametrize("name", [*SAMPLING, None])
def test_each_option_reaches_the_engine(rpc: RpcClient, name: str | None) -> None:
    sampling = SAMPLING if name is None else {name: SAMPLING[name]}
    whole(rpc, chat_request("hi", sampling=sampling, priority="batch", cache_key="k"))
    same_request(rpc, "/v1/chat/completions", messages=HI, priority="batch", prompt_cache_key="k", **sampling)


def test_texts_and_tokens(rpc: RpcClient) -> None:
    assert whole(rpc, generate_request(prompt="Once", sampling={"max_tokens": 3})).text == "ans"
    same_request(rpc, "/v1/completions", prompt="Once", max_tokens=3)
    found = list(pieces(rpc, generate_request(tokens={"ids": [1, 2, 3]})))
    assert "".join(piece.text for piece in found) == "answer 0" and found[-1].finish_reason
    same_request(rpc, "/v1/completions", prompt=[1, 2, 3])


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"json_schema": '{"type": "object"}'}, {"guided_json": '{"type": "object"}'}),
        ({"regex": "\\{\\}"}, {"guided_regex": "\\{\\}"}),
        ({"grammar": 'start: "{}"'}, {"guided_grammar": 'start: "{}"'}),
        ({"choices": {"texts": ["{}", "no"]}}, {"guided_choice": ["{}", "no"]}),
        ({"json_object": True}, {"response_format": {"type": "json_object"}}),
    ],
)
def test_forms(rpc: RpcClient, form: Any, field: Any) -> None:
    say(rpc.live, "{}")
    assert whole(rpc, chat_request("hi", **form)).text == "{}"
    same_request(rpc, "/v1/chat/completions", messages=HI, **field)
    assert rpc.live.async_engine.seen[-1].grammar is not None


def test_integers_of_further_fields_are_exact(rpc: RpcClient) -> None:
    schema = {"type": "integer", "minimum": 10**30 + 1}
    say(rpc.live, str(10**30 + 1))
    whole(rpc, generate_request(prompt="x", extra_json=json.dumps({"guided_json": schema, "max_tokens": 64})))
    assert rpc.live.async_engine.seen[-1].grammar == GrammarSpec.json_schema(schema)


def test_tools_by_further_fields(rpc: RpcClient) -> None:
    say(rpc.live, ONE)
    request = chat_request("hi", extra_json=json.dumps({"tools": TOOLS}))
    answer = whole(rpc, request)
    (call,) = json.loads(answer.tool_calls_json)
    assert call["function"]["name"] == "weather" and answer.finish_reason == "tool_calls"
    streamed = [json.loads(each.tool_calls_json) for each in pieces(rpc, request) if each.tool_calls_json]
    assert "".join(part["function"].get("arguments", "") for (part,) in streamed) == '{"city": "Ulm"}'


def test_thoughts(rpc: RpcClient) -> None:
    rpc.live.async_engine.tokenizer.thinks = "qwen3"
    say(rpc.live, "<think>\nhm\n</think>\n\nyes")
    assert (whole(rpc, chat_request("hi")).reasoning.strip(), whole(rpc, chat_request("hi")).text) == ("hm", "yes")


def test_adapters_by_name(rpc: RpcClient) -> None:
    rpc.live.client.adapters["sql"] = AdapterInfo("sql", "adapters/sql", "ready", "host")
    assert whole(rpc, chat_request("hi", model="sql")).model == "sql"
    assert rpc.live.async_engine.seen[-1].adapter == "sql"


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({}, grpc.StatusCode.INVALID_ARGUMENT, "'prompt', 'tokens' and 'chat'"),
        ({"prompt": "x", "model": "nope"}, grpc.StatusCode.NOT_FOUND, "nope"),
        ({"prompt": "x", "sampling": {"temperature": 9.0}}, grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
        ({"prompt": "x", "sampling": {"top_k": -7}}, grpc.StatusCode.INVALID_ARGUMENT, "top_k"),
        ({"prompt": "x", "priority": "soon"}, grpc.StatusCode.INVALID_ARGUMENT, "priority"),
        ({"prompt": "x" * 3000}, grpc.StatusCode.INVALID_ARGUMENT, "2048"),
        ({"tokens": {"ids": [4_000_000_000]}}, grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        ({"tokens": {}}, grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        ({"chat": {}}, grpc.StatusCode.INVALID_ARGUMENT, "messages"),
        ({"chat": {"messages": [{"role": "!"}]}}, grpc.StatusCode.INVALID_ARGUMENT, "role"),
        ({"prompt": "x", "grammar": "x"}, grpc.StatusCode.INVALID_ARGUMENT, "guided_grammar"),
        ({"prompt": "x", "json_object": False}, grpc.StatusCode.INVALID_ARGUMENT, "json_object"),
        ({"prompt": "x", "extra_json": "["}, grpc.StatusCode.INVALID_ARGUMENT, "extra_json"),
        ({"prompt": "x", "extra_json": '{"n": 2}'}, grpc.StatusCode.INVALID_ARGUMENT, "'n'"),
        ({"prompt": "x", "extra_json": '{"warmth": 2}'}, grpc.StatusCode.INVALID_ARGUMENT, "warmth"),
    ],
)
def test_statuses(rpc: RpcClient, fields: dict[str, Any], status: grpc.StatusCode, text: str) -> None:
    for call in (lambda: whole(rpc, generate_request(**fields)), lambda: list(pieces(rpc, generate_request(**fields)))):
        error = refused(call)
        assert error.code() is status and text in error.details(), error


def test_errors_of_the_engine(rpc: RpcClient) -> None:
    rpc.live.async_engine.fail_after = (0, CapacityError("The server is busy."))
    error = refused(lambda: whole(rpc, chat_request("hi")))
    assert error.code() is grpc.StatusCode.UNAVAILABLE and error.details() == "The server is busy."
    trailers = dict(error.trailing_metadata())
    assert trailers["error-code"] == "server_overloaded" and trailers["retry-after"] == "1"
    assert trailers["x-request-id"]
    rpc.live.async_engine.fail_after = (3, EngineDead("The engine process ended."))
    stream = pieces(rpc, chat_request("hi"))
    assert [next(stream).text for _ in range(3)] == ["a", "n", "s"]
    error = refused(lambda: next(stream))
    assert error.code() is grpc.StatusCode.UNAVAILABLE and "ended" in error.details()


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\xff", b"\x12\x03\xff\xfe\xfd", b"\x08\x01" * 40 + b"\x0c"])
def test_malformed_messages(rpc: RpcClient, data: bytes) -> None:
    for call in (lambda: whole(rpc, data), lambda: list(pieces(rpc, data))):
        error = refused(call)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not rpc.live.async_engine.seen
    assert whole(rpc, chat_request("hi")).text == "answer 0"


def gate(rpc: RpcClient) -> asyncio.Event:
    event = asyncio.Event()
    rpc.live.async_engine.gate = event
    return event


def test_a_deadline_ends_the_request(rpc: RpcClient) -> None:
    gate(rpc)
    engine = rpc.live.async_engine
    for seconds in (0.3, 3.0, 30.0):  # until the request has reached the engine within them
        error = refused(lambda limit=seconds: whole(rpc, chat_request("hi"), timeout=limit))  # type: ignore[misc]
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if engine.seen:
            break
    wait_until(lambda: 0 < len(engine.aborted) == len(engine.seen))
    assert 0 < engine.seen[-1].timeout <= seconds + 0.1


def test_a_call_that_is_cancelled_ends_its_request(rpc: RpcClient) -> None:
    rpc.live.async_engine.say = lambda request, index: "x" * 2000
    stream = pieces(rpc, chat_request("hi"))
    next(stream)
    stream.cancel()
    wait_until(lambda: len(rpc.live.async_engine.aborted) == 1)
    gate(rpc)
    waiting = pieces(rpc, chat_request("hi"))
    wait_until(lambda: len(rpc.live.async_engine.seen) == 2)
    waiting.cancel()
    wait_until(lambda: len(rpc.live.async_engine.aborted) == 2)
    wait_until(lambda: rpc.live.state.limits.active == 0)


def test_many_calls_on_one_connection(rpc: RpcClient) -> None:
    streams = [pieces(rpc, chat_request(f"number {number}")) for number in range(50)]
    assert {"".join(piece.text for piece in stream) for stream in streams} == {"answer 0"}
    assert len(rpc.live.async_engine.seen) == 50


def test_keys_and_tenants(serve_with: Any) -> None:
    live = serve_with(ServerConfig(api_key=("right",)))
    with rpc_of(live) as rpc:
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            error = refused(lambda metadata=metadata: whole(rpc, chat_request("hi"), metadata=metadata))
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED and "API key" in error.details()
        for metadata in ((("authorization", "Bearer right"),), (("x-api-key", "right"),)):
            assert whole(rpc, chat_request("hi"), metadata=metadata).text == "answer 0"
        assert prompt(live) == "<user>hi\n<assistant>"
