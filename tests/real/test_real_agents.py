"""Agents of OpenAI's Agents SDK on the real model: a tool, a handoff, an answer's form, sessions, by all three doors.

The calls are forced, as a small model chooses no tool by itself; their arguments and all other text are its own.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from support.api.real_server import RealServer

agents = pytest.importorskip("agents", reason="openai-agents is not installed")

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("default")]
QUESTION = "Ann is 30 years old and wants pears. Are there any?"
KINDS = ("OpenAIResponsesModel", "OpenAIChatCompletionsModel", "OpenAIResponsesWSModel")
CALL = ("function_call", "function_call_output")


class Customer(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


async def run(agent: Any, streams: bool, said: str, **options: Any) -> Any:
    """Run an agent; of a streamed run, the events' texts must be those of its items."""
    if not streams:
        return await agents.Runner.run(agent, said, **options)
    result = agents.Runner.run_streamed(agent, said, **options)
    heard = [each.data async for each in result.stream_events() if each.type == "raw_response_event"]
    for kind, field in (
        ("response.output_text.delta", "text"),
        ("response.function_call_arguments.delta", "arguments"),
    ):
        deltas = "".join(each.delta for each in heard if each.type == kind)
        items = [part for reply in result.raw_responses for item in reply.output for part in parts_of(item)]
        assert deltas == "".join(getattr(each, field, "") for each in items)
    return result


def parts_of(item: Any) -> list[Any]:
    return list(item.content) if item.type == "message" else [item]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tool_a_handoff_and_a_session(real_server: RealServer, kind: str, streams: bool) -> None:
    agents.set_tracing_disabled(True)
    called: list[str] = []

    @agents.function_tool
    def in_stock(fruit: Literal["apples", "pears"]) -> str:
        """How many pieces of a fruit are in stock."""
        called.append(fruit)
        return "12"

    async def work(model: Any) -> None:
        brief: Any = {"temperature": 0, "max_tokens": 200, "include_usage": True}
        forced: Any = {**brief, "parallel_tool_calls": False}
        session = agents.SQLiteSession("one")
        settings = agents.ModelSettings(**forced, tool_choice="required")
        shop = agents.Agent(name="shop", model=model, tools=[in_stock], model_settings=settings)
        shop.tool_use_behavior = "stop_on_first_tool"
        served = await run(shop, streams, QUESTION, session=session)
        assert len(called) == 1 and called[0] in ("apples", "pears") and served.final_output == "12"
        settings = agents.ModelSettings(**brief)
        clerk = agents.Agent(name="clerk", model=model, output_type=Customer, model_settings=settings)
        settings = agents.ModelSettings(**forced, tool_choice="transfer_to_clerk")
        door = agents.Agent(name="door", model=model, handoffs=[clerk], model_settings=settings)
        written = await run(door, streams, "Write the customer down.", session=session)
        assert isinstance(written.final_output, Customer) and written.last_agent.name == "clerk"
        kinds = [each.get("type", "message") for each in await session.get_items()]
        assert kinds == ["message", *CALL, "message", *CALL, "message"]
        replies = [*served.raw_responses, *written.raw_responses]
        assert [each.usage.output_tokens > 0 for each in replies] == [True] * 3
        if kind != "OpenAIChatCompletionsModel":
            later = await run(clerk, streams, "Once more.", previous_response_id=written.last_response_id)
            assert isinstance(later.final_output, Customer)
            assert later.raw_responses[0].usage.input_tokens > replies[-1].usage.input_tokens

    async def connect() -> None:
        http = httpx.AsyncClient(trust_env=False)
        url = f"{real_server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=http) as client:
            model = getattr(agents, kind)("small", client)
            await work(model)
            await model.close()

    asyncio.run(connect())
