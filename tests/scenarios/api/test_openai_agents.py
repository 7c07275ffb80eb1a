"""Agents of OpenAI's SDK at its defaults: tools, a handoff, an answer with a form, turns; by all three of its models.

What a model decides is told to a fake engine word for word.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from support.api.api_live import Live

agents = pytest.importorskip("agents", reason="openai-agents is not installed")

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("default")]
QUESTION = "Ann is 30 years old. Who is it about?"
LARK = 'start: "add " /[a-z ]{1,20}/ LF\nLF: "\\n"\n'
KINDS = ("OpenAIResponsesModel", "OpenAIChatCompletionsModel", "OpenAIResponsesWSModel")


class Customer(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


ANN = Customer(name="Ann", age=30)


@asynccontextmanager
async def model_of(url: str, kind: str) -> AsyncIterator[Any]:
    """A model of the SDK, whose client looks at no proxy."""
    agents.set_tracing_disabled(True)
    http = httpx.AsyncClient(trust_env=False)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http) as client:
        model = getattr(agents, kind)("tiny", client)
        yield model
        await model.close()


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def scene(model: Any, called: list[str]) -> Any:
    """An agent with a function, a tool of a grammar where the door has such, and a colleague with an answer's form."""

    @agents.function_tool
    def in_stock(fruit: Literal["apples", "pears"]) -> str:
        """How many pieces of a fruit are in stock."""
        called.append(f"in_stock {fruit}")
        return "12"

    async def write(context: Any, text: str) -> str:
        called.append(text)
        return "written"

    tools = [in_stock]
    if not isinstance(model, agents.OpenAIChatCompletionsModel):
        form = {"type": "grammar", "syntax": "lark", "definition": LARK}
        tools.append(agents.CustomTool("note", "Write a note.", write, format=form))
    clerk = agents.Agent(name="clerk", instructions="Name the customer.", model=model, output_type=Customer)
    return agents.Agent(name="shop", instructions="Serve.", model=model, tools=tools, handoffs=[clerk])


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_task_of_many_turns(live: Live, kind: str, streams: bool) -> None:
    engine, called = live.async_engine, []
    has_custom = kind != "OpenAIChatCompletionsModel"
    turns = [call("in_stock", fruit="pears"), call("transfer_to_clerk"), ANN.model_dump_json(), "Good bye."]
    if has_custom:
        turns.insert(1, call("note", input="add pears\n"))
    engine.set_max_len(1 << 20)
    engine.say = lambda request, index: turns[len(engine.seen) - 1]

    async def work() -> None:
        async with model_of(live.url, kind) as model:
            shop, session = scene(model, called), agents.SQLiteSession("one")
            if streams:
                result = agents.Runner.run_streamed(shop, QUESTION, session=session)
                kinds = {each.data.type for each in [_ async for _ in result.stream_events()] if hasattr(each, "data")}
                wanted = {"response.function_call_arguments.delta", "response.output_text.delta"}
                wanted |= {"response.custom_tool_call_input.delta"} if has_custom else set()
                assert wanted <= kinds, kinds
            else:
                result = await agents.Runner.run(shop, QUESTION, session=session)
            assert result.final_output == ANN and result.last_agent.name == "clerk"
            assert result.context_wrapper.usage.requests == len(turns) - 1
            later = agents.Agent(name="door", instructions="Say good bye.", model=model)
            assert (await agents.Runner.run(later, "Thanks!", session=session)).final_output == turns[-1]

    asyncio.run(work())
    assert called == ["in_stock pears", "add pears\n"][: 1 + has_custom]
    last = bytes(token for token in engine.seen[-1].tokens if token < 256).decode()
    assert len(engine.seen) == len(turns) and all(each in last for each in (QUESTION, "12", '"Ann"', "Thanks!"))
    held = [each.grammar for each in engine.seen]
    assert held[-2] is not None and '"Ann"'[1:] not in held[-2].text and '"age"' in held[-2].text
    assert held[-1] is None and (not has_custom or "LF:" in held[0].text)
