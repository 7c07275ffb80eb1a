"""Chats that later turns go on from, also those of requests that nobody has checked."""

from __future__ import annotations

from typing import Any

import pytest

from rootgraft.api.sockets.past_conversations import PastConversations

ANSWER = {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    "messages", [None, 5, "ab", {"role": "user"}, [], [7], [{"content": {"a": 1}}], [{"content": [1]}]]
)
@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"continue_final_message": True, "echo": 3}])
def test_a_request_that_was_cancelled_at_once_may_have_any_messages(messages: Any, fields: dict[str, Any]) -> None:
    past = PastConversations(1 << 20)
    past.keep("a", {"messages": messages, **fields}, ANSWER)
    asked = past.with_turn("a", {"messages": [{"role": "user", "content": "hi"}]})["messages"]
    assert asked[-2]["role"] == "assistant" and asked[-1] == {"role": "user", "content": "hi"}


def test_a_continued_message_has_the_thoughts_and_calls_of_both() -> None:
    past = PastConversations(1 << 20)
    begun = {"role": "assistant", "content": "<think>a", "reasoning_content": "b", "name": "x"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {"role": "assistant", "content": "d", "reasoning_content": "c", "tool_calls": [call]}
    past.keep("a", {"messages": [begun], "continue_final_message": True}, answer)
    [found] = past.with_turn("a", {"messages": []})["messages"]
    assert found == {**begun, "content": "<think>ad", "reasoning_content": "bc", "tool_calls": [call]}
