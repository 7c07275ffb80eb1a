"""Agent with a tool (openai-agents): each turn sends the whole conversation, and only the new part is computed.

pip install openai-agents; python tool_agent.py [URL]
"""

import asyncio
import sys

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

STOCK = {"apples": 12, "pears": 0}


@function_tool
def in_stock(fruit: str) -> str:
    """How many pieces of a fruit are in stock.

    Args:
        fruit: its name in the plural, such as apples.
    """
    return f"{STOCK.get(fruit.lower(), 0)} {fruit}"


async def ask(url: str) -> None:
    """Run the agent once: a forced call, its result, and the model's answer."""
    async with AsyncOpenAI(base_url=url, api_key="none") as client:
        name = (await client.models.list()).data[0].id
        agent = Agent(
            name="shop",
            instructions="You answer questions about the stock of a fruit shop in one sentence. " * 8,
            model=OpenAIChatCompletionsModel(name, client),
            model_settings=ModelSettings(temperature=0, max_tokens=60, tool_choice="required"),
            tools=[in_stock],
        )
        result = await Runner.run(agent, "Do you have apples?")
        for item in result.new_items:
            print(f"{item.type}: {getattr(item, 'output', None) or item.raw_item}")
        usage = result.context_wrapper.usage
        cached = usage.input_tokens_details.cached_tokens
        print(f"{usage.requests} calls: {cached} of {usage.input_tokens} prompt tokens came from the cache")


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    """Print the items of the run and the prefix cache hits."""
    set_tracing_disabled(True)
    asyncio.run(ask(url))


if __name__ == "__main__":
    main(*sys.argv[1:])
