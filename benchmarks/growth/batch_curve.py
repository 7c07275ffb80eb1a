"""Decode step by the number of sequences that share nothing."""

from __future__ import annotations

from benchmarks.growth.curve import Curve
from benchmarks.growth.machine_bounds import MachineBounds
from benchmarks.growth.random_engine import SHAPE, SMALL, random_engine

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONTEXT, _STEPS = 128, 15


def measure(quick: bool) -> list[Curve]:
    """Measure the curve of the batch."""
    sizes = (1, 2, 4) if quick else ROWS
    times = []
    options = {"max_num_seqs": sizes[-1], "max_model_len": 1024, "kv_cache_memory": 0.1 if quick else 3.0}
    with random_engine(SMALL if quick else SHAPE, **options) as engine:
        bounds = MachineBounds.measure(engine.model)
        for rows in sizes:
            engine.start([engine.prompt(_CONTEXT) for _ in range(rows)])
            times.append(1e3 * engine.step_seconds(_STEPS))
            engine.stop()
        bounds = bounds.measured_again()
    limit = [1e3 * bounds.decode(rows, _CONTEXT) for rows in sizes]
    reason = "weights are read once for all rows, until their products take longer"
    return [Curve("batch", "Decode step, ms", "sequences in the batch", sizes, times, 1.0, reason, limit)]
