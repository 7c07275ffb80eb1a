"""The same conversation through each protocol: what reaches the chat template and the engine is what a chat sends.

Then each protocol's own answers go back as history, in each way in which the protocol can say it.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from support.api.api_fakes import ByteTokenizer
from support.api.api_live import Live
from support.api.bad.bad_structured import tool
from support.api.messages_asks import client_of
from support.api.tool_asks import CITY
from support.machine.thoroughness import repeats

TOOLS = [
    tool("weather", description="Of a city.", parameters=CITY),
    tool("ping", description="", parameters={"type": "object", "properties": {"a": {"enum": [None, 1.0, "é"]}}}),
]
FUNCTIONS = [one["function"] for one in TOOLS]
TEXTS = ["hi", "Naïve 😀", " a\n", "x\u2028y", "<think>no</think>"]
THOUGHTS = ["", "Hm 😀.", "a\n\nb"]
CALLS = [("weather", {"city": "Ulm 😀"}), ("ping", {}), ("weather", {"city": "", "n": 12345678901234567890, "f": 1.5})]
Turn = dict[str, Any]


def draw_turns(draw: random.Random) -> list[Turn]:
    """A conversation that ends with a question or with results."""
    turns: list[Turn] = [{"role": "system", "text": draw.choice(TEXTS)}] if draw.random() < 0.5 else []
    number = 0
    for _ in range(draw.randrange(1, 4)):
        turns.append({"role": "user", "text": draw.choice(TEXTS)})
        calls = draw.sample(CALLS, draw.choice([0, 1, 2]))
        turn = {"role": "assistant", "thought": draw.choice(THOUGHTS), "text": draw.choice(["", *TEXTS])}
        turn["calls"] = [(f"call_{number + at}", *call) for at, call in enumerate(calls)]
        number += len(calls)
        turns.append(turn)
        turns += [{"role": "tool", "id": each, "text": draw.choice(TEXTS)} for each, *_ in turn["calls"]]
    return [*turns, {"role": "user", "text": draw.choice(TEXTS)}]


def as_chat(turns: list[Turn]) -> dict[str, Any]:
    messages: list[Turn] = []
    for turn in turns:
        if turn["role"] == "tool":
            messages.append({"role": "tool", "tool_call_id": turn["id"], "content": turn["text"]})
            continue
        messages.append({"role": turn["role"], "content": turn["text"]})
        if turn.get("thought"):
            messages[-1]["reasoning"] = turn["thought"]
        if turn.get("calls"):
            messages[-1]["content"] = turn["text"] or None
            messages[-1]["tool_calls"] = [
                {"id": each, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
                for each, name, arguments in turn["calls"]
            ]
    return {"messages": messages, "tools": TOOLS}


def as_response(turns: list[Turn]) -> dict[str, Any]:
    items: list[Turn] = []
    for turn in turns:
        if turn["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": turn["id"], "output": turn["text"]})
            continue
        if turn.get("thought"):
            content = [{"type": "reasoning_text", "text": turn["thought"]}]
            items.append({"type": "reasoning", "id": f"rs_{len(items)}", "summary": [], "content": content})
        if turn["text"] or not turn.get("calls"):
            items.append({"role": turn["role"], "content": turn["text"]})
        items += [
            {"type": "function_call", "call_id": each, "name": name, "arguments": json.dumps(arguments)}
            for each, name, arguments in turn.get("calls", ())
        ]
    asked: dict[str, Any] = {"input": items, "tools": [{"type": "function", **each} for each in FUNCTIONS]}
    if turns[0]["role"] == "system":
        asked |= {"instructions": turns[0]["text"], "input": items[1:]}
    return asked


def as_message(turns: list[Turn]) -> dict[str, Any]:
    asked: dict[str, Any] = {"max_tokens": 100}
    messages: list[Turn] = []
    for turn in turns:
        if turn["role"] == "system":
            asked["system"] = turn["text"]
            continue
        if turn["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": turn["id"], "content": turn["text"]}
            if messages[-1]["role"] == "user":
                messages[-1]["content"].append(block)
            else:
                messages.append({"role": "user", "content": [block]})
            continue
        blocks: list[Turn] = []
        if turn.get("thought"):
            blocks.append({"type": "thinking", "thinking": turn["thought"], "signature": "s"})
        if turn["text"] or not turn.get("calls"):
            blocks.append({"type": "text", "text": turn["text"]})
        blocks += [
            {"type": "tool_use", "id": each, "name": name, "input": arguments}
            for each, name, arguments in turn.get("calls", ())
        ]
        if messages and messages[-1]["role"] == turn["role"]:
            messages[-1]["content"] += blocks
        else:
            messages.append({"role": turn["role"], "content": blocks})
    tools = [
        {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
        for each in FUNCTIONS
    ]
    return {**asked, "messages": messages, "tools": tools}


def as_ollama(turns: list[Turn]) -> dict[str, Any]:
    messages: list[Turn] = []
    for turn in turns:
        message: Turn = {"role": turn["role"], "content": turn["text"]}
        if turn["role"] == "tool":
            message["tool_call_id"] = turn["id"]
        if turn.get("thought"):
            message["thinking"] = turn["thought"]
        if turn.get("calls"):
            message["tool_calls"] = [
                {"id": each, "function": {"name": name, "arguments": arguments}}
                for each, name, arguments in turn["calls"]
            ]
        messages.append(message)
    return {"messages": messages, "tools": TOOLS, "stream": False}


CHAT = "/v1/chat/completions"
FORMS: dict[str, Any] = {
    CHAT: as_chat,
    "/v1/responses": as_response,
    "/v1/messages": as_message,
    "/api/chat": as_ollama,
}
# The same parameters in each protocol; None where it has none.
RESPONSES, MESSAGES, OLLAMA = "/v1/responses", "/v1/messages", "/api/chat"
NAMED = {"type": "function", "function": {"name": "ping"}}
CITY_FORM = {"name": "x", "schema": CITY}


def everywhere(**options: Any) -> dict[str, Any]:
    return {CHAT: options, RESPONSES: options, MESSAGES: options, OLLAMA: {"options": options}}


# The same parameters in each protocol that has them.
OPTIONS: list[dict[str, Any]] = [
    everywhere(),
    everywhere(temperature=0.5, top_p=0.75),
    everywhere(temperature=0),
    everywhere(seed=7, top_k=5),
    {
        CHAT: {"max_tokens": 9},
        RESPONSES: {"max_output_tokens": 9},
        MESSAGES: {"max_tokens": 9},
        OLLAMA: {"options": {"num_predict": 9}},
    },
    {
        CHAT: {"stop": ["a", "\n"]},
        RESPONSES: {"stop": ["a", "\n"]},
        MESSAGES: {"stop_sequences": ["a", "\n"]},
        OLLAMA: {"options": {"stop": ["a", "\n"]}},
    },
    {
        CHAT: {"tool_choice": "required"},
        RESPONSES: {"tool_choice": "required"},
        MESSAGES: {"tool_choice": {"type": "any"}},
    },
    {
        CHAT: {"tool_choice": "none"},
        RESPONSES: {"tool_choice": "none"},
        MESSAGES: {"tool_choice": {"type": "none"}},
    },
    {
        CHAT: {"tool_choice": NAMED},
        RESPONSES: {"tool_choice": {"type": "function", "name": "ping"}},
        MESSAGES: {"tool_choice": {"type": "tool", "name": "ping"}},
    },
    {
        CHAT: {"parallel_tool_calls": False},
        RESPONSES: {"parallel_tool_calls": False},
        MESSAGES: {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    },
    {
        CHAT: {"response_format": {"type": "json_schema", "json_schema": CITY_FORM}},
        RESPONSES: {"text": {"format": {"type": "json_schema", **CITY_FORM}}},
        MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": CITY}}},
        OLLAMA: {"format": CITY},
    },
    {
        CHAT: {"enable_thinking": False},
        MESSAGES: {"thinking": {"type": "disabled"}},
        OLLAMA: {"think": False},
    },
    {
        CHAT: {"reasoning_effort": "high"},
        RESPONSES: {"reasoning": {"effort": "high"}},
        OLLAMA: {"think": "high"},
    },
    {
        CHAT: {"reasoning_effort": "none"},
        RESPONSES: {"reasoning": {"effort": "none"}},
    },
    {
        CHAT: {"thinking_token_budget": 30},
        RESPONSES: {"thinking_token_budget": 30},
    },
    {
        CHAT: {"thinking": {"type": "enabled", "budget_tokens": 30}},
        MESSAGES: {"thinking": {"type": "enabled", "budget_tokens": 30}},
    },
]


def asked_of(path: str, turns: list[Turn], option: dict[str, Any]) -> dict[str, Any]:
    """Return a body with a conversation, a length that all protocols share, and an option."""
    length: dict[str, Any] = {RESPONSES: {"max_output_tokens": 100}}.get(path, {"max_tokens": 100})
    if path == OLLAMA:
        return {**as_ollama(turns), **option, "options": {"num_predict": 100, **option.get("options", {})}}
    return {**FORMS[path](turns), **length, **option}


def seen(live: Live) -> dict[str, Any]:
    """What the last request has brought before the template and the engine."""
    request = live.async_engine.seen[-1]
    rendered = live.async_engine.tokenizer.rendered[-1]
    return {
        "rendered": {**rendered, "messages": [without_ids(each) for each in rendered["messages"]]},
        "tokens": request.tokens.tolist(),
        "params": request.params,
        "stop": request.stop,
        "grammar": request.grammar,
        "reasoning": request.reasoning,
        "skip": request.skip_special_tokens,
        "shown": request.shown_tokens,
    }


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls", ())
    fields = {name: value for name, value in message.items() if name not in ("tool_call_id", "tool_calls")}
    return fields | {"calls": [each["function"] for each in calls]}


def unlike(wanted: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    return {name: (wanted[name], found[name]) for name in wanted if wanted[name] != found[name]}


def post(live: Live, path: str, asked: dict[str, Any]) -> dict[str, Any]:
    with live.http() as http:
        reply = http.post(path, json={"model": "tiny", **asked})
    assert reply.status_code == 200, (path, asked, reply.text)
    return dict(reply.json())


def set_formats(live: Live, draw: random.Random) -> None:
    live.async_engine.tokenizer = ByteTokenizer()
    live.async_engine.tokenizer.thinks = draw.choice(["", "qwen3", "deepseek_r1"])


def test_the_same_turns(live: Live) -> None:
    live.async_engine.say = lambda request, index: ""
    for seed in range(repeats(60)):
        draw = random.Random(seed)
        set_formats(live, draw)
        check_same(live, draw_turns(draw), draw.choice(OPTIONS))


@pytest.mark.parametrize("option", OPTIONS)
def test_the_same_parameters(live: Live, option: dict[str, Any]) -> None:
    live.async_engine.say = lambda request, index: ""
    live.async_engine.tokenizer.thinks = "qwen3"
    check_same(live, [{"role": "user", "text": "hi"}], option)


def check_same(live: Live, turns: list[Turn], option: dict[str, Any]) -> None:
    found = {}
    for path in option:
        before = len(live.async_engine.seen)
        # The answer is empty, which is none where a call must be made: what has reached the engine is looked at alone.
        with live.http() as http:
            reply = http.post(path, json={"model": "tiny", **asked_of(path, turns, option[path])})
        assert len(live.async_engine.seen) == before + 1, reply.text
        found[path] = seen(live)
    for path in option:
        assert not unlike(found[CHAT], found[path]), (path, unlike(found[CHAT], found[path]), turns, option[path])


ANSWERS = [
    "Well 😀.",
    "",
    "Two\n\nparagraphs. ",
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>',
    'Well. <tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>\n\nAnd so on.',
    'A\n<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>\nB\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "x"}}\n</tool_call>\nC',
]
LEADS = ["", "<think>\nHm.\n\nSo.\n</think>\n\n", "<think>cut off"]


@pytest.mark.parametrize("thinks", ["", "qwen3"])
@pytest.mark.parametrize("lead", LEADS)
def test_an_answer_goes_back_as_history(live: Live, thinks: str, lead: str) -> None:
    """Text, reasoning and calls as each protocol gave them reach the template as a chat's do."""
    if lead and not thinks:
        return
    live.async_engine.tokenizer.thinks = thinks
    for said in ANSWERS:
        said = lead if lead == LEADS[2] else lead + said
        live.async_engine.say = lambda request, index, said=said: said
        wanted = after_chat(live)
        for name, ask in WAYS.items():
            ask(live)
            found = unlike(wanted, seen(live))
            # Anthropic's protocol needs a length.
            found.pop("params", None)
            assert not found, (said, name, found)


