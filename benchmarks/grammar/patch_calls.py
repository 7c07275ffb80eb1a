"""Sampled calls of Codex's ``apply_patch`` on the real model: each input must be a patch of its grammar.

All of it must be there: as soon as no more fits, ``max_output_tokens`` ends a patch, and does not cut it.

    PYTHONPATH=tests python -m benchmarks.grammar.patch_calls [--calls 200] [--output FILE.json]

Half of the calls are forced by name and half are one of two tools that must be called, half of them are streamed, with
temperatures up to 1.5 and every seed another. The judge is a regular expression, which has nothing in common with what
holds the calls. Exit code 1 if one call is not a patch.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import openai
import regex
from support.grammar.patch_grammar import PATCH as LARK

from benchmarks.fleet.fleet_harness import START_SECONDS, Figure, finish, parser, run_within, serve_command, wait_ready
from benchmarks.serve.server import Server

CHANGE = r"(?:(?:@@(?: .+)?\n|[+\- ].*\n)+(?:\*\*\* End of File\n)?)?"
HUNKS = (
    r"\*\*\* Add File: .+\n(?:\+.*\n)+",
    r"\*\*\* Delete File: .+\n",
    r"\*\*\* Update File: .+\n(?:\*\*\* Move to: .+\n)?" + CHANGE,
)
PATCH = regex.compile(rf"\*\*\* Begin Patch\n(?:{'|'.join(HUNKS)})+\*\*\* End Patch\n?")
TOOL: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": LARK},
}
OTHER: dict[str, Any] = {
    "type": "custom",
    "name": "run",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]{2,9}( -[a-z])?"},
}
TASKS = ("Delete the file a.txt.", "Add a file b.py that prints hello.", "Rename x to y in main.c.", "Fix the bug.")


def body_of(number: int) -> dict[str, Any]:
    """Return the fields of a call; the same number gives the same ones."""
    draw = random.Random(number)
    is_named = number % 2 == 0
    return {
        "model": "small",
        "input": TASKS[number % len(TASKS)],
        "tools": [TOOL] if is_named else [TOOL, OTHER],
        "tool_choice": {"type": "custom", "name": "apply_patch"} if is_named else "required",
        "temperature": draw.choice((0.3, 0.7, 1.0, 1.5)),
        "max_output_tokens": draw.randrange(60, 120),
        "stream": number % 4 < 2,
        "extra_body": {"seed": number},
    }


@dataclass(frozen=True, slots=True)
class Call:
    """A call in an answer."""

    name: str
    text: str
    is_ended: bool  # by the limit of tokens

    def is_right(self) -> bool:
        """Return whether its input is of its tool's form."""
        pattern = PATCH if self.name == "apply_patch" else regex.compile(OTHER["format"]["definition"])
        return pattern.fullmatch(self.text) is not None


async def called(client: openai.AsyncOpenAI, number: int) -> list[Call]:
    """Ask for an answer, and return its calls. Raises AssertionError if deltas are not the inputs."""
    answer: Any = await client.responses.create(**body_of(number))
    if body_of(number)["stream"]:
        texts: dict[str, str] = {}
        async for event in answer:
            if event.type == "response.custom_tool_call_input.delta":
                texts[event.item_id] = texts.get(event.item_id, "") + event.delta
        answer = event.response
        assert {each.id: each.input for each in answer.output} == texts, texts
    last = len(answer.output) - 1
    is_ended = answer.status != "completed"
    return [Call(each.name, each.input, is_ended and at == last) for at, each in enumerate(answer.output)]


async def measure(options: argparse.Namespace) -> int:
    """Ask for all calls, eight at a time, and report."""
    limit = asyncio.Semaphore(8)
    with Server(serve_command("--served-model-name", "small", "--threads", "2")).running() as (url, process):
        await asyncio.to_thread(wait_ready, url, process)
        async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=600) as client:

            async def one(number: int) -> list[Call]:
                async with limit:
                    return await called(client, number)

            answers = await asyncio.gather(*map(one, range(options.calls)))
    calls = [call for answer in answers for call in answer]
    wrong = [call for call in calls if not call.is_right()]
    for call in wrong[:3]:
        print(call, file=sys.stderr)
    figures = [
        Figure.exactly("answers without a call", sum(not answer for answer in answers), 0),
        Figure.exactly("calls that are not of their grammar", len(wrong), 0),
    ]
    counts = Counter(f"{call.name}{', ended by the limit' if call.is_ended else ''}" for call in calls)
    return finish(options, figures, {"calls": counts, "answers": len(answers)})


def main() -> int:
    """Measure. Returns 1 if something does not hold."""
    made = parser(__doc__)
    made.add_argument("--calls", type=int, default=200)
    options = made.parse_args()
    return run_within(START_SECONDS + 4 * options.calls, measure(options))  # type: ignore[no-any-return]


if __name__ == "__main__":
    sys.exit(main())
