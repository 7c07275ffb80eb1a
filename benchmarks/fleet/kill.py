"""Kill replicas under mixed streams of the default model: every answer must be what an undisturbed engine gives.

    python -m benchmarks.fleet.kill [--replicas 2] [--streams 16] [--kills 4] [--tokens 64] [--poison | --split]

Free text, sampled text with penalties and logprobs, two answers to a prompt, stop strings, a JSON schema, a choice, and
three adapters, first through one engine process, then through a fleet of engine processes of one thread each, of which
one is killed (SIGKILL) again and again while answers are written. Tokens, logprobs, text, ends and token counts are
compared. A replica with a request that has lost two in a row is left alone until the request gets a token, since the
third loss would end it. With ``--poison`` instead, the replica of one request is killed whenever it has it and has sent
no token: that request must fail after the third, and the others must be answered as ever. With ``--split`` one replica
computes the prompts and the other one the answers, and each prompt is 320 tokens longer. Exit code 1 for any
difference.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from array import array
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rootgraft.engine.checkpoint.locate import resolve_model
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.serving.async_engine import AsyncEngine
from rootgraft.engine.serving.engine_client import EngineClient
from rootgraft.engine.serving.output_processor import SequenceOutput
from rootgraft.engine.serving.request import TextRequest
from rootgraft.engine.serving.template_client import EngineTemplate
from rootgraft.engine.text.tokenizer import Tokenizer
from rootgraft.engine.types import SamplingParams
from rootgraft.fleet.dispatcher import MOST_DEATHS, SUSPECT_DEATHS, DispatcherLimits
from rootgraft.fleet.fleet import Fleet
from rootgraft.fleet.replica_launcher import ProcessLauncher
from rootgraft.grammar.spec import GrammarSpec

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
QUESTIONS = (
    "Tell me about the sea.", "Write a story of a fox and a hen.", "What is a matrix?", "Describe a person.",
    "Why do leaves fall in autumn?", "Name a colour and say why you like it.", "How does one bake bread?",
)  # fmt: skip
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 5, "presence_penalty": 0.7, "frequency_penalty": 0.3, "logprobs": 2},
    {"temperature": 0.8, "seed": 9, "top_p": 0.9, "repetition_penalty": 1.1, "n": 2},
    {"temperature": 0.7, "seed": 2, "stop": (".", "\n\n")},
    {"temperature": 1.0, "seed": 3, "grammar": GrammarSpec.json_schema(SCHEMA)},
    {"grammar": GrammarSpec.choice(["red, like a rose", "blue, like the sky", "green, like the grass"])},
    {"adapter": "pirate", "temperature": 0.9, "seed": 4},
    {"adapter": "contact"},
    {"adapter": "shell", "logprobs": 0},
)


@dataclass
class Outcome:
    """Texts of a run of all streams, and the longest pause of each stream between two deltas, in seconds."""

    outputs: list[dict[int, SequenceOutput]] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    num_kills: int = 0
    num_replays: int = 0


def requests(tokenizer: Tokenizer, count: int, max_tokens: int, more: int = 0) -> list[TextRequest]:
    """Return the requests of all streams.

    Args:
        more: tokens before each prompt, which no other one has.
    """
    made = []
    names = sorted(path.name for path in ADAPTERS.iterdir() if path.is_dir())
    for number in range(count):
        kind = dict(KINDS[number % len(KINDS)])
        own = {name: kind.pop(name) for name in ("n", "stop", "grammar", "adapter") if name in kind}
        if "adapter" in own:
            own["adapter"] = names[number % len(names)]
        prompt = f"<|im_start|>user\n{QUESTIONS[number % len(QUESTIONS)]}<|im_end|>\n<|im_start|>assistant\n"
        params = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **kind})
        head = array("i", map(random.Random(number).randrange, [1000] * more))
        made.append(TextRequest(head + tokenizer.encode(prompt, False), params, **own))
    return made


async def _read(engine: AsyncEngine, request: TextRequest, outcome: Outcome, place: int) -> None:
    outputs, last, pause = outcome.outputs[place], time.monotonic(), 0.0
    async with aclosing(engine.stream(request)) as stream:
        async for deltas in stream:
            now = time.monotonic()
            pause, last = max(pause, now - last if outputs else 0.0), now
            for delta in deltas:
                outputs.setdefault(delta.index, SequenceOutput()).add(delta)
    outcome.pauses.append(pause)


async def _kill(fleet: Fleet, outcome: Outcome, replicas: int, kills: int) -> None:
    """Kill a replica whenever all serve and answers are under way."""
    draw = random.Random(1)
    while outcome.num_kills < kills:
        await asyncio.sleep(draw.uniform(0.2, 1.0))
        if len(fleet.replicas) < replicas or not any(outcome.outputs):
            continue
        name = draw.choice(list(fleet.replicas))
        if not any(
            entry.replica == name and entry.losses.in_a_row >= SUSPECT_DEATHS for entry in fleet._dispatcher._journal
        ):
            fleet.replicas[name].kill()
            outcome.num_kills += 1


async def run(
    config: EngineConfig,
    replicas: int,
    streams: int,
    kills: int,
    max_tokens: int,
    *,
    roles: Sequence[str] = (),
    more: int = 0,
) -> Outcome:
    """Run all streams; ``replicas`` 0 is an engine without a fleet. ``more`` is passed to ``requests``."""
    path = resolve_model(None).path
    tokenizer = Tokenizer.load(path)
    make = partial(EngineClient, config, path, heartbeat_timeout=30.0)
    limits = DispatcherLimits(heartbeat_seconds=30.0)  # the machine may be busy
    template = EngineTemplate(config, path)
    launcher = ProcessLauncher(partial(make, spawn=template.spawn), template)
    client: Any = Fleet(launcher, replicas, limits, roles=roles) if replicas else make()
    ready = await client.start()
    engine = AsyncEngine(client, tokenizer, ready)
    outcome = Outcome([{} for _ in range(streams)])
    asked = requests(tokenizer, streams, max_tokens, more)
    jobs = [_read(engine, each, outcome, place) for place, each in enumerate(asked)]
    killer = asyncio.create_task(_kill(client, outcome, replicas, kills)) if kills else None
    try:
        await asyncio.gather(*jobs)
    finally:
        if killer is not None:
            killer.cancel()
        outcome.num_replays = client.num_replays if replicas else 0
        await client.close()
    return outcome


async def run_poison(config: EngineConfig, streams: int, max_tokens: int) -> tuple[Outcome, str]:
    """Run all streams beside a request whose replicas are killed. Returns what they said, and how that one failed."""
    path = resolve_model(None).path
    tokenizer = Tokenizer.load(path)
    fleet = Fleet(ProcessLauncher(partial(EngineClient, config, path)), 2, DispatcherLimits(heartbeat_seconds=30.0))
    engine = AsyncEngine(fleet, tokenizer, await fleet.start())
    outcome = Outcome([{} for _ in range(streams)])
    jobs = [_read(engine, each, outcome, place) for place, each in enumerate(requests(tokenizer, streams, max_tokens))]
    others = asyncio.gather(*jobs)
    try:
        failure = await _poison(fleet, engine, tokenizer, outcome)
        await others
        outcome.num_replays = fleet.num_replays
    finally:
        others.cancel()
        await fleet.close()
    return outcome, failure


async def _poison(fleet: Fleet, engine: AsyncEngine, tokenizer: Tokenizer, outcome: Outcome) -> str:
    """Ask for an answer to a prompt of many steps, and kill each replica that begins with it. Returns the error."""
    prompt = tokenizer.encode("Once more. " * 1200, False)
    asked = asyncio.create_task(_read(engine, TextRequest(prompt, SamplingParams(max_tokens=4)), Outcome([{}]), 0))
    killed: set[str] = set()
    journal = fleet._dispatcher._journal
    while not asked.done():
        await asyncio.sleep(0.02)
        for entry in journal:
            is_it = len(entry.submit.tokens) == len(prompt) and not entry.generated
            if is_it and entry.replica is not None and entry.replica not in killed:
                killed.add(entry.replica)
                fleet.replicas[entry.replica].kill()
                outcome.num_kills += 1
    error = asked.exception()
    return f"{type(error).__name__}: {error}"


def differences(one: Outcome, other: Outcome) -> list[str]:
    """Return the streams that differ in more than what the prefix cache and drafts had to do with."""
    found = []
    for place, pair in enumerate(zip(one.outputs, other.outputs, strict=True)):
        facts = [
            {
                index: (out.tokens, out.text, out.logprobs, out.finish and out.finish.reason,
                        out.finish and (out.finish.usage.prompt, out.finish.usage.completion, out.finish.stop_reason))
                for index, out in outputs.items()
            }
            for outputs in pair
        ]  # fmt: skip
        if facts[0] != facts[1]:
            found.append(f"stream {place}: {facts[0]}\nthen {facts[1]}")
    return found


def config_of(threads: int = 1) -> EngineConfig:
    return EngineConfig(
        device="cpu", threads=threads, kv_cache_memory=0.25, max_num_seqs=16, enable_lora=True, lora_dir=str(ADAPTERS)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--poison", action="store_true", help="one request kills its replicas")
    parser.add_argument("--split", action="store_true", help="one replica for prompts, one for answers")
    options = parser.parse_args()
    streams, tokens = options.streams, options.tokens
    more, roles = (320, ("prefill", "decode")) if options.split else (0, ())
    plain = asyncio.run(run(config_of(), 0, streams, 0, tokens, more=more))
    if options.poison:
        outcome, failure = asyncio.run(run_poison(config_of(), streams, tokens))
        wrong = differences(plain, outcome)
        print("\n".join(wrong))
        print(f"{outcome.num_kills} kills: {failure}")
        print(f"{streams} other streams, {outcome.num_replays} replays, {len(wrong)} streams differ")
        return int(bool(wrong) or outcome.num_kills != MOST_DEATHS or "3 times in a row" not in failure)
    config = replace(config_of(), kv_peer_gib=0.25)
    killed = asyncio.run(run(config, options.replicas, streams, options.kills, tokens, roles=roles, more=more))
    wrong = differences(plain, killed)
    print("\n".join(wrong))
    print(f"{streams} streams, {killed.num_kills} kills, {killed.num_replays} replays, {len(wrong)} streams differ")
    print(f"longest pause of a stream: {max(plain.pauses):.2f} s undisturbed, {max(killed.pauses):.2f} s with kills")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
