"""Typed decisions against as many choice requests, on a server of this machine.

    python benchmarks/serve/decisions.py [--questions 200] [--concurrency 4] [--rounds 3]

Both ask the same questions about the same text, with the same prompts, at the same concurrency: one way as requests of
``/v1/decisions``, the other as chats whose answer is one of the labels. Rounds alternate between the two, each with a
text of its own, which no cache knows. The curve is the time of one request of 200 questions over the number of choices.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import httpx

_WORDS = (
    "river",
    "stone",
    "paper",
    "light",
    "market",
    "engine",
    "winter",
    "letter",
    "garden",
    "signal",
    "bridge",
    "wonder",
)
_TEXT_WORDS = 1_350  # about 1,500 tokens


def text_of(seed: int) -> str:
    """Return a text of about 1,500 tokens."""
    chance = random.Random(seed)
    return " ".join(chance.choice(_WORDS) + chance.choice(["", "", ",", "."]) for _ in range(_TEXT_WORDS))


def question(number: int, num_choices: int) -> dict[str, Any]:
    """Return a choice question; its choices are the same words for all."""
    choices = [{"value": f"{_WORDS[at % len(_WORDS)]} {at}"} for at in range(num_choices)]
    return {"type": "choice", "instructions": f"Which one goes with number {number}?", "choices": choices}


def chat_of(text: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the choice request of a question: the prompt that a decision gives the model, its labels as choices."""
    labels = [chr(ord("A") + at) for at in range(len(asked["choices"]))]
    lines = [f"{label}: {choice['value']}" for label, choice in zip(labels, asked["choices"], strict=True)]
    prompt = "\n".join([f"Question: {asked['instructions']}", *lines, "Answer with the letter of one option only."])
    content = f"{text}\n\n{prompt}"
    return {
        "messages": [{"role": "user", "content": content}],
        "structured_outputs": {"choice": labels},
        "temperature": 0,
        "max_tokens": 8,
    }


async def at_concurrency(calls: Sequence[Callable[[], Awaitable[Any]]], concurrency: int) -> float:
    """Run calls, so many at a time, and return the seconds that all of them take."""
    waiting = iter(calls)

    async def work() -> None:
        for call in waiting:
            await call()

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return time.perf_counter() - began


class Bench:
    """A client of the server."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = await self._http.post(path, json=body)
        reply.raise_for_status()
        return dict(reply.json())

    async def decisions(self, seeds: Sequence[int], questions: list[dict[str, Any]]) -> float:
        """Ask all questions about each text, one request a text; return the seconds of all, one client a text."""
        bodies = [{"input": text_of(seed), "questions": questions} for seed in seeds]
        calls = [partial(self.post, "/v1/decisions", body) for body in bodies]
        return await at_concurrency(calls, len(seeds))

    async def choices(self, seeds: Sequence[int], questions: list[dict[str, Any]]) -> float:
        """Ask the same as choice requests, each client about a text of its own."""
        texts = [text_of(seed) for seed in seeds]
        bodies = [chat_of(text, asked) for asked in questions for text in texts]
        calls = [partial(self.post, "/v1/chat/completions", body) for body in bodies]
        return await at_concurrency(calls, len(seeds))


async def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return medians, and the curve."""
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:
        bench = Bench(http)
        questions = [question(number, options.choices) for number in range(options.questions)]
        await bench.decisions([1], questions[:2])
        await bench.choices([1], questions[:2])
        rates: dict[str, list[float]] = {"decisions": [], "choices": []}
        for number in range(options.rounds):
            for name, ask in (("decisions", bench.decisions), ("choices", bench.choices)):
                seeds = [100 * (number + 1) + 10 * (name == "choices") + each for each in range(options.concurrency)]
                seconds = await ask(seeds, questions)
                rates[name].append(len(questions) * len(seeds) / seconds)
                print(f"{name}: {seconds:.1f} s", file=sys.stderr, flush=True)
        curve = {}
        for num_choices in options.curve:
            asked = [question(number, num_choices) for number in range(options.curve_questions)]
            body = {"input": text_of(9_000 + num_choices), "questions": asked}
            began = time.perf_counter()
            found = await bench.post("/v1/decisions", body)
            curve[num_choices] = {
                "seconds": round(time.perf_counter() - began, 2),
                "tree_tokens": found["usage"]["input_tokens"],
            }
    ratios = [ours / theirs for ours, theirs in zip(rates["decisions"], rates["choices"], strict=True)]
    return {
        "questions_a_second": {name: round(statistics.median(each), 2) for name, each in rates.items()},
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(each, 2) for each in ratios],
        "curve": curve,
        "load": os.getloadavg(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a server that runs; by default one is started with the default model")
    parser.add_argument("--port", type=int, default=38_561)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--choices", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--curve", type=int, nargs="*", default=[2, 26, 255])
    parser.add_argument("--curve-questions", type=int, default=10)
    options = parser.parse_args()
    if options.url is not None:
        print(json.dumps(asyncio.run(measure(options.url, options)), indent=1))
        return
    command = [sys.executable, "-m", "rootgraft.api.cli.main", "serve", "--port", str(options.port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{options.port}"
        try:
            while not _is_ready(url):
                time.sleep(0.5)
            print(json.dumps(asyncio.run(measure(url, options)), indent=1))
        finally:
            process.terminate()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    main()
