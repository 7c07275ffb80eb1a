"""/v1/responses as OpenAI's own client sees it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pydantic
import pytest
from api_live import Live, wait_until
from bad_structured import tool
from test_bad_inputs import check_error
from test_tool_calls_api import CASES, FORCED, PING, TWO, WEATHER

from api.config import ServerConfig
from engine.errors import EngineDead, RequestError

PATH = "/v1/responses"
ASKED: Any = {"model": "tiny", "input": "hi"}
TOOLS: Any = [{"type": "function", **one["function"]} for one in (WEATHER, PING)]


class City(pydantic.BaseModel):
    city: str


def say(live: Live, text: str) -> None:
    live.frontend.say = lambda request, index: text


def prompt(live: Live) -> str:
    return bytes(live.frontend.seen[-1].tokens.tolist()).decode()


def rendered(live: Live) -> list[dict[str, Any]]:
    """The messages of the last conversation."""
    return list(live.frontend.tokenizer.rendered[-1]["messages"])


def flat(choice: Any) -> Any:
    """A chat's choice of tools as responses have it."""
    if isinstance(choice, str):
        return choice
    if choice["type"] == "function":
        return {"type": "function", **choice["function"]}
    allowed = choice["allowed_tools"]
    return {"type": "allowed_tools", "mode": allowed["mode"], "tools": [flat(one) for one in allowed["tools"]]}


def events_of(live: Live, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    with live.http() as http:
        reply = http.post(PATH, json={**ASKED, "stream": True, **fields})
    assert reply.status_code == 200 and reply.text.endswith("\n\n"), reply.text
    found = []
    for event in reply.text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert [data["type"] for _, data in found] == [name for name, _ in found]
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    return found


def test_a_whole_response(live: Live) -> None:
    with live.openai() as client:
        answer = client.responses.create(**ASKED, metadata={"a": "b"}, user="me", max_output_tokens=50)
    num_prompt = len(live.frontend.seen[0].tokens)
    assert prompt(live) == "<user>hi\n<assistant>" and live.frontend.seen[0].params.max_tokens == 50
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
    assert json.loads(live.frontend.seen[0].grammar.content)["required"] == ["city"]
    assert answer.text is not None and answer.text.format.type == "json_schema"  # type: ignore[union-attr]
    assert answer.text.format.name == "City"  # type: ignore[union-attr]


def test_a_json_object(live: Live) -> None:
    say(live, "{}")
    with live.openai() as client:
        answer = client.responses.create(**ASKED, text={"format": {"type": "json_object"}})
    assert answer.output_text == "{}" and live.frontend.seen[0].grammar.kind == "json_object"


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


def test_an_answer_that_breaks_its_promise_fails(live: Live) -> None:
    say(live, "not JSON")
    asked = {"text": {"format": {"type": "json_object"}}}
    with live.openai() as client:
        answer = client.responses.create(**ASKED, **asked)
    assert answer.status == "failed" and answer.error is not None and answer.error.code == "server_error"
    assert events_of(live, **asked)[-1][0] == "response.failed"


def test_a_dead_engine_ends_a_stream_in_an_error_and_a_failure(live: Live) -> None:
    live.frontend.fail_after = (2, EngineDead("The engine is not running."))
    *_, (error, data), (end, response) = events_of(live)
    assert error == "error" and (data["code"], data["param"]) == ("engine_dead", None)
    assert end == "response.failed" and response["response"]["status"] == "failed"
    assert response["response"]["error"] == {"code": "server_error", "message": data["message"]}
    live.frontend.fail_after = (0, RequestError("Too deep.", param="response_format"))
    with live.http() as http:
        asked = {**ASKED, "stream": True, "text": {"format": {"type": "json_object"}}}
        check_error(http.post(PATH, json=asked), 400, "text.format", "invalid_value")


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


def test_going_on_from_a_response(live: Live) -> None:
    with live.openai() as client:
        first = client.responses.create(**ASKED, instructions="Once.")
        second = client.responses.create(model="tiny", input="more", previous_response_id=first.id)
        client.responses.create(model="tiny", input="end", previous_response_id=second.id)
        contents = [message["content"] for message in rendered(live)]
        assert contents == ["hi", "answer 0", "more", "answer 0", "end"]
        assert second.previous_response_id == first.id
        client.responses.delete(first.id)
        client.responses.create(model="tiny", input="end", previous_response_id=second.id)
        assert [message["content"] for message in rendered(live)] == contents
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="tiny", input="x", previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found" and caught.value.param == "previous_response_id"


def test_outputs_alone_after_a_response_with_calls(live: Live) -> None:
    say(live, FORCED)
    with live.openai() as client:
        first = client.responses.create(**ASKED, tools=TOOLS, tool_choice="required")
        outputs: Any = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "ok"}  # type: ignore[union-attr]
            for item in first.output
        ]
        say(live, "Done.")
        last = client.responses.create(model="tiny", input=outputs, previous_response_id=first.id)
        assert last.output_text == "Done."
        with pytest.raises(openai.BadRequestError, match="there is no call 'c9'"):
            client.responses.create(
                model="tiny", input=[{"type": "function_call_output", "call_id": "c9", "output": "x"}]
            )


