"""Structured outputs and tool calls from the whole server with the default model: every finished answer validates."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest
from support.api.real_server import RealServer
from support.machine.thoroughness import taking_turns

pytestmark = pytest.mark.heavy

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "born": {"type": "string", "format": "date"},
        "height": {"type": "number", "minimum": 0.3, "maximum": 2.8},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]+$"}, "minItems": 1, "maxItems": 3},
        "parent": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/person"}]},
    },
    "required": ["name", "born", "height", "tags", "parent"],
    "additionalProperties": False,
    "$defs": {
        "person": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"$ref": "#/$defs/unit"}},
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["celsius", "fahrenheit"]}},
}
ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "number"}}, "required": ["a", "b"]}
SCHEMAS = {"get_weather": WEATHER, "add": ADD, "ping": {"const": {}}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather now.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": ADD}},
    {"type": "function", "function": {"name": "ping", "description": "See whether it works."}},
]
MOST = 90
"""Tokens of an answer: some more than the shortest form of each schema needs, so that a budget also ends some."""
QUESTION: Any = [{"role": "user", "content": "What is the weather in Paris? Describe a person there."}]


@pytest.fixture(scope="module")
def server(real_server: RealServer) -> Iterator[RealServer]:
    yield real_server
    assert "rootgraft:structured_answers_broken_total{" in (metrics := real_server.http.get("/metrics").text)
    assert re.search(r"structured_answers_broken_total\{[^}]*\} 0\.0", metrics)


def check(text: str | None, schema: Any) -> None:
    jsonschema.validate(json.loads(text or ""), schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)


def ask(server: RealServer, **fields: Any) -> list[Any]:
    asked: dict[str, Any] = {"model": "small", "messages": QUESTION, "max_tokens": MOST, "seed": 1, **fields}
    choices: list[Any] = server.client.chat.completions.create(**asked).choices
    return choices


def check_calls(choice: Any, allowed: set[str]) -> list[str]:
    """Every call is of an allowed tool and holds its schema; the names."""
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    names = [call.function.name for call in choice.message.tool_calls]
    assert set(names) <= allowed
    for call in choice.message.tool_calls:
        check(call.function.arguments, SCHEMAS[call.function.name])
    return names


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_schemas_hold_at_any_temperature(server: RealServer, temperature: float) -> None:
    for choice in ask(server, response_format=FORMAT, temperature=temperature, n=2):
        assert choice.finish_reason == "stop"
        check(choice.message.content, SCHEMA)


def test_a_streamed_answer_is_the_whole_one(server: RealServer) -> None:
    [whole] = ask(server, response_format=FORMAT, temperature=0.7)
    asked: Any = {"model": "small", "messages": QUESTION, "max_tokens": MOST, "seed": 1, "temperature": 0.7}
    with server.client.chat.completions.stream(**asked, response_format=FORMAT) as events:
        final = events.get_final_completion().choices[0]
    assert final.message.content == whole.message.content and final.finish_reason == "stop"
    check(final.message.content, SCHEMA)


class Person(pydantic.BaseModel):
    name: str
    kind: Literal["child", "adult"]


def test_the_parse_method(server: RealServer) -> None:
    answer = server.client.chat.completions.parse(
        model="small", messages=QUESTION, response_format=Person, max_tokens=60
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


class Film(pydantic.BaseModel):
    """Describes a film."""

    title: str
    tags: set[str] = pydantic.Field(min_length=2, max_length=4)
    years: set[int] = pydantic.Field(min_length=2, max_length=4)
    actors: frozenset[str] = pydantic.Field(max_length=2)
    prizes: dict[str, int] = pydantic.Field(min_length=2, max_length=3)


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), pairs
    return dict(pairs)


def check_film(text: str | None) -> None:
    film = json.loads(text or "", object_pairs_hook=without_repeats)
    assert all(len(set(film[name])) == len(film[name]) for name in ("tags", "years", "actors"))
    Film.model_validate(film)


@pytest.mark.parametrize("seed", taking_turns(range(2), 2))
def test_sets_of_pydantic_whole_and_streamed(server: RealServer, seed: int) -> None:
    asked: dict[str, Any] = {"model": "small", "messages": QUESTION, "response_format": Film, "max_tokens": MOST}
    asked |= {"seed": seed, "temperature": 1.0}
    whole = server.client.chat.completions.parse(**asked).choices[0]
    assert whole.finish_reason == "stop" and isinstance(whole.message.parsed, Film)
    check_film(whole.message.content)
    with server.client.chat.completions.stream(**asked) as events:
        final = events.get_final_completion().choices[0]
    assert final.message.content == whole.message.content and isinstance(final.message.parsed, Film)


@pytest.mark.parametrize("strict", [True, False])
def test_sets_are_parameters_of_a_tool(server: RealServer, strict: bool) -> None:
    tool = openai.pydantic_function_tool(Film)
    tool["function"]["strict"] = strict
    asked: dict[str, Any] = {"model": "small", "messages": QUESTION, "tools": [tool], "max_tokens": MOST}
    [choice] = server.client.chat.completions.create(**asked, tool_choice="required", temperature=1.0).choices
    assert choice.finish_reason == "tool_calls"
    for call in choice.message.tool_calls or []:
        assert call.type == "function"
        check_film(call.function.arguments)
    [choice] = server.client.chat.completions.create(**asked | {"max_tokens": 40}, tool_choice="auto").choices
    assert choice.finish_reason in ("stop", "length", "tool_calls")


def test_a_budget_closes_and_a_smaller_one_says_so(server: RealServer) -> None:
    [closed] = ask(server, response_format=FORMAT, max_tokens=60, temperature=2.0)
    assert closed.finish_reason == "stop"
    check(closed.message.content, SCHEMA)
    [short] = ask(server, response_format=FORMAT, max_tokens=8)
    assert short.finish_reason == "length"


def test_other_forms(server: RealServer) -> None:
    forms: list[tuple[dict[str, Any], str]] = [
        ({"guided_regex": "(yes|no)!{2}"}, "(yes|no)!!"),
        ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
        ({"structured_outputs": {"grammar": 'start: "a" /[0-9]{3}/'}}, "a[0-9]{3}"),
        ({"ebnf": 'root ::= ("x" | "y") [0-9]'}, "[xy][0-9]"),
        ({"response_format": {"type": "json_object"}, "max_tokens": 40}, r"\{[\s\S]*\}"),
    ]
    for fields, pattern in forms:
        body = {"model": "small", "prompt": "Well:", "max_tokens": 20, "temperature": 1.5, "n": 2} | fields
        for choice in server.http.post("/v1/completions", json=body).json()["choices"]:
            assert choice["finish_reason"] == "stop" and re.fullmatch(pattern, choice["text"]), choice


@pytest.mark.parametrize(("temperature", "parallel"), [(0.0, True), (2.0, False)])
def test_required_calls(server: RealServer, temperature: float, parallel: bool) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": parallel}
    for choice in ask(server, **fields, temperature=temperature, n=2):
        assert len(check_calls(choice, set(SCHEMAS))) >= 1
        assert parallel or len(choice.message.tool_calls) == 1


def test_named_calls(server: RealServer) -> None:
    for name in SCHEMAS:
        choice = {"type": "function", "function": {"name": name}}
        for answer in ask(server, tools=TOOLS, tool_choice=choice, temperature=1.5, n=2):
            assert check_calls(answer, {name}) == [name]
            assert name != "ping" or answer.message.tool_calls[0].function.arguments == "{}"


def test_streamed_calls_are_the_whole_ones(server: RealServer) -> None:
    asked: Any = {"model": "small", "messages": QUESTION, "max_tokens": MOST, "seed": 1, "temperature": 0.5}
    asked |= {"tools": TOOLS, "tool_choice": "required"}
    [whole] = server.client.chat.completions.create(**asked).choices
    with server.client.chat.completions.stream(**asked) as events:
        final = events.get_final_completion().choices[0]
    assert check_calls(final, set(SCHEMAS)) == check_calls(whole, set(SCHEMAS))
    assert [call.function.arguments for call in final.message.tool_calls or []] == [
        call.function.arguments for call in whole.message.tool_calls or []
    ]


def test_calls_that_the_model_may_make(server: RealServer) -> None:
    """Some of these answers call and some do not; ``logit_bias`` makes sure that some do."""
    tokens = server.http.post("/tokenize", json={"prompt": "<tool_call>", "add_special_tokens": False}).json()["tokens"]
    asked: dict[str, Any] = {"tools": TOOLS, "temperature": 1.0, "n": 3, "max_tokens": 120}
    choices = ask(server, **asked) + ask(server, **asked, logit_bias={str(token): 12 for token in tokens})
    called = [choice for choice in choices if choice.message.tool_calls]
    assert called
    for choice in called:
        if choice.finish_reason == "tool_calls":
            for call in choice.message.tool_calls:
                check(call.function.arguments, SCHEMAS[call.function.name])
    assert all(choice.message.content for choice in choices if choice not in called)


def test_calls_or_a_document(server: RealServer) -> None:
    for choice in ask(server, tools=TOOLS, response_format=FORMAT, temperature=1.0, n=3):
        if choice.message.tool_calls:
            check_calls(choice, set(SCHEMAS))
        elif choice.finish_reason == "stop":
            check(choice.message.content, SCHEMA)


def test_a_whole_conversation_with_a_tool(server: RealServer) -> None:
    [choice] = ask(server, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "get_weather"}})
    result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "18 degrees and sunny"}
    [answer] = ask(server, messages=[*QUESTION, choice.message, result], tools=TOOLS, tool_choice="none", temperature=0)
    assert answer.message.content and answer.message.tool_calls is None


def test_refusals_come_back_with_their_place(server: RealServer) -> None:
    bad = {"type": "object", "properties": {"x": {"$dynamicRef": "#x"}}}
    named = {"type": "function", "function": {"name": "bad"}}
    tools = [TOOLS[0], {"type": "function", "function": {"name": "bad", "parameters": bad}}]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": bad}}}, "response_format"),
        ({"extra_body": {"guided_json": bad}}, "guided_json"),
        *(
            ({"tools": tools, "tool_choice": choice}, "tools[1].function.parameters")
            for choice in ("auto", "required", named)
        ),
    ]
    for fields, param in cases:
        with pytest.raises(openai.BadRequestError, match="dynamicRef") as caught:
            ask(server, **fields)
        assert caught.value.param == param and "at '/properties/x/$dynamicRef'" in caught.value.message
