"""What takes long with a long request is done on other threads: the event loop serves the others meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from support.api.api_live import Live
from support.api.reply_checks import check_error

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
LONG = "x" * 60_000


def call(arguments: str) -> list[dict[str, Any]]:
    function = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "assistant", "tool_calls": [function]}, {"role": "tool", "tool_call_id": "a", "content": "1"}]


def tool(description: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "description": description, "parameters": {}}}]


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
