"""Answers of an engine core to prompts that come together, and of an engine process to one."""

from __future__ import annotations

import asyncio
from array import array

from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.messages import Done, Message, Submit, TokenOut
from rootgraft.engine.serving.engine_client import EngineClient
from rootgraft.engine.types import SamplingParams
from support.engine.core_hooks import preempt, scheduler_of


def greedy_answers(
    core: EngineCore, prompts: list[list[int]], count: int, preempt_every: int = 0
) -> tuple[list[list[int]], list[int]]:
    """Return ``count`` greedy tokens after each prompt, and the cached tokens of each.

    Args:
        preempt_every: if given, after so many steps the sequence that has run longest is preempted.
    """
    said: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
    cached = dict.fromkeys(said, 0)
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    core.handle([Submit(number, array("i", prompt), params) for number, prompt in enumerate(prompts)])
    steps = 0
    while core.has_work:
        steps += 1
        running = scheduler_of(core).running
        if preempt_every and steps % preempt_every == 0 and running:
            preempt(core, running[0])
        for message in core.step():
            assert isinstance(message, (TokenOut, Done)), message
            if isinstance(message, TokenOut):
                said[message.id] += message.tokens
            else:
                cached[message.id] = message.usage.cached
        core.check()
    return list(said.values()), list(cached.values())


async def tokens_of(client: EngineClient, params: SamplingParams) -> list[int]:
    """Return the answer of an engine that is started to the prompt 1, 2, 3."""
    tokens: list[int] = []
    ended: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    def take(messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, TokenOut):
                tokens.extend(message.tokens)
            elif isinstance(message, Done):
                ended.set_result(message)

    client.on_frame = take
    client.submit([Submit(1, array("i", [1, 2, 3]), params)])
    await ended
    return tokens
