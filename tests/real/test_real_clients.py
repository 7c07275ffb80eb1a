"""Other people's clients at their defaults against a server on the real model; who is not installed is skipped.

What the model says is of no interest here; that each client gets what it relies on is.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pydantic
import pytest
from support.api.real_server import RealServer

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("default")]
QUESTION = "Ann is 30 years old. Who is it about?"


class Person(pydantic.BaseModel):
    name: str
    age: int = pydantic.Field(ge=0, le=150)


@pytest.fixture(scope="module")
def base_url(real_server: RealServer) -> str:
    return str(real_server.client.base_url)


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none") as made:
        yield made


def test_openai(client: openai.OpenAI) -> None:
    asked: Any = {"model": "small", "input": QUESTION}
    assert isinstance(client.responses.parse(**asked, text_format=Person).output_parsed, Person)
    with client.responses.stream(**asked, max_output_tokens=20, temperature=0) as events:
        *_, last = events
    first = client.responses.create(**asked, max_output_tokens=20, temperature=0)
    assert last.type == f"response.{first.status}" and last.response.output_text == first.output_text
    begun = client.responses.create(**asked, background=True, max_output_tokens=4000, extra_body={"ignore_eos": True})
    assert client.responses.cancel(begun.id).status == "cancelled"


def test_instructor(client: openai.OpenAI) -> None:
    instructor = pytest.importorskip("instructor")
    asked: Any = {"model": "small", "response_model": Person, "messages": [{"role": "user", "content": QUESTION}]}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        patched = instructor.from_openai(client, mode=mode)
        assert isinstance(patched.chat.completions.create(**asked, max_tokens=100), Person)
        *_, last = patched.chat.completions.create_partial(**asked, max_tokens=100)
        assert last.age is not None


def test_pydantic_ai(base_url: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    provider = pytest.importorskip("pydantic_ai.providers.openai").OpenAIProvider(base_url=base_url, api_key="none")
    for kind in (models.OpenAIChatModel, models.OpenAIResponsesModel):
        agent = pydantic_ai.Agent(
            kind("small", provider=provider), output_type=Person, model_settings={"max_tokens": 100}
        )
        assert isinstance(asyncio.run(agent.run(QUESTION)).output, Person)


def test_langchain(base_url: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    for use_responses_api in (False, True):
        model = langchain.ChatOpenAI(
            model="small", base_url=base_url, api_key="none", max_tokens=100, use_responses_api=use_responses_api
        )
        assert model.invoke(QUESTION).usage_metadata["total_tokens"] > 0 and list(model.stream(QUESTION))
        for method in ("json_schema", "function_calling"):
            assert isinstance(model.with_structured_output(Person, method=method).invoke(QUESTION), Person)


def test_llama_index(base_url: str) -> None:
    llms = pytest.importorskip("llama_index.llms.openai_like")
    tools = pytest.importorskip("llama_index.core.tools")
    message = pytest.importorskip("llama_index.core.llms").ChatMessage(role="user", content=QUESTION)
    prompt = pytest.importorskip("llama_index.core.prompts").PromptTemplate(QUESTION)

    def weather(city: str) -> str:
        """Return the weather of a city."""
        return city

    options: Any = {"model": "small", "api_base": base_url, "api_key": "none", "max_tokens": 60}
    model = llms.OpenAILike(**options, is_chat_model=True, is_function_calling_model=True)
    assert model.chat([message]).message.content and list(model.stream_chat([message]))
    asked: Any = {"tools": [tools.FunctionTool.from_defaults(weather)], "user_msg": QUESTION, "tool_required": True}
    *_, last = model.stream_chat_with_tools(**asked)
    for reply in (model.chat_with_tools(**asked), last):
        assert {call.tool_name for call in model.get_tool_calls_from_response(reply)} == {"weather"}
    assert isinstance(model.structured_predict(Person, prompt), Person)
    plain = llms.OpenAILike(**options, is_chat_model=False)
    assert plain.complete(QUESTION).text and list(plain.stream_complete(QUESTION))


def test_litellm(base_url: str) -> None:
    litellm = pytest.importorskip("litellm")
    asked: Any = {"model": "openai/small", "api_base": base_url, "api_key": "none", "max_tokens": 100}
    asked["messages"] = [{"role": "user", "content": QUESTION}]
    answer = litellm.completion(**asked, response_format=Person).choices[0].message.content
    assert Person.model_validate_json(answer)
    assert list(litellm.completion(**asked, stream=True))
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**asked, "max_tokens": 100_000})


def test_pydantic_ai_in_anthropics_protocol(base_url: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.anthropic")
    provider = pytest.importorskip("pydantic_ai.providers.anthropic").AnthropicProvider

    async def ask() -> Person:
        async with anthropic.AsyncAnthropic(
            base_url=base_url.removesuffix("/").removesuffix("/v1"), api_key="x"
        ) as made:
            model = models.AnthropicModel("small", provider=provider(anthropic_client=made))
            agent = pydantic_ai.Agent(model, output_type=Person, model_settings={"max_tokens": 100})
            return (await agent.run(QUESTION)).output

    assert isinstance(asyncio.run(ask()), Person)


def test_litellm_in_anthropics_protocol(base_url: str) -> None:
    litellm = pytest.importorskip("litellm")
    asked: Any = {"model": "anthropic/small", "api_base": base_url.removesuffix("/").removesuffix("/v1")}
    asked |= {"api_key": "none", "max_tokens": 100, "messages": [{"role": "user", "content": QUESTION}]}
    answer = litellm.completion(**asked)
    assert answer.choices[0].message.content and answer.usage.prompt_tokens > 0
    assert list(litellm.completion(**asked, stream=True))


def test_dspy(base_url: str) -> None:
    """The model is too small for what dspy asks it to write; what dspy made of the answers tells that it read them."""
    dspy = pytest.importorskip("dspy")
    model = dspy.LM("openai/small", api_base=base_url, api_key="none", max_tokens=60, cache=False)
    with dspy.context(lm=model), contextlib.suppress(dspy.utils.exceptions.AdapterParseError):
        dspy.Predict("question -> name: str, age: int")(question=QUESTION)
    assert model.history and all(call["usage"]["completion_tokens"] > 0 for call in model.history)
    assert all(call["outputs"] for call in model.history)


def test_guidance(base_url: str) -> None:
    guidance = pytest.importorskip("guidance")
    model = guidance.models.OpenAI("small", base_url=base_url, api_key="none", echo=False)
    with guidance.user():
        model += QUESTION
    with guidance.assistant():
        model += guidance.json(name="person", schema=Person, max_tokens=100)
    assert Person.model_validate_json(model["person"])
    with guidance.user():
        model += "And now?"
    with guidance.assistant():
        model += guidance.gen("text", max_tokens=10)
    assert isinstance(model["text"], str)


@pytest.mark.parametrize(
    ("package", "script", "count"),
    [
        # npm install ai @ai-sdk/openai @ai-sdk/openai-compatible zod
        ("ai", "ai_sdk.mjs", 18),
        # npm install openai ws
        ("openai", "openai_node.mjs", 6),
    ],
)
def test_clients_in_node(base_url: str, package: str, script: str, count: int) -> None:
    """Their packages are looked for in the repository's root."""
    if not (Path(__file__).parents[2] / "node_modules" / package).exists():
        pytest.skip(f"the package {package} of Node is not installed")
    path = Path(__file__).parents[1] / "scenarios" / "api" / "clients" / script
    ran = subprocess.run(["node", str(path), base_url], capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and ran.stdout.count("ok ") == count, ran.stdout + ran.stderr
