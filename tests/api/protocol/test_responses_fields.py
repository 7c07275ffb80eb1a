"""The body of /v1/responses: items, what is wrong with a field, what changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
from support.api.api_live import Live
from support.api.bad.bad_structured import tool
from support.api.reply_checks import check_error
from support.api.responses_asks import ASKED, PATH, TOOLS, rendered, say
from support.api.tool_asks import TWO

from rootgraft.grammar.spec import GrammarSpec


def test_items_become_messages(live: Live) -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}], "status": None},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Ulm"}', "id": "fc_1"},
        {"type": "function_call", "call_id": "c2", "name": "ping", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "pong"}]},
        {"type": "message", "role": "user", "content": "and now?"},
    ]
    with live.openai() as client:
        client.responses.create(model="tiny", input=items, instructions="Speak.", tools=TOOLS)  # type: ignore
    messages = rendered(live)
    assert [message["role"] for message in messages] == [
        *("system", "system", "user", "assistant", "tool", "tool", "user"),
    ]
    assert [message["content"] for message in messages] == [
        *("Speak.", "Be brief.", "ab", "Well.", "sun", "pong", "and now?"),
    ]
    assert [call["id"] for call in messages[3]["tool_calls"]] == ["c1", "c2"]
    assert messages[3]["tool_calls"][0]["function"]["arguments"] == {"city": "Ulm"}


def test_what_was_answered_may_be_sent_back(live: Live) -> None:
    say(live, "Well. " + TWO)
    with live.openai() as client:
        first = client.responses.create(**ASKED, tools=TOOLS)
        calls = [item for item in first.output if item.type == "function_call"]
        outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "1"} for call in calls]
        sent: Any = [{"role": "user", "content": "hi"}, *first.output, *outputs]
        client.responses.create(model="tiny", input=sent, tools=TOOLS)
    assert [message["role"] for message in rendered(live)] == ["user", "assistant", "tool", "tool"]


def test_penalties_reach_the_engine_and_come_back(live: Live) -> None:
    """A response object has both, as the types of Open Responses require, asked for or not."""
    penalties = {"presence_penalty": -2, "frequency_penalty": 2}
    with live.http() as http:
        told = [
            http.post(PATH, json={"input": "hi", **each}).json() for each in ({}, penalties, dict.fromkeys(penalties))
        ]
        stream = http.post(PATH, json={"input": "hi", "stream": True, **penalties}).text
        kept = http.get(f"{PATH}/{told[1]['id']}").json()
    wanted = [(0.0, 0.0), (-2.0, 2.0), (0.0, 0.0)]
    assert [(each["presence_penalty"], each["frequency_penalty"]) for each in told] == wanted
    assert (kept["presence_penalty"], kept["frequency_penalty"]) == (-2.0, 2.0)
    assert stream.count('"presence_penalty":-2.0') == stream.count('"frequency_penalty":2.0') == 3
    params = [request.params for request in live.async_engine.seen]
    assert [(each.presence_penalty, each.frequency_penalty) for each in params] == [*wanted, (-2.0, 2.0)]
    with live.openai() as client:
        sent = client.responses.create(model="tiny", input="hi", extra_body=penalties)
    assert sent.model_dump()["frequency_penalty"] == 2.0


LARGE = {"type": "object", "properties": {"a": {"enum": ["x" * 50 + str(n) for n in range(20_000)]}}}
BAD: list[tuple[dict[str, Any], str | None, str | None]] = [
    ({"input": None}, "input", "missing_required_parameter"),
    ({"input": []}, "input", "invalid_value"),
    ({"input": 5}, "input", "invalid_value"),
    ({"input": [5]}, "input[0]", "invalid_value"),
    ({"input": [{"type": "web_search_call", "id": "x", "status": "completed"}]}, "input", "invalid_value"),
    ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0]", "invalid_value"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "invalid_value"),
    ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
        "input[0].content[0].type",
        "invalid_value",
    ),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", None),
    ({"unheard_of": 1}, "unheard_of", "unknown_parameter"),
    ({"messages": []}, "messages", "unknown_parameter"),
    ({"temperature": 3}, "temperature", "invalid_value"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"presence_penalty": 2.01}, "presence_penalty", "invalid_value"),
    ({"presence_penalty": -2.01}, "presence_penalty", "invalid_value"),
    ({"frequency_penalty": 2.01}, "frequency_penalty", "invalid_value"),
    ({"frequency_penalty": -2.01}, "frequency_penalty", "invalid_value"),
    ({"frequency_penalty": "1"}, "frequency_penalty", "invalid_type"),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ({"input": "x" * 5000}, "input", "context_length_exceeded"),
    ({"top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"truncation": "middle"}, "truncation", "invalid_value"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "invalid_value"),
    ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
    ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
    ({"stream_options": {}}, "stream_options", "invalid_value"),
    ({"background": True, "store": False}, "background", "invalid_value"),
    ({"background": True, "generate": False}, "background", "invalid_value"),
    ({"include": ["everything"]}, "include[0]", "invalid_value"),
    ({"metadata": {"a": 1}}, "metadata.a", "invalid_type"),
    ({"metadata": {"a": "b" * 513}}, "metadata", "invalid_value"),
    ({"text": {"verbosity": "none"}}, "text.verbosity", "invalid_value"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "invalid_value"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": LARGE}}}, "text.format", "invalid_value"),
    ({"tools": [{"type": 5}]}, "tools[0].type", "invalid_value"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "invalid_value"),
    ({"tools": [TOOLS[1], TOOLS[1]]}, "tools[1].name", "invalid_value"),
    ({"tools": [tool("ping")]}, "tools[0].name", "missing_required_parameter"),
    (
        {"tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]},
        "tools[0].parameters.type",
        "invalid_value",
    ),
    ({"tools": [{"type": "function", "name": "f", "parameters": LARGE}]}, "tools[0].parameters", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "none"}}, "tool_choice", "invalid_value"),
    ({"previous_response_id": "resp_none"}, "previous_response_id", "previous_response_not_found"),
    ({"cache_salt": ""}, "cache_salt", "invalid_value"),
]


def test_what_is_wrong_is_said(live: Live) -> None:
    with live.http() as http:
        for fields, param, code in BAD:
            reply = http.post(PATH, json={**ASKED, **fields})
            code = code or "missing_required_parameter"
            try:
                check_error(reply, 400, param, code)
            except AssertionError as error:
                raise AssertionError(f"{fields}: {error}") from error
    assert not live.async_engine.seen


def test_what_changes_nothing_is_taken(live: Live) -> None:
    taken = {
        "reasoning": {"effort": None},
        "truncation": "disabled",
        "service_tier": "flex",
        "max_tool_calls": 3,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "instructions": None,
        "tools": [],
        "include": [],
        "context_management": [],
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
    }
    with live.http() as http:
        reply = http.post(PATH, json={**ASKED, **taken})
    assert reply.status_code == 200, reply.text
    assert reply.json()["prompt_cache_key"] == "k" and reply.json()["safety_identifier"] == "s"


def test_integers_beyond_64_bits_are_exact_in_schemas_and_come_back(live: Live) -> None:
    """As a float, 2^64 + 1 would be 2^64; JSON that is written as a whole cannot hold it as an integer of 64 bits."""
    schema = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 2**64 + 1}}, "required": ["x"]}
    live.async_engine.say = lambda request, index: '{"x": 18446744073709551617}'
    asked = {"input": "hi", "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}}
    with live.http() as http:
        whole = http.post(PATH, json=asked)
        assert live.async_engine.seen[-1].grammar == GrammarSpec.json_schema(schema)
        kept = http.get(f"{PATH}/{whole.json()['id']}")
        stream = http.post(PATH, json=asked | {"stream": True})
        tools = http.post(
            PATH, json={"input": "hi", "tools": [{"type": "function", "name": "f", "parameters": schema}]}
        )
    assert whole.status_code == 200 and kept.json() == whole.json() and "response.completed" in stream.text
    assert whole.json()["text"]["format"]["schema"] == schema and tools.json()["tools"][0]["parameters"] == schema


@pytest.mark.parametrize(
    ("verbosity", "named"), [("low", "text.verbosity"), ("medium", None), ("high", "text.verbosity")]
)
def test_hints_of_clients_are_taken_and_named(live: Live, verbosity: str, named: str | None) -> None:
    """Codex sends a verbosity by default; with "auto" a server may leave items out, and need not."""
    with live.http() as http:
        reply = http.post(PATH, json={**ASKED, "text": {"verbosity": verbosity}, "truncation": "auto"})
        chat = {"messages": [{"role": "user", "content": "hi"}], "verbosity": verbosity, "max_tokens": 2}
        chatted = http.post("/v1/chat/completions", json={**chat, "transforms": ["middle-out"]})
    assert reply.status_code == chatted.status_code == 200, reply.text + chatted.text
    assert reply.headers.get("x-rootgraft-left-out") == named
    assert chatted.headers.get("x-rootgraft-left-out") == (named and "verbosity")
