"""/v1/messages as Anthropic's own client sees it: whole answers, streams, tools, thoughts, forms, usage."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import anthropic
import pydantic
import pytest
from support.api.api_live import Live, ask
from support.api.messages_asks import ASKED, COUNT, HI, PATH, PING, TOOLS, client_of, events_of, post, prompt, say
from support.api.tool_asks import CASES, ONE, TWO
from support.machine.waits import wait_until

from rootgraft.api.config import ServerConfig
from rootgraft.engine.errors import EngineDead, RequestError
from rootgraft.engine.serving.output_processor import TextDelta
from rootgraft.engine.types import FinishReason


class City(pydantic.BaseModel):
    city: str


def ending(live: Live, **usage: int) -> None:
    """Answers end with other counts in their usage."""
    made = live.async_engine._delta

    def delta(*given: Any) -> TextDelta:
        one: TextDelta = made(*given)
        if one.finish is None:
            return one
        return replace(one, finish=replace(one.finish, usage=replace(one.finish.usage, **usage)))

    live.async_engine._delta = delta


def test_a_whole_message(live: Live) -> None:
    with client_of(live.url) as client:
        answer = client.messages.create(**ASKED, system="Be brief.", metadata={"user_id": "u"}, extra_body={"top_k": 5})
    request = live.async_engine.seen[0]
    assert prompt(live) == "<system>Be brief.\n<user>hi\n<assistant>"
    assert (request.params.max_tokens, request.params.top_k) == (100, 5)
    assert answer.id.startswith("msg_") and (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "answer 0"}]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    usage, num_prompt = answer.usage, len(request.tokens)
    assert (usage.cache_read_input_tokens, usage.output_tokens) == (num_prompt // 2, 8)
    assert usage.input_tokens == num_prompt - num_prompt // 2 and usage.cache_creation_input_tokens == 0


def test_a_stream_event_by_event(live: Live) -> None:
    found = events_of(live)
    assert [event["type"] for event in found] == [
        *("message_start", "ping", "content_block_start"),
        *["content_block_delta"] * 8,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    start = found[0]["message"]
    assert (start["content"], start["stop_reason"], start["stop_sequence"]) == ([], None, None)
    num_prompt = len(live.async_engine.seen[0].tokens)
    assert (start["usage"]["input_tokens"], start["usage"]["output_tokens"]) == (num_prompt, 0)
    assert found[2] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert found[3]["delta"] == {"type": "text_delta", "text": "a"}
    end = found[-2]
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == 8 and end["usage"]["cache_read_input_tokens"] == num_prompt // 2


def test_the_client_lists_the_models(live: Live) -> None:
    with client_of(live.url) as client:
        assert [model.id for model in client.models.list()] == ["tiny", "org/alias"]


def test_the_helpers_of_the_client_stream(live: Live) -> None:
    with client_of(live.url) as client:
        with client.messages.stream(**ASKED) as stream:
            assert "".join(stream.text_stream) == "answer 0"
            final = stream.get_final_message()
        whole = client.messages.create(**ASKED)
    assert final.content[0].text == whole.content[0].text and final.id != whole.id  # type: ignore[union-attr]
    assert final.usage.input_tokens == whole.usage.input_tokens
    assert final.usage.cache_read_input_tokens == whole.usage.cache_read_input_tokens
    assert final.usage.output_tokens == whole.usage.output_tokens == 8

    async def ask() -> str:
        made = anthropic.AsyncAnthropic(base_url=live.url, api_key="none")
        async with made as client, client.messages.stream(**ASKED) as stream:
            return await stream.get_final_text()

    assert asyncio.run(ask()) == "answer 0"


CHOICES: dict[str, Any] = {"auto": {"type": "auto"}, "none": {"type": "none"}, "required": {"type": "any"}}


def choice_of(chat: Any) -> Any:
    return CHOICES[chat] if isinstance(chat, str) else {"type": "tool", "name": chat["function"]["name"]}


@pytest.mark.parametrize(("choice", "text", "calls", "content"), CASES[:-1])
def test_calls_whole_and_streamed(
    live: Live, choice: Any, text: str, calls: list[tuple[str, str]], content: str | None
) -> None:
    say(live, text)
    asked: Any = {**ASKED, "max_tokens": 400, "tools": TOOLS, "tool_choice": choice_of(choice)}
    with client_of(live.url) as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
    for answer in (whole, streamed):
        found = [block for block in answer.content if block.type == "tool_use"]
        assert [(call.name, call.input) for call in found] == [(name, json.loads(args)) for name, args in calls]
        assert len({call.id for call in found}) == len(found)
        assert "".join(block.text for block in answer.content if block.type == "text") == (content or "")
        assert answer.stop_reason == ("tool_use" if calls else "end_turn")


def test_a_stream_of_calls_event_by_event(live: Live) -> None:
    say(live, f"Well. {TWO}\nDone.")
    found = events_of(live, tools=TOOLS, max_tokens=400)
    blocks = [event["content_block"]["type"] for event in found if event["type"] == "content_block_start"]
    assert blocks == ["text", "tool_use", "tool_use", "text"]
    assert [event["content_block"]["input"] for event in found if event.get("content_block", {}).get("input")] == []
    parts = [""] * 4
    for event in found:
        if event["type"] == "content_block_delta":
            parts[event["index"]] += event["delta"].get("partial_json", event["delta"].get("text"))
    assert parts == ["Well.", '{"city": "Ulm"}', "{}", "Done."]
    order = [(event["type"][14:], event["index"]) for event in found if event["type"].startswith("content_block_st")]
    assert order == [(kind, index) for index in range(4) for kind in ("start", "stop")]


def test_parallel_calls_can_be_forbidden(live: Live) -> None:
    say(live, '{"name": "ping", "arguments": {}}')
    for choice in ({"type": "any"}, {"type": "any", "disable_parallel_tool_use": True}):
        post(live, tools=TOOLS, tool_choice=choice)
    several, one = (json.loads(request.grammar.content) for request in live.async_engine.seen)
    assert several["type"] == "array" and "anyOf" in one


def test_of_a_call_that_is_cut_off_whole_values_are_kept(live: Live) -> None:
    say(live, ONE)
    answer = post(live, tools=TOOLS, max_tokens=ONE.index("lm"))
    assert answer["stop_reason"] == "max_tokens"
    assert answer["content"][0]["input"] == {}, "half of a text is no value, as the client reads it from a stream"
    say(live, '<tool_call>\n{"name": "weather", "arguments": {"n": 123456789012345678901, "city": "Ulm"}}')
    for stream in (False, True):
        with live.http() as http:
            reply = http.post(PATH, json={**ASKED, "tools": TOOLS, "max_tokens": 86, "stream": stream})
        assert reply.status_code == 200 and '"stop_reason":"max_tokens"' in reply.text
        assert stream or '{"n": 123456789012345678901}' in reply.text


def test_integers_of_calls_are_exact(live: Live) -> None:
    long = 123456789012345678901234567890
    say(live, f'{{"n": {long}}}')
    tool = {"name": "n", "input_schema": {"type": "object", "properties": {"n": {"maximum": long + 1}}}}
    with live.http() as http:
        reply = http.post(PATH, json={**ASKED, "tools": [tool], "tool_choice": {"type": "tool", "name": "n"}})
        content = reply.json()["content"]
        assert content[0]["input"] == {"n": long}
        result = {"type": "tool_result", "tool_use_id": content[0]["id"]}
        turns = [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
        assert http.post(PATH, json={**ASKED, "messages": [*HI, *turns]}).status_code == 200
        [call] = live.async_engine.tokenizer.rendered[-1]["messages"][1]["tool_calls"]
        assert call["function"]["arguments"] == {"n": long}
        say(live, "5")
        form = {"type": "json_schema", "schema": {"maximum": long + 1}}
        for fields in ({"output_format": form}, {"output_config": {"format": form}}):
            assert http.post(PATH, json={**ASKED, **fields}).status_code == 200
    formed = [request.grammar for request in live.async_engine.seen if request.grammar is not None]
    assert len(formed) == 3 and all(str(long + 1) in str(grammar.content) for grammar in formed)


def test_a_conversation_as_the_template_gets_it(live: Live) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "d", "citations": None},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Ülm"}},
                {"type": "tool_use", "id": "t2", "name": "ping", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "gone", "is_error": True},
                {"type": "text", "text": "e"},
            ],
        },
        {"role": "system", "content": "f"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t2", "name": "ping", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t2"}]},
    ]
    post(live, messages=messages, tools=TOOLS, system=[{"type": "text", "text": "s"}, {"type": "text", "text": "t"}])
    rendered = live.async_engine.tokenizer.rendered[-1]
    calls = [
        {"type": "function", "id": "t1", "function": {"name": "weather", "arguments": {"city": "Ülm"}}},
        {"type": "function", "id": "t2", "function": {"name": "ping", "arguments": {}}},
    ]
    thought = {"reasoning_content": "Hm.", "reasoning": "Hm."}
    assert rendered["messages"] == [
        {"role": "system", "content": "s\nt"},
        {"role": "user", "content": "a\nb\nc"},
        {"role": "assistant", "content": "d", "tool_calls": calls, **thought},
        {"role": "tool", "content": "rain", "tool_call_id": "t1", "name": "weather"},
        {"role": "tool", "content": "Error: gone", "tool_call_id": "t2", "name": "ping"},
        {"role": "user", "content": "e"},
        {"role": "system", "content": "f"},
        {"role": "assistant", "tool_calls": calls[1:]},
        {"role": "tool", "content": "", "tool_call_id": "t2", "name": "ping"},
    ]
    assert rendered["tools"][0]["function"]["parameters"] == TOOLS[0]["input_schema"]


def test_data_for_accounts_is_no_part_of_the_prompt(live: Live) -> None:
    for number in range(2):
        first = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={number};"}
        post(live, system=[first, {"type": "text", "text": "Be brief."}])
    assert prompt(live, 0) == prompt(live, 1) == "<system>Be brief.\n<user>hi\n<assistant>"


def test_an_answer_goes_on_from_its_beginning(live: Live) -> None:
    post(live, messages=[*HI, {"role": "assistant", "content": "The best is ("}])
    assert prompt(live).endswith("<user>hi\n<assistant>The best is (")


def test_stop_sequences(live: Live) -> None:
    with client_of(live.url) as client:
        answer = client.messages.create(**ASKED, stop_sequences=["\n\n", "x"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "\n\n")
    assert live.async_engine.seen[0].stop == ("\n\n", "x")


def test_lengths(live: Live) -> None:
    assert post(live, max_tokens=3)["stop_reason"] == "max_tokens"
    empty = post(live, max_tokens=0, cache_control={"type": "ephemeral"})
    assert (empty["content"], empty["stop_reason"], empty["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    assert [event["type"] for event in events_of(live, max_tokens=0)][2:] == ["message_delta", "message_stop"]
    num_prompt = len(live.async_engine.seen[0].tokens)
    live.async_engine.set_max_len(num_prompt + 4)
    assert post(live, max_tokens=100_000)["stop_reason"] == "model_context_window_exceeded"
    assert live.async_engine.seen[-1].params.max_tokens == 4
    assert post(live, max_tokens=4)["stop_reason"] == "max_tokens"


def test_tokens_are_counted_as_usage_says(live: Live) -> None:
    asked: dict[str, Any] = {
        "system": "Be brief.",
        "tools": TOOLS,
        "tool_choice": {"type": "tool", "name": "ping"},
        "messages": [*HI, {"role": "assistant", "content": "x"}, *HI],
    }
    say(live, "{}")
    ending(live, cached=0)
    with client_of(live.url) as client:
        for fields in ({}, asked, {"system": "é" * 50}):
            fields = {"model": "tiny", "messages": HI, **fields}
            count = client.messages.count_tokens(**fields)
            assert count.input_tokens == client.messages.create(max_tokens=20, **fields).usage.input_tokens > 0
    post(live, path=COUNT, messages=[{"role": "user", "content": "x" * 5000}])  # more than the model's length


def test_thoughts(live: Live) -> None:
    live.async_engine.tokenizer.thinks = "qwen3"
    say(live, "<think>\nWell.\n</think>\n\nYes.")
    with client_of(live.url) as client:
        asked: Any = {**ASKED, "thinking": {"type": "enabled", "budget_tokens": 20}}
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        client.messages.create(**ASKED, thinking={"type": "disabled"})
        client.messages.create(**ASKED, thinking={"type": "adaptive"}, output_config={"effort": "low"})
        hidden = client.messages.create(**{**asked, "thinking": {**asked["thinking"], "display": "omitted"}})
        again = [*HI, {"role": "assistant", "content": whole.content}, *HI]
        client.messages.create(**{**ASKED, "messages": again})  # type: ignore[dict-item]
    for answer in (whole, streamed):
        thought, text = answer.content
        assert (thought.thinking, text.text) == ("Well.", "Yes.") and thought.signature  # type: ignore[union-attr]
        assert answer.usage.output_tokens_details.thinking_tokens == 7  # type: ignore[union-attr]
    assert whole.content[0].to_dict() == streamed.content[0].to_dict()
    assert [block.type for block in hidden.content] == ["text"]
    budget, _, off, adaptive, _, _ = live.async_engine.seen
    assert budget.reasoning.budget == 20 and adaptive.reasoning is None and off.reasoning is None
    kwargs = [rendered["kwargs"] for rendered in live.async_engine.tokenizer.rendered[-6:]]
    assert kwargs[0]["enable_thinking"] is True and kwargs[2]["enable_thinking"] is False
    assert kwargs[3] == {"reasoning_effort": "low"}
    assert live.async_engine.tokenizer.rendered[-1]["messages"][1]["reasoning_content"] == "Well."
    types = [event["delta"]["type"] for event in events_of(live, **asked) if event["type"] == "content_block_delta"]
    assert sorted(set(types)) == ["signature_delta", "text_delta", "thinking_delta"]
    assert types.index("signature_delta") == types.index("text_delta") - 1


def test_thoughts_at_intervals(serve_with: Any) -> None:
    live = serve_with(ServerConfig(stream_interval=5))
    live.async_engine.tokenizer.thinks = "qwen3"
    say(live, "<think>\nWell, well, well.\n</think>\n\nYes.")
    with client_of(live.url) as client, client.messages.stream(**ASKED) as stream:
        thought, text = stream.get_final_message().content
    assert (thought.thinking, text.text) == ("Well, well, well.", "Yes.")  # type: ignore[union-attr]


def test_a_parsed_message(live: Live) -> None:
    say(live, '{"city": "Ulm"}')
    with client_of(live.url) as client:
        assert client.messages.parse(**ASKED, output_format=City).parsed_output == City(city="Ulm")
    form = {"type": "json_schema", "schema": City.model_json_schema()}
    post(live, output_config={"format": form})
    post(live, output_format=form)
    assert all(json.loads(request.grammar.content)["required"] == ["city"] for request in live.async_engine.seen)


def test_marks_pin_up_to_where_they_are(live: Live) -> None:
    live.async_engine.tokenizer.speaks = ""
    short, long = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
    system = [{"type": "text", "text": "ab", "cache_control": long}, {"type": "text", "text": "cd"}]
    use: Any = {"type": "tool_use", "id": "t1", "name": "ping", "input": {}, "cache_control": short}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "text", "text": "3", "cache_control": long}],
    }
    user = [{"type": "text", "text": "go"}, {"type": "text", "text": "on", "cache_control": short}]
    messages: list[Any] = [{"role": "user", "content": user}, {"role": "assistant", "content": [use]}]
    messages.append({"role": "user", "content": [result, {"type": "text", "text": "What now?"}]})
    with client_of(live.url) as client:
        client.messages.create(model="tiny", max_tokens=5, system=system, messages=messages)  # type: ignore[arg-type]
    [request] = live.async_engine.seen
    text = bytes(list(request.tokens)).decode()
    pins = [(text[:tokens], seconds) for tokens, seconds in request.prefix_pins]
    call = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    head = "<system>ab\n"
    asked = f"{head}cd\n<user>go\non\n"
    called = f"{asked}<assistant>{call}\n"
    answered = f"{called}<user><tool_response>\n3\n</tool_response>\n"
    assert pins == [(head, 3600.0), (asked, 300.0), (called, 300.0), (answered, 3600.0)]
    assert text == f"{answered}<user>What now?\n<assistant>" and request.pin_seconds == 0


def test_a_mark_on_a_tool_pins_tools_and_instructions(live: Live) -> None:
    tools = [{**PING, "cache_control": {"type": "ephemeral"}}]
    for fields in ({"system": "Be brief."}, {}):
        post(live, tools=tools, **fields)
    [told, bare] = live.async_engine.seen
    beginnings = [bytes(list(request.tokens[: request.prefix_pins[0][0]])).decode() for request in (told, bare)]
    assert beginnings[0].endswith("<system>Be brief.\n") and '"ping"' in beginnings[0]
    assert beginnings[1].endswith("\n<user>") and '"ping"' in beginnings[1]


def test_a_template_that_refuses_a_beginning_gets_the_whole_prompt_pinned(live: Live) -> None:
    render = live.async_engine.tokenizer.render_chat

    def strict(messages: Any, **options: Any) -> str:
        if not options["add_generation_prompt"]:
            raise RequestError("The chat template refuses the messages.")
        return str(render(messages, **options))

    live.async_engine.tokenizer.render_chat = strict
    post(live, system=[{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}])
    [request] = live.async_engine.seen
    assert request.prefix_pins == ((len(request.tokens), 300.0),)


def test_usage_of_marks_adds_up(live: Live) -> None:
    ending(live, prompt=100, cached=30, pinned=96)
    short, long = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
    marked = [{"role": "user", "content": [{"type": "text", "text": "a" * 60, "cache_control": long}]}]
    with client_of(live.url) as client:
        for fields, num_long in (
            ({"system": [{"type": "text", "text": "s", "cache_control": short}]}, 0),
            ({"cache_control": short}, 0),
            ({"messages": marked}, len(f"<user>{'a' * 60}\n") - 30),
            ({"messages": marked, "cache_control": short}, len(f"<user>{'a' * 60}\n") - 30),
            ({"cache_control": long, "messages": [{"role": "user", "content": "b" * 90}]}, 66),
        ):
            usage = client.messages.create(**{**ASKED, **fields}).usage  # type: ignore[dict-item]
            counts = usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens
            assert counts == (4, 66, 30) and usage.cache_creation is not None
            assert usage.cache_creation.ephemeral_1h_input_tokens == num_long
            assert usage.cache_creation.ephemeral_5m_input_tokens == 66 - num_long
    assert [request.pin_seconds for request in live.async_engine.seen] == [0, 300, 0, 300, 3600]
    end = events_of(live)[-2]["usage"]
    assert (end["input_tokens"], end["cache_creation_input_tokens"], end["cache_read_input_tokens"]) == (4, 66, 30)
    ending(live, prompt=100, cached=98, pinned=96)
    assert post(live, cache_control=short)["usage"]["cache_creation_input_tokens"] == 0


def test_an_agent_of_ten_turns(live: Live) -> None:
    messages: list[Any] = list(HI)
    with client_of(live.url) as client:
        for turn in range(10):
            say(live, "Done." if turn == 9 else ONE.replace("Ulm", f"C{turn}"))
            with client.messages.stream(**{**ASKED, "messages": messages, "tools": TOOLS}) as stream:  # type: ignore[dict-item]
                answer = stream.get_final_message()
            messages.append({"role": "assistant", "content": answer.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": f"rain in {block.input['city']}"}
                for block in answer.content
                if block.type == "tool_use"
            ]
            if answer.stop_reason != "tool_use":
                break
            messages.append({"role": "user", "content": results})
    assert turn == 9 and messages[-1]["content"][0].text == "Done."
    tools = [each for each in live.async_engine.tokenizer.rendered[-1]["messages"] if each["role"] == "tool"]
    assert [each["content"] for each in tools] == [f"rain in C{number}" for number in range(9)]


def test_the_runner_of_the_client(live: Live) -> None:
    """The client's own loop: it calls the function for each tool_use and sends its results."""
    asked: list[str] = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Of a city."""
        asked.append(city)
        return "rain"

    def answer(request: Any, index: int) -> str:
        return "Done." if len(asked) == 3 else ONE.replace("Ulm", f"C{len(asked)}")

    live.async_engine.say = answer
    with client_of(live.url) as client:
        runner = client.beta.messages.tool_runner(**ASKED, tools=[weather])  # type: ignore[call-overload]
        final = runner.until_done()
    assert asked == ["C0", "C1", "C2"] and final.content[0].text == "Done."


def test_errors_within_a_stream(live: Live) -> None:
    live.async_engine.fail_after = (2, EngineDead("The engine is not running."))
    end = events_of(live)[-1]
    assert end["type"] == "error" and end["request_id"]
    assert end["error"] == {"type": "overloaded_error", "message": "The engine is not running."}
    refused = pytest.raises(anthropic.APIStatusError, match="engine is not running")
    with client_of(live.url) as client, refused, client.messages.stream(**ASKED) as stream:
        stream.get_final_message()


def test_ends_that_are_errors(live: Live) -> None:
    made = live.async_engine._delta
    for reason, status, kind in (
        (FinishReason.TIMEOUT, 504, "timeout_error"),
        (FinishReason.ABORT, 500, "api_error"),
        (FinishReason.ERROR, 500, "api_error"),
    ):

        def delta(*given: Any, reason: FinishReason = reason) -> TextDelta:
            one: TextDelta = made(*given)
            return one if one.finish is None else replace(one, finish=replace(one.finish, reason=reason))

        live.async_engine._delta = delta
        assert post(live, status)["error"]["type"] == kind
        *told, last = events_of(live)
        assert last["error"]["type"] == kind and told[-1]["type"] == "content_block_stop"
        text = "".join(event["delta"]["text"] for event in told if event["type"] == "content_block_delta")
        assert text == "answer 0", "what was there before the error is told"
        live.async_engine.step_tokens = 100
        with live.http() as http:
            assert http.post(PATH, json={**ASKED, "stream": True}).status_code == status, "nothing was told yet"
        live.async_engine.step_tokens = 1


def test_a_client_that_leaves_is_noticed(live: Live) -> None:
    live.async_engine.gate = asyncio.Event()
    with ask(live, PATH, ASKED):
        wait_until(lambda: len(live.async_engine.seen) == 1)
    wait_until(lambda: len(live.async_engine.aborted) == 1)
