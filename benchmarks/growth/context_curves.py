"""Decode step and time to first token of one sequence, by its context."""

from __future__ import annotations

import statistics

from benchmarks.growth.curve import Curve
from benchmarks.growth.machine_bounds import MachineBounds
from benchmarks.growth.random_engine import SHAPE, SMALL, RandomEngine, random_engine

CONTEXTS = (1024, 2048, 4096, 8192, 16_384, 32_768)
_STEPS = 15
_REPEATS, _BUDGET = 3, 5.0  # Repeats of each prompt. No further repeat starts after this number of seconds.
_MOST_OF_LIMIT = 1.3


def measure(quick: bool) -> list[Curve]:
    """Measure the curves of the context."""
    contexts = (64, 128, 256) if quick else CONTEXTS
    decode, first = [], []
    with random_engine(SMALL if quick else SHAPE, max_model_len=contexts[-1] + 512, kv_cache_memory=2.0) as engine:
        bounds = MachineBounds.measure(engine.model)
        _measure(engine, contexts[0])  # The first measurement only warms up the engine.
        for context in contexts:
            seconds, step = _measure(engine, context)
            first.append(1e3 * seconds)
            decode.append(1e3 * step)
        bounds = bounds.measured_again()
    return [
        Curve(
            "context-decode",
            "Decode step, ms",
            "tokens of context",
            contexts,
            decode,
            exponent=1.0,
            reason="weights, then the KV of every token, are read once",
            limit=[1e3 * bounds.decode(1, context) for context in contexts],
            most=_MOST_OF_LIMIT,
        ),
        Curve(
            "context-ttft",
            "Time to first token, ms",
            "tokens of prompt",
            contexts,
            first,
            exponent=2.0,
            reason="attention compares every token with all before it",
            limit=[1e3 * bounds.prefill(context) for context in contexts],
        ),
    ]


def _measure(engine: RandomEngine, context: int) -> tuple[float, float]:
    """Return the median seconds to the first token of a new prompt, and of a decode step after it."""
    times: list[float] = []
    while True:
        times.append(engine.start([engine.prompt(context)]))
        if len(times) == _REPEATS or sum(times) > _BUDGET:
            break
        engine.stop()
    step = engine.step_seconds(_STEPS)
    engine.stop()
    return statistics.median(times), step
