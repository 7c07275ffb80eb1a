"""Results of parallel calls by their ids, over generated conversations, and the same rule in the three protocols."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.api.api_live import Live

from rootgraft.api.protocol.chat import ChatRequest

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def call(call_id: str | None, name: str = "f") -> dict[str, Any]:
    made = {"type": "function", "function": {"name": name, "arguments": "{}"}}
    return made if call_id is None else {**made, "id": call_id}


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def parsed(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [message.for_template() for message in ChatRequest.model_validate({"messages": messages}).messages]


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A conversation with results in any order, others between them, ids used again; and as it is to be read."""
    sent: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
    wanted = list(sent)
    for turn in range(draw(st.integers(1, 4))):
        ids = draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=5, unique=draw(st.booleans())))
        said = {"role": "assistant", "content": None, "tool_calls": [call(each) for each in ids]}
        results = [result(each, f"{turn}:{number}") for number, each in enumerate(ids)]
        order = draw(st.permutations(range(len(ids))))
        # Results of calls that share an id can only be told apart by their order.
        taken: dict[str, int] = {}
        came = []
        for number in order:
            same = [each for each in range(len(ids)) if ids[each] == ids[number]]
            came.append(results[same[taken.setdefault(ids[number], 0)]])
            taken[ids[number]] += 1
        between = draw(st.lists(st.integers(0, len(ids)), max_size=2, unique=True))
        sent.append(said)
        wanted.append(said)
        for number in range(len(ids) + 1):
            if number in between:
                sent.append({"role": "user", "content": f"between {turn}"})
                wanted.append(sent[-1])
            if number < len(ids):
                sent.append(came[number])
                wanted.append(results[number])
        sent.append({"role": "user", "content": f"next {turn}"})
        wanted.append(sent[-1])
    return sent, wanted


@given(conversations())
def test_results_are_in_the_order_of_their_calls(case: tuple[list[dict[str, Any]], list[dict[str, Any]]]) -> None:
    sent, wanted = case
    assert [message.get("content") for message in parsed(sent)] == [message["content"] for message in wanted]


def test_what_is_in_order_stays_as_it_is() -> None:
    said = {"role": "assistant", "content": "Well.", "tool_calls": [call("a"), call("b")]}
    sent = [{"role": "user", "content": "q"}, said, result("a", "1"), result("b", "2")]
    chat = ChatRequest.model_validate({"messages": sent})
    assert [message.tool_call_id for message in chat.messages] == [None, None, "a", "b"]


def test_calls_without_ids_take_unknown_ones_in_their_order() -> None:
    said = {"role": "assistant", "content": None, "tool_calls": [call(None), call("b"), call(None)]}
    sent = [{"role": "user", "content": "q"}, said, result("b", "2"), result("x", "1"), result("y", "3")]
    assert [message.get("content") for message in parsed(sent)][2:] == ["1", "2", "3"]
    with pytest.raises(ValidationError, match="no such call"):
        parsed([*sent, result("z", "4")])


@pytest.mark.parametrize(
    ("ids", "number", "text"),
    [
        (["zzz"], 0, "names 'zzz', but there is no such call before it"),
        (["a", "a"], 1, "names 'a', a call that already has a result"),
        (["b", "a", "b"], 2, "names 'b', a call that already has a result"),
        (["a", "x" * 200], 1, f"names '{'x' * 128}', but there is no such call before it"),
    ],
)
def test_unknown_and_doubled_ids_are_the_same_error_in_all_protocols(
    live: Live, ids: list[str], number: int, text: str
) -> None:
    calls = [("a", "f"), ("b", "g")]
    chat = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call(*each) for each in calls]},
        *(result(each, "r") for each in ids),
    ]
    blocks = [{"type": "tool_use", "id": each, "name": name, "input": {}} for each, name in calls]
    results = [{"type": "tool_result", "tool_use_id": each, "content": "r"} for each in ids]
    messages = [chat[0], {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    items = [
        chat[0],
        *({"type": "function_call", "call_id": each, "name": name, "arguments": "{}"} for each, name in calls),
        *({"type": "function_call_output", "call_id": each, "output": "r"} for each in ids),
    ]
    asked = {
        CHAT: ({"messages": chat}, f"messages[{number + 2}].tool_call_id"),
        "/tokenize": ({"messages": chat}, f"messages[{number + 2}].tool_call_id"),
        MESSAGES: (
            {"model": "tiny", "max_tokens": 4, "messages": messages},
            f"messages[2].content[{number}].tool_use_id",
        ),
        RESPONSES: ({"input": items}, f"input[{number + 3}].call_id"),
        f"{RESPONSES}/input_tokens": ({"input": items}, f"input[{number + 3}].call_id"),
    }
    with live.http() as http:
        for path, (body, field) in asked.items():
            reply = http.post(path, json=body)
            assert reply.status_code == 400, (path, reply.text)
            assert reply.json()["error"]["message"] == f"'{field}' {text}.", path
            if path != MESSAGES:
                assert (reply.json()["error"]["param"], reply.json()["error"]["code"]) == (field, "invalid_value")


def test_the_template_gets_them_in_order_from_all_protocols(live: Live) -> None:
    chat = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call("a"), call("b")]},
        result("b", "B"),
        result("a", "A"),
    ]
    uses = [{"type": "tool_use", "id": each, "name": "f", "input": {}} for each in "ab"]
    results = [{"type": "tool_result", "tool_use_id": each, "content": each.upper()} for each in "ba"]
    messages = [chat[0], {"role": "assistant", "content": uses}, {"role": "user", "content": results}]
    items = [
        chat[0],
        *({"type": "function_call", "call_id": each, "name": "f", "arguments": "{}"} for each in "ab"),
        *({"type": "function_call_output", "call_id": each, "output": each.upper()} for each in "ba"),
    ]
    with live.http() as http:
        for path, body in (
            (CHAT, {"messages": chat}),
            ("/tokenize", {"messages": chat}),
            (MESSAGES, {"model": "tiny", "max_tokens": 4, "messages": messages}),
            (RESPONSES, {"input": items}),
        ):
            assert http.post(path, json=body).status_code == 200
            rendered = live.async_engine.tokenizer.rendered[-1]["messages"]
            assert [each["content"] for each in rendered[-2:]] == ["A", "B"], (path, json.dumps(rendered))
