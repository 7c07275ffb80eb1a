"""Tools as clients use them: grammars and prompts that reach the engine, calls that come back, whole and streamed."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest
from support.api.api_live import Live
from support.api.bad.bad_structured import named, schema_format, tool
from support.api.reply_checks import scrape, value
from support.api.tool_asks import CASES, CITY, FORCED, ONE, SHORT, TOOLS, TWO

from rootgraft.api.generate.model_engine import TemplateFormats
from rootgraft.api.structured.tool_formats import FORMATS
from rootgraft.engine.errors import GrammarRefused
from rootgraft.grammar.spec import GrammarKind

CHAT = "/v1/chat/completions"
HI: Any = [{"role": "user", "content": "hi"}]


def post(live: Live, **fields: Any) -> dict[str, Any]:
    with live.http() as http:
        reply = http.post(CHAT, json={"messages": HI, "tools": TOOLS, **fields})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def say(live: Live, text: str) -> None:
    live.async_engine.say = lambda request, index: text


def prompt(live: Live) -> str:
    return bytes(live.async_engine.seen[-1].tokens.tolist()).decode()


def test_a_model_that_names_recipients_is_asked_for_text_where_it_may_call_nothing(live: Live) -> None:
    """Functionary 3.2: the prompt ends in the mark, and in the recipient too unless a function may be one."""
    live.async_engine.tokenizer.speaks = "functionary_v32"
    say(live, "all\nWell.")
    with live.openai() as client:
        asked: Any = {"model": "tiny", "messages": HI, "tools": TOOLS}
        assert client.chat.completions.create(**asked).choices[0].message.content == "Well."
        assert prompt(live).endswith("<assistant>>>>")
        with client.chat.completions.stream(**asked) as events:
            assert events.get_final_completion().choices[0].message.content == "Well."
        say(live, '{"a": 1}')
        answers = [
            client.chat.completions.create(**asked, tool_choice="none"),
            client.chat.completions.create(model="tiny", messages=HI),
            client.chat.completions.create(model="tiny", messages=HI, response_format={"type": "json_object"}),
        ]
    for answer, seen in zip(answers, live.async_engine.seen[-3:], strict=True):
        assert answer.choices[0].message.content == '{"a": 1}'
        assert bytes(seen.tokens.tolist()).decode().endswith("<assistant>>>>all\n")


@pytest.mark.parametrize(("choice", "text", "calls", "content"), CASES)
def test_calls_whole_and_streamed(
    live: Live, choice: Any, text: str, calls: list[tuple[str, str]], content: str | None
) -> None:
    say(live, text)
    asked: Any = {"model": "tiny", "messages": HI, "tools": TOOLS, "tool_choice": choice, "n": 2}
    with live.openai() as client:
        whole = client.chat.completions.create(**asked).choices
        with client.chat.completions.stream(**asked) as events:
            streamed = events.get_final_completion().choices
    for choices in (whole, streamed):
        assert len(choices) == 2
        for answer in choices:
            found = answer.message.tool_calls or []
            assert [(call.function.name, call.function.arguments) for call in found] == calls
            assert all(call.type == "function" and call.id.startswith("call_") for call in found)
            assert len({call.id for call in found}) == len(found)
            assert answer.message.content == content
            assert answer.finish_reason == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize(
    "speaks",
    [
        *("qwen3_coder", "glm45", "minimax_m2", "mistral_args", "kimi_k2", "granite", "pythonic", "functionary"),
        *("functionary_v32", "gemma4"),
    ],
)
def test_every_format_comes_back_as_json(live: Live, speaks: str) -> None:
    """The model's own form is read off the template, and clients see OpenAI's shape, whole and streamed."""
    live.async_engine.tokenizer.speaks = speaks
    form = FORMATS[speaks]
    asked = {"city": 'Ulm </tool_call> "x"\n{}'}
    text = form.calls([("weather", json.dumps(asked, ensure_ascii=False)), ("ping", "{}")])
    say(live, text)
    body: Any = {"model": "tiny", "messages": HI, "tools": TOOLS}
    with live.openai() as client:
        whole = client.chat.completions.create(**body).choices[0]
        with client.chat.completions.stream(**body) as events:
            streamed = events.get_final_completion().choices[0]
    for answer in (whole, streamed):
        found = answer.message.tool_calls or []
        assert [(call.function.name, json.loads(call.function.arguments)) for call in found] == [
            ("weather", asked),
            ("ping", {}),
        ]
        assert answer.message.content is None and answer.finish_reason == "tool_calls"
        ids = [call.id for call in found]
        assert ids == ["functions.weather:0", "functions.ping:1"] if speaks == "kimi_k2" else len({*ids}) == 2
    sent = [{"role": "assistant", "tool_calls": [call.model_dump() for call in whole.message.tool_calls or []]}]
    sent += [{"role": "tool", "tool_call_id": call.id, "content": "1"} for call in whole.message.tool_calls or []]
    say(live, "Done.")
    post(live, messages=[*HI, *sent])
    assert text in prompt(live)


def test_other_routes_read_the_same_formats(live: Live) -> None:
    live.async_engine.tokenizer.speaks = "qwen3_coder"
    say(live, FORMATS["qwen3_coder"].calls([("weather", '{"city": "a\\nb"}')]))
    function = TOOLS[0]["function"]
    with live.http() as http:
        asked = {"model": "tiny", "input": "hi", "tools": [{"type": "function", **function}]}
        [item] = http.post("/v1/responses", json=asked).json()["output"]
        tools = [{"name": "weather", "input_schema": CITY}]
        asked = {"model": "tiny", "max_tokens": 900, "messages": HI, "tools": tools}
        [block] = http.post("/v1/messages", json=asked).json()["content"]
    assert (item["type"], item["name"], json.loads(item["arguments"])) == ("function_call", "weather", {"city": "a\nb"})
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "weather", {"city": "a\nb"})


def test_a_stream_of_calls_chunk_by_chunk(live: Live) -> None:
    say(live, "Well. " + TWO)
    with live.openai() as client:
        chunks = list(client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, stream=True))  # type: ignore
    first, *middle, last = [chunk.choices[0] for chunk in chunks]
    assert (first.delta.role, first.delta.content, first.delta.tool_calls) == ("assistant", None, None)
    deltas = [call for choice in middle for call in choice.delta.tool_calls or []]
    starts = [call for call in deltas if call.id is not None]
    assert [(call.index, call.type, call.function.name, call.function.arguments) for call in starts] == [  # type: ignore
        (0, "function", "weather", ""),
        (1, "function", "ping", ""),
    ]
    for call in deltas:
        if call not in starts:
            assert call.type is None and call.function is not None
            assert call.function.name is None and call.function.arguments
    assert [call.index for call in deltas] == sorted(call.index for call in deltas)
    assert last.finish_reason == "tool_calls" and last.delta.model_dump(exclude_none=True) == {}


def test_the_grammar_of_each_choice(live: Live) -> None:
    for choice, kind in (
        ("auto", GrammarKind.STRUCTURAL_TAG),
        ("required", GrammarKind.JSON_SCHEMA),
        (named("weather"), GrammarKind.JSON_SCHEMA),
    ):
        say(live, {"auto": "x", "required": FORCED}.get(str(choice), '{"city": "x"}'))
        post(live, tool_choice=choice)
        assert (
            live.async_engine.seen[-1].grammar.kind is kind and live.async_engine.seen[-1].skip_special_tokens is False
        )
    assert live.async_engine.seen[-1].grammar.value() == CITY
    post(live, tool_choice="none")
    assert live.async_engine.seen[-1].grammar is None and live.async_engine.seen[-1].skip_special_tokens is True


def test_forced_calls_are_calls_of_the_tools_that_are_allowed(live: Live) -> None:
    say(live, FORCED)
    post(live, tool_choice="required")
    schema = live.async_engine.seen[-1].grammar.value()
    good = [{"name": "weather", "arguments": {"city": "x"}}, {"name": "ping", "arguments": {}}]
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid(good)
    bad: list[Any] = [[], [*good] * 9, [{"name": "other", "arguments": {}}], [{"name": "ping", "arguments": {"x": 1}}]]
    bad += [good[0], [{"name": "weather", "arguments": {}}], [{"name": "ping"}], [{**good[1], "x": 1}]]
    assert not any(validator.is_valid(value) for value in bad)
    say(live, '{"name": "ping", "arguments": {}}')
    post(live, tool_choice="required", parallel_tool_calls=False)
    validator = jsonschema.Draft202012Validator(live.async_engine.seen[-1].grammar.value())
    assert validator.is_valid(good[0]) and not validator.is_valid(good)
    say(live, '[{"name":"ping","arguments":{}}]')
    post(live, tool_choice=SHORT)
    validator = jsonschema.Draft202012Validator(live.async_engine.seen[-1].grammar.value())
    assert validator.is_valid(good[1:]) and not validator.is_valid(good)


def test_references_of_a_tool_stay_within_it(live: Live) -> None:
    def typed(kind: str) -> dict[str, Any]:
        return {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": kind}}}

    say(live, '[{"name": "i", "arguments": {"a": 1}}, {"name": "s", "arguments": {"a": "1"}}]')
    tools = [tool("i", parameters=typed("integer")), tool("s", parameters=typed("string"))]
    answer = post(live, tools=tools, tool_choice="required")
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    validator = jsonschema.Draft202012Validator(live.async_engine.seen[-1].grammar.value())
    assert validator.is_valid([{"name": "i", "arguments": {"a": 1}}, {"name": "s", "arguments": {"a": "1"}}])
    assert not validator.is_valid([{"name": "i", "arguments": {"a": "1"}}])


def test_one_call_at_most(live: Live) -> None:
    say(live, ONE)
    post(live, parallel_tool_calls=False)
    assert live.async_engine.seen[-1].grammar.value()["format"]["stop_after_first"] is True
    post(live)
    assert live.async_engine.seen[-1].grammar.value()["format"]["stop_after_first"] is False


def test_prompts_of_forced_calls_end_in_their_beginning(live: Live) -> None:
    say(live, '{"city": "x"}')
    post(live, tool_choice=named("weather"))
    assert prompt(live).endswith('<assistant><tool_call>\n{"name": "weather", "arguments": ')
    say(live, '{"name": "ping", "arguments": {}}')
    post(live, tool_choice="required", parallel_tool_calls=False)
    assert prompt(live).endswith("<assistant><tool_call>\n")
    say(live, "x")
    post(live)
    assert prompt(live).endswith("<assistant>")


FAMILIES = {
    "hermes": ONE,
    "llama3_json": '{"name": "weather", "parameters": {"city": "Ulm"}}',
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Ulm"}}]',
    "": ONE,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_format_follows_the_chat_template(live: Live, family: str) -> None:
    live.async_engine.tokenizer.speaks = family
    say(live, FAMILIES[family])
    [choice] = post(live)["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Ulm"}'}
    assert live.state.engine.dialect(live.async_engine) is live.state.engine.dialect(live.async_engine)
    assert live.state.engine.dialect(live.async_engine).format.name == (family or "generic")
    assert live.state.engine.dialect(live.async_engine).by_template is bool(family)


def test_templates_get_tools_as_they_know_them(live: Live) -> None:
    say(live, "x")
    post(live)
    assert live.async_engine.tokenizer.rendered[-1]["tools"] == [
        {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": CITY}},
        {
            "type": "function",
            "function": {"name": "ping", "description": "", "parameters": {"type": "object", "properties": {}}},
        },
    ]
    post(live, tool_choice="none")
    assert "weather" in prompt(live)
    post(live, tools=[])
    assert live.async_engine.tokenizer.rendered[-1]["tools"] is None and live.async_engine.seen[-1].grammar is None


def test_nulls_in_a_tools_schema_are_absent_keywords(live: Live) -> None:
    """Go writes a list or map that was never made as null."""
    say(live, "x")
    city = {"type": "string", "description": None, "enum": None, "default": None}
    nulls = {"type": "object", "properties": {"city": city}, "required": None, "$defs": None}
    tools = [
        {"type": "function", "function": {"name": "weather", "parameters": nulls}},
        {"type": "function", "function": {"name": "ping", "parameters": {"type": "object", "properties": None}}},
    ]
    for choice in ("auto", "required"):
        post(live, tools=tools, tool_choice=choice)
    assert [tool["function"]["parameters"] for tool in live.async_engine.tokenizer.rendered[-1]["tools"]] == [
        {"type": "object", "properties": {"city": {"type": "string", "default": None}}},
        {"type": "object"},
    ]
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": nulls}}
    post(live, tools=None, response_format=form)
    assert live.async_engine.seen[-1].grammar.value() == {
        "type": "object",
        "properties": {"city": {"type": "string"}},
    }


HISTORY: Any = [
    {"role": "user", "content": "And now?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}},
            {"id": "b", "type": "function", "function": {"name": "ping", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "rain"},
    {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "pong"}]},
    {"role": "assistant", "content": "It rains."},
]


def test_a_template_without_tools_gets_them_as_text(live: Live) -> None:
    live.async_engine.tokenizer.speaks = ""
    say(live, "x")
    post(live, messages=HISTORY)
    seen = live.async_engine.tokenizer.rendered[-1]
    assert seen["tools"] is None
    system, user, calls, results, answer = seen["messages"]
    assert system["role"] == "system" and json.dumps(CITY, separators=(",", ":")) in system["content"]
    assert '<tool_call>\n{"name": "NAME", "arguments": {...}}\n</tool_call>' in system["content"]
    assert user == {"role": "user", "content": "And now?"}
    assert calls == {"role": "assistant", "content": TWO}
    assert results == {
        "role": "user",
        "content": "<tool_response>\nrain\n</tool_response>\n<tool_response>\npong\n</tool_response>",
    }
    assert answer == {"role": "assistant", "content": "It rains."}
    post(live, messages=[{"role": "system", "content": "Be brief."}, *HISTORY])
    system = live.async_engine.tokenizer.rendered[-1]["messages"][0]
    assert system["content"].startswith("Be brief.\n\nYou can call functions.")
    post(live, messages=HISTORY, tools=[])
    assert live.async_engine.tokenizer.rendered[-1]["messages"][0] == {"role": "user", "content": "And now?"}


def test_tokenize_counts_what_chat_does(live: Live) -> None:
    """Some formats begin an answer that is no call with a mark, which is a part of the prompt."""
    say(live, "x")
    for family in ("hermes", "functionary_v32", ""):
        live.async_engine.tokenizer.speaks = family
        live.state._formats = TemplateFormats(live.state.options)
        for messages, tools in ((HISTORY, TOOLS), (HI, []), (HI, TOOLS)):
            usage = post(live, messages=messages, tools=tools)["usage"]
            with live.http() as http:
                told = http.post("/tokenize", json={"messages": messages, "tools": tools}).json()
            assert told["tokens"] == list(live.async_engine.seen[-1].tokens)
            assert told["count"] == usage["prompt_tokens"]


def test_calls_or_the_form_that_was_asked_for(live: Live) -> None:
    asked: Any = {"tools": TOOLS, **schema_format({"type": "object", "required": ["a"]})}
    for text, reason in ((ONE, "tool_calls"), ('{"a": 1}', "stop"), ('{"b": 1}', "error"), ("text", "error")):
        say(live, text)
        assert post(live, **asked)["choices"][0]["finish_reason"] == reason
    assert [part["type"] for part in live.async_engine.seen[-1].grammar.value()["format"]["elements"]] == [
        "tags_with_separator",
        "json_schema",
    ]
    say(live, FORCED)
    assert post(live, **asked, tool_choice="required")["choices"][0]["finish_reason"] == "tool_calls"
    say(live, '{"a": 1}')
    answer = post(live, **asked, tool_choice="none")["choices"][0]
    assert (answer["finish_reason"], answer["message"]["content"]) == ("stop", '{"a": 1}')


def test_bare_json_calls_and_a_form_at_once_are_refused(live: Live) -> None:
    live.async_engine.tokenizer.speaks = "llama3_json"
    with live.openai() as client, pytest.raises(openai.BadRequestError, match="without marks") as caught:
        client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, **schema_format({}))  # type: ignore
    assert caught.value.param == "response_format"


BROKEN: list[tuple[Any, str]] = [
    ("auto", ONE.replace('"Ulm"', "5")),
    ("required", "[]"),
    ("required", "text"),
    ("required", '[{"name": "weather", "arguments": {}}]'),
    (named("weather"), "{}"),
    (named("weather"), '{"city": "Ul'),
    (named("ping"), '{"x": 1}'),
    ("auto", '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'),
]


@pytest.mark.parametrize("stream", [False, True])
def test_invalid_calls_end_in_error(live: Live, stream: bool) -> None:
    before = value(scrape(live), "structured_answers_broken", "_total")
    with live.http() as http:
        for choice, text in BROKEN:
            say(live, text)
            body = {"messages": HI, "tools": TOOLS, "tool_choice": choice, "stream": stream}
            reply = http.post(CHAT, json=body)
            assert '"finish_reason":"error"' in reply.text and "tool_calls" not in reply.text.rpartition("finish")[2]
    families = scrape(live)
    assert value(families, "structured_answers_broken", "_total") == before + len(BROKEN)
    assert value(families, "structured_requests", "_total", kind="tools") >= len(BROKEN)


def test_a_call_cut_off_by_the_budget(live: Live) -> None:
    say(live, '{"city": "Ulm"}')
    [choice] = post(live, tool_choice=named("weather"), max_tokens=9)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": '


@pytest.mark.parametrize(("text", "reason"), [('{"city": "U', "stop"), ('{"city": "Ulm"}', "tool_calls")])
def test_a_call_that_a_stop_string_cuts_is_no_finished_call(live: Live, text: str, reason: str) -> None:
    """What ends in tool_calls may be parsed: after a stop string that is so if the last call is whole."""
    say(live, text)
    asked: Any = {"messages": HI, "tools": TOOLS, "tool_choice": named("weather"), "stop": "m"}
    with live.http() as http:
        [whole] = http.post(CHAT, json=asked).json()["choices"]
        stream = http.post(CHAT, json=asked | {"stream": True}).text
    assert (whole["finish_reason"], whole["stop_reason"]) == (reason, "m")
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == text
    assert f'"finish_reason":"{reason}","stop_reason":"m"' in stream


@pytest.mark.parametrize("choice", ["auto", "required", named("b")])
def test_refused_schemas_name_tool_keyword_and_pointer(live: Live, choice: Any) -> None:
    tools = [tool("a"), tool("b", parameters={"type": "object", "properties": {"x": {"not": {}}}})]
    where = {
        "auto": "/format/tags/0/content/elements/1/content/json_schema",
        "required": "/items/anyOf/1/properties/arguments",
    }.get(str(choice), "")
    live.async_engine.fail_after = (0, GrammarRefused("not", f"{where}/properties/x/not", "no"))
    with live.http() as http:
        reply = http.post(CHAT, json={"messages": HI, "tools": tools, "tool_choice": choice})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "tools[1].function.parameters"
    assert error["message"] == ("'tools[1].function.parameters' cannot be enforced: 'not' at '/properties/x/not': no.")
    assert (error["keyword"], error["pointer"], error["reason"]) == ("not", "/properties/x/not", "no")


def test_logprobs_of_calls_are_all_there(live: Live) -> None:
    say(live, "a " + ONE)
    asked: Any = {"model": "tiny", "messages": HI, "tools": TOOLS, "logprobs": True}
    with live.openai() as client:
        whole = client.chat.completions.create(**asked).choices[0].logprobs
        streamed = [
            entry.token
            for chunk in client.chat.completions.create(**asked, stream=True)
            if chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content or []
        ]
    assert whole is not None and whole.content is not None
    assert "".join(entry.token for entry in whole.content) == "a " + ONE == "".join(streamed)


class Weather(pydantic.BaseModel):
    """Of a city."""

    city: str
    unit: Literal["C", "F"]


def test_pydantic_tools_of_the_client(live: Live) -> None:
    say(live, '[{"name": "Weather", "arguments": {"city": "Ulm", "unit": "C"}}]')
    asked: Any = {"model": "tiny", "messages": HI, "tools": [openai.pydantic_function_tool(Weather)]}
    asked["tool_choice"] = "required"
    with live.openai() as client:
        [call] = client.chat.completions.parse(**asked).choices[0].message.tool_calls or []
        with client.chat.completions.stream(**asked) as events:
            kinds = [event.type for event in events]
            [streamed] = events.get_final_completion().choices[0].message.tool_calls or []
    expected = Weather(city="Ulm", unit="C")
    assert call.function.parsed_arguments == streamed.function.parsed_arguments == expected
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds


def test_an_answer_with_calls_can_be_sent_back(live: Live) -> None:
    say(live, TWO)
    with live.openai() as client:
        message = client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS).choices[0].message  # type: ignore
        results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "1"} for call in message.tool_calls or []]
        history: Any = [*HI, message, *results]
        client.chat.completions.create(model="tiny", messages=history, tools=TOOLS)  # type: ignore[arg-type]
    calls = live.async_engine.tokenizer.rendered[-1]["messages"][1]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [{"city": "Ulm"}, {}]


def test_arguments_may_come_back_as_the_object_that_they_are(live: Live) -> None:
    """As clients send them that have parsed them, and as some templates' own examples have them."""
    say(live, "x")
    for function in ({"arguments": {"city": "Ulm", "n": 2**70}}, {"arguments": {}}):
        call = {"id": "a", "type": "function", "function": {"name": "weather", **function}}
        history = [*HI, {"role": "assistant", "tool_calls": [call]}]
        with live.http() as http:
            assert http.post("/v1/chat/completions", json={"messages": history}).status_code == 200
            [message] = live.async_engine.tokenizer.rendered[-1]["messages"][-1:]
            assert message["tool_calls"][0]["function"] == call["function"]
            item = {"type": "function_call", "call_id": "a", **call["function"]}
            assert http.post("/v1/responses", json={"input": [*HI, item]}).status_code == 200
            [message] = live.async_engine.tokenizer.rendered[-1]["messages"][-1:]
            assert message["tool_calls"][0]["function"] == call["function"]
