"""Anthropic's client against a server on the real model: answers, counts, pins, an agent of ten turns with tools."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from support.api.messages_asks import TOOLS, client_of
from support.api.real_server import RealServer

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("default")]
ASKED: Any = {"model": "small", "max_tokens": 30, "messages": [{"role": "user", "content": "Name three colours."}]}
GREEDY: Any = {"extra_body": {"temperature": 0}}


@pytest.fixture
def client(real_server: RealServer) -> Any:
    with client_of(str(real_server.http.base_url)) as made:
        yield made


def test_whole_and_streamed(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASKED, **GREEDY)
    with client.messages.stream(**ASKED, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert whole.content[0].text == text == final.content[0].text  # type: ignore[union-attr]
    assert whole.stop_reason == final.stop_reason and whole.usage.output_tokens == final.usage.output_tokens <= 30
    begun = {"role": "assistant", "content": "Red, green and"}
    going_on = client.messages.create(**{**ASKED, "messages": [*ASKED["messages"], begun]}, **GREEDY)
    assert going_on.content[0].text.strip()  # type: ignore[union-attr]


def test_counts_and_pins(client: anthropic.Anthropic) -> None:
    system: Any = [{"type": "text", "text": "Colours. " * 100, "cache_control": {"type": "ephemeral"}}]
    asked = {**ASKED, "system": system, "max_tokens": 0}
    count = client.messages.count_tokens(model="small", messages=ASKED["messages"], system=system).input_tokens
    first, second = (client.messages.create(**asked).usage for _ in range(2))
    marked = client.messages.count_tokens(model="small", messages=[{"role": "user", "content": ""}], system=system)
    assert first.cache_creation_input_tokens <= marked.input_tokens < count - 3
    for usage in (first, second):
        parts = usage.input_tokens, usage.cache_creation_input_tokens or 0, usage.cache_read_input_tokens or 0
        assert sum(parts) == count
    assert first.cache_creation_input_tokens and first.cache_creation_input_tokens > 150
    assert second.cache_creation_input_tokens == 0 and (second.cache_read_input_tokens or 0) > 150


def test_an_agent_of_ten_turns(client: anthropic.Anthropic) -> None:
    """Each turn the model has to call a tool, which the grammar sees to; then it has to answer."""
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Ulm, Bonn and Kiel?"}]
    for turn in range(10):
        choice: Any = {"type": "none"} if turn == 9 else {"type": "any", "disable_parallel_tool_use": True}
        asked: Any = {"model": "small", "max_tokens": 40, "messages": messages, "tools": TOOLS, "tool_choice": choice}
        with client.messages.stream(**asked) as stream:
            answer = stream.get_final_message()
        messages.append({"role": "assistant", "content": answer.content})
        calls = [block for block in answer.content if block.type == "tool_use"]
        assert len(calls) == (0 if turn == 9 else 1)
        for call in calls:
            assert call.name == "ping" or set(call.input) >= {"city"}, call
        if turn < 9:
            assert answer.stop_reason in ("tool_use", "max_tokens")  # the second where the budget made it shorter
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "12 degrees"} for call in calls]
            messages.append({"role": "user", "content": results})
        if turn > 1:
            assert (answer.usage.cache_read_input_tokens or 0) > answer.usage.input_tokens
    assert answer.content and answer.stop_reason in ("end_turn", "max_tokens", "model_context_window_exceeded")
