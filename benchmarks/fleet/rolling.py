"""Change the version behind a name under load: canary, promote, rollback; no request fails and no answer is of two.

    python -m benchmarks.fleet.rolling [--models 2] [--replicas 2] [--seconds 5] [--output FILE.json]

One server of so many base models, all of them the default one, each with replicas and a catalogue of its own; the
example adapters `pirate` and `shell` are versions of one name of each. What each version answers to each question is
asked first, by version, while nothing else runs. Then clients of OpenAI's library ask under the name, streaming and
not, and `rootgraft models` changes what it stands for. Each answer must be, letter by letter, what the version in its
`x-model-version` says; a request that begins after a change has returned must get a version that the change allows, and
a rollback has to be in force within a second. Exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from benchmarks.fleet.fleet_harness import START_SECONDS, Figure, finish, parser, run_within, serve_command, wait_ready
from benchmarks.serve.server import Server
from rootgraft.api.cli.main import main as command_line

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
QUESTIONS = ("Tell me about the sea.", "What is a list?", "Name a colour.", "Why do leaves fall?", "How is bread made?")
BASES = ("first", "second", "third")
MOST_CALL = 1.0


@dataclass
class Load:
    """Answers that the clients of one model name received.

    Attributes:
        name: that they ask.
        allowed: versions that requests may get before, during and after each change; the last one holds.
        changes: each with its verb, seconds of the call, seconds from its begin to the end of the first answer that was
            asked for after it, and answers by version until the next change.
    """

    name: str
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
            version, text = await ask(client, load.name, question, tokens, stream=stream)
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
    """Run a command of ``rootgraft models``, and note from when on which versions may answer.

    While it runs those from before may, and those from after, as answers may come before the command has ended.
    """
    began = time.monotonic()
    if load.allowed:
        load.allowed.append(load.allowed[-1].union(allowed))
    code = await asyncio.to_thread(command_line, ["models", verb, *words, "--url", url])
    if code:
        raise SystemExit(f"rootgraft models {verb} has ended with {code}")
    load.changes.append({"verb": verb, "call_s": round(time.monotonic() - began, 3), "answers": {}})
    load.allowed.append(frozenset(allowed))
    load.changed = began


async def go_on(load: Load, seconds: float) -> None:
    """Let the load go on for some seconds, and until a request that began after the last change is answered."""
    await asyncio.sleep(seconds)
    while load.changed is not None and not load.failed:
        await asyncio.sleep(0.02)


async def run(url: str, base: str | None, clients: int, tokens: int, seconds: float) -> Load:
    """Change a name of a base model under load. ``base`` None for the only one."""
    load, end = Load("assistant" if base is None else f"assistant-{base}"), asyncio.Event()
    of_base = () if base is None else ("--base", base)
    name = load.name
    for version in ("pirate", "shell"):
        await change(load, url, "add", (), name, "--source", f"file://{ADAPTERS / version}", *of_base)
    http = openai.DefaultAsyncHttpxClient(trust_env=False, timeout=120)
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=http) as client:
        listed = (await client._client.get(f"{url}/admin/models")).json()["data"]
        one, two = [version["digest"] for each in listed if each["id"] == name for version in each["versions"]]
        for digest in (one, two):
            for question in range(len(QUESTIONS)):
                model = f"{name}@{digest[:12]}"
                load.answers[digest, question] = (await ask(client, model, question, tokens, stream=False))[1]
        await change(load, url, "promote", (one,), f"{name}@{one[:12]}")
        asks = [asyncio.create_task(keep_asking(client, load, place, tokens, end)) for place in range(clients)]
        await go_on(load, seconds)
        await change(load, url, "canary", (one, two), f"{name}@{two[:12]}", "--weight", "50")
        await go_on(load, seconds)
        await change(load, url, "promote", (two,), f"{name}@{two[:12]}")
        await go_on(load, seconds)
        await change(load, url, "rollback", (one, two), name)
        await go_on(load, seconds)
        await change(load, url, "rollback", (one,), name)
        await go_on(load, seconds)
        end.set()
        await asyncio.gather(*asks)
    return load


def file_of(folder: Path, models: int, replicas: int) -> str:
    """Return a models file of base models with replicas and a catalogue each."""
    entries = [
        {"served-model-name": base, "replicas": replicas, "model-catalog": f"{folder}/{base}.db"}
        for base in BASES[:models]
    ]
    return json.dumps({"models": entries})


def options_of(folder: Path) -> tuple[str, ...]:
    """Return the options of servers that may bring the example adapters."""
    return ("--enable-lora", "--adapter-sources", f"file://{ADAPTERS}", "--adapter-cache-dir", f"{folder}/adapters")


async def run_all(url: str, bases: Sequence[str | None], clients: int, tokens: int, seconds: float) -> list[Load]:
    """Change a name of each base model under load, all at once."""
    return await asyncio.gather(*(run(url, base, clients, tokens, seconds) for base in bases))


async def _measure(options: argparse.Namespace, folder: Path) -> int:
    (folder / "fleet.yaml").write_text(file_of(folder, options.models, options.replicas))
    command = serve_command("--config", str(folder / "fleet.yaml"), *options_of(folder))
    with Server(command).running() as (url, process):
        await asyncio.to_thread(wait_ready, url, process)
        bases = BASES[: options.models]
        loads = await run_all(url, bases, options.clients, options.tokens, options.seconds)
    figures, more = [], {}
    for load in loads:
        calls = [each for each in load.changes if each["verb"] == "rollback"]
        figures += [
            Figure.exactly(f"{load.name}, failed", load.failed, []),
            Figure.exactly(f"{load.name}, of two versions or the wrong one", load.wrong, []),
            Figure.exactly(f"{load.name}, versions that answered", len(load.counts), 2),
            Figure.most(
                f"{load.name}, rollback, longest, s",
                max((each["call_s"] for each in calls), default=math.nan),
                MOST_CALL,
            ),
        ]
        more[load.name] = {
            "answers": sum(load.counts.values()),
            "by_version": dict(load.counts),
            "changes": load.changes,
        }
    return finish(options, figures, more)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--models", type=int, default=1, choices=range(1, len(BASES) + 1))
    made.add_argument("--replicas", type=int, default=2, help="of each model")
    made.add_argument("--clients", type=int, default=4, help="of each model")
    made.add_argument("--tokens", type=int, default=32)
    made.add_argument("--seconds", type=float, default=5.0, help="duration of the load before and after each change")
    options = made.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return int(run_within(2 * START_SECONDS + 10 * options.seconds, _measure(options, Path(folder))))


if __name__ == "__main__":
    sys.exit(main())