HI = [{"role": "user", "text": "hi"}]


def after_chat(live: Live) -> dict[str, Any]:
    asked = as_chat(HI)
    message = post(live, CHAT, asked)["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in message.get("tool_calls", ())
    ]
    asked["messages"] += [message, *results, {"role": "user", "content": "And?"}]
    post(live, CHAT, asked)
    return seen(live)


def outputs(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    calls = [item["call_id"] for item in items if item["type"] == "function_call"]
    return [{"type": "function_call_output", "call_id": each, "output": "done"} for each in calls]


AND = {"role": "user", "content": "And?"}


def after_items(live: Live) -> None:
    asked = {**as_response(HI), "store": False, "include": ["reasoning.encrypted_content"]}
    items = post(live, "/v1/responses", asked)["output"]
    post(live, "/v1/responses", {**asked, "input": [*asked["input"], *items, *outputs(items), AND]})


def after_references(live: Live) -> None:
    asked = as_response(HI)
    items = post(live, "/v1/responses", asked)["output"]
    named = [{"type": "item_reference", "id": item["id"]} for item in items]
    post(live, "/v1/responses", {**asked, "input": [*asked["input"], *named, *outputs(items), AND]})


def after_previous(live: Live) -> None:
    asked = as_response(HI)
    first = post(live, "/v1/responses", asked)
    rest = [*outputs(first["output"]), AND]
    post(live, "/v1/responses", {**asked, "previous_response_id": first["id"], "input": rest})


def after_blocks(live: Live) -> None:
    asked = as_message(HI) | {"max_tokens": 1_500}
    with client_of(live.url) as client:
        found = client.messages.create(model="tiny", **asked)
    blocks = [block.to_dict() for block in found.content]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "done"}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    answer = {"role": "assistant", "content": blocks}
    asked["messages"] += [answer, {"role": "user", "content": [*results, {"type": "text", "text": "And?"}]}]
    post(live, "/v1/messages", asked)


def after_ollama(live: Live) -> None:
    asked = as_ollama(HI)
    message = post(live, "/api/chat", asked)["message"]
    results = [
        {"role": "tool", "tool_name": call["function"]["name"], "content": "done"}
        for call in message.get("tool_calls", ())
    ]
    asked["messages"] += [message, *results, AND]
    post(live, "/api/chat", asked)


WAYS = {
    "items": after_items,
    "references": after_references,
    "previous_response_id": after_previous,
    "ollama": after_ollama,
    "blocks": after_blocks,
}
