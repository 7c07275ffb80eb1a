"""``prompt_cache_key``, ``cache_control`` and calls that only warm a prefix, as they reach the engine and come back."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from support.api.api_fakes import MAX_LEN
from support.api.api_live import Live
from support.api.reply_checks import check_error

from rootgraft.api.protocol.chat import ChatRequest
from rootgraft.api.protocol.chat_messages import ChatMessage

HI = [{"role": "user", "content": "Hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
}


@pytest.mark.parametrize("path", BODIES)
def test_sessions_and_pins_reach_the_engine(live: Live, path: str) -> None:
    with live.http() as http:
        for fields in (
            {},
            {"prompt_cache_key": "k" * 256, "cache_control": {"type": "ephemeral"}},
            {"prompt_cache_key": "", "cache_control": {"type": "ephemeral", "ttl": "1s"}},
            {"cache_control": {"type": "ephemeral", "ttl": "24h"}},
            {"cache_control": {"type": "ephemeral", "ttl": "1440m"}},
        ):
            reply = http.post(path, json=BODIES[path] | fields)
            assert reply.status_code == 200, reply.text
    seen = [(request.session, request.pin_seconds) for request in live.async_engine.seen]
    assert seen == [("", 0.0), ("k" * 256, 300.0), ("", 1.0), ("", 86400.0), ("", 86400.0)]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_chat_of_no_tokens_computes_its_prompt(live: Live, field: str) -> None:
    with live.openai() as client:
        asked: Any = {"model": "tiny", "messages": HI, field: 0, "logprobs": True}
        answer = client.chat.completions.create(**asked)
        *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason, choice.logprobs.content) == ("", "length", [])
    assert answer.usage.completion_tokens == last.usage.completion_tokens == 0
    assert answer.usage.prompt_tokens == last.usage.prompt_tokens == len(live.async_engine.seen[0].tokens)
    assert [chunk.choices[0].delta.content or "" for chunk in chunks] == ["", ""]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert [request.params.max_tokens for request in live.async_engine.seen] == [1, 1]


def test_a_chat_of_no_tokens_has_no_form(live: Live) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with live.http() as http:
        for fields in ({"response_format": form}, {"tools": [tool], "tool_choice": "required"}):
            reply = http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 0, **fields})
            assert reply.status_code == 200, reply.text
            assert reply.json()["choices"][0]["message"]["content"] == ""
    assert all(request.grammar is None for request in live.async_engine.seen)


def test_usage_has_every_count(live: Live) -> None:
    with live.http() as http:
        usage = http.post("/v1/chat/completions", json={"messages": HI, "n": 2}).json()["usage"]
    assert usage["prompt_tokens_details"].keys() == {"cached_tokens", "forked_tokens", "pinned_tokens"}
    assert usage["completion_tokens_details"].keys() == {
        *("accepted_prediction_tokens", "rejected_prediction_tokens", "drafted_tokens", "forced_tokens"),
        "reasoning_tokens",
    }  # fmt: skip


def test_marks_in_a_chat_pin_up_to_where_they_are(live: Live) -> None:
    mark = {"type": "ephemeral", "ttl": "10m"}
    parts = [{"type": "text", "text": "one ", "cache_control": mark}, {"type": "text", "text": "two"}]
    messages = [{"role": "system", "content": "s", "cache_control": mark}, {"role": "user", "content": parts}]
    with live.http() as http:
        assert http.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
        four, five = ([{"role": "user", "content": [parts[0]] * count}] for count in (4, 5))
        assert http.post("/v1/chat/completions", json={"messages": four}).status_code == 200
        reply = http.post("/v1/chat/completions", json={"messages": five})
        check_error(reply, 400, "cache_control", "invalid_value")
        assert http.post("/v1/chat/completions", json={"messages": messages, "n": 2}).status_code == 200
    pins = [request.prefix_pins for request in live.async_engine.seen]
    assert len(pins[1]) == 4
    assert pins[0] == pins[2] == ((len("<system>s\n"), 600.0), (len("<system>s\n<user>one "), 600.0))


def test_too_many_marks_are_refused_at_the_first_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mark looked at copies what stands before it."""
    copies: list[int] = []
    copy = ChatMessage.model_copy
    monkeypatch.setattr(ChatMessage, "model_copy", lambda self, **named: copies.append(1) or copy(self, **named))
    part = {"type": "text", "text": "", "cache_control": {"type": "ephemeral"}}
    with pytest.raises(ValidationError, match="4 times"):
        ChatRequest.model_validate({"messages": [{"role": "user", "content": [part] * 12}] * 500})
    assert len(copies) == 5


