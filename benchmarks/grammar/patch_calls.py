"""Sampled calls of Codex's ``apply_patch`` on the real model: each input must be a patch of its grammar.

    PYTHONPATH=tests python -m benchmarks.grammar.patch_calls [--calls 200] [--output FILE.json]

Half of the calls are forced by name and half are one of two tools that must be called, half of them are streamed, with
temperatures up to 1.5 and every seed another. The judge is a regular expression of Python, which has nothing in common
with what holds the calls. Exit code 1 if one call is no patch.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
from collections import Counter
from typing import Any

import openai
from support.grammar.patch_grammar import PATCH as LARK

from benchmarks.fleet.fleet_harness import START_SECONDS, Figure, finish, parser, run_within, serve_command, wait_ready
from benchmarks.serve.server import Server

CHANGE = r"(?:(?:@@(?: .+)?\n|[+\- ].*\n)+(?:\*\*\* End of File\n)?)?"
HUNKS = (
    r"\*\*\* Add File: .+\n(?:\+.*\n)+",
    r"\*\*\* Delete File: .+\n",
    r"\*\*\* Update File: .+\n(?:\*\*\* Move to: .+\n)?" + CHANGE,
)
PATCH = re.compile(rf"\*\*\* Begin Patch\n(?:{'|'.join(HUNKS)})+\*\*\* End Patch\n?")
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
        "temperature": draw.choice((0.7, 1.0, 1.5)),
        "max_output_tokens": draw.randrange(60, 120),
        "stream": number % 4 < 2,
        "extra_body": {"seed": number},
    }


async def called(client: openai.AsyncOpenAI, number: int) -> list[tuple[str, str]]:
    """Make a call. Returns names and inputs of the calls in the answer."""
    answer: Any = await client.responses.create(**body_of(number))
    if not body_of(number)["stream"]:
        return [(each.name, each.input) for each in answer.output]
    pieces = Counter[str]()
    texts: dict[str, str] = {}
    async for event in answer:
        if event.type == "response.custom_tool_call_input.delta":
            texts[event.item_id] = texts.get(event.item_id, "") + event.delta
            pieces[event.item_id] += 1
        elif event.type == "response.output_item.done":
            assert event.item.input == texts[event.item.id], "the deltas make the input"
            texts[event.item.id] = event.item.name + "\0" + event.item.input
    return [(name, text) for name, _, text in (each.partition("\0") for each in texts.values())]


def is_right(name: str, text: str) -> bool:
    """Return whether a call's input is of its tool's form."""
    pattern = PATCH if name == "apply_patch" else re.compile(OTHER["format"]["definition"])
    return pattern.fullmatch(text) is not None


async def measure(options: argparse.Namespace) -> int:
    """Ask for all calls, eight at a time, and report."""
    limit = asyncio.Semaphore(8)
    with Server(serve_command("--served-model-name", "small", "--threads", "2")).running() as (url, process):
        await asyncio.to_thread(wait_ready, url, process)
        async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=600) as client:

            async def one(number: int) -> list[tuple[str, str]]:
                async with limit:
                    return await called(client, number)

            answers = await asyncio.gather(*map(one, range(options.calls)))
    calls = [call for answer in answers for call in answer]
    wrong = [call for call in calls if not is_right(*call)]
    for name, text in wrong[:3]:
        print(f"{name}: {text!r}", file=sys.stderr)
    figures = [
        Figure.exactly("answers without a call", sum(not answer for answer in answers), 0),
        Figure.exactly("calls that are not of their grammar", len(wrong), 0),
    ]
    return finish(options, figures, {"calls": Counter(name for name, _ in calls), "answers": len(answers)})


def main() -> int:
    """Measure. Returns 1 if something does not hold."""
    made = parser(__doc__)
    made.add_argument("--calls", type=int, default=200)
    options = made.parse_args()
    return run_within(START_SECONDS + 4 * options.calls, measure(options))  # type: ignore[no-any-return]


if __name__ == "__main__":
    sys.exit(main())
