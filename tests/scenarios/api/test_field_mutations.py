"""Every place of a rich body, with every kind of wrong value: never a 5xx, and the error names the field.

The bodies have the fields of the published clients' types, nested ones too. Null is the same as an absent field.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic.types import message_create_params as messages
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats
from openai.types.responses import response_create_params as responses
from support.api.api_live import Live
from support.api.reply_checks import declared
from support.api.tool_asks import CITY, TOOLS
from support.machine.thoroughness import taking_turns

CHAT, RESPONSES, MESSAGES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions"
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
MARK = {"type": "ephemeral", "ttl": "1h"}
SAMPLED = {"temperature": 0.5, "top_p": 0.5, "top_k": 3, "seed": 1}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {
        **SAMPLED,
        "model": "tiny",
        "prompt": ["a", "b"],
        "max_tokens": 3,
        "n": 1,
        "stop": ["x"],
        "logprobs": 1,
        "echo": True,
        "logit_bias": {"5": 1},
        "stream": True,
        "stream_options": {"include_usage": True},
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    },
    CHAT: {
        **SAMPLED,
        "model": "tiny",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "s", "cache_control": MARK}]},
            {"role": "user", "content": "hi", "name": "n"},
            {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "t"},
        ],
        "max_completion_tokens": 3,
        "n": 1,
        "stop": ["x"],
        "logprobs": True,
        "top_logprobs": 1,
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": True,
        "logit_bias": {"5": 1},
        "stream": True,
        "stream_options": {"include_usage": True},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
        "reasoning_effort": "low",
        "metadata": {"a": "b"},
        "chat_template_kwargs": {"a": 1},
    },
    RESPONSES: {
        **SAMPLED,
        "model": "tiny",
        "instructions": "i",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "t"},
            {"type": "custom_tool_call", "call_id": "d", "name": "weather", "input": "t"},
        ],
        "max_output_tokens": 3,
        "top_logprobs": 1,
        "include": ["message.output_text.logprobs"],
        "tools": [
            {"type": "function", "name": "weather", "parameters": CITY, "strict": True},
            {"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "regex", "definition": "a"}},
        ],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
        "parallel_tool_calls": True,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "metadata": {"a": "b"},
        "store": False,
        "stream": True,
        "stream_options": {"include_obfuscation": False},
        "truncation": "auto",
        "user": "u",
    },
    MESSAGES: {
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 3,
        "model": "tiny",
        "max_tokens": 30,
        "system": [{"type": "text", "text": "s", "cache_control": MARK}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Ulm"}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": "t", "is_error": True}],
            },
        ],
        "tools": [{"name": "weather", "description": "d", "input_schema": CITY, "cache_control": MARK}],
        "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "stop_sequences": ["x"],
        "stream": True,
        "metadata": {"user_id": "u"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    },
    "/generate": {
        "inputs": "hi",
        "parameters": {
            **SAMPLED,
            "adapter_id": "tiny",
            "details": True,
            "grammar": {"type": "json", "value": SCHEMA},
            "max_new_tokens": 3,
            "stop": ["x"],
            "top_n_tokens": 1,
            "truncate": 3,
            "repetition_penalty": 1.5,
        },
    },
    "/api/chat": {
        "model": "tiny",
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Ulm"}}}]},
            {"role": "tool", "tool_name": "weather", "content": "t"},
        ],
        "tools": TOOLS,
        "stream": True,
        "options": {**SAMPLED, "num_predict": 3, "stop": ["x"], "min_p": 0.1, "repeat_penalty": 1.1},
        "logprobs": True,
        "top_logprobs": 1,
        "think": "low",
    },
}
TYPES: dict[str, Any] = {
    COMPLETIONS: completions.CompletionCreateParamsBase,
    CHAT: chats.CompletionCreateParamsBase,
    RESPONSES: responses.ResponseCreateParamsBase,
    MESSAGES: messages.MessageCreateParamsBase,
}
# Objects whose entries are not fields: a null in them is a value.
MAPS = (("logit_bias",), ("metadata",), ("chat_template_kwargs",), ("input",), ("arguments",))
DEEP: Any = None
for _ in range(60):
    DEEP = [DEEP]
VALUES: list[Any] = [
    *(None, True, 0, -1, 2**63, 2**70, -(2**70), 10**400, 1.5, 1e308, "", "x", "x" * 300, "\ud800", "\x00😀"),
    *([], {}, [None], [[]], {"a": None}, {"type": "x"}, {"type": None}, [{}], [{"type": []}], {"": {"": []}}, DEEP),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all parts of a body, but the parts of schemas, which have tests of their own."""
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        if key not in ("schema", "parameters", "input_schema") or path == ():
            yield from places(each, (*path, key))


def mutated(body: dict[str, Any], path: tuple[Any, ...], value: Any, *, drops: bool = False) -> dict[str, Any]:
    body = copy.deepcopy(body)
    part: Any = body
    for key in path[:-1]:
        part = part[key]
    if drops:
        del part[path[-1]]
    elif isinstance(part, list) or path[-1] in part or len(path) == 1:
        part[path[-1]] = value
    return body


def places_of(path: str) -> list[tuple[Any, ...]]:
    """The places of a body, and the fields of the client's type that it does not have."""
    names = declared(TYPES[path]) - BODIES[path].keys() if path in TYPES else set()
    return [*places(BODIES[path]), *((name,) for name in sorted(names))]


def message_of(path: str, reply: Any) -> str:
    """Check the shape of a protocol's error; its message, and the field that it names."""
    told = reply.json()
    if path == MESSAGES:
        assert told.keys() == {"type", "error", "request_id"} and told["type"] == "error", told
        return str(told["error"]["message"])
    if path in ("/generate", "/api/chat"):
        return f"{told['error']} {told['param']}"
    assert told["error"].keys() >= {"message", "type", "param", "code"}, told
    return f"{told['error']['message']} {told['error']['param']}"


def names_place(told: str, place: tuple[Any, ...]) -> bool:
    """Return whether an error names a part of the place; half of a surrogate pair is no JSON at all."""
    return any(str(key) in told for key in place if isinstance(key, str)) or "not valid JSON" in told


@pytest.mark.parametrize("path", BODIES)
def test_every_place_with_every_value(live: Live, path: str) -> None:
    live.async_engine.say = lambda request, index: '{"city": "Ulm"}'
    found: list[Any] = []
    with live.http(headers={"content-type": "application/json"}) as http:

        def post(body: dict[str, Any]) -> Any:
            return http.post(path, content=json.dumps(body))

        assert post(BODIES[path]).status_code == 200, post(BODIES[path]).text
        for place in taking_turns(places_of(path), 4):
            for value in VALUES:
                reply = post(mutated(BODIES[path], place, value))
                if reply.status_code >= 500:
                    found.append((place, value, reply.status_code, reply.text))
                elif reply.status_code != 200 and not names_place(told := message_of(path, reply), place):
                    found.append((place, value, reply.status_code, told))
            if isinstance(place[-1], str) and place[0] in BODIES[path] and place[-2:-1] not in MAPS:
                null, absent = (post(mutated(BODIES[path], place, None, drops=drops)) for drops in (False, True))
                if null.status_code != absent.status_code:
                    found.append((place, "null", null.status_code, null.text, absent.status_code, absent.text))
    assert not found, "\n".join(str(each)[:420] for each in [len(found), *found[:60]])