def test_references_to_items(live: Live) -> None:
    with live.openai() as client:
        first = client.responses.create(**ASKED)
        sent: Any = [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "b"}]
        client.responses.create(model="tiny", input=sent)
        assert [message["content"] for message in rendered(live)] == ["answer 0", "b"]
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="tiny", input=[{"id": "msg_none"}])  # type: ignore
    assert caught.value.param == "input[0].id"


def test_asking_for_a_response_and_deleting_it(live: Live) -> None:
    with live.openai() as client:
        made = client.responses.create(**ASKED)
        assert client.responses.retrieve(made.id).model_dump() == made.model_dump()
        client.responses.delete(made.id)
        for ask in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError, match="not found"):
                ask(made.id)
        unstored = client.responses.create(**ASKED, store=False)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(unstored.id)
        streamed = events_of(live)[-1][1]["response"]
        assert client.responses.retrieve(streamed["id"]).output_text == "answer 0"


def test_the_items_of_a_response_page_by_page(live: Live) -> None:
    with live.openai() as client:
        first = client.responses.create(model="tiny", input=[{"role": "user", "content": str(n)} for n in range(5)])
        second = client.responses.create(model="tiny", input="5", previous_response_id=first.id)
        pages = client.responses.input_items.list(second.id, limit=2, order="asc")
        items = list(pages)
        texts = [item.content[0].text for item in items]  # type: ignore
        assert texts == ["0", "1", "2", "3", "4", "answer 0", "5"] and pages.has_more
        latest = client.responses.input_items.list(second.id, limit=3)
        assert [item.id for item in latest.data] == [item.id for item in reversed(items[-3:])]
        assert [item.type for item in items] == ["message"] * 7
        with pytest.raises(openai.BadRequestError, match="names no item"):
            client.responses.input_items.list(second.id, after="msg_none")


def test_a_background_response_is_made_and_found(live: Live) -> None:
    live.frontend.gate = gate = asyncio.Event()
    with live.openai() as client:
        begun = client.responses.create(**ASKED, background=True)
        assert (begun.status, begun.output, begun.background) == ("in_progress", [], True)
        wait_until(lambda: bool(live.frontend.seen))
        assert client.responses.retrieve(begun.id).status == "in_progress"
        with pytest.raises(openai.BadRequestError, match="not finished yet"):
            client.responses.create(**ASKED, previous_response_id=begun.id)
        live.loop.call_soon_threadsafe(gate.set)
        wait_until(lambda: client.responses.retrieve(begun.id).status == "completed")
        assert client.responses.retrieve(begun.id).output_text == "answer 0"
        assert client.responses.cancel(begun.id).status == "completed"
        assert live.state.active == 0 and live.state.responses.num_jobs == 0


