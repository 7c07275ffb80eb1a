"""Mixed requests at once to an ``LLM``, and whether two of them gave the same answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rootgraft import LLM, SamplingParams
from rootgraft.grammar.thought_rules import ThoughtRules
from rootgraft.lora.request import LoRARequest
from support.engine.core_hooks import thinking

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "age": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<call>"],
        "tags": [{"begin": "<call>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</call>"}],
        "at_least_one": True,
    },
}
FORMS = {1: {"json": SCHEMA}, 3: {"structural_tag": TOOLS}, 5: {"json": SCHEMA}, 7: {"regex": "[a-f]{2,9}"}}
THOUGHTS = {
    2: ThoughtRules("<think>", "</think>", is_open=True, budget=5),
    5: ThoughtRules("<think>", "</think>", is_open=True, budget=6, newlines=1),
}
"""By number of a request: without a form, whose thought a budget ends, and with a schema after the thought."""
TOLERANCE = 0.01
"""Of logprobs: they are of sums in another order."""


class Answered(NamedTuple):
    """An answer: its tokens, why it ended, and the logprobs of each position by token."""

    tokens: tuple[int, ...]
    reason: str | None
    scores: list[dict[int, float]] | None


def mixed_answers(
    llm: LLM, adapters: Sequence[str] = (), count: int = 32, logprobs: int | None = None
) -> list[Answered]:
    """Answer shared and repeated prompts: adapters in turns, draws, penalties, scores, forms of all kinds, thoughts.

    Args:
        logprobs: number of logprobs of each position of every request; None for 2 of every third request.
    """
    prompts = [f"{'the same beginning of all ' * (i % 3)}{'ab ' * (i % 5)}request {i % 7}" for i in range(count)]
    names = (None, *adapters)
    requests = [(name := names[i % len(names)]) and LoRARequest(name, i % len(names), name) for i in range(count)]
    params = [_params(i) for i in range(count)]
    if logprobs is not None:
        for each in params:
            each.logprobs = logprobs
    with thinking(llm, [THOUGHTS.get(i % 8) for i in range(count)]):
        found = llm.generate(prompts, params, lora_request=requests, use_tqdm=False)
    return [
        Answered(tuple(each.outputs[0].token_ids), each.outputs[0].finish_reason, _scores(each.outputs[0].logprobs))
        for each in found
    ]


def assert_same(found: Sequence[Answered], expected: Sequence[Answered]) -> None:
    """Assert that tokens and ends are equal, and logprobs nearly so."""
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    for one, other in zip(found, expected, strict=True):
        for position, wanted in zip(one.scores or [], other.scores or [], strict=True):
            assert position.keys() == wanted.keys()
            assert all(abs(position[token] - wanted[token]) < TOLERANCE for token in position)


def is_greedy(i: int) -> bool:
    """Return whether request number ``i`` takes the most likely tokens."""
    return i % 5 != 0


def _params(i: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0 if is_greedy(i) else 0.8,
        seed=i,
        max_tokens=4 + i % 13 + (20 if i % 8 in (2, 3, 5) else 0),
        logprobs=2 if i % 3 == 0 else None,
        prompt_logprobs=1 if i % 8 == 0 else None,
        repetition_penalty=1.2 if i % 6 == 0 else 1.0,
        structured_outputs=FORMS.get(i % 8),
    )


def _scores(logprobs: Any) -> list[dict[int, float]] | None:
    if logprobs is None:
        return None
    return [{token: score.logprob for token, score in position.items()} for position in logprobs]
