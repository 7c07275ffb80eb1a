"""Thoughts of the real model, whose template begins one, through the real clients; who is not installed is skipped.

The model was never taught to think: it goes on until its budget, or the form of the answer, ends the thought. Its end
mark is ordinary text over several tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
from support.api.real_server import RealServer, start
from support.api.tool_asks import TOOLS

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("default")]
QUESTION = "Ann is 30 years old. Who is it about?"
ASKED: Any = {"model": "small", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '').split('</think>')[-1] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""


class Person(pydantic.BaseModel):
    name: str
    age: int = pydantic.Field(ge=0, le=150)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    template = tmp_path_factory.mktemp("thinking") / "template.jinja"
    Path(template).write_text(TEMPLATE)
    running = start("--chat-template", str(template))
    yield running
    running.close()


def test_a_schema_after_a_thought(server: RealServer) -> None:
    ask = server.client.chat.completions
    budget: Any = {"extra_body": {"thinking_token_budget": 12}}
    parsed = ask.parse(**ASKED, response_format=Person, max_tokens=100, **budget)
    choice, usage = parsed.choices[0], parsed.usage
    assert isinstance(choice.message.parsed, Person) and choice.finish_reason == "stop"
    assert choice.message.reasoning_content == choice.message.reasoning  # type: ignore[attr-defined]
    assert choice.message.reasoning_content  # type: ignore[attr-defined]
    assert usage is not None and usage.completion_tokens_details is not None
    assert 0 < (usage.completion_tokens_details.reasoning_tokens or 0) <= 12
    with ask.stream(**ASKED, response_format=Person, max_tokens=100, **budget) as stream:
        thought = "".join(
            getattr(event.chunk.choices[0].delta, "reasoning_content", None) or ""
            for event in stream
            if event.type == "chunk" and event.chunk.choices
        )
        final = stream.get_final_completion().choices[0].message
    assert thought == choice.message.reasoning_content  # type: ignore[attr-defined]
    assert final.content == choice.message.content


def test_an_answer_is_complete_at_every_length_from_its_shortest_on(server: RealServer) -> None:
    ask = server.client.chat.completions
    form: Any = {"response_format": Person}
    cut = server.http.post(
        "/v1/chat/completions",
        json={**ASKED, "max_tokens": 2, "response_format": {"type": "json_schema", "json_schema": {
            "name": "p", "schema": Person.model_json_schema()}}},
    ).json()["choices"][0]  # fmt: skip
    assert cut["finish_reason"] == "length"
    shortest = cut["min_completion_tokens"]
    for length in (shortest, shortest + 1, shortest + 5, shortest + 40):
        choice = ask.parse(**ASKED, **form, max_tokens=length).choices[0]
        assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Person), length


def test_tools_after_a_thought(server: RealServer) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        for thinks in (True, False):
            answer = server.client.chat.completions.create(
                **ASKED,
                tools=TOOLS,
                tool_choice=choice,
                max_tokens=150,
                extra_body={"enable_thinking": thinks, **({"thinking_budget": 10} if thinks else {})},
            ).choices[0]
            assert answer.finish_reason == "tool_calls" and answer.message.tool_calls
            assert json.loads(answer.message.tool_calls[0].function.arguments) is not None  # type: ignore[union-attr]
            assert bool(answer.message.reasoning_content) is thinks  # type: ignore[attr-defined]


def test_drafts_change_no_thought(server: RealServer, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    asked: Any = {**ASKED, "temperature": 1, "seed": 3, "max_tokens": 80, "n": 2}
    asked["extra_body"] = {"thinking_token_budget": 30}
    plain = start("--chat-template", str(template), "--speculative-config", '{"method": "off"}')
    try:
        for form in (None, Person):
            answers = []
            for each in (server, plain):
                chat = each.client.chat.completions
                answers.append(chat.parse(**asked, response_format=form) if form else chat.create(**asked))
            for left, right in zip(answers[0].choices, answers[1].choices, strict=True):
                assert left.message.model_dump() == right.message.model_dump()
    finally:
        plain.close()


def test_responses(server: RealServer) -> None:
    asked: Any = {"model": "small", "input": QUESTION, "extra_body": {"thinking_token_budget": 12}}
    first = server.client.responses.parse(**asked, text_format=Person, max_output_tokens=100)
    assert [item.type for item in first.output] == ["reasoning", "message"]
    assert isinstance(first.output_parsed, Person)
    assert first.usage is not None and first.usage.output_tokens_details.reasoning_tokens > 0
    items: Any = [{"role": "user", "content": QUESTION}, *first.output, {"role": "user", "content": "Sure?"}]
    again = server.client.responses.create(**{**asked, "input": items}, max_output_tokens=40)
    assert again.output[0].type == "reasoning"


def test_pydantic_ai(server: RealServer) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    messages = pytest.importorskip("pydantic_ai.messages")
    url = str(server.client.base_url)
    provider = pytest.importorskip("pydantic_ai.providers.openai").OpenAIProvider(base_url=url, api_key="none")
    settings = {"max_tokens": 150, "extra_body": {"thinking_token_budget": 12}}
    for kind in (models.OpenAIChatModel, models.OpenAIResponsesModel):
        agent = pydantic_ai.Agent(kind("small", provider=provider), output_type=Person, model_settings=settings)
        result = asyncio.run(agent.run(QUESTION))
        assert isinstance(result.output, Person)
        parts = [part for message in result.all_messages() for part in message.parts]
        thoughts = [part for part in parts if isinstance(part, messages.ThinkingPart)]
        assert len(thoughts) == 1
        assert isinstance(asyncio.run(agent.run("Sure?", message_history=result.all_messages())).output, Person)


def test_langchain(server: RealServer) -> None:
    langchain = pytest.importorskip("langchain_openai")
    for use_responses_api in (False, True):
        model = langchain.ChatOpenAI(
            model="small",
            base_url=str(server.client.base_url),
            api_key="none",
            max_tokens=150,
            use_responses_api=use_responses_api,
            extra_body={"thinking_token_budget": 12},
        )
        answer = model.invoke(QUESTION)
        assert answer.usage_metadata["output_token_details"]["reasoning"] > 0
        if use_responses_api:
            assert answer.content[0]["type"] == "reasoning"
        assert "think>" not in str(answer.text)
        assert list(model.stream(QUESTION))
        for method in ("json_schema", "function_calling"):
            assert isinstance(model.with_structured_output(Person, method=method).invoke(QUESTION), Person)
