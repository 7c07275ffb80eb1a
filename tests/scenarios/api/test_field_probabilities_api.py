"""Probabilities of fields beside an answer that a schema holds: which requests may ask for them, and what comes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from support.api.api_live import Live
from support.api.real_server import RealServer
from support.api.reply_checks import check_error

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["angry", "calm"]}, "urgent": {"type": "boolean"}, "late": {"type": "boolean"}},
    "required": ["mood", "urgent"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "mood", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "My parcel is broken!"}]},
    COMPLETIONS: {"prompt": "My parcel is broken!", "max_tokens": 60},
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_needs_a_schema(live: Live, path: str) -> None:
    forms: list[dict[str, Any]] = [
        *({}, {"response_format": {"type": "json_object"}}, {"guided_regex": "a|b"}, {"guided_choice": ["a"]}),
        {"structured_outputs": {"json_object": True}},
    ]
    with live.http() as http:
        for form in forms:
            reply = http.post(path, json={**GOOD[path], **form, "field_probabilities": True})
            check_error(reply, 400, "field_probabilities", "invalid_value")
            assert "JSON Schema" in reply.json()["error"]["message"]


def test_contradicts_tools(live: Live) -> None:
    with live.http() as http:
        body = {**GOOD[CHAT], "response_format": FORM, "tools": [TOOL], "field_probabilities": True}
        check_error(http.post(CHAT, json=body), 400, "field_probabilities", "invalid_value")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_engine_is_asked_only_where_wanted(live: Live, path: str) -> None:
    live.async_engine.say = lambda request, index: '{"mood":"calm","urgent":true}'
    for wanted in (True, False):
        with live.http() as http:
            body = {**GOOD[path], "response_format": FORM, "field_probabilities": wanted}
            [choice] = http.post(path, json=body).json()["choices"]
        assert live.async_engine.seen[-1].params.allowed_logprobs is wanted
        assert ("field_probabilities" in choice) is wanted


@pytest.mark.heavy
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_streams_have_those_of_the_whole_answer(real_server: RealServer, path: str) -> None:
    body = {**GOOD[path], "response_format": FORM, "field_probabilities": True, "seed": 5, "n": 2, "temperature": 1.5}
    whole = real_server.http.post(path, json=body).json()["choices"]
    lines = real_server.http.post(path, json={**body, "stream": True}).text.splitlines()
    streamed: list[list[Any]] = [[], []]
    for line in lines:
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                streamed[choice["index"]] += choice.get("field_probabilities", [])
    for choice, pieces in zip(whole, streamed, strict=True):
        found = choice["field_probabilities"]
        answer = json.loads(choice["message"]["content"] if path == CHAT else choice["text"])
        values = {each["path"]: each["value"] for each in found if each["kind"] == "value"}
        assert values == {f"/{name}": value for name, value in answer.items()}
        [late] = [each for each in found if each["kind"] == "presence"]
        assert (late["path"], late["value"]) == ("/late", "late" in answer)
        assert [each["path"] for each in pieces] == [each["path"] for each in found]
        for one, other in zip(found, pieces, strict=True):
            assert 0 < one["probability"] <= 1
            assert one["probability"] == pytest.approx(other["probability"], rel=1e-4)


@pytest.mark.heavy
def test_a_choice_has_the_shares_of_its_tokens(real_server: RealServer) -> None:
    """True and false by the raw logprobs of the tokens with which they begin, as it was drawn after a blank or none."""
    prompt = "[true,false,true,true,false,true,false,false,"
    asked = {"prompt": prompt, "guided_json": {"type": "boolean"}, "temperature": 0, "logprobs": 20}
    reply = real_server.http.post(COMPLETIONS, json={**asked, "field_probabilities": True}).json()
    [choice] = reply["choices"]
    [found] = choice["field_probabilities"]
    blanks = choice["text"][: len(choice["text"]) - len(choice["text"].lstrip())]
    masses = {"true": 0.0, "false": 0.0}
    for token, logprob in choice["logprobs"]["top_logprobs"][0].items():
        begun = token.removeprefix(blanks)
        for word in masses:
            if token.startswith(blanks) and begun and word.startswith(begun):
                masses[word] += math.exp(logprob)
    drawn = masses["true" if found["value"] else "false"]
    assert found["probability"] == pytest.approx(drawn / sum(masses.values()), abs=0.01), choice


@pytest.mark.heavy
def test_responses_have_those_of_the_whole_answer(real_server: RealServer) -> None:
    """Those of a stream's events, one after another, are those of the response; the request names its own fields."""
    form = {"format": {"type": "json_schema", **FORM["json_schema"]}}
    body = {"input": "x", "text": form, "field_probabilities": True, "seed": 5, "temperature": 1.5}
    whole = real_server.http.post("/v1/responses", json=body).json()
    answer = json.loads(whole["output"][-1]["content"][0]["text"])
    values = {each["path"]: each["value"] for each in whole["field_probabilities"] if each["kind"] == "value"}
    assert values == {f"/{name}": value for name, value in answer.items()}
    told: list[Any] = []
    ended: dict[str, Any] = {}
    for line in real_server.http.post("/v1/responses", json={**body, "stream": True}).text.splitlines():
        event = json.loads(line[6:]) if line.startswith("data: {") else {}
        told += event.get("field_probabilities", [])
        ended = event.get("response", ended)
    assert [each["path"] for each in ended["field_probabilities"]] == [e["path"] for e in whole["field_probabilities"]]
    assert told == ended["field_probabilities"][: len(told)]
    assert {each["path"] for each in told} >= {f"/{name}" for name in list(answer)[:-1]}
    plain = real_server.http.post("/v1/responses", json={"input": "x", "max_output_tokens": 1}).json()
    assert "field_probabilities" not in plain
    reply = real_server.http.post("/v1/responses", json={"input": "x", "field_probabilities": True})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "field_probabilities")
    assert "text.format" in reply.json()["error"]["message"]


