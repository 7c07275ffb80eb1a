"""Structured outputs as clients ask for them: what reaches the engine, what comes back, what happens if it is wrong."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pydantic
import pytest
from support.api.api_live import Live
from support.api.bad.bad_structured import FORMS, schema_format
from support.api.reply_checks import scrape, value

from rootgraft.engine.errors import GrammarRefused, RequestError
from rootgraft.grammar.spec import GrammarKind, GrammarSpec

HI: Any = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
LARK = '// a number\nstart: NUMBER "!"\nNUMBER: /[0-9]+/\n'
EBNF = '# a number\nroot ::= [0-9]+ "start:"\n'
TAG = {"type": "triggered_tags", "triggers": ["<a>"], "tags": []}
OLD_TAG = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]}

ASKED: list[tuple[dict[str, Any], GrammarSpec]] = [
    ({"response_format": {"type": "json_object"}}, GrammarSpec.json_object()),
    (schema_format(SCHEMA), GrammarSpec.json_schema(SCHEMA)),
    (schema_format(True), GrammarSpec.json_schema(True)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": False, "schema": SCHEMA}}},
        GrammarSpec.json_schema(SCHEMA),
    ),
    ({"response_format": {"type": "structural_tag", "format": TAG}}, GrammarSpec.structural_tag({"format": TAG})),
    ({"response_format": {"type": "structural_tag", **OLD_TAG}}, GrammarSpec.structural_tag(OLD_TAG)),
    ({"structured_outputs": {"json": SCHEMA}}, GrammarSpec.json_schema(SCHEMA)),
    ({"structured_outputs": {"json": json.dumps(SCHEMA, indent=1)}}, GrammarSpec.json_schema(SCHEMA)),
    ({"structured_outputs": {"regex": "[a-z]+"}}, GrammarSpec.regex("[a-z]+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, GrammarSpec.choice(["a", "b"])),
    ({"structured_outputs": {"grammar": LARK}}, GrammarSpec.lark(LARK)),
    ({"structured_outputs": {"grammar": EBNF}}, GrammarSpec.ebnf(EBNF)),
    ({"structured_outputs": {"json_object": True, "regex": None}}, GrammarSpec.json_object()),
    ({"structured_outputs": {"regex": "a", "json_object": False}}, GrammarSpec.regex("a")),
    ({"structured_outputs": {"structural_tag": {"format": TAG}}}, GrammarSpec.structural_tag({"format": TAG})),
    ({"structured_outputs": {"structural_tag": '{"format": {}}'}}, GrammarSpec.structural_tag({"format": {}})),
    ({"guided_json": SCHEMA}, GrammarSpec.json_schema(SCHEMA)),
    ({"guided_json": json.dumps(SCHEMA)}, GrammarSpec.json_schema(SCHEMA)),
    ({"guided_regex": "a|b"}, GrammarSpec.regex("a|b")),
    ({"guided_choice": ["a", "b"]}, GrammarSpec.choice(["a", "b"])),
    ({"guided_grammar": "?start: \"x\""}, GrammarSpec.lark("?start: \"x\"")),
    ({"guided_grammar": "root  ::= 'x'"}, GrammarSpec.ebnf("root  ::= 'x'")),
    ({"regex": "a|b"}, GrammarSpec.regex("a|b")),
    ({"ebnf": EBNF}, GrammarSpec.ebnf(EBNF)),
    ({"response_format": {"type": "text"}, "regex": "a"}, GrammarSpec.regex("a")),
]  # fmt: skip


def text_for(spec: GrammarSpec) -> str:
    """An answer that the safety net lets pass, whatever was asked for."""
    return '{"a": 1}' if spec.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT) else "b"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_way_to_ask_reaches_the_engine(live: Live, path: str, stream: bool) -> None:
    live.async_engine.say = lambda request, index: text_for(request.grammar)
    body: dict[str, Any] = {"stream": stream, "n": 2, "temperature": 1.5, "seed": 3, "min_p": 0.1}
    body |= {"messages": HI} if path == CHAT else {"prompt": ["x", "y"], "max_tokens": 64}
    with live.http() as http:
        for fields, spec in ASKED:
            live.async_engine.seen.clear()
            reply = http.post(path, json=body | fields)
            assert reply.status_code == 200, (fields, reply.text)
            assert [request.grammar for request in live.async_engine.seen] == [spec] * (1 if path == CHAT else 2), (
                fields
            )
            assert reply.text.count('"finish_reason":"stop"') == (2 if path == CHAT else 4), fields


def test_no_form_is_no_grammar(live: Live) -> None:
    with live.http() as http:
        for fields in ({"response_format": {"type": "text"}}, dict.fromkeys(key for form in FORMS for key in form)):
            assert http.post(CHAT, json={"messages": HI, **fields}).status_code == 200
            assert http.post(COMPLETIONS, json={"prompt": "x", **fields}).status_code == 200
    assert [request.grammar for request in live.async_engine.seen] == [None] * 4


def test_two_forms_at_once_are_named(live: Live) -> None:
    with live.http() as http:
        reply = http.post(CHAT, json={"messages": HI, "guided_regex": "a", **FORMS[0]})
    assert reply.json()["error"]["message"] == "'guided_regex' contradicts 'response_format'."


def test_limits_name_keyword_and_pointer(live: Live) -> None:
    schema = {"properties": {"a/b": {"enum": [str(number) for number in range(11_000)]}}}
    with live.http() as http:
        message = http.post(CHAT, json={"messages": HI, **schema_format(schema)}).json()["error"]["message"]
    assert "'response_format'" in message and "'enum' at '/properties/a~1b/enum'" in message
    assert "11000" in message and "10000" in message


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_the_compiler_name_the_field(live: Live, stream: bool) -> None:
    with live.http() as http:
        for path, body in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "x"})):
            for fields, field in (
                (schema_format(SCHEMA), "response_format"),
                ({"guided_json": SCHEMA}, "guided_json"),
                ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
            ):
                live.async_engine.fail_after = (0, GrammarRefused("not", "/properties/a/not", "no"))
                reply = http.post(path, json={**body, **fields, "stream": stream})
                assert reply.status_code == 400
                error = reply.json()["error"]
                assert error["param"] == field and error["code"] == "invalid_value"
                assert error["message"] == f"'{field}' cannot be enforced: 'not' at '/properties/a/not': no."
                assert (error["keyword"], error["pointer"], error["reason"]) == ("not", "/properties/a/not", "no")


BIG = 10**30 + 1


def test_integers_beyond_64_bits_are_exact_in_schemas(live: Live) -> None:
    """Floats would make a bound of 10^30 + 1 one of 10^30."""
    schema = {"type": "integer", "minimum": BIG}
    live.async_engine.say = lambda request, index: str(BIG)
    with live.http() as http:
        for fields in (schema_format(schema), {"structured_outputs": {"json": schema}}, {"guided_json": schema}):
            for path, body in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "x", "max_tokens": 64})):
                reply = http.post(path, json={**body, **fields})
                assert reply.json()["choices"][0]["finish_reason"] == "stop"
                assert live.async_engine.seen[-1].grammar == GrammarSpec.json_schema(schema)
        tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": schema}}}}
        assert http.post(CHAT, json={"messages": HI, "tools": [tool]}).status_code == 200
        assert str(BIG) in live.async_engine.seen[-1].grammar.text
        live.async_engine.tokenizer.speaks = ""
        assert http.post(CHAT, json={"messages": HI, "tools": [tool], "tool_choice": "none"}).status_code == 200
        digits = '{"prompt": "x", "guided_json": {"minimum": ' + "1" * 5_000 + "}}"
        reply = http.post(COMPLETIONS, content=digits, headers={"content-type": "application/json"})
        assert reply.status_code == 400 and "infinity" in reply.text
        seed = http.post(COMPLETIONS, json={"prompt": "x", "seed": BIG, **schema_format(schema)})
        assert seed.status_code == 400 and seed.json()["error"]["param"] == "seed"


def test_integers_beyond_64_bits_are_exact_in_options_of_other_forms(live: Live) -> None:
    """The options of an inference request are text within its body."""
    schema = {"type": "integer", "minimum": BIG}
    live.async_engine.say = lambda request, index: str(BIG)
    tensors = [("text_input", "x"), ("sampling_parameters", json.dumps({"guided_json": schema, "max_tokens": 64}))]
    inputs = [{"name": name, "datatype": "BYTES", "shape": [1], "data": [text]} for name, text in tensors]
    with live.http() as http:
        assert http.post("/v2/models/tiny/infer", json={"inputs": inputs}).status_code == 200
        assert live.async_engine.seen[-1].grammar == GrammarSpec.json_schema(schema)
        inputs[1]["data"] = [json.dumps({"seed": BIG})]
        seed = http.post("/v2/models/tiny/infer", json={"inputs": inputs})
        assert seed.status_code == 400 and "seed" in seed.text
        for name, fields in (("max_tokens", {"max_tokens": BIG}), ("seed", {"seed": BIG})):
            reply = http.post("/v2/models/tiny/infer", json={"inputs": inputs[:1], "parameters": fields})
            assert reply.status_code == 400 and name in reply.text
        reply = http.post("/generate", json={"inputs": "x", "parameters": {"seed": BIG}})
        assert reply.status_code == 422 and "seed" in reply.text


def test_integers_beyond_64_bits_are_exact_in_what_the_model_reads(live: Live) -> None:
    """A state, an instruction, a part of JSON, and arguments of an earlier call as an object."""
    question = {"type": "noul", "instructions": {"b": BIG}, "criteria": {"true": {"c": BIG}}}
    data = {"type": "input_json", "data": {"a": BIG}}
    item = {"role": "user", "content": [data]}
    predicate = {"type": "predicate", "instructions": [data]}
    asked: list[tuple[str, dict[str, Any], int]] = [
        ("/v1/systemone", {"state": {"a": BIG}, "questions": {"q": question}}, 3),
        ("/v1/decisions", {"input": [item], "questions": [predicate]}, 2),
    ]
    with live.http() as http:
        for path, body, count in asked:
            assert http.post(path, json=body).status_code == 200
            prompt = live.async_engine.tokenizer.decode(live.async_engine.seen[-1].tokens)
            assert prompt.count(str(BIG)) == count
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": {"a": BIG}}
        said = [{"role": "user", "content": "x"}, call, {"type": "function_call_output", "call_id": "c", "output": "y"}]
        fields = {"chat_template_kwargs": {"d": BIG}}
        assert http.post("/v1/responses", json={"input": said, **fields}).status_code == 200
    assert live.async_engine.tokenizer.rendered[-1]["kwargs"] == {"d": BIG}
    [called] = live.async_engine.tokenizer.rendered[-1]["messages"][1]["tool_calls"]
    assert called["function"]["arguments"] == {"a": BIG}


def test_integers_beyond_64_bits_are_repeated_in_responses(live: Live) -> None:
    """Tools that cannot be called here, choices and items of theirs have fields of any kind."""
    other = {"type": "web_search", "limit": BIG}
    tools = [{"type": "function", "name": "f", "parameters": {"properties": {"a": {"maximum": BIG}}}}, other]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}, other]}
    item = {"type": "web_search_call", "id": "ws_1", "action": {"limit": BIG}}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}
    said = [{"role": "user", "content": "x"}, call, item]
    asked = {"tools": tools, "tool_choice": choice}
    with live.http() as http:
        first = http.post("/v1/responses", json={"input": said, **asked})
        assert first.status_code == 200 and first.json()["tools"][1]["limit"] == BIG
        for stream in (False, True):
            body = {"input": "x", "previous_response_id": first.json()["id"], "stream": stream, **asked}
            reply = http.post("/v1/responses", json=body)
            assert reply.status_code == 200 and str(BIG) in reply.text and "internal_error" not in reply.text
        listed = http.get(f"/v1/responses/{first.json()['id']}/input_items").json()["data"]
    assert listed[0]["action"] == {"limit": BIG}


def test_other_errors_of_the_engine_stay_what_they_are(live: Live) -> None:
    live.async_engine.fail_after = (0, RequestError("No such adapter.", param="model"))
    with live.http() as http:
        error = http.post(CHAT, json={"messages": HI, **schema_format(SCHEMA)}).json()["error"]
    assert (error["param"], error["message"]) == ("model", "No such adapter.")


class Point(pydantic.BaseModel):
    x: int
    name: Literal["a", "b"] = "a"


def test_the_parse_method_of_the_client(live: Live) -> None:
    live.async_engine.say = lambda request, index: '{"x": 7, "name": "b"}'
    with live.openai() as client:
        answer = client.chat.completions.parse(model="tiny", messages=HI, response_format=Point)
        assert answer.choices[0].message.parsed == Point(x=7, name="b")
        with client.chat.completions.stream(model="tiny", messages=HI, response_format=Point) as events:
            final = events.get_final_completion()
    assert final.choices[0].message.parsed == Point(x=7, name="b")
    assert live.async_engine.seen[0].grammar == live.async_engine.seen[1].grammar
    assert live.async_engine.seen[0].grammar.kind is GrammarKind.JSON_SCHEMA


BROKEN = [
    (SCHEMA, "no JSON"),
    (SCHEMA, '{"a": "1"}'),
    (SCHEMA, '{"a": 1} '[:-3]),
    (SCHEMA, "{}"),
    ({"type": "string", "format": "date"}, '"2023-02-29"'),
    ({"type": "number", "multipleOf": 0.1}, "0.25"),
    ({"type": "string", "pattern": "^[0-9]+$"}, '"12a"'),
    ({"additionalProperties": False}, '{"a": 1}'),
    ({"patternProperties": {"^a": {"type": "null"}}}, '{"ab": 1}'),
    ({}, "NaN"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_breaks_its_promise_ends_in_error(live: Live, stream: bool) -> None:
    before = scrape(live)
    with live.http() as http:
        for schema, text in BROKEN:
            live.async_engine.say = lambda request, index, text=text: text
            for path, body in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "x", "max_tokens": 50})):
                reply = http.post(path, json={**body, **schema_format(schema), "stream": stream})
                assert '"finish_reason":"error"' in reply.text and '"stop"' not in reply.text, (schema, text)
    after = scrape(live)
    broken = 2 * len(BROKEN)
    assert value(after, "structured_answers_broken", "_total") == (
        value(before, "structured_answers_broken", "_total") + broken
    )
    assert value(after, "structured_requests", "_total", kind="json_schema") == (
        value(before, "structured_requests", "_total", kind="json_schema") + broken
    )
    assert value(after, "request_success", "_total", finished_reason="error") >= broken


HELD = [
    (SCHEMA, '{"a": 1, "b": [1.5e3, null, "\\u00e9"]}'),
    (SCHEMA, '{"a": ' + "9" * 9_000 + "}"),
    ({"type": "string", "format": "no-such-format"}, '"x"'),
    ({"type": "string", "format": "color"}, '"x"'),
    ({"type": "number", "multipleOf": 0.1}, "0.3"),
    ({"type": "number", "multipleOf": 1e-3}, "1e300"),
    ({"type": "string", "pattern": "^\\p{L}+$"}, '"e"'),
    ({"type": "array"}, "[" * 400 + "]" * 400),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}, "5"),
    ({"$schema": "http://json-schema.org/draft-04/schema#", "maximum": 5, "exclusiveMaximum": True}, "4"),
    (True, "null"),
]


def test_an_answer_that_holds_ends_in_stop(live: Live) -> None:
    live.async_engine.set_max_len(20_000)
    with live.http() as http:
        for schema, text in HELD:
            live.async_engine.say = lambda request, index, text=text: text
            reply = http.post(CHAT, json={"messages": HI, **schema_format(schema)}).json()
            assert reply["choices"][0]["finish_reason"] == "stop", (schema, text[:80])


def test_what_was_cut_off_is_not_judged(live: Live) -> None:
    live.async_engine.say = lambda request, index: '{"a": '
    asked = {"messages": HI, **schema_format(SCHEMA)}
    with live.http() as http:
        short = http.post(CHAT, json={**asked, "max_tokens": 3}).json()["choices"][0]
        stopped = http.post(CHAT, json={**asked, "stop": "x"}).json()["choices"][0]
    assert (short["finish_reason"], short["message"]["content"]) == ("length", '{"a')
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", "x")


@pytest.mark.parametrize("stream", [False, True])
def test_a_budget_below_the_minimum_is_told_the_minimum(live: Live, stream: bool) -> None:
    live.async_engine.say, live.async_engine.shortest = (lambda request, index: '{"a": 1}'), 7
    with live.http() as http:
        for path, body in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "x"})):
            for budget, told in ((3, 1), (50, 0)):
                fields = {**body, **schema_format(SCHEMA), "max_tokens": budget, "stream": stream}
                text = http.post(path, json=fields).text
                assert text.count('"min_completion_tokens":7') == text.count('"finish_reason":"length"') == told
        live.async_engine.shortest = None
        text = http.post(path, json={**fields, "max_tokens": 3}).text
    assert '"finish_reason":"length"' in text and "min_completion_tokens" not in text


def test_one_broken_answer_of_several(live: Live) -> None:
    live.async_engine.say = lambda request, index: '{"a": 1}' if index else '{"a": null}'
    with live.openai() as client:
        choices = client.chat.completions.create(model="tiny", messages=HI, n=3, **schema_format(SCHEMA)).choices
    assert [choice.finish_reason for choice in choices] == ["error", "stop", "stop"]


def test_counters_of_the_compiler(live: Live) -> None:
    live.client.stats = {"grammar_hits": 5.0, "grammar_compiled": 4.0, "grammar_refused": 3.0, "grammar_stopped": 2.0}
    live.client.stats |= {"grammar_pending": 1.0, "grammar_cached_bytes": 4096.0}
    families = scrape(live)
    assert [
        value(families, name, "_total")
        for name in ("grammar_cache_hits", "grammar_compiles", "grammar_refusals", "grammar_compiles_stopped")
    ] == [5, 4, 3, 2]
    assert (value(families, "grammar_compiles_pending"), value(families, "grammar_cache_bytes")) == (1, 4096)


def test_the_client_sees_a_refusal_as_a_bad_request(live: Live) -> None:
    live.async_engine.fail_after = (0, RequestError("No.", param="response_format"))
    with live.openai() as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HI, **schema_format(SCHEMA))
    assert caught.value.param == "response_format"
