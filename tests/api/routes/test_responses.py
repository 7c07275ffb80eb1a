"""/v1/responses as OpenAI's own client sees it: whole answers, streams, calls, forms, ends."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pydantic
import pytest
from support.api.api_live import Live, ask
from support.api.reply_checks import check_error
from support.api.responses_asks import ASKED, PATH, TOOLS, events_of, flat, prompt, say
from support.api.tool_asks import CASES, TWO
from support.machine.waits import wait_until

from rootgraft.engine.errors import EngineDead, GrammarRefused


class City(pydantic.BaseModel):
    city: str


def test_a_whole_response(live: Live) -> None:
    with live.openai() as client:
        answer = client.responses.create(**ASKED, metadata={"a": "b"}, user="me", max_output_tokens=50)
    num_prompt = len(live.async_engine.seen[0].tokens)
    assert prompt(live) == "<user>hi\n<assistant>" and live.async_engine.seen[0].params.max_tokens == 50
    assert answer.id.startswith("resp_") and answer.object == "response" and answer.model == "tiny"
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    [item] = answer.output
    assert item.type == "message" and item.role == "assistant" and item.status == "completed"
    assert item.id.startswith("msg_") and answer.output_text == "answer 0"
    assert answer.metadata == {"a": "b"} and answer.user == "me" and answer.max_output_tokens == 50
    assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens == 0
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (num_prompt, 8, num_prompt + 8)
    assert usage.input_tokens_details.cached_tokens == num_prompt // 2
    assert answer.text is not None and answer.text.format is not None and answer.text.format.type == "text"
    assert (answer.tools, answer.tool_choice, answer.parallel_tool_calls) == ([], "auto", True)


def test_a_stream_event_by_event(live: Live) -> None:
    found = events_of(live)
    names = [name for name, _ in found]
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert names[4:-4] == ["response.output_text.delta"] * 8
    assert names[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    first, last = found[0][1]["response"], found[-1][1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert last["status"] == "completed" and last["id"] == first["id"]
    added, done = found[2][1]["item"], found[-2][1]["item"]
    assert added["content"] == [] and added["id"] == done["id"] == last["output"][0]["id"]
    assert {data["item_id"] for name, data in found if "output_text" in name} == {added["id"]}
    assert done == last["output"][0] and done["content"][0]["text"] == "answer 0"


def test_the_helper_of_the_client_streams(live: Live) -> None:
    with live.openai() as client, client.responses.stream(**ASKED) as events:
        texts = [event.delta for event in events if event.type == "response.output_text.delta"]
        final = events.get_final_response()
    assert "".join(texts) == final.output_text == "answer 0"


@pytest.mark.parametrize(("choice", "text", "calls", "content"), CASES)
def test_calls_whole_and_streamed(
    live: Live, choice: Any, text: str, calls: list[tuple[str, str]], content: str | None
) -> None:
    say(live, text)
    asked: Any = {**ASKED, "tools": TOOLS, "tool_choice": flat(choice)}
    with live.openai() as client:
        whole = client.responses.create(**asked)
        with client.responses.stream(**asked) as events:
            streamed = events.get_final_response()
    for answer in (whole, streamed):
        found = [item for item in answer.output if item.type == "function_call"]
        assert [(call.name, call.arguments) for call in found] == calls
        assert all(call.call_id.startswith("call_") and call.id.startswith("fc_") for call in found)  # type: ignore
        assert len({call.call_id for call in found}) == len({call.id for call in found}) == len(found)
        assert answer.output_text == (content or "")
        assert answer.status == "completed" and answer.tools[0].name == "weather"  # type: ignore[union-attr]


def test_a_stream_of_calls_event_by_event(live: Live) -> None:
    say(live, "Well. " + TWO)
    found = events_of(live, tools=TOOLS)
    names = [name.removeprefix("response.") for name, _ in found]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    short = [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]
    message = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    assert short == ["created", "in_progress", *message, "output_item.done", *call, *call, "completed"]
    output = found[-1][1]["response"]["output"]
    for name, data in found:
        if "item_id" in data:
            assert output[data["output_index"]]["id"] == data["item_id"], name
    parts: dict[int, str] = {}
    for name, data in found:
        if name.endswith("arguments.delta"):
            parts[data["output_index"]] = parts.get(data["output_index"], "") + data["delta"]
    assert list(parts.values()) == [item["arguments"] for item in output[1:]] == ['{"city": "Ulm"}', "{}"]


def test_a_parsed_response(live: Live) -> None:
    say(live, '{"city": "Ulm"}')
    with live.openai() as client:
        answer = client.responses.parse(**ASKED, text_format=City)
        with client.responses.stream(**ASKED, text_format=City) as events:
            streamed = events.get_final_response()
    assert answer.output_parsed == streamed.output_parsed == City(city="Ulm")
    assert json.loads(live.async_engine.seen[0].grammar.content)["required"] == ["city"]
    assert answer.text is not None and answer.text.format.type == "json_schema"  # type: ignore[union-attr]
    assert answer.text.format.name == "City"  # type: ignore[union-attr]


def test_a_json_object(live: Live) -> None:
    say(live, "{}")
    with live.openai() as client:
        answer = client.responses.create(**ASKED, text={"format": {"type": "json_object"}})
    assert answer.output_text == "{}" and live.async_engine.seen[0].grammar.kind == "json_object"


def test_logprobs(live: Live) -> None:
    with live.openai() as client:
        answer = client.responses.create(**ASKED, include=["message.output_text.logprobs"], top_logprobs=2)
        bare = client.responses.create(**ASKED, include=["reasoning.encrypted_content"])
    entries = answer.output[0].content[0].logprobs  # type: ignore
    assert bytes(byte for entry in entries for byte in entry.bytes) == b"answer 0"
    assert [len(entry.top_logprobs) for entry in entries] == [2] * 8
    assert bare.output[0].content[0].logprobs == []  # type: ignore
    streamed = [
        entry["token"]
        for name, data in events_of(live, top_logprobs=1)
        if name.endswith("text.delta")
        for entry in data["logprobs"]
    ]
    assert "".join(streamed) == "answer 0"


def test_a_cut_answer_is_incomplete(live: Live) -> None:
    with live.openai() as client:
        answer = client.responses.create(**ASKED, max_output_tokens=3)
    assert (answer.status, answer.output_text) == ("incomplete", "ans")
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"  # type: ignore[union-attr]
    *_, (name, data) = events_of(live, max_output_tokens=3)
    assert name == "response.incomplete" and data["response"]["status"] == "incomplete"


def test_the_helper_of_the_client_has_a_cut_answer_in_its_last_event(live: Live) -> None:
    """As with OpenAI, whose helper waits for `response.completed` and raises: the answer is in the event before."""
    with live.openai() as client, client.responses.stream(**ASKED, max_output_tokens=3) as events:
        *_, last = events
        with pytest.raises(RuntimeError, match=r"response\.completed"):
            events.get_final_response()
    assert last.type == "response.incomplete"
    assert (last.response.status, last.response.output_text) == ("incomplete", "ans")


def test_an_answer_that_breaks_its_promise_fails(live: Live) -> None:
    say(live, "not JSON")
    asked = {"text": {"format": {"type": "json_object"}}}
    with live.openai() as client:
        answer = client.responses.create(**ASKED, **asked)
    assert answer.status == "failed" and answer.error is not None and answer.error.code == "server_error"
    assert events_of(live, **asked)[-1][0] == "response.failed"


def test_a_dead_engine_ends_a_stream_in_an_error_and_a_failure(live: Live) -> None:
    live.async_engine.fail_after = (2, EngineDead("The engine is not running."))
    *_, (error, data), (end, response) = events_of(live)
    assert error == "error" and (data["code"], data["param"]) == ("engine_dead", None)
    assert end == "response.failed" and response["response"]["status"] == "failed"
    assert response["response"]["error"] == {"code": "server_error", "message": data["message"]}
    live.async_engine.fail_after = (0, GrammarRefused("items", "/items", "too deep"))
    with live.http() as http:
        asked = {**ASKED, "stream": True, "text": {"format": {"type": "json_object"}}}
        check_error(http.post(PATH, json=asked), 400, "text.format", "invalid_value")


def test_a_client_that_leaves_gets_nothing_stored(live: Live) -> None:
    live.async_engine.gate = asyncio.Event()
    with ask(live, PATH, ASKED):
        wait_until(lambda: len(live.async_engine.seen) == 1)
    wait_until(lambda: len(live.async_engine.aborted) == 1)
    assert len(live.state.stores.responses) == 0