def test_a_prompt_that_is_too_long_is_rendered_once_whatever_its_marks(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    renders: list[int] = []
    tokenizer = live.async_engine.tokenizer
    render = tokenizer.render_chat

    def counted(messages: Any, *args: Any, **named: Any) -> str:
        if "xxx" in str(messages):  # not to find out how the template writes calls
            renders.append(1)
        return render(messages, *args, **named)

    monkeypatch.setattr(tokenizer, "render_chat", counted)
    part = {"type": "text", "text": "x" * MAX_LEN, "cache_control": {"type": "ephemeral"}}
    with live.http() as http:
        reply = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [part] * 4}]})
    check_error(reply, 400, "messages", "context_length_exceeded")
    assert len(renders) == 1


RETAIN: dict[str, Any] = {"action_type": "kv.retain", "payload": {"directives": [{"priority": 50, "duration": 60.0}]}}


def retained(**directive: Any) -> dict[str, Any]:
    return {"actions": [{"action_type": "kv.retain", "payload": {"directives": [{"priority": 1, **directive}]}}]}


HINTS: list[tuple[dict[str, Any], float]] = [
    ({"retain_for": 86400}, 86400.0),
    ({"retain_for": 0.5}, 0.5),
    ({"release": True}, 0.0),
    ({}, 300.0),
    ({"protocol_version": "0.1", "message_id": "m", "actions": [RETAIN]}, 60.0),
    ({"actions": [{"action_type": "kv.retain", "payload": {"directives": [{"priority": 0}]}}]}, 0.0),
    ({"actions": [{"action_type": "kv.retain", "payload": {"directives": [{"priority": 1}]}}]}, 86400.0),
    ({"actions": [{"action_type": "kv.demote", "payload": {"directives": 1}}] * 16}, 300.0),
    ({"release": True, "actions": [RETAIN]}, 0.0),
    ({"actions": [RETAIN | {"payload": {"directives": [{"priority": 1, "duration": 7.0}] * 128}}]}, 7.0),
    ({"actions": [RETAIN | {"action_id": "i" * 256}]}, 60.0),
    *((retained(duration=given), kept) for given, kept in ((0, 0.0), (86400, 86400.0), (1e308, 86400.0))),
    *((retained(start=0, end=most), 86400.0) for most in (1, 2**63 - 1)),
    ({"actions": [{"action_type": "kv.demote", "action_id": "i" * 256}]}, 300.0),
]


@pytest.mark.parametrize("path", BODIES)
def test_hints_of_sessions_reach_the_engine(live: Live, path: str) -> None:
    with live.http() as http:
        for hints, _ in HINTS:
            reply = http.post(path, json=BODIES[path] | {"prompt_cache_key": "k", "kv_hints": hints})
            assert reply.status_code == 200, reply.text
    assert [request.session_seconds for request in live.async_engine.seen] == [seconds for _, seconds in HINTS]


@pytest.mark.parametrize("path", BODIES)
def test_wrong_hints_are_refused_by_name(live: Live, path: str) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"retain_for": 0}, "kv_hints.retain_for"),
        ({"retain_for": 86400.5}, "kv_hints.retain_for"),
        ({"retain_for": 5, "release": True}, "kv_hints.release"),
        ({"actions": [RETAIN] * 17}, "kv_hints.actions"),
        ({"actions": [RETAIN | {"payload": {"directives": [{"priority": 101}]}}]}, "kv_hints.actions[0]"),
        ({"actions": [RETAIN | {"payload": {"directives": [{"priority": 1}] * 129}}]}, "kv_hints.actions[0]"),
        ({"actions": [RETAIN | {"action_id": "i" * 257}]}, "kv_hints.actions[0]"),
        ({"actions": [{"action_type": "kv.demote", "action_id": "i" * 257}]}, "kv_hints.actions[0]"),
        ({"keep": 1}, "kv_hints"),
        *((retained(duration=value), "duration") for value in (-0.5, "1")),
        *((retained(start=value), "start") for value in (-1, 2**63)),
        *((retained(end=value), "end") for value in (0, 2**63)),
    ]
    with live.http() as http:
        for hints, field in cases:
            reply = http.post(path, json=BODIES[path] | {"prompt_cache_key": "k", "kv_hints": hints})
            assert reply.status_code == 400, (hints, reply.text)
            assert field in reply.json()["error"]["message"], (hints, reply.text)
        for hints in ({"retain_for": 5}, {"release": True}):
            reply = http.post(path, json=BODIES[path] | {"kv_hints": hints})
            assert (reply.status_code, "needs 'prompt_cache_key'" in reply.text) == (400, True), reply.text


@pytest.mark.parametrize("path", BODIES)
def test_a_prefetch_computes_the_prompt_alone(live: Live, path: str) -> None:
    fields = {"kv_hints": {"prefetch": True}, "max_output_tokens" if path == "/v1/responses" else "max_tokens": 9}
    with live.http() as http:
        body = http.post(path, json=BODIES[path] | fields).json()
    usage = body["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) == 0
    assert [request.params.max_tokens for request in live.async_engine.seen] == [1]
