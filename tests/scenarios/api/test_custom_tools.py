"""Custom tools as clients use them: text of a grammar as input, beside functions, forced and free, over many turns."""

from __future__ import annotations

import json
from itertools import cycle
from typing import Any

import pytest
from lark import Lark
from support.api.api_live import Live
from support.api.bad.bad_structured import tool
from support.api.real_server import RealServer
from support.api.reply_checks import check_error
from support.grammar.patch_grammar import PATCH as CODEX
from support.machine.thoroughness import repeats

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
HI: Any = [{"role": "user", "content": "hi"}]
LARK = 'start: "add " /[^\\n]+/ LF\nLF: "\\n"\n'
INPUT = 'add "a"\\b\n'
PING = tool("ping")
FORM = {"type": "grammar", "grammar": {"syntax": "lark", "definition": LARK}}
PATCH: dict[str, Any] = {"type": "custom", "custom": {"name": "patch", "format": FORM}}
NOTE = {"type": "custom", "custom": {"name": "note", "description": "Anything."}}
CODE = {
    "type": "custom",
    "custom": {"name": "code", "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[A-Z]{2}"}}},
}
# Brackets that open or close no group.
_ODD = {"syntax": "regex", "definition": r"(A|\)|[()\]])B"}
ODD = {"type": "custom", "custom": {"name": "odd", "format": {"type": "grammar", "grammar": _ODD}}}
CALL = f'<tool_call>\n{{"name": "patch", "arguments": {json.dumps({"input": INPUT})}}}\n</tool_call>'
TWO = CALL + '\n<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'


PARSER = Lark(CODEX.replace("/(.*)/", "/(.+)/?"))
"""Another project's, which has no terminals without a character."""


def say(live: Live, text: str) -> None:
    live.async_engine.say = lambda request, index: text


def flat(each: dict[str, Any]) -> dict[str, Any]:
    """A tool of chats in the form of responses."""
    if each["type"] == "function":
        return {"type": "function", **each["function"]}
    form = each["custom"].get("format", {"type": "text"})
    return {"type": "custom", **each["custom"], "format": {"type": form["type"], **form.get("grammar", {})}}


def test_calls_of_chats_have_the_text(live: Live) -> None:
    say(live, "Well. " + TWO)
    asked: Any = {"model": "tiny", "messages": HI, "tools": [PATCH, PING, NOTE]}
    with live.openai() as client:
        message = client.chat.completions.create(**asked).choices[0].message
        first, second = message.tool_calls or ()
        assert first.type == "custom" and (first.custom.name, first.custom.input) == ("patch", INPUT)
        assert second.type == "function" and second.function.name == "ping"
        pieces = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
    calls = [call.to_dict() for piece in pieces for call in piece.tool_calls or () if call.index == 0]
    assert calls[0]["type"] == "custom" and calls[0]["custom"] == {"name": "patch", "input": ""}
    assert "".join(call["custom"]["input"] for call in calls) == INPUT
    grammar = live.async_engine.seen[-1].grammar
    assert grammar is not None and "json_lark" in grammar.text and "LF:" in grammar.text


def test_items_of_responses_and_their_events(live: Live) -> None:
    say(live, TWO)
    asked: Any = {"model": "tiny", "input": "hi", "tools": [flat(PATCH), flat(PING)]}
    with live.openai() as client:
        response = client.responses.create(**asked)
        call, other = response.output
        assert call.type == "custom_tool_call" and (call.name, call.input) == ("patch", INPUT)
        assert call.id is not None and call.id.startswith("ctc_") and other.type == "function_call"
        events = list(client.responses.create(**asked, stream=True))
        deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
        [done] = [event for event in events if event.type == "response.custom_tool_call_input.done"]
        assert "".join(deltas) == done.input == INPUT
        assert response.tools[0].to_dict() == {**flat(PATCH), "description": None}
        # The next turn, by reference and by items: the same prompt, with the call as the model wrote it.
        output: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
        more: Any = {"type": "function_call_output", "call_id": other.call_id, "output": "pong"}
        client.responses.create(model="tiny", previous_response_id=response.id, input=[output, more])
        items: Any = [{"role": "user", "content": "hi"}, call.to_dict(), other.to_dict(), output, more]
        client.responses.create(model="tiny", input=items)
    first, second = live.async_engine.seen[-2:]
    assert first.tokens == second.tokens
    assert json.dumps({"input": INPUT})[1:-1] in bytes(first.tokens.tolist()).decode()


def test_a_chat_goes_on_after_a_call(live: Live) -> None:
    call = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": INPUT}}
    messages = [
        *HI,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
    ]
    with live.http() as http:
        assert http.post(CHAT, json={"messages": messages, "tools": [PATCH]}).status_code == 200
        wrong = [HI[0], {"role": "assistant", "tool_calls": [{"id": "c1", "type": "custom", "custom": {"input": 1}}]}]
        message = check_error(
            http.post(CHAT, json={"messages": wrong}), 400, "messages[1].tool_calls[0].custom", "invalid_value"
        )
    assert "'name' and 'input'" in message