def other_body(path: str, **fields: Any) -> dict[str, Any]:
    """Return a body of Anthropic's or Ollama's protocol whose answer has the form."""
    shape = (
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "max_tokens": 60}
        if path == "/v1/messages"
        else {"format": SCHEMA, "stream": False}
    )
    return {**GOOD[CHAT], **shape, **fields}


@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat"])
def test_other_protocols_ask_for_them_too(live: Live, path: str) -> None:
    live.async_engine.say = lambda request, index: '{"mood":"calm","urgent":true}'
    with live.http() as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        for wanted in (True, False):
            reply = http.post(path, json=other_body(path, model=model, field_probabilities=wanted))
            assert reply.status_code == 200, reply.text
            assert live.async_engine.seen[-1].params.allowed_logprobs is wanted
        without = {key: value for key, value in other_body(path).items() if key not in ("output_config", "format")}
        refused = http.post(path, json={**without, "model": model, "field_probabilities": True})
        assert refused.status_code == 400 and "field_probabilities" in refused.text and "JSON Schema" in refused.text


@pytest.mark.heavy
@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat"])
def test_other_protocols_tell_those_of_chats(real_server: RealServer, path: str) -> None:
    model = real_server.http.get("/v1/models").json()["data"][0]["id"]
    drawn: dict[str, Any] = {"seed": 5, "temperature": 0.9}
    chat = {**GOOD[CHAT], "response_format": FORM, "field_probabilities": True, "max_tokens": 60, **drawn}
    [wanted] = [choice["field_probabilities"] for choice in real_server.http.post(CHAT, json=chat).json()["choices"]]
    options = drawn if path == "/v1/messages" else {"options": {**drawn, "num_predict": 60}}
    body = other_body(path, model=model, field_probabilities=True, **options)
    whole = real_server.http.post(path, json=body).json()["field_probabilities"]
    lines = real_server.http.post(path, json={**body, "stream": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith(("data: {", "{"))]
    streamed = [each for event in events for each in event.get("field_probabilities", [])]
    for found in (whole, streamed):
        assert [each["path"] for each in found] == [each["path"] for each in wanted]
        assert [each["probability"] for each in found] == pytest.approx([e["probability"] for e in wanted], rel=1e-3)
