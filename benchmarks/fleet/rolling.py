"""Change the version behind a name under load: canary, promote, rollback; no request fails and no answer is of two.

    python -m benchmarks.fleet.rolling [--clients 4] [--tokens 32] [--seconds 5] [--output FILE.json]

One server of the default model with a catalogue; the example adapters `pirate` and `shell` are versions of one name.
What each version answers to each question is asked first, by version, while nothing else runs. Then clients of OpenAI's
library ask under the name, streaming and not, and `rootgraft models` changes what it stands for. Each answer must be,
letter by letter, what the version in its `x-model-version` says; a request that begins after a change has returned must
get a version that the change allows. Exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

from benchmarks.serve.server import Server, machine
from rootgraft.api.cli.main import main as command_line

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
QUESTIONS = ("Tell me about the sea.", "What is a list?", "Name a colour.", "Why do leaves fall?", "How is bread made?")
NAME = "assistant"


@dataclass
class Load:
    """What the clients saw.

    Attributes:
        allowed: versions that requests may get after each change, and before and during the first; the last one holds.
        changes: each with its verb, seconds of the call, seconds from its begin to the end of the first answer that was
            asked for after it, and answers by version until the next change.
    """

    answers: dict[tuple[str, int], str] = field(default_factory=dict)
    allowed: list[frozenset[str]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)
    changed: float | None = None  # when the last change began, until an answer has come that was asked for after it


async def ask(client: openai.AsyncOpenAI, model: str, question: int, tokens: int, *, stream: bool) -> tuple[str, str]:
    """Return the version that answers and its text."""
    options: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTIONS[question]}],
        "max_tokens": tokens,
        "temperature": 0,
    }
    if not stream:
        whole = await client.chat.completions.with_raw_response.create(**options)
        return whole.headers["x-model-version"], whole.parse().choices[0].message.content or ""
    raw = await client.chat.completions.with_raw_response.create(**options, stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in raw.parse() if chunk.choices]
    return raw.headers["x-model-version"], "".join(pieces)


async def keep_asking(client: openai.AsyncOpenAI, load: Load, place: int, tokens: int, end: asyncio.Event) -> None:
    """Ask again and again, and compare."""
    number = place
    while not end.is_set():
        number += 1
        question, stream = number % len(QUESTIONS), number % 2 == 0
        began, first = time.monotonic(), len(load.allowed) - 1
        try:
            version, text = await ask(client, NAME, question, tokens, stream=stream)
        except openai.OpenAIError as error:
            load.failed.append(repr(error))
            continue
        load.counts[version] += 1
        answers = load.changes[-1]["answers"]
        answers[version[:12]] = answers.get(version[:12], 0) + 1
        if text != load.answers[version, question]:
            load.wrong.append(f"{version[:12]} to {QUESTIONS[question]!r}: {text!r}")
        if version not in frozenset.union(*load.allowed[first:]):
            load.wrong.append(f"{version[:12]} answered a request that began after another one was put in its place")
        if load.changed is not None and version in load.allowed[-1] and began >= load.changed:
            load.changes[-1]["first_answer_s"] = round(time.monotonic() - load.changed, 3)
            load.changed = None


async def change(load: Load, url: str, verb: str, allowed: Collection[str], *words: str) -> None:
    """Run a command of ``rootgraft models``, and note from when on which versions may answer."""
    began = time.monotonic()
    code = await asyncio.to_thread(command_line, ["models", verb, *words, "--url", url])
    if code:
        raise SystemExit(f"rootgraft models {verb} has ended with {code}")
    load.changes.append({"verb": verb, "call_s": round(time.monotonic() - began, 3), "answers": {}})
    load.allowed.append(frozenset(allowed))
    load.changed = began


async def run(url: str, clients: int, tokens: int, seconds: float) -> Load:
    load, end = Load(), asyncio.Event()
    for version in ("pirate", "shell"):
        await change(load, url, "add", (), NAME, "--source", f"file://{ADAPTERS / version}")
    async with openai.AsyncOpenAI(
        base_url=url, api_key="none", max_retries=0, http_client=httpx.AsyncClient(trust_env=False, timeout=120)
    ) as client:
        listed = (await client._client.get(f"{url}/admin/models")).json()["data"][-1]
        one, two = [version["digest"] for version in listed["versions"]]
        for digest in (one, two):
            for question in range(len(QUESTIONS)):
                model = f"{NAME}@{digest[:12]}"
                load.answers[digest, question] = (await ask(client, model, question, tokens, stream=False))[1]
        await change(load, url, "promote", (one,), f"{NAME}@{one[:12]}")
        asks = [asyncio.create_task(keep_asking(client, load, place, tokens, end)) for place in range(clients)]
        await asyncio.sleep(seconds)
        await change(load, url, "canary", (one, two), f"{NAME}@{two[:12]}", "--weight", "50")
        await asyncio.sleep(seconds)
        await change(load, url, "promote", (two,), f"{NAME}@{two[:12]}")
        await asyncio.sleep(seconds)
        await change(load, url, "rollback", (one, two), NAME)
        await asyncio.sleep(seconds)
        await change(load, url, "rollback", (one,), NAME)
        await asyncio.sleep(seconds)
        end.set()
        await asyncio.gather(*asks)
    return load


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=5.0, help="of load before and after each change")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        words = [sys.executable, "-P", "-m", "rootgraft.api.cli.main", "serve", "--port", "{port}", "--enable-lora"]
        words += ["--adapter-sources", f"file://{ADAPTERS}", "--model-catalog", f"{folder}/models.db"]
        words += ["--adapter-cache-dir", f"{folder}/adapters", "--kv-cache-memory", "0.25"]
        url, _ = stack.enter_context(Server(shlex.join(words)).running())
        wait_ready(url)
        load = asyncio.run(run(url, options.clients, options.tokens, options.seconds))
    figures = {
        "answers": sum(load.counts.values()),
        "by_version": {version[:12]: count for version, count in load.counts.items()},
        "failed": load.failed,
        "of_two_versions_or_the_wrong_one": load.wrong,
        "changes": load.changes,
    }
    command = f"python -m benchmarks.fleet.rolling --clients {options.clients} --tokens {options.tokens}"
    command += f" --seconds {options.seconds:g}"
    text = json.dumps({"command": command, "machine": machine(), "figures": figures}, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")
    return int(bool(load.failed or load.wrong))


def wait_ready(url: str) -> None:
    """Wait until a server that was just started is ready."""
    place = url.removesuffix("/v1")
    with httpx.Client(trust_env=False) as http:
        while True:
            try:
                if http.get(f"{place}/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
