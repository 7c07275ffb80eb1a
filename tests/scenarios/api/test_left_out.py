"""Declarations that cannot be served are left out and named; what demands them is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api.api_live import Live

from rootgraft.api.protocol.base import MAX_ID
from rootgraft.api.protocol.response_items import items_left_out
from rootgraft.api.protocol.responses import ResponseRequest

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
LEFT_OUT = "x-rootgraft-left-out"
ADD = {"type": "object", "properties": {"a": {"type": "integer"}}}
USER = {"role": "user", "content": "hi"}
CASES = {
    CHAT: (
        {"messages": [USER]},
        {"type": "function", "function": {"name": "add", "parameters": ADD}},
        [
            {"type": "shell", "name": "apply_patch"},
            {"type": "openrouter:web_search"},
        ],
    ),
    RESPONSES: (
        {"input": "hi"},
        {"type": "function", "name": "add", "parameters": ADD},
        [
            {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]},
            {"type": "shell", "name": "apply_patch"},
            {"type": "web_search", "external_web_access": False},
            {"type": "local_shell"},
            {"type": "mcp", "server_label": "s", "server_url": "https://example.org"},
        ],
    ),
    MESSAGES: (
        {"model": "tiny", "max_tokens": 4, "messages": [USER]},
        {"name": "add", "input_schema": ADD},
        [
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
            {"type": "bash_20250124", "name": "bash"},
            {"type": "mcp_toolset", "mcp_server_name": "s"},
        ],
    ),
}


@pytest.mark.parametrize("path", CASES)
def test_other_tools_are_left_out_and_named(live: Live, path: str) -> None:
    body, function, others = CASES[path]
    with live.http() as http:
        plain = http.post(path, json={**body, "tools": [function]})
        assert plain.status_code == 200 and LEFT_OUT not in plain.headers
        mixed = [others[0], function, *others[1:]]
        reply = http.post(path, json={**body, "tools": mixed})
        assert reply.status_code == 200, reply.text
        named = [f"tools[{number}] {tool['type']}" for number, tool in enumerate(mixed) if tool is not function]
        assert reply.headers[LEFT_OUT] == ", ".join(named).replace(":", "?")
        seen = live.async_engine.seen
        assert seen[0].tokens == seen[1].tokens and seen[0].grammar == seen[1].grammar is not None
        alone = http.post(path, json={**body, "tools": others})
        assert alone.status_code == 200 and seen[2].grammar is None
        stream = http.post(path, json={**body, "tools": mixed, "stream": True})
        assert stream.status_code == 200 and stream.headers[LEFT_OUT] == reply.headers[LEFT_OUT]


@pytest.mark.parametrize(
    ("path", "choice"),
    [
        (CHAT, {"type": "custom", "custom": {"name": "apply_patch"}}),
        (CHAT, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"type": "shell"}]}}),
        (RESPONSES, {"type": "custom", "name": "apply_patch"}),
        (RESPONSES, {"type": "web_search"}),
        (RESPONSES, {"type": "mcp", "server_label": "s"}),
        (RESPONSES, {"type": "function", "name": "apply_patch"}),
        (RESPONSES, {"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp", "server_label": "s"}]}),
        (MESSAGES, {"type": "tool", "name": "web_search"}),
    ],
)
def test_a_forced_choice_of_another_tool_is_refused(live: Live, path: str, choice: Any) -> None:
    body, function, others = CASES[path]
    with live.http() as http:
        reply = http.post(path, json={**body, "tools": [function, *others], "tool_choice": choice})
    assert reply.status_code == 400 and "tool_choice" in reply.json()["error"]["message"], reply.text


@pytest.mark.parametrize("path", CASES)
def test_a_call_is_demanded_and_only_other_tools_are_there(live: Live, path: str) -> None:
    body, function, others = CASES[path]
    choice: Any = {"type": "any"} if path == MESSAGES else "required"
    with live.http() as http:
        assert http.post(path, json={**body, "tools": [*others, function], "tool_choice": choice}).status_code == 200
        reply = http.post(path, json={**body, "tools": others, "tool_choice": choice})
    assert reply.status_code == 400 and "'tool_choice' needs a function" in reply.json()["error"]["message"], reply.text


def test_allowed_tools_are_those_of_them_that_can_be_called(live: Live) -> None:
    body, function, others = CASES[RESPONSES]
    allowed = [{"type": "web_search"}, {"type": "function", "name": "add"}]
    with live.http() as http:
        for mode, tools, has_grammar in (
            ("auto", allowed, True),
            ("required", allowed, True),
            ("auto", allowed[:1], False),
        ):
            choice = {"type": "allowed_tools", "mode": mode, "tools": tools}
            reply = http.post(RESPONSES, json={**body, "tools": [function, *others], "tool_choice": choice})
            assert reply.status_code == 200, reply.text
            assert (live.async_engine.seen[-1].grammar is not None) == has_grammar


def test_errors_count_the_tools_that_are_left_out(live: Live) -> None:
    for path, (body, function, others) in CASES.items():
        bad = {"type": "function", "function": {"name": "a b"}} if path == CHAT else {**function, "name": "a b"}
        with live.http() as http:
            reply = http.post(path, json={**body, "tools": [*others, bad]})
        assert reply.status_code == 400 and f"tools[{len(others)}]" in reply.json()["error"]["message"], reply.text


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"type": "shell_call", "call_id": "c1", "action": {"commands": ["ls"]}},
    {"type": "shell_call_output", "call_id": "c1", "output": [{"stdout": "done"}]},
    {"type": "local_shell_call", "call_id": "c2", "action": {"type": "exec", "command": ["ls"]}, "status": "completed"},
    {"type": "function_call_output", "call_id": "c2", "output": "files"},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
    {"type": "mcp_list_tools", "server_label": "s", "tools": []},
    {"type": "tool_search_output", "tools": []},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]


def test_items_of_other_tools_are_left_out_and_kept(live: Live) -> None:
    plain = [item for item in HISTORY if "role" in item]
    with live.http() as http:
        first, reply = (http.post(RESPONSES, json={"input": items}) for items in (plain, HISTORY))
        assert reply.status_code == 200, reply.text
        seen = live.async_engine.seen
        assert seen[0].tokens == seen[1].tokens
        left_out = [f"input[{n}] {item['type']}" for n, item in enumerate(HISTORY) if "role" not in item and n != 4]
        assert reply.headers[LEFT_OUT] == ", ".join(left_out)
        kept = http.get(f"{RESPONSES}/{reply.json()['id']}/input_items?order=asc&limit=100").json()["data"]
        assert [item["type"] for item in kept] == [item.get("type", "message") for item in HISTORY]
        later = {"input": "d", "previous_response_id": reply.json()["id"]}
        assert http.post(RESPONSES, json=later).status_code == 200
        assert http.post(RESPONSES, json={**later, "previous_response_id": first.json()["id"]}).status_code == 200
        assert seen[2].tokens == seen[3].tokens


def test_blocks_of_other_servers_tools_are_left_out(live: Live) -> None:
    text = {"type": "text", "text": "b", "citations": [{"type": "web_search_result_location", "url": "x"}]}
    blocks = [
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"type": "web_search_result"}]},
        {"type": "mcp_tool_use", "id": "m1", "name": "x", "server_name": "s", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "m1", "is_error": False, "content": []},
        text,
    ]
    with live.http() as http:
        for content in ([{"type": "text", "text": "b"}], blocks):
            messages = [USER, {"role": "assistant", "content": content}, USER]
            body = {
                "model": "tiny",
                "max_tokens": 4,
                "messages": messages,
                "mcp_servers": [{"type": "url", "name": "s"}],
            }
            reply = http.post(MESSAGES, json=body)
            assert reply.status_code == 200, reply.text
    assert live.async_engine.seen[0].tokens == live.async_engine.seen[1].tokens
    named = [f"messages[1].content[{number}] {block['type']}" for number, block in enumerate(blocks[:4])]
    assert reply.headers[LEFT_OUT] == ", ".join(["mcp_servers", *named])


@given(st.lists(st.sampled_from(HISTORY), min_size=1, max_size=9))
def test_what_is_left_out_is_told_by_place(items: list[dict[str, Any]]) -> None:
    body = ResponseRequest.model_validate({"input": items})
    served = ("message", "function_call_output")
    wanted = [(n, item["type"]) for n, item in enumerate(items) if item.get("type", "message") not in served]
    assert items_left_out(body.input) == [f"input[{number}] {kind}" for number, kind in wanted]


def test_the_header_is_bounded_plain_text(live: Live) -> None:
    tools = [{"type": "ä\r\n" + "x" * (MAX_ID - 3)}] + [{"type": f"t{number}"} for number in range(20)]
    with live.http() as http:
        reply = http.post(RESPONSES, json={"input": "hi", "tools": tools})
    assert reply.status_code == 200
    told = reply.headers[LEFT_OUT]
    assert len(told) < 1000 and told.isascii() and told.endswith(" and 13 more") and "tools[0] ???x" in told