@pytest.mark.parametrize("each", [PATCH, NOTE, CODE, ODD], ids=["lark", "text", "regex", "brackets"])
@pytest.mark.parametrize("is_named", [True, False])
def test_a_forced_call_is_held_by_the_grammar(live: Live, each: dict[str, Any], is_named: bool) -> None:
    name = each["custom"]["name"]
    choice: Any = {"type": "custom", "custom": {"name": name}} if is_named else "required"
    say(live, json.dumps({"input": "AB"}))
    with live.http() as http:
        reply = http.post(CHAT, json={"messages": HI, "tools": [PING, each], "tool_choice": choice})
        assert reply.status_code == 200, reply.text
        named = {"type": "custom", "name": name} if is_named else "required"
        body = {"input": "hi", "tools": [flat(PING), flat(each)], "tool_choice": named}
        assert http.post(RESPONSES, json=body).status_code == 200
    for seen in live.async_engine.seen:
        assert seen.grammar is not None and '"input"' in seen.grammar.text.replace("\\", "")
    assert live.async_engine.seen[0].grammar == live.async_engine.seen[1].grammar
    if is_named:
        [call] = reply.json()["choices"][0]["message"]["tool_calls"]
        assert call["custom"] == {"name": name, "input": "AB"}


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "grammar"}, "tools[0].{}format.{}"),
        ({"type": "text", "syntax": "lark", "definition": "x"}, "tools[0].{}format.{}"),
        ({"type": "grammar", "syntax": "ebnf", "definition": "x"}, "tools[0].{}format.{}syntax"),
        ({"type": "grammar", "syntax": "lark", "definition": ""}, "tools[0].{}format.{}definition"),
        ({"type": "grammar", "syntax": "regex", "definition": "a)|(b"}, "tools[0].{}format.{}definition"),
        ({"type": "grammar", "syntax": "regex", "definition": r"(a\)"}, "tools[0].{}format.{}definition"),
    ],
)
def test_a_wrong_form_is_refused_by_place(live: Live, form: dict[str, Any], param: str) -> None:
    with live.http() as http:
        reply = http.post(RESPONSES, json={"input": "hi", "tools": [{"type": "custom", "name": "x", "format": form}]})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"].startswith(param.format("", "")), reply.text


def test_a_grammar_beyond_what_models_write_is_refused_where_it_is_demanded(live: Live) -> None:
    live.async_engine.tokenizer.speaks = "qwen3_coder"
    with live.http() as http:
        reply = http.post(CHAT, json={"messages": HI, "tools": [PATCH]})
        assert "without quotes" in check_error(reply, 400, "tools[0].custom.format", "invalid_value")
        assert http.post(CHAT, json={"messages": HI, "tools": [NOTE, CODE]}).status_code == 200


@pytest.mark.heavy
def test_inputs_of_a_real_model(real_server: RealServer) -> None:
    """Sampled calls of Codex's grammar, forced."""
    each = {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": CODEX},
    }
    body = {
        "input": "Delete the file a.txt.",
        "tools": [each],
        "tool_choice": {"type": "custom", "name": "apply_patch"},
        "max_output_tokens": 90,
        "temperature": 0.7,
    }
    reply = real_server.http.post(RESPONSES, json={**body, "seed": 1}).json()
    assert "output" in reply, reply
    [call] = reply["output"]
    assert call["type"] == "custom_tool_call"
    PARSER.parse(call["input"])


@pytest.mark.heavy
def test_sampled_patches(real_server: RealServer) -> None:
    """Each follows the grammar that Codex sends, as another project's parser reads it, and none is cut."""
    form = {"type": "grammar", "grammar": {"syntax": "lark", "definition": CODEX}}
    body = {
        "messages": [{"role": "user", "content": "Put a greeting into hello.txt, and delete a.txt."}],
        "tools": [{"type": "custom", "custom": {"name": "apply_patch", "format": form}}],
        "tool_choice": "required",
        "max_tokens": 60,
        "n": 10,
    }
    inputs = []
    for seed, temperature in zip(range(repeats(20)), cycle((0.4, 0.8, 1.0, 1.3)), strict=False):
        asked = {**body, "seed": seed, "temperature": temperature}
        reply = real_server.http.post(CHAT, json=asked).json()
        assert "choices" in reply, reply
        for choice in reply["choices"]:
            [made] = choice["message"]["tool_calls"]
            inputs.append(made["custom"]["input"])
            PARSER.parse(inputs[-1])
    assert len(set(inputs)) > len(inputs) / 4
