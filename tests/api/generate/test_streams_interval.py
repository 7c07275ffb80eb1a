"""How the tokens of a stream are cut into events: no larger than a step by default, ``--stream-interval`` of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.api.api_live import Live

from rootgraft.api.config import ServerConfig
from rootgraft.engine.errors import ConfigError, EngineDead

TEXT = "drafts bring several tokens at a time"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
INPUT = {CHAT: {"messages": [{"role": "user", "content": "hi"}]}, COMPLETIONS: {"prompt": "hi"}}


def events(live: Live, path: str, **body: Any) -> list[dict[str, Any]]:
    with live.http() as http:
        text = http.post(path, json={**INPUT[path], "max_tokens": 100, "stream": True, **body}).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["delta"].get("content") or "")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("step", [1, 5, 17])
@pytest.mark.parametrize("interval", [1, 2, 5, 12, 1000])
def test_pieces(serve_with: Any, path: str, step: int, interval: int) -> None:
    """One token is one character here. The first step comes at once, the last tokens with the end."""
    live = serve_with(ServerConfig(stream_interval=interval))
    live.async_engine.say, live.async_engine.step_tokens = lambda request, index: TEXT[index:], step
    told = events(live, path, n=2, logprobs=True if path == CHAT else 1)
    for index in range(2):
        choices = [choice for event in told for choice in event["choices"] if choice["index"] == index]
        pieces = [text for choice in choices if (text := text_of(choice))]
        assert "".join(pieces) == TEXT[index:] and choices[-1]["finish_reason"] == "stop"
        assert len(pieces[0]) == min(step, len(TEXT) - index)
        assert all(interval <= len(piece) < interval + step for piece in pieces[1:-1])
        assert len(pieces[-1]) < interval + step
        if interval == 1:
            assert all(len(piece) <= step for piece in pieces)
        for choice in choices:
            if scores := choice["logprobs"]:
                shown = scores["content"] if path == CHAT else scores["tokens"]
                assert len(shown) == len(text_of(choice))


def test_responses_too(serve_with: Any) -> None:
    live = serve_with(ServerConfig(stream_interval=10))
    live.async_engine.say = lambda request, index: TEXT
    with live.openai() as client:
        told = list(client.responses.create(model="tiny", input="hi", stream=True))
    pieces = [event.delta for event in told if event.type == "response.output_text.delta"]
    assert [len(piece) for piece in pieces] == [1, 10, 10, 10, len(TEXT) - 31] and "".join(pieces) == TEXT


def test_thoughts_too(serve_with: Any) -> None:
    live = serve_with(ServerConfig(stream_interval=10))
    live.async_engine.tokenizer.thinks = "qwen3"
    live.async_engine.say = lambda request, index: f"<think>\n{TEXT}\n</think>\n\n{TEXT}"
    deltas = [event["choices"][0]["delta"] for event in events(live, CHAT)]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == TEXT
    assert "".join(delta.get("content") or "" for delta in deltas) == TEXT


def test_an_error_comes_after_what_was_held_back(serve_with: Any) -> None:
    live = serve_with(ServerConfig(stream_interval=10))
    live.async_engine.say = lambda request, index: TEXT
    live.async_engine.fail_after = (7, EngineDead("The engine process has ended."))
    *told, last = events(live, COMPLETIONS)
    assert [text_of(event["choices"][0]) for event in told] == [TEXT[0], TEXT[1:7]]
    assert last["error"]["code"] == "engine_dead"


def test_what_is_counted_does_not_change(serve_with: Any) -> None:
    asked = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    usages = []
    for interval in (1, 7):
        live = serve_with(ServerConfig(stream_interval=interval))
        live.async_engine.say = lambda request, index: TEXT
        told = events(live, CHAT, **asked)
        usages.append(told[-1]["usage"])
        counts = [event["usage"]["completion_tokens"] for event in told[:-1]]
        assert counts == sorted(counts) and counts[-1] == len(TEXT)
        with live.http() as http:
            assert http.post(CHAT, json=INPUT[CHAT]).json()["usage"] == told[-1]["usage"]
    assert usages[0] == usages[1]


def test_limits_of_the_option() -> None:
    for value in (1, 2, 1 << 20):
        assert ServerConfig(stream_interval=value).stream_interval == value
    for value in (0, -1, (1 << 20) + 1):
        with pytest.raises(ConfigError, match="--stream-interval must be at"):
            ServerConfig(stream_interval=value)
