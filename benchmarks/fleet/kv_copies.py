"""KV between two replicas of one thread each: what a copy saves, and what prompts apart from answers gain.

    python -m benchmarks.fleet.kv_copies [--prompts 6] [--output FILE.json]                      a copy against prefill
    python -m benchmarks.fleet.kv_copies --split [--seconds 40] [--every 4] [--output FILE.json]  1p+1d against 2

The default model. A *copy*: a prompt is computed by one replica, which then takes no more requests, and asked again;
the other one copies its KV. Seconds to the first token, and processor time of all processes, against the prompt's own.

The *split*: 16 streams of short prompts, and a prompt of 1,500 tokens every few seconds, over two replicas that do
both, and over one for prompts and one for answers, in turns (two of each). Exit code 1 for a figure that is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil

from benchmarks.fleet.fleet_harness import START_SECONDS, Figure, finish, parser, percentiles, run_within
from rootgraft.engine.checkpoint.locate import resolve_model
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.serving.async_engine import AsyncEngine
from rootgraft.engine.serving.engine_client import EngineClient
from rootgraft.engine.serving.request import TextRequest
from rootgraft.engine.serving.template_client import EngineTemplate
from rootgraft.engine.text.tokenizer import Tokenizer
from rootgraft.engine.types import SamplingParams
from rootgraft.fleet.dispatcher import DispatcherLimits
from rootgraft.fleet.fleet import Fleet
from rootgraft.fleet.replica_launcher import ProcessLauncher

LENGTH, STREAMS, ANSWER = 1500, 16, 128
PAGE = 16
MIXED, SPLIT = (), ("prefill", "decode")


@asynccontextmanager
async def two_replicas(roles: Sequence[str]) -> AsyncIterator[tuple[AsyncEngine, Fleet]]:
    """Start two replicas of one thread each, and end them."""
    config = EngineConfig(
        device="cpu", threads=1, kv_cache_memory=1.0, max_num_seqs=2 * STREAMS, kv_peer_gib=0.5,
        speculative_config='{"method": "off"}',
    )  # fmt: skip
    path = resolve_model(None).path
    template = EngineTemplate(config, path)
    make = partial(EngineClient, config, path, heartbeat_timeout=30.0, spawn=template.spawn)
    limits = DispatcherLimits(heartbeat_seconds=30.0)
    fleet = Fleet(ProcessLauncher(make, template), 2, limits, roles=roles)
    try:
        ready = await fleet.start()
        yield AsyncEngine(fleet, Tokenizer.load(path), ready), fleet
    finally:
        await fleet.close()


def request(rng: random.Random, length: int, answer: int) -> TextRequest:
    """Return a request that has no prefix in common with another one."""
    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    return TextRequest(array("i", (rng.randrange(1000, 40_000) for _ in range(length))), params)


@dataclass
class Heard:
    """Measurements of one request: seconds to the first token and between later ones; cached tokens of the prompt."""

    first: float = 0.0
    gaps: list[float] = field(default_factory=list)
    cached: int = 0


async def ask(engine: AsyncEngine, asked: TextRequest) -> Heard:
    heard, last = Heard(), time.perf_counter()
    async with aclosing(engine.stream(asked)) as stream:
        async for deltas in stream:
            now, num_tokens = time.perf_counter(), sum(len(delta.tokens) for delta in deltas)
            if num_tokens and not heard.first:
                heard.first, last = now - last, now
            elif num_tokens:
                heard.gaps.append(now - last)
                last = now
            for delta in deltas:
                if delta.finish is not None:
                    heard.cached = delta.finish.usage.cached
    return heard


def processor_seconds() -> float:
    """Return the processor time of this process and of the replicas."""
    own = psutil.Process()
    times = [each.cpu_times() for each in (own, *own.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


async def measure_copies(count: int) -> tuple[list[Figure], dict[str, Any]]:
    """Compare prompts that are computed with the same prompts copied."""
    rng, rows = random.Random(1), []
    async with two_replicas(MIXED) as (engine, fleet):
        names = list(fleet.replicas)
        dispatcher = fleet._dispatcher
        for name in names:
            dispatcher.drain(name)
            await ask(engine, request(rng, 200, 4))
            dispatcher.reopen(name, time.monotonic())
        for number in range(count):
            holder, other = names if number % 2 else names[::-1]
            prompt, costs = request(rng, LENGTH, 1), []
            # The dispatcher notes who has a prompt's KV before it hands on the end of the answer.
            for closed in (other, holder):
                dispatcher.drain(closed)
                before = processor_seconds()
                heard = await ask(engine, prompt)
                costs.append((heard, processor_seconds() - before))
                dispatcher.reopen(closed, time.monotonic())
            rows.append(costs)
    seconds = [copied.first / computed.first for (computed, _), (copied, _) in rows]
    figures = [
        Figure.least("times faster than prefill (median)", 1 / statistics.median(seconds), 5.0),
        Figure.least(
            "tokens copied, at least", min(copied.cached for _, (copied, _) in rows), LENGTH // PAGE * PAGE - PAGE
        ),
    ]
    more = {
        "seconds_computed": [round(computed.first, 3) for (computed, _), _ in rows],
        "seconds_copied": [round(copied.first, 3) for _, (copied, _) in rows],
        "processor_ratio": round(sum(b for _, (_, b) in rows) / sum(a for (_, a), _ in rows), 3),
    }
    return figures, more


@dataclass
class Load:
    """Latencies of streams and prompts with one layout."""

    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    num_tokens: int = 0
    seconds: float = 0.0

    def add(self, other: Load) -> None:
        self.gaps += other.gaps
        self.firsts += other.firsts
        self.num_tokens += other.num_tokens
        self.seconds += other.seconds

    def report(self) -> dict[str, Any]:
        return {
            "between tokens": percentiles(self.gaps),
            "first token of a long prompt": percentiles(self.firsts),
            "tokens a second": round(self.num_tokens / self.seconds, 1),
        }


async def run_load(roles: Sequence[str], seconds: float, every: float, seed: int) -> Load:
    """Run the streams, and a long prompt every so many seconds."""
    rng, load = random.Random(seed), Load(seconds=seconds)
    async with two_replicas(roles) as (engine, _):
        end = time.monotonic() + seconds

        async def stream() -> None:
            while time.monotonic() < end:
                heard = await ask(engine, request(rng, 32, ANSWER))
                load.gaps += heard.gaps
                load.num_tokens += 1 + len(heard.gaps)

        async def long_prompt() -> None:
            load.firsts.append((await ask(engine, request(rng, LENGTH, 8))).first)
            load.num_tokens += 8

        async with asyncio.TaskGroup() as group:
            for _ in range(STREAMS):
                group.create_task(stream())
            while time.monotonic() < end - every:
                group.create_task(long_prompt())
                await asyncio.sleep(every)
    return load


async def measure_split(seconds: float, every: float) -> tuple[list[Figure], dict[str, Any]]:
    """Compare two mixed replicas with one for prompts and one for answers."""
    loads = {MIXED: Load(), SPLIT: Load()}
    for number, roles in enumerate((MIXED, SPLIT, SPLIT, MIXED)):
        loads[roles].add(await run_load(roles, seconds, every, number // 2))
    mixed, split = loads[MIXED].report(), loads[SPLIT].report()
    ratio = split["between tokens"]["p99"] / mixed["between tokens"]["p99"]
    rate = split["tokens a second"] / mixed["tokens a second"]
    more = {"two that do both": mixed, "1p+1d": split, "tokens a second, 1p+1d to two that do both": round(rate, 3)}
    return [Figure.most("p99 between tokens, 1p+1d to two that do both", ratio, 0.6)], more


async def _measure(options: argparse.Namespace) -> int:
    measured = measure_split(options.seconds, options.every) if options.split else measure_copies(options.prompts)
    figures, more = await measured
    return finish(options, figures, more)


def main() -> int:
    made = parser(__doc__)
    made.add_argument(
        "--split", action="store_true", help="separate replicas for prompts and answers, instead of copies"
    )
    made.add_argument("--prompts", type=int, default=6)
    made.add_argument("--seconds", type=float, default=40.0, help="duration of each of the four runs")
    made.add_argument("--every", type=float, default=4.0, help="seconds from one long prompt to the next")
    options = made.parse_args()
    return int(run_within(START_SECONDS + 8 * options.seconds, _measure(options)))


if __name__ == "__main__":
    sys.exit(main())
