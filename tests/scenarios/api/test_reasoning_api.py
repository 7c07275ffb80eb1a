"""Thoughts as clients see them: apart from the answer, whole and streamed, with their own fields and budgets."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from support.api.api_live import Live
from support.api.bad.bad_structured import schema_format
from support.api.reply_checks import scrape, value
from support.api.tool_asks import ONE, TOOLS

from rootgraft.api.config import REASONING_PARSERS, ServerConfig
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.text.reasoning_formats import FORMATS
from rootgraft.grammar.thought_rules import ThoughtRules

CHAT = "/v1/chat/completions"
HI: Any = [{"role": "user", "content": "hi"}]
PERSON = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture
def thinking(live: Live) -> Live:
    live.async_engine.tokenizer.thinks = "qwen3"
    return live


def post(live: Live, status: int = 200, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    asked = {"messages": HI, **fields} if path == CHAT else fields
    with live.http() as http:
        reply = http.post(path, json=asked)
    assert reply.status_code == status, reply.text
    return dict(reply.json())


def say(live: Live, text: str) -> None:
    live.async_engine.say = lambda request, index: text


def rules(live: Live) -> ThoughtRules | None:
    found: ThoughtRules | None = live.async_engine.seen[-1].reasoning
    return found


def streamed(live: Live, **fields: Any) -> tuple[str, str, list[dict[str, Any]]]:
    """Thought, answer and chunks of a stream."""
    with live.http() as http:
        reply = http.post(CHAT, json={"messages": HI, "stream": True, **fields})
    chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == 0]
    thought = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    assert thought == "".join(delta.get("reasoning") or "" for delta in deltas)
    return thought, "".join(delta.get("content") or "" for delta in deltas), chunks


ANALYSIS, FINAL, NEXT = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|><|start|>assistant"
CASES = [
    ("qwen3", "<think>\nWell, 1 < 2.\n</think>\n\nYes.", "Well, 1 < 2.", "Yes.", 14),
    ("qwen3", "\n <think>a</think>b", "a", "b", 1),
    ("qwen3", "No thought.", None, "No thought.", 0),
    ("qwen3", "<thin", None, "<thin", 0),
    ("qwen3", "Later <think>is</think> too late", None, "Later <think>is</think> too late", 0),
    ("qwen3", "<think>cut off </thi", "cut off </thi", None, 13),
    ("qwen3", "<think></think>Nothing", None, "Nothing", 0),
    ("qwen3", "<think>a\n\n\nb</</think></think>", "a\n\n\nb</", "</think>", 7),
    ("deepseek_r1", "Well.\n</think>\n\nYes.", "Well.", "Yes.", 6),
    ("deepseek_r1", "<think>\nAgain</think>Yes", "Again", "Yes", 6),
    ("deepseek_r1", "never ends", "never ends", None, 10),
    ("deepseek_r1", "<th", "<th", None, 3),
    ("gemma4", "<|channel>thought\nHm.<channel|>Yes.", "Hm.", "Yes.", 4),
    ("openai_gptoss", f"{ANALYSIS}Hm.{NEXT}{FINAL}Yes.", "Hm.", "Yes.", 3),
    ("openai_gptoss", f"{ANALYSIS}Hm.{NEXT}{ANALYSIS}So!{NEXT}{FINAL}Yes.", "Hm.\nSo!", "Yes.", 6),
    ("openai_gptoss", f"{FINAL}Yes. <|end|>", None, "Yes. <|end|>", 0),
    ("openai_gptoss", f"{ANALYSIS}cut off <|end|><|st", "cut off <|end|><|st", None, 19),
    ("openai_gptoss", f"{ANALYSIS}a{NEXT}<|channel|>fin", "a", None, 1),
]


@pytest.mark.parametrize(("thinks", "said", "thought", "content", "num_tokens"), CASES)
def test_thought_and_answer_are_told_apart(
    live: Live, thinks: str, said: str, thought: str | None, content: str | None, num_tokens: int
) -> None:
    live.async_engine.tokenizer.thinks = thinks
    say(live, said)
    body = post(live)
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (thought, content)
    assert message["reasoning"] == message["reasoning_content"]
    usage = body["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == num_tokens
    assert usage["completion_tokens"] == len(said)
    found, answer, chunks = streamed(live, stream_options={"include_usage": True})
    assert (found, answer) == (thought or "", content or "")
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_tokens


def test_thoughts_in_messages_of_their_own_with_a_form_and_tools(live: Live) -> None:
    """gpt-oss: the prompt ends with the header that every message has; the final channel leads to the form."""
    live.async_engine.tokenizer.thinks, live.async_engine.tokenizer.speaks = "openai_gptoss", "openai"
    say(live, f'{ANALYSIS}Hm.{NEXT}{FINAL}{{"a": 1}}')
    message = post(live, **schema_format(PERSON))["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", '{"a": 1}')
    assert rules(live) == ThoughtRules(ANALYSIS, NEXT, is_open=False, lead=FINAL)
    call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Ulm"}'
    say(live, f"{ANALYSIS}Hm.{NEXT}<|channel|>commentary<|message|>I look.{NEXT}{call}")
    message = post(live, tools=TOOLS)["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "I look.")
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Ulm"}'}
    assert rules(live) == ThoughtRules(ANALYSIS, NEXT, is_open=False)
    say(live, f"{FINAL}No.")
    assert post(live, tools=TOOLS)["choices"][0]["message"]["content"] == "No."
    post(live, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}})
    assert rules(live) == ThoughtRules(ANALYSIS, NEXT, is_open=False)


def test_several_answers_think_each_for_itself(thinking: Live) -> None:
    thinking.async_engine.say = lambda request, index: f"<think>{'t' * index}</think>{index}" if index else "0"
    body = post(thinking, n=4)
    assert [choice["message"]["content"] for choice in body["choices"]] == ["0", "1", "2", "3"]
    assert [choice["message"]["reasoning_content"] for choice in body["choices"]] == [None, "t", "tt", "ttt"]
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6


def test_a_thought_need_not_be_shown(thinking: Live) -> None:
    say(thinking, "<think>secret</think>open")
    body = post(thinking, include_reasoning=False)
    assert body["choices"][0]["message"]["reasoning_content"] is None
    assert body["choices"][0]["message"]["content"] == "open"
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6
    assert streamed(thinking, include_reasoning=False)[:2] == ("", "open")


def test_logprobs_are_of_all_tokens_once(thinking: Live) -> None:
    said = "<think>ab</think>\n\ncd"
    say(thinking, said)
    whole = post(thinking, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in whole) == said
    _, _, chunks = streamed(thinking, logprobs=True)
    entries = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert "".join(entry["token"] for entry in entries) == said


def test_a_model_that_does_not_think_has_empty_places_for_thoughts(live: Live, serve_with: Any) -> None:
    say(live, "<think>a</think>b")
    message = post(live)["choices"][0]["message"]
    assert message["content"] == "<think>a</think>b" and message["reasoning"] is message["reasoning_content"] is None
    assert "tool_calls" not in message  # as in vLLM 0.33, which leaves out an empty list; its attribute is None
    with live.openai() as client:
        answer = client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS).choices[0].message
    assert answer.tool_calls is None and answer.reasoning_content is None  # type: ignore[attr-defined]
    off = serve_with(ServerConfig(reasoning_parser="none"))
    off.async_engine.tokenizer.thinks = "qwen3"
    say(off, "<think>a</think>b")
    assert post(off)["choices"][0]["message"]["content"] == "<think>a</think>b"
    chosen = serve_with(ServerConfig(reasoning_parser="mistral"))
    say(chosen, "[THINK]a[/THINK]b")
    assert post(chosen)["choices"][0]["message"]["reasoning_content"] == "a"


def test_default_variables_of_the_template(serve_with: Any) -> None:
    quiet = serve_with(ServerConfig(default_chat_template_kwargs='{"enable_thinking": false, "a": 1}'))
    quiet.async_engine.tokenizer.thinks = "qwen3"
    say(quiet, "Yes.")
    assert post(quiet)["choices"][0]["message"]["content"] == "Yes."
    assert quiet.async_engine.tokenizer.rendered[-1]["kwargs"] == {"enable_thinking": False, "a": 1}
    post(quiet, chat_template_kwargs={"enable_thinking": True})
    assert quiet.async_engine.tokenizer.rendered[-1]["kwargs"] == {"enable_thinking": True, "a": 1}
    post(quiet, path="/tokenize", messages=HI)
    assert quiet.async_engine.tokenizer.rendered[-1]["kwargs"] == {"enable_thinking": False, "a": 1}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "must be a JSON object such as"),
        ("[1]", "must be a JSON object such as"),
        ('{"tools": 1}', "--default-chat-template-kwargs must not contain 'tools': the server sets it"),
        ('{"a": [1]}', "'a' in --default-chat-template-kwargs must be a string, a number or a boolean"),
    ],
)
def test_wrong_default_variables(text: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(fault)):
        ServerConfig(default_chat_template_kwargs=text)


def test_thoughts_are_counted(thinking: Live) -> None:
    say(thinking, "<think>abc</think>d")
    before = value(scrape(thinking), "reasoning_tokens", "_total")
    post(thinking)
    assert value(scrape(thinking), "reasoning_tokens", "_total") == before + 3


def test_the_option_names_all_formats() -> None:
    assert ("auto", "none", *FORMATS) == REASONING_PARSERS


def test_what_the_engine_is_told(thinking: Live) -> None:
    post(thinking)
    assert rules(thinking) is None
    form = schema_format(PERSON)
    post(thinking, **form)
    assert rules(thinking) == ThoughtRules("<think>", "</think>", is_open=False, newlines=2)
    post(thinking, structured_outputs={"regex": "\n*yes"})
    assert rules(thinking) == ThoughtRules("<think>", "</think>", is_open=False)
    thinking.async_engine.tokenizer.thinks = "deepseek_r1"
    post(thinking, **form)
    assert rules(thinking) == ThoughtRules("<think>", "</think>", is_open=True, newlines=2)
    post(thinking, **form, max_tokens=0)
    assert rules(thinking) is None


BUDGETS: list[tuple[dict[str, Any], int | None]] = [
    ({"thinking_token_budget": 0}, 0),
    ({"thinking_token_budget": 1 << 20}, 1 << 20),
    ({"thinking_token_budget": -1}, None),
    ({"thinking_budget": 7}, 7),
    ({"thinking_budget": 7, "thinking_token_budget": 7}, 7),
    ({"thinking": {"type": "enabled", "budget_tokens": 9}}, 9),
    ({"thinking": {"type": "adaptive"}}, None),
    ({"thinking": {"type": "disabled"}}, 0),
    ({"reasoning_effort": "none"}, 0),
    ({"reasoning_effort": "high"}, None),
    ({"enable_thinking": False}, 0),
    ({"enable_thinking": True, "thinking_budget": 5}, 5),
]


@pytest.mark.parametrize(("fields", "budget"), BUDGETS)
def test_budgets_by_the_names_that_clients_use(thinking: Live, fields: dict[str, Any], budget: int | None) -> None:
    thinking.async_engine.tokenizer.thinks = "deepseek_r1"
    post(thinking, **fields)
    found = rules(thinking)
    assert (None if found is None else found.budget) == budget


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking_token_budget": (1 << 20) + 1}, "thinking_token_budget"),
        ({"thinking_budget": 1.5}, "thinking_budget"),
        ({"thinking_budget": 5, "thinking_token_budget": 6}, "thinking_budget"),
        ({"thinking_budget": 5, "thinking": {"type": "enabled", "budget_tokens": 6}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"reasoning_effort": "none", "enable_thinking": True}, "enable_thinking"),
        ({"reasoning_effort": "low", "thinking": {"type": "disabled"}}, "thinking.type"),
        ({"include_reasoning": "yes"}, "include_reasoning"),
    ],
)
def test_wrong_values_are_named(thinking: Live, fields: dict[str, Any], param: str) -> None:
    error = post(thinking, 400, **fields)["error"]
    assert error["param"] == param and param in error["message"]


def test_a_budget_is_kept_by_a_model_that_does_not_think(live: Live) -> None:
    for fields in ({}, {"thinking_token_budget": 5}, {"thinking": {"type": "enabled", "budget_tokens": 5}}):
        assert post(live, **fields)["choices"][0]["message"]["reasoning_content"] is None
        assert live.async_engine.seen[-1].reasoning is None
    assert len({bytes(request.tokens) for request in live.async_engine.seen}) == 1
    post(live, thinking_token_budget=-1)
    post(live, reasoning_effort="none")
    post(live, enable_thinking=False)


def test_the_template_is_told_whether_to_think(thinking: Live) -> None:
    def kwargs(**fields: Any) -> Any:
        post(thinking, **fields)
        return thinking.async_engine.tokenizer.rendered[-1]["kwargs"]

    assert kwargs() == {}
    assert kwargs(reasoning_effort="low") == {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}
    assert kwargs(enable_thinking=False) == {"enable_thinking": False, "thinking": False}
    asked = kwargs(reasoning_effort="high", chat_template_kwargs={"enable_thinking": False})
    assert asked == {"reasoning_effort": "high", "enable_thinking": False, "thinking": True}
    # The prompt says that there is no thought: the answer is held to its form at once, and is all text.
    say(thinking, "</think> is text")
    body = post(thinking, enable_thinking=False, response_format={"type": "text"})
    assert body["choices"][0]["message"]["content"] == "</think> is text" and rules(thinking) is None
    post(thinking, enable_thinking=False, **schema_format(PERSON))
    assert rules(thinking) is None


def test_the_form_is_checked_in_the_answer_alone(thinking: Live) -> None:
    say(thinking, '<think>no {json</think>\n\n{"a": 1}')
    choice = post(thinking, **schema_format(PERSON))["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ('{"a": 1}', "stop")
    say(thinking, '<think>no {json</think>\n\n{"b": 1}')
    assert post(thinking, **schema_format(PERSON))["choices"][0]["finish_reason"] == "error"
    say(thinking, "<think>a</think>\nyes")
    choice = post(thinking, structured_outputs={"regex": "\nyes"})["choices"][0]
    assert choice["message"]["content"] == "\nyes"


def test_calls_come_after_the_thought(thinking: Live) -> None:
    say(thinking, f"<think>call <tool_call> or not</think>\n\n{ONE}")
    message = post(thinking, tools=TOOLS)["choices"][0]["message"]
    assert message["reasoning_content"] == "call <tool_call> or not"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]
    assert message["content"] is None
    thought, content, chunks = streamed(thinking, tools=TOOLS)
    assert (thought, content) == ("call <tool_call> or not", "")
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_forced_call_is_begun_after_the_thought(thinking: Live) -> None:
    choice = {"type": "function", "function": {"name": "ping"}}
    lead = '<tool_call>\n{"name": "ping", "arguments": '
    say(thinking, f"<think>ping it</think>\n\n{lead}{{}}")
    message = post(thinking, tools=TOOLS, tool_choice=choice)["choices"][0]["message"]
    found = rules(thinking)
    assert found is not None and found.lead == lead and found.newlines == 2
    assert not bytes(thinking.async_engine.seen[-1].tokens.tolist()).decode().endswith(lead)
    call = message["tool_calls"][0]["function"]
    assert (message["reasoning_content"], call["name"], call["arguments"]) == ("ping it", "ping", "{}")
    say(thinking, lead + "{}")  # the thought never began
    message = post(thinking, tools=TOOLS, tool_choice=choice)["choices"][0]["message"]
    assert message["reasoning_content"] is None and message["tool_calls"][0]["function"]["arguments"] == "{}"
    say(thinking, "{}")
    message = post(thinking, tools=TOOLS, tool_choice=choice, enable_thinking=False)["choices"][0]["message"]
    assert bytes(thinking.async_engine.seen[-1].tokens.tolist()).decode().endswith(lead)
    assert message["tool_calls"][0]["function"]["arguments"] == "{}"


def test_earlier_thoughts_go_to_the_template(thinking: Live) -> None:
    def rendered(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
        post(thinking, messages=list(messages), **fields)
        return list(thinking.async_engine.tokenizer.rendered[-1]["messages"])

    for name in ("reasoning_content", "reasoning"):
        said = {"role": "assistant", "content": "b", name: "a"}
        assert rendered(*HI, said, *HI)[1] == {
            "role": "assistant",
            "content": "b",
            "reasoning_content": "a",
            "reasoning": "a",
        }
    cut = {"role": "assistant", "content": None, "reasoning_content": "a", "reasoning": "a"}
    assert rendered(*HI, cut, *HI)[1]["content"] == ""
    for empty in ({}, {"content": None}, {"content": ""}, {"content": None, "tool_calls": []}, {"content": []}):
        assert rendered(*HI, {"role": "assistant", **empty}, *HI)[1] == {"role": "assistant", "content": ""}
    for role in ("user", "system"):
        error = post(thinking, 400, messages=[*HI, {"role": role, "content": None}])["error"]
        assert error["param"] == "messages[1].content"


def test_a_continued_message_goes_on_where_it_stands(thinking: Live) -> None:
    def goes_on(content: str) -> dict[str, Any]:
        say(thinking, "more</think>\n\nYes")
        messages = [*HI, {"role": "assistant", "content": content}]
        asked: Any = {"continue_final_message": True, "add_generation_prompt": False}
        return dict(post(thinking, messages=messages, **asked)["choices"][0]["message"])

    assert goes_on("<think>I think ")["content"] == "Yes"
    assert goes_on("<think>I think ")["reasoning_content"] == "more"
    assert goes_on("<think>I</think>So ")["content"] == "more</think>\n\nYes"
    assert goes_on("So ")["reasoning_content"] is None


def test_a_stop_string_ends_a_thought_too(thinking: Live) -> None:
    """As in vLLM: stop strings are looked for in all of the text."""
    say(thinking, "<think>on and ")
    body = post(thinking, stop=["on"])
    assert thinking.async_engine.seen[-1].stop == ("on",)
    choice = body["choices"][0]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == (None, "on and ")
    assert choice["finish_reason"] == "stop"


def test_completions_know_no_thoughts(thinking: Live) -> None:
    say(thinking, "<think>a</think>b")
    body = post(thinking, path="/v1/completions", prompt="p", echo=True, max_tokens=50, **schema_format(PERSON))
    assert body["choices"][0]["text"] == "p<think>a</think>b" and rules(thinking) is None


def test_a_response_has_the_thought_as_an_item(thinking: Live) -> None:
    say(thinking, "<think>\nhm\n</think>\n\nYes")
    with thinking.openai() as client:
        whole = client.responses.create(model="tiny", input="hi", reasoning={"effort": "low"})
        with client.responses.stream(model="tiny", input="hi") as stream:
            events = list(stream)
    for response in (whole, events[-1].response):  # type: ignore[union-attr]
        thought, message = response.output
        assert (thought.type, thought.summary, thought.status) == ("reasoning", [], "completed")
        assert [(part.type, part.text) for part in thought.content] == [("reasoning_text", "hm")]
        assert thought.id.startswith("rs_") and message.type == "message"
        assert response.output_text == "Yes"
        assert response.usage.output_tokens_details.reasoning_tokens == 4
    assert whole.reasoning.effort == "low"  # type: ignore[union-attr]
    kinds = [event.type for event in events]
    assert list(dict.fromkeys(kinds[2:])) == [
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.completed",
    ]
    assert [event.output_index for event in events if event.type == "response.output_item.done"] == [0, 1]
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "hm"


def test_a_conversation_of_responses_keeps_its_thoughts(thinking: Live) -> None:
    say(thinking, "<think>hm</think>Yes")
    with thinking.openai() as client:
        first = client.responses.create(model="tiny", input="hi")
        client.responses.create(model="tiny", input="and?", previous_response_id=first.id)
        stored = thinking.async_engine.tokenizer.rendered[-1]["messages"]
        items: Any = [{"role": "user", "content": "hi"}, *first.output, {"role": "user", "content": "and?"}]
        client.responses.create(model="tiny", input=items)
        sent = thinking.async_engine.tokenizer.rendered[-1]["messages"]
    said = {"role": "assistant", "content": "Yes", "reasoning_content": "hm", "reasoning": "hm"}
    assert stored == sent and stored[1] == said
    call = {"type": "function_call", "call_id": "c", "name": "ping", "arguments": "{}"}
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "in short"}]}
    post(
        thinking,
        path="/v1/responses",
        input=[*HI, summary, call, {"type": "function_call_output", "call_id": "c", "output": "1"}],
    )
    message = thinking.async_engine.tokenizer.rendered[-1]["messages"][1]
    assert message["reasoning_content"] == "in short" and message["tool_calls"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"input": [{"type": "reasoning", "summary": [{"type": "text", "text": ""}]}]}, "input[0].summary[0].type"),
    ],
)
def test_wrong_values_in_responses(thinking: Live, fields: dict[str, Any], param: str) -> None:
    error = post(thinking, 400, path="/v1/responses", **{"input": "hi", **fields})["error"]
    assert error["param"] == param


def test_a_response_with_logprobs_has_those_of_its_answer(thinking: Live) -> None:
    say(thinking, "<think>ab</think>cd")
    body = post(thinking, path="/v1/responses", input="hi", include=["message.output_text.logprobs"])
    part = body["output"][1]["content"][0]
    assert part["text"] == "".join(entry["token"] for entry in part["logprobs"]) == "cd"
    say(thinking, "<tho ab")
    body = post(thinking, path="/v1/responses", input="hi", include=["message.output_text.logprobs"])
    part = body["output"][0]["content"][0]
    assert part["text"] == "".join(entry["token"] for entry in part["logprobs"]) == "<tho ab"


def test_a_response_that_is_cut_in_its_thought(thinking: Live) -> None:
    say(thinking, "<think>" + "on " * 30)
    body = post(thinking, path="/v1/responses", input="hi", max_output_tokens=20, thinking_token_budget=500)
    assert body["status"] == "incomplete"
    assert [(item["type"], item["status"]) for item in body["output"]] == [("reasoning", "incomplete")]
    found = rules(thinking)
    assert found is not None and found.budget == 500