def test_a_background_response_is_cancelled_or_deleted(live: Live) -> None:
    live.frontend.gate = asyncio.Event()
    with live.openai() as client:
        first, second = (client.responses.create(**ASKED, background=True) for _ in range(2))
        wait_until(lambda: len(live.frontend.seen) == 2)
        assert client.responses.cancel(first.id).status == "cancelled"
        assert client.responses.cancel(first.id).status == client.responses.retrieve(first.id).status == "cancelled"
        client.responses.delete(second.id)
        wait_until(lambda: len(live.frontend.aborted) == 2)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(second.id)
        live.frontend.gate = None
        foreground = client.responses.create(**ASKED)
        with pytest.raises(openai.BadRequestError, match="'background'"):
            client.responses.cancel(foreground.id)


def test_a_background_response_that_fails(live: Live) -> None:
    live.frontend.fail_after = (1, EngineDead("The engine is not running."))
    with live.openai() as client:
        begun = client.responses.create(**ASKED, background=True)
        wait_until(lambda: client.responses.retrieve(begun.id).status == "failed")
        error = client.responses.retrieve(begun.id).error
    assert error is not None and error.message == "The engine is not running."


def test_a_response_belongs_to_its_key(serve_with: Any) -> None:
    live = serve_with(ServerConfig(api_key=("one", "two")))
    with live.openai(api_key="one") as mine, live.openai(api_key="two") as theirs:
        made = mine.responses.create(**ASKED)
        assert mine.responses.retrieve(made.id).id == made.id
        for ask in (theirs.responses.retrieve, theirs.responses.delete, theirs.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(made.id)
        with pytest.raises(openai.BadRequestError):
            theirs.responses.create(**ASKED, previous_response_id=made.id)
        reference: Any = [{"type": "item_reference", "id": made.output[0].id}]
        with pytest.raises(openai.BadRequestError):
            theirs.responses.create(model="tiny", input=reference)


def test_a_server_that_stores_nothing(serve_with: Any) -> None:
    live = serve_with(ServerConfig(max_stored_response_bytes=0))
    with live.openai() as client:
        made = client.responses.create(**ASKED)
        assert made.model_dump()["store"] is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError, match="background"):
            client.responses.create(**ASKED, background=True)
    assert live.state.active == 0


LARGE = {"type": "object", "properties": {"a": {"enum": ["x" * 50 + str(n) for n in range(20_000)]}}}
BAD: list[tuple[dict[str, Any], str | None, str | None]] = [
    ({"input": None}, "input", "missing_required_parameter"),
    ({"input": []}, "input", "invalid_value"),
    ({"input": 5}, "input", "invalid_value"),
    ({"input": [5]}, "input[0]", "invalid_value"),
    ({"input": [{"type": "reasoning", "id": "x", "summary": []}]}, "input[0]", "invalid_value"),
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
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ({"max_output_tokens": 1 << 20}, "input", "context_length_exceeded"),
    ({"top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
    ({"reasoning": {"effort": "high"}}, "reasoning", "unsupported_parameter"),
    ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
    ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
    ({"stream_options": {}}, "stream_options", "invalid_value"),
    ({"background": True, "stream": True}, "background", "invalid_value"),
    ({"background": True, "store": False}, "background", "invalid_value"),
    ({"include": ["everything"]}, "include[0]", "invalid_value"),
    ({"metadata": {"a": 1}}, "metadata.a", "invalid_type"),
    ({"metadata": {"a": "b" * 513}}, "metadata", "invalid_value"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "invalid_value"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "invalid_value"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": LARGE}}}, "text.format", "invalid_value"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
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
    assert not live.frontend.seen


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


def test_a_client_that_leaves_gets_nothing_stored(live: Live) -> None:
    live.frontend.gate = asyncio.Event()
    with live.http() as http, pytest.raises(httpx.ReadTimeout):
        http.post(PATH, json=ASKED, timeout=0.2)
    wait_until(lambda: len(live.frontend.aborted) == 1)
    assert len(live.state.responses) == 0
