"""Two base models behind one door: one is killed, changed and removed under load, and the other feels nothing of it.

    python -m benchmarks.fleet.two_models [--clients 2] [--tokens 32] [--seconds 4] [--output FILE.json]

`rootgraft serve --config` with the default model twice, in two forms of its weights. Clients of OpenAI's library stream
from both and compare each answer, letter by letter, with what the model said before, while nothing else ran. Meanwhile

1. the engine process of the second is killed: its streams go on in the one that takes its place;
2. the second becomes another model (a changed file and SIGHUP): each answer is the old or the new one's, whole;
3. the second is removed (`rootgraft models remove`): its streams end as they would have, and new ones get a 404.

Exit code 1 if a request failed, or an answer was another one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import psutil

from benchmarks.fleet.fleet_harness import START_SECONDS, Figure, finish, parser, run_within, wait_ready
from benchmarks.serve.server import Server
from rootgraft.api.cli.main import main as command_line

QUESTIONS = ("Tell me about the sea.", "What is a list?", "Name a colour.", "Why do leaves fall?")
FORMS = ("gguf_dynamic", "gguf")  # Form of the second model's weights at the start, and the form that they change to.
NAMES = ("first", "second")


@dataclass
class Load:
    """Answers that the clients received.

    Attributes:
        answers: of each model, the answers that are right for a question.
        ended: names of removed models.
        refused: requests that began after the end of their model, and were told so.
    """

    answers: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    ended: set[str] = field(default_factory=set)
    refused: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)


async def ask(client: openai.AsyncOpenAI, model: str, question: int, tokens: int) -> str:
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTIONS[question]}],
        max_tokens=tokens,
        temperature=0,
        stream=True,
    )
    text, finish = "", None
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        finish = chunk.choices[0].finish_reason or finish
    return f"{text} ({finish})"


async def keep_asking(client: openai.AsyncOpenAI, load: Load, model: str, tokens: int, end: asyncio.Event) -> None:
    """Stream again and again, until the end or that of the model."""
    number = 0
    while not end.is_set():
        number += 1
        question, was_ended = number % len(QUESTIONS), model in load.ended
        try:
            text = await ask(client, model, question, tokens)
        except openai.NotFoundError as error:
            load.refused += 1
            if model not in load.ended:
                load.failed.append(repr(error))
            return
        except openai.OpenAIError as error:
            load.failed.append(repr(error))
            continue
        load.counts[model] += 1
        if was_ended:
            load.wrong.append(f"{model} answered a request that began after its end")
        if text not in load.answers[model, question]:
            load.wrong.append(f"{model} to {QUESTIONS[question]!r}: {text!r}")


async def learn(client: openai.AsyncOpenAI, load: Load, model: str, tokens: int) -> None:
    """Ask a model everything once, while nothing else runs."""
    for question in range(len(QUESTIONS)):
        load.answers.setdefault((model, question), set()).add(await ask(client, model, question, tokens))


def file_of(folder: Path, form: str) -> str:
    """Return a models file with the second model in a form of its weights."""
    models = [{"served-model-name": NAMES[0]}, {"served-model-name": NAMES[1], "quantization": form}]
    return json.dumps({"threads": 1, "kv-cache-memory": 0.25, "usage-ledger": f"{folder}/usage.db", "models": models})


def engines(process: psutil.Process) -> list[psutil.Process]:
    """Return the engine processes of a server, in the order of their start."""
    found = []
    for each in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it is ending
            # One that was forked has the words of the template that it was forked from.
            is_forked = "rootgraft.engine.core.engine_template" in each.cmdline() and each.ppid() != process.pid
            if is_forked or "rootgraft.engine.core.engine_process" in each.cmdline():
                found.append((each.create_time(), each))
    return [each for _, each in sorted(found, key=lambda pair: pair[0])]


async def run(url: str, server: psutil.Process, file: Path, options: argparse.Namespace) -> Load:
    load, end, tokens = Load(), asyncio.Event(), options.tokens
    http = openai.DefaultAsyncHttpxClient(trust_env=False, timeout=120)
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=http) as client:
        listed = [card.id async for card in client.models.list()]
        assert listed == list(NAMES), listed
        # The last form first, so that its answers are known before it takes the name under load.
        await change(load, server, file, file_of(file.parent, FORMS[1]), "learning")
        for name in NAMES:
            await learn(client, load, name, tokens)
        await change(load, server, file, file_of(file.parent, FORMS[0]), "back")
        await learn(client, load, "second", tokens)
        asks = [
            asyncio.create_task(keep_asking(client, load, name, tokens, end))
            for name in NAMES
            for _ in range(options.clients)
        ]
        await asyncio.sleep(options.seconds)
        os.kill(engines(server)[-1].pid, signal.SIGKILL)
        await settled(server)
        await asyncio.sleep(options.seconds)
        await change(load, server, file, file_of(file.parent, FORMS[1]), "rolling_update")
        await asyncio.sleep(options.seconds)
        began = time.monotonic()
        load.ended.add("second")
        assert await asyncio.to_thread(command_line, ["models", "remove", "second", "--url", url]) == 0
        load.figures["remove_call_s"] = round(time.monotonic() - began, 3)
        while len(engines(server)) > 1:
            await asyncio.sleep(0.1)
        load.figures["removed_engine_ended_s"] = round(time.monotonic() - began, 3)
        await asyncio.sleep(options.seconds)
        end.set()
        await asyncio.gather(*asks)
    return load


async def settled(server: psutil.Process) -> None:
    """Wait until the engine that was killed has a successor."""
    await asyncio.sleep(1)
    while len(engines(server)) < len(NAMES):
        await asyncio.sleep(0.1)


async def change(load: Load, server: psutil.Process, file: Path, content: str, what: str) -> None:
    """Change the models file, and wait until the new engine has taken the old one's place."""
    before, began = {each.pid for each in engines(server)}, time.monotonic()
    file.write_text(content)
    server.send_signal(signal.SIGHUP)
    while True:
        now = {each.pid for each in engines(server)}
        if len(now) == len(NAMES) and now - before:
            break
        await asyncio.sleep(0.1)
    load.figures[f"{what}_s"] = round(time.monotonic() - began, 3)


async def _measure(options: argparse.Namespace, folder: Path) -> int:
    file = folder / "fleet.yaml"
    file.write_text(file_of(folder, FORMS[0]))
    words = [sys.executable, "-P", "-m", "rootgraft.api.cli.main", "serve", "--port", "{port}"]
    with Server(shlex.join([*words, "--config", str(file)])).running() as (url, process):
        assert process is not None
        await asyncio.to_thread(wait_ready, url, process)
        load = await run(url, psutil.Process(process.pid), file, options)
        with sqlite3.connect(f"file:{folder}/usage.db?mode=ro", uri=True) as db:
            ledger = dict(db.execute("SELECT model, sum(requests) FROM usage GROUP BY model"))
    figures = [
        Figure.exactly("failed", load.failed, []),
        Figure.exactly("answers that differ", load.wrong, []),
        Figure.least("refused after the removal", load.refused, 1),
    ]
    return finish(options, figures, {"answers": dict(load.counts), "ledger": ledger, **load.figures})


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--clients", type=int, default=2, help="of each model")
    made.add_argument("--tokens", type=int, default=32)
    made.add_argument("--seconds", type=float, default=4.0, help="duration of the load before and after each event")
    options = made.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return int(run_within(2 * START_SECONDS + 10 * options.seconds, _measure(options, Path(folder))))


if __name__ == "__main__":
    sys.exit(main())
