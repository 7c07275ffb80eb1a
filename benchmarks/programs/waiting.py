"""How long requests that find nothing in the cache wait, by the order of admission: ours, and first come, first served.

The real scheduler, cache and tree drive a device that computes nothing and takes a set time for each step and token.
One tenant asks for more than the device can do for a while: four of five requests share a long prefix, the fifth has
nothing in common with any other. The clock is virtual, so the figures are the same on every machine.
"""

from __future__ import annotations

import statistics
from array import array
from random import Random

from benchmarks.computed_step import ComputedStep
from benchmarks.growth.scheduler_curves import InstantWorker
from rootgraft.engine.batch import Batch, RowResult, StepHandle, StepResult
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.messages import Submit, TokenOut
from rootgraft.engine.types import SamplingParams

STEP, PER_TOKEN = 0.020, 0.0005
ROWS, BUDGET, PAGES = 8, 512, 2048
REQUESTS, RATE, COLD = 300, 14.0, 0.2
PREFIX, OWN, ANSWER = 800, 24, 16


class _Device(InstantWorker):
    """Every answer is the same word; the tokens of the last step are kept."""

    num_pages = PAGES
    tokens = 0

    def launch(self, batch: Batch) -> StepHandle:
        self.tokens = batch.num_tokens
        result = StepResult(tuple(RowResult((1,) if row.draws else ()) for row in batch.rows))
        return ComputedStep(batch, result)


def _waits(*, first_come: bool, seed: int) -> dict[int, float]:
    """Seconds to the first token of each cold request, by its number."""
    rng = Random(seed)
    prefix = [rng.randrange(2, 50_000) for _ in range(PREFIX)]
    arrivals, cold, at = [], set(), 0.0
    for number in range(REQUESTS):
        at += rng.expovariate(RATE)
        own = [rng.randrange(2, 50_000) for _ in range(PREFIX + OWN)]
        if rng.random() < COLD:
            cold.add(number)
        arrivals.append((at, number, own if number in cold else prefix + own[:OWN]))
    device, now = _Device(), 0.0
    config = EngineConfig(max_num_seqs=ROWS, max_num_batched_tokens=BUDGET, speculative_config='{"method": "off"}')
    core = EngineCore(config, device)
    scheduler = core._scheduler
    scheduler._clock = scheduler._queue._clock = scheduler.session_pins._clock = lambda: now
    if first_come:
        scheduler._queue._cached = None
    first: dict[int, float] = {}
    while arrivals or core.has_work:
        if not core.has_work:
            now = max(now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now:
            began, number, tokens = arrivals.pop(0)
            first[number] = -began
            core.handle([Submit(number, array("i", tokens), SamplingParams(max_tokens=ANSWER, temperature=0))])
        messages = core.step()
        now += STEP + PER_TOKEN * device.tokens
        for message in messages:
            if isinstance(message, TokenOut) and first[message.id] <= 0:
                first[message.id] += now
    return {number: first[number] for number in cold}


def cold_waits(seeds: int = 3) -> dict[str, float]:
    """Waits of cold requests in both orders, over several draws of the traffic, in seconds and as ratios."""
    ours: list[float] = []
    theirs: list[float] = []
    for seed in range(seeds):
        mine, first_come = _waits(first_come=False, seed=seed), _waits(first_come=True, seed=seed)
        ours += mine.values()
        theirs += [first_come[number] for number in mine]
    return {
        "requests": len(ours),
        "mean_s": statistics.mean(ours),
        "mean_first_come_s": statistics.mean(theirs),
        "mean_ratio": statistics.mean(ours) / statistics.mean(theirs),
        "longest_s": max(ours),
        "longest_first_come_s": max(theirs),
        "largest_ratio": max(a / b for a, b in zip(ours, theirs, strict=True)),
    }
