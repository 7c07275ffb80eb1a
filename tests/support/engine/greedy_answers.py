"""Answers of an engine core to prompts that come together."""

from __future__ import annotations

from array import array

from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.messages import Done, Submit, TokenOut
from rootgraft.engine.types import SamplingParams


def greedy_answers(core: EngineCore, prompts: list[list[int]], count: int) -> tuple[list[list[int]], list[int]]:
    """Return ``count`` greedy tokens after each prompt, and the cached tokens of each."""
    said: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
    cached = dict.fromkeys(said, 0)
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    core.handle([Submit(number, array("i", prompt), params) for number, prompt in enumerate(prompts)])
    while core.has_work:
        for message in core.step():
            assert isinstance(message, (TokenOut, Done)), message
            if isinstance(message, TokenOut):
                said[message.id] += message.tokens
            else:
                cached[message.id] = message.usage.cached
        core.check()
    return list(said.values()), list(cached.values())
