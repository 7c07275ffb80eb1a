"""Integers beyond 64 bits, which no door may round: they reach prompts, schemas, stored items and answers exactly."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.api.api_live import Live
from support.api.rpc_live import GENERATION, chat_request, rpc_of
from support.api.socket_asks import hear_ends, socket_of, tell
from support.api.tool_asks import tool

WIDE = 12345678901234567890123
"""A double next to it is 12345678901234567000000 or so."""
NEGATIVE = -WIDE
NUMBERS = {"n": WIDE, "least": [NEGATIVE]}
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "integer", "minimum": NEGATIVE, "maximum": WIDE}
KWARGS = {"chat_template_kwargs": {"n": WIDE, "least": NEGATIVE}}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": NUMBERS}
RESULT = {"type": "function_call_output", "call_id": "c", "output": json.dumps(NUMBERS)}
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": NUMBERS}}
CHAT_TURNS = [*HI, {"role": "assistant", "tool_calls": [CALLED]}, {"role": "tool", "tool_call_id": "c", "content": "x"}]
USED = {"type": "tool_use", "id": "c", "name": "f", "input": NUMBERS}
TURNS = [
    *HI,
    {"role": "assistant", "content": [USED]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]},
]
QUESTION = {"type": "predicate", "instructions": "Is it so?"}
PROMPTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/responses", {"input": [{"role": "user", "content": "hi"}, CALL]}),
    ("/v1/responses", {"input": [{"role": "user", "content": "hi"}, {**CALL, "arguments": json.dumps(NUMBERS)}]}),
    ("/v1/responses", {"input": [{"role": "user", "content": "hi"}, {**CALL, "arguments": "{}"}, RESULT]}),
    ("/v1/responses", {"input": "hi", **KWARGS}),
    ("/v1/responses/input_tokens", {"input": [{"role": "user", "content": "hi"}, CALL]}),
    ("/v1/chat/completions", {"messages": CHAT_TURNS}),
    ("/v1/chat/completions", {"messages": [*HI, {"role": "assistant", "function_call": CALLED["function"]}]}),
    ("/v1/chat/completions", {"messages": HI, **KWARGS}),
    ("/tokenize", {"messages": CHAT_TURNS}),
    ("/tokenize", {"messages": HI, **KWARGS}),
    ("/v1/messages", {"messages": TURNS, "max_tokens": 5}),
    ("/v1/messages", {"messages": HI, "max_tokens": 5, **KWARGS}),
    ("/v1/messages/count_tokens", {"messages": TURNS}),
    ("/api/chat", {"messages": CHAT_TURNS, "stream": False}),
    ("/v1/decisions", {"input": [{"role": "user", "content": [{"type": "input_json", "data": NUMBERS}]}]}),
    ("/v1/decisions", {"input": "hi", "questions": [{**QUESTION, "instructions": str(NUMBERS)}]}),
    ("/v1/systemone", {"state": NUMBERS, "questions": {"a": {"type": "noul", "instructions": "Is it so?"}}}),
    ("/v1/systemone", {"state": "hi", "questions": {"a": {"type": "noul", "instructions": NUMBERS}}}),
    ("/v1/systemone", {"state": "hi", "questions": {"a": {"type": "choice", "criteria": {"a": None, "b": NUMBERS}}}}),
    ("/v1/systemone", {"state": "hi", "questions": {"a": {"type": "score", "criteria": ["a", NUMBERS]}}}),
]


def _body(path: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"model": "tiny", **({"questions": [QUESTION]} if path == "/v1/decisions" else {}), **body}


def _seen(live: Live) -> str:
    """What the chat template got last."""
    return str(live.async_engine.tokenizer.rendered[-1])


@pytest.mark.parametrize(("path", "body"), PROMPTS)
def test_they_reach_the_prompt(live: Live, path: str, body: dict[str, Any]) -> None:
    with live.http() as http:
        reply = http.post(path, json=_body(path, body))
        assert reply.status_code < 500, reply.text
    assert str(WIDE) in _seen(live) and str(NEGATIVE) in _seen(live)


def test_they_are_in_stored_conversations(live: Live) -> None:
    """In items of other tools too, which are left out of the prompt but stored and listed."""
    other = {"type": "web_search_call", "id": "ws_1", "found": NUMBERS}
    part = {"type": "output_text", "text": "x", "annotations": [NUMBERS], "logprobs": []}
    said = {"type": "message", "role": "assistant", "content": [part]}
    with live.http() as http:
        asked = {"model": "tiny", "input": [*HI, said, other, CALL], "tools": [{"type": "web_search", "at": WIDE}]}
        reply = http.post("/v1/responses", json=asked)
        assert reply.status_code == 200, reply.text
        stored = reply.json()
        assert stored["tools"][0]["at"] == WIDE
        assert http.get(f"/v1/responses/{stored['id']}").json()["tools"] == stored["tools"]
        items = http.get(f"/v1/responses/{stored['id']}/input_items?order=asc").json()["data"]
        assert items[2]["found"] == NUMBERS and json.loads(items[3]["arguments"]) == NUMBERS
        further = {"model": "tiny", "input": "and?", "previous_response_id": stored["id"]}
        assert http.post("/v1/responses", json=further).status_code == 200
        assert str(WIDE) in _seen(live)
        referred = [{"type": "item_reference", "id": items[at]["id"]} for at in (2, 3)]
        again = http.post("/v1/responses", json={"model": "tiny", "input": [*HI, *referred]})
        assert again.status_code == 200, again.text
        assert str(WIDE) in _seen(live)
        repeated = http.get(f"/v1/responses/{again.json()['id']}/input_items?order=asc").json()["data"]
        assert repeated[1:] == items[2:4]
        streamed = http.post("/v1/responses", json={**asked, "stream": True})
        assert str(WIDE) in streamed.text and "response.completed" in streamed.text


def test_they_reach_prompts_and_schemas_over_a_websocket(live: Live) -> None:
    with socket_of(live, "/v1/stream") as socket:
        tell(socket, {"type": "generate", "id": "a", "messages": CHAT_TURNS})
        hear_ends(socket, 1)
        assert str(WIDE) in _seen(live)
        tell(socket, {"type": "generate", "id": "b", "after": "a", "messages": HI, "guided_json": SCHEMA})
        hear_ends(socket, 1)
        assert str(WIDE) in _seen(live)
    with socket_of(live, "/v1/responses") as socket:
        tell(socket, {"type": "response.create", "model": "tiny", "input": [*HI, CALL]})
        hear_ends(socket, 1, ("response.completed", "error"))
    assert str(WIDE) in _seen(live)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "extra",
    [{"guided_json": SCHEMA}, {"tools": [tool("f", parameters={"properties": {"n": SCHEMA}})]}, KWARGS],
    ids=["schema", "tool", "template"],
)
def test_they_are_taken_from_extra_json_of_a_grpc_call(live: Live, extra: dict[str, Any], stream: bool) -> None:
    live.async_engine.say = lambda request, index: str(WIDE)
    with rpc_of(live) as rpc:
        request = chat_request("hi", extra_json=json.dumps(extra))
        if stream:
            assert list(rpc.stream(f"{GENERATION}/Generate", request, "rootgraft.v1.GenerateChunk"))
        else:
            rpc.unary(f"{GENERATION}/GenerateUnary", request, "rootgraft.v1.GenerateResponse")
    asked = live.async_engine.seen[-1].grammar
    found = _seen(live) if asked is None else str(asked.text or asked.content)
    assert str(WIDE) in found and str(NEGATIVE) in found


@pytest.mark.parametrize("where", ["parameters", "sampling_parameters"])
def test_they_are_taken_from_options_of_the_open_inference_protocol(live: Live, where: str) -> None:
    live.async_engine.say = lambda request, index: str(WIDE)
    tensors = [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}]
    options = {"guided_json": SCHEMA}
    if where == "parameters":
        body = {"inputs": tensors, "parameters": options}
    else:
        text = json.dumps(options)
        body = {"inputs": [*tensors, {"name": where, "datatype": "BYTES", "shape": [1], "data": [text]}]}
    with live.http() as http:
        reply = http.post("/v2/models/tiny/infer", json=body)
        assert reply.status_code == 200, reply.text
    assert str(WIDE).encode() in live.async_engine.seen[-1].grammar.content


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": HI, "seed": WIDE}, "seed"),
        ("/v1/chat/completions", {"messages": HI, "n": WIDE}, "n"),
        ("/v1/chat/completions", {"messages": HI, "min_tokens": WIDE}, "min_tokens"),
        ("/v1/chat/completions", {"messages": HI, "top_k": NEGATIVE}, "top_k"),
        ("/v1/chat/completions", {"messages": HI, "temperature": WIDE}, "temperature"),
        ("/v1/chat/completions", {"messages": HI, "logit_bias": {"1": WIDE}}, "logit_bias"),
        ("/v1/chat/completions", {"messages": HI, "stop_token_ids": [WIDE]}, "stop_token_ids"),
        ("/v1/completions", {"prompt": [WIDE]}, "prompt"),
        ("/v1/completions", {"prompt": [[1], [NEGATIVE]]}, "prompt"),
        ("/v1/completions", {"prompt": "x", "allowed_token_ids": [WIDE]}, "allowed_token_ids"),
        ("/v1/completions", {"prompt": "x", "logprob_token_ids": [WIDE]}, "logprob_token_ids"),
        ("/v1/responses", {"input": "x", "seed": WIDE}, "seed"),
        ("/v1/messages", {"messages": HI, "max_tokens": 5, "seed": WIDE}, "seed"),
        ("/detokenize", {"tokens": [WIDE]}, "tokens"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": WIDE}, "add_special_tokens"),
    ],
)
def test_they_are_refused_by_name_where_a_number_has_limits(
    live: Live, path: str, body: dict[str, Any], param: str
) -> None:
    with live.http() as http:
        reply = http.post(path, json={"model": "tiny", **body})
    assert reply.status_code == 400 and param in reply.json()["error"].get("message", ""), reply.text


def test_they_change_nothing_where_a_field_is_ignored(live: Live) -> None:
    call = {**CALLED, "index": WIDE}
    with live.http() as http:
        turns = [*HI, {"role": "assistant", "tool_calls": [call]}]
        reply = http.post("/v1/chat/completions", json={"messages": turns})
        assert reply.status_code == 200, reply.text
