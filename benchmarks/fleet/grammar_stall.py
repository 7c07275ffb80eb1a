"""The pause of structured streams whose replica is killed, with their grammars compiled ahead and without.

    python -m benchmarks.fleet.grammar_stall [--trials 4] [--streams 6]

Two replicas of the default model, of one thread each. In each trial so many streams, each with a schema that no one has
seen, begin on one of them; once all have tokens it is killed, and the pause of each stream until its next token is
taken. Trials with and without take turns, as the speed of a shared machine changes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from contextlib import aclosing
from functools import partial
from typing import Any

import numpy as np

from benchmarks.fleet.kill import config_of
from benchmarks.serve.schemas import SCHEMAS
from rootgraft.engine.checkpoint.locate import resolve_model
from rootgraft.engine.serving.async_engine import AsyncEngine
from rootgraft.engine.serving.engine_client import EngineClient
from rootgraft.engine.serving.request import TextRequest
from rootgraft.engine.text.tokenizer import Tokenizer
from rootgraft.engine.types import SamplingParams
from rootgraft.fleet.dispatcher import DispatcherLimits
from rootgraft.fleet.fleet import Fleet
from rootgraft.fleet.placement import replica_table
from rootgraft.fleet.replica_launcher import ProcessLauncher
from rootgraft.grammar.spec import GrammarSpec

COPIES = {"ahead": replica_table.GRAMMAR_COPIES, "not ahead": 1}


def schema(number: int) -> dict[str, Any]:
    """Return a schema that no other number gives."""
    chosen = SCHEMAS[number % len(SCHEMAS)]
    name, text = f"field_{number}", {"type": "string", "minLength": 40, "maxLength": 200}
    properties = {name: text, **chosen["properties"]}
    return {**chosen, "properties": properties, "required": list(properties)}


async def _read(engine: AsyncEngine, request: TextRequest, arrivals: list[float]) -> None:
    async with aclosing(engine.stream(request)) as stream:
        async for _ in stream:
            arrivals.append(time.monotonic())


async def _trial(fleet: Fleet, engine: AsyncEngine, tokenizer: Tokenizer, first: int, streams: int) -> list[float]:
    """Return the pauses of the streams that were replayed."""
    while len(fleet.replicas) < 2:
        await asyncio.sleep(0.1)
    await asyncio.sleep(3.0)  # the new replica has read the vocabulary
    prompt = "<|im_start|>user\nMake up an example.<|im_end|>\n<|im_start|>assistant\n"
    params = SamplingParams(max_tokens=120, temperature=1.0, seed=1)
    arrivals: list[list[float]] = [[] for _ in range(streams)]
    tasks = []
    for number, seen in enumerate(arrivals):
        grammar = GrammarSpec.json_schema(schema(first + number))
        request = TextRequest(tokenizer.encode(prompt, False), params, grammar=grammar)
        tasks.append(asyncio.create_task(_read(engine, request, seen)))
    while not all(arrivals):
        await asyncio.sleep(0.02)
    busiest = max(fleet.replicas, key=lambda name: fleet.replicas[name].stats.get("running", 0.0))
    before, killed = fleet.num_replays, time.monotonic()
    fleet.replicas[busiest].kill()
    await asyncio.gather(*tasks)
    pauses = [min((at for at in seen if at > killed + 0.05), default=killed) - killed for seen in arrivals]
    return sorted(pauses, reverse=True)[: fleet.num_replays - before]


async def _measure(trials: int, streams: int) -> dict[str, list[float]]:
    path = resolve_model(None).path
    tokenizer = Tokenizer.load(path)
    make = partial(EngineClient, config_of(), path, heartbeat_timeout=30.0)
    fleet = Fleet(ProcessLauncher(make), 2, DispatcherLimits(heartbeat_seconds=30.0))
    engine = AsyncEngine(fleet, tokenizer, await fleet.start())
    pauses: dict[str, list[float]] = {name: [] for name in COPIES}
    try:
        for trial in range(trials * len(COPIES)):
            name = list(COPIES)[trial % len(COPIES)]
            replica_table.GRAMMAR_COPIES = COPIES[name]
            found = await _trial(fleet, engine, tokenizer, trial * streams, streams)
            print(f"{name}: {', '.join(f'{pause:.2f}' for pause in found)} s", flush=True)
            pauses[name] += found
    finally:
        await fleet.close()
    return pauses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=4, help="of each kind")
    parser.add_argument("--streams", type=int, default=6)
    options = parser.parse_args()
    for name, pauses in asyncio.run(_measure(options.trials, options.streams)).items():
        p50, p99 = np.percentile(pauses, (50, 99))
        print(f"{name}: {len(pauses)} streams, pause p50 {p50:.2f} s, p99 {p99:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
