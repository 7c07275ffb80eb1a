"""Typed decisions against as many choice requests, here and by llama.cpp's server.

    python -m benchmarks.serve.decisions [--questions 200] [--concurrency 4] [--rounds 3] [--llama-server PATH]

All ask the same questions about the same text, with the same prompts, at the same concurrency: one way as requests of
``/v1/decisions``, the others as chats whose answer is one of the labels. llama.cpp has no typed decisions: it gets the
chats, each with a grammar of its labels, and serves the same GGUF file. Rounds go through the ways in turn, each with
texts of its own, which no cache knows. The curve is the time of one request over the number of choices of a question.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.serve.installed_peers import PEERS, find_llama_server
from benchmarks.serve.server import Server, machine
from rootgraft.engine.checkpoint.locate import resolve_model

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


def chat_of(text: str, asked: dict[str, Any], dialect: str) -> dict[str, Any]:
    """Return the choice request of a question: the prompt that a decision gives the model, its labels as choices."""
    labels = [chr(ord("A") + at) for at in range(len(asked["choices"]))]
    lines = [f"{label}: {choice['value']}" for label, choice in zip(labels, asked["choices"], strict=True)]
    prompt = "\n".join([f"Question: {asked['instructions']}", *lines, "Answer with the letter of one option only."])
    content = f"{text}\n\n{prompt}"
    held: dict[str, Any] = {"structured_outputs": {"choice": labels}}
    if dialect == "llama.cpp":
        held = {"grammar": "root ::= " + " | ".join(json.dumps(label) for label in labels)}
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8, **held}


async def at_concurrency(calls: Sequence[Callable[[], Awaitable[Any]]], concurrency: int) -> float:
    """Run calls, so many at a time, and return the seconds that all of them take."""
    waiting = iter(calls)

    async def work() -> None:
        for call in waiting:
            await call()

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return time.perf_counter() - began


class Client:
    """A client of one server.

    Attributes:
        dialect: how the server is told the choices of a chat.
    """

    def __init__(self, http: httpx.AsyncClient, dialect: str) -> None:
        self._http = http
        self._dialect = dialect

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = await self._http.post(path, json=body)
        reply.raise_for_status()
        return dict(reply.json())

    async def decisions(self, seeds: Sequence[int], questions: list[dict[str, Any]]) -> float:
        """Ask all questions about each text, one request a text; return the seconds of all, one client a text."""
        bodies = [{"input": text_of(seed), "questions": questions} for seed in seeds]
        calls = [partial(self.post, "/decisions", body) for body in bodies]
        return await at_concurrency(calls, len(seeds))

    async def choices(self, seeds: Sequence[int], questions: list[dict[str, Any]]) -> float:
        """Ask the same as choice requests, each client about a text of its own."""
        texts = [text_of(seed) for seed in seeds]
        bodies = [chat_of(text, asked, self._dialect) for asked in questions for text in texts]
        calls = [partial(self.post, "/chat/completions", body) for body in bodies]
        return await at_concurrency(calls, len(seeds))


async def measure(urls: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Return medians of questions a second, ratios within the rounds, and the curve.

    Args:
        urls: of our server as "ours", and of llama.cpp's as "llama.cpp" where it runs.
    """
    async with AsyncExitStack() as stack:
        clients = {
            name: Client(
                await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=600, trust_env=False)), name
            )
            for name, url in urls.items()
        }
        ours = clients["ours"]
        ways = {"decisions": ours.decisions, "choices": ours.choices}
        ways |= {f"choices by {name}": client.choices for name, client in clients.items() if client is not ours}
        questions = [question(number, options.choices) for number in range(options.questions)]
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for ask in ways.values():
            await ask([1], questions[:2])
        for number in range(options.rounds):
            for place, (name, ask) in enumerate(ways.items()):
                seeds = [1_000 * (number + 1) + 100 * place + each for each in range(options.concurrency)]
                seconds = await ask(seeds, questions)
                rates[name].append(len(questions) * len(seeds) / seconds)
                print(f"{name}: {seconds:.1f} s", file=sys.stderr, flush=True)
        curve = {count: await _point(ours, count, options.curve_questions) for count in options.curve}
    return {
        "questions_a_second": {name: round(statistics.median(each), 2) for name, each in rates.items()},
        "decisions_over": {
            name: [round(ours / theirs, 2) for ours, theirs in zip(rates["decisions"], each, strict=True)]
            for name, each in rates.items()
            if name != "decisions"
        },
        "curve": curve,
        "load": os.getloadavg(),
    }


async def _point(client: Client, num_choices: int, num_questions: int) -> dict[str, Any]:
    """Return seconds and tokens of one request about a new text."""
    asked = [question(number, num_choices) for number in range(num_questions)]
    began = time.perf_counter()
    found = await client.post("/decisions", {"input": text_of(9_000_000 + num_choices), "questions": asked})
    return {"seconds": round(time.perf_counter() - began, 2), "tree_tokens": found["usage"]["input_tokens"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--choices", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--curve", type=int, nargs="*", default=[2, 26, 255])
    parser.add_argument("--curve-questions", type=int, default=10)
    parser.add_argument("--llama-server", help="llama.cpp's llama-server; by default it is left out")
    parser.add_argument("--output", type=Path, help="JSON file of the result")
    options = parser.parse_args()
    servers = {"ours": Server(f"{shlex.quote(sys.executable)} -m rootgraft.api.cli.main serve --port {{port}}")}
    if options.llama_server is not None:
        peer = find_llama_server(options.llama_server, Path())
        script, model = PEERS / "llama_cpp.sh", resolve_model(None).path
        variables = f"LLAMA_SERVER={shlex.quote(str(peer.program))} MODEL={shlex.quote(str(model))}"
        servers["llama.cpp"] = Server(f"env {variables} bash {shlex.quote(str(script))} {{port}}")
    with ExitStack() as stack:
        urls = {name: stack.enter_context(server.running())[0] for name, server in servers.items()}
        for name, url in urls.items():
            _wait_until_ready(url.removesuffix("/v1") + ("/ready" if name == "ours" else "/health"))
        document = {"machine": machine(), **asyncio.run(measure(urls, options))}
    print(json.dumps(document, indent=1))
    if options.output is not None:
        options.output.write_text(json.dumps(document, indent=1) + "\n")


def _wait_until_ready(url: str) -> None:
    """Wait until a server's model is loaded, up to five minutes."""
    for _ in range(600):
        try:
            if httpx.get(url, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"{url} did not become ready")


if __name__ == "__main__":
    main()
