"""Adapters: a step, the load of one more and a request by how many are registered; a step by how many are active."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks.growth.curve import Curve
from benchmarks.growth.machine_bounds import MachineBounds
from benchmarks.growth.random_engine import SHAPE, SMALL, RandomEngine, random_engine
from benchmarks.serve.make_adapters import random_factors, write_adapter

REGISTERED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
ACTIVE = (1, 2, 4, 8, 16, 32, 64)
_ROWS = 8  # Rows of a step, and slots; many more adapters are registered.
_FAR = 4 * _ROWS  # beyond so many the host does not keep what has no slot
_RANK, _CONTEXT, _STEPS, _TURNS = 8, 64, 15, 8


def measure(quick: bool) -> list[Curve]:
    """Measure the curves of adapters."""
    registered = (1, 2, 2 * _FAR, 3 * _FAR) if quick else REGISTERED
    return [*_registered(registered), _active((1, 2, 4) if quick else ACTIVE, quick)]


def _registered(counts: tuple[int, ...]) -> list[Curve]:
    """Measure on a small model, whose steps hide the least of what names cost."""
    steps, loads, swaps = [], [], []
    far = [count for count in counts if count > _FAR]
    with tempfile.TemporaryDirectory() as folder, _engine(SMALL, _ROWS) as engine:
        names: list[str] = []
        for count in counts:
            new = [f"a{number}" for number in range(len(names), count)]
            for name in new:
                _write(engine, Path(folder) / name, int(name[1:]))
            loads.append(1e3 * statistics.median(_load_seconds(engine, Path(folder) / name) for name in new))
            names += new
            steps.append(1e3 * _step(engine, _ROWS, names[:1]))
            if count in far:
                swaps.append(1e3 * _swap(engine, names))
    label = "adapters registered"
    step = "a sequence holds its adapter, and names are looked up by hash"
    swap = "its file is read, and its factors copied to a slot"
    return [
        Curve("adapters-registered", "Decode step, ms", label, counts, steps, 0.0, step),
        Curve("adapters-load", "Load of one more, ms", label, counts, loads, 0.0, "it reads one file"),
        Curve("adapters-swap", "Request of one without a slot, ms", label, far, swaps, 0.0, swap),
    ]


def _active(counts: tuple[int, ...], quick: bool) -> Curve:
    rows = counts[-1]
    with tempfile.TemporaryDirectory() as folder, _engine(SMALL if quick else SHAPE, rows) as engine:
        bounds = MachineBounds.measure(engine.model)
        names = [f"a{number}" for number in range(rows)]
        for name in names:
            _write(engine, Path(folder) / name, int(name[1:]))
            _load_seconds(engine, Path(folder) / name)
        times = [1e3 * _step(engine, rows, names[:count]) for count in counts]
        factors = random_factors(engine.model, _RANK, everywhere=True, seed=0).values()
        each = 2 * sum(a.numel() + b.numel() for a, b in factors) / bounds.measured_again().reading
    limit = [times[0] + 1e3 * (count - counts[0]) * each for count in counts]
    reason = "the factors of every active adapter are read once"
    return Curve(
        "adapters-active", f"Decode step of {rows} rows, ms", "adapters active", counts, times, 1.0, reason, limit
    )


def _engine(shape: dict[str, Any], rows: int) -> AbstractContextManager[RandomEngine]:
    return random_engine(
        shape,
        max_num_seqs=rows,
        max_model_len=1024,
        kv_cache_memory=1.0,
        enable_lora=True,
        max_loras=rows,
        max_lora_rank=_RANK,
    )


def _write(engine: RandomEngine, folder: Path, seed: int) -> None:
    write_adapter(folder, random_factors(engine.model, _RANK, everywhere=True, seed=seed), _RANK)


def _load_seconds(engine: RandomEngine, folder: Path) -> float:
    begin = time.perf_counter()
    engine.load_adapter(folder.name, folder)
    return time.perf_counter() - begin


def _step(engine: RandomEngine, rows: int, names: Sequence[str]) -> float:
    """Return the seconds of a step of rows over adapters in turn."""
    engine.start([engine.prompt(_CONTEXT) for _ in range(rows)], names)
    seconds = engine.step_seconds(_STEPS)
    engine.stop()
    return seconds


def _swap(engine: RandomEngine, names: Sequence[str]) -> float:
    """Return the median seconds for each of some requests at once until its first token; none of them has a slot."""
    times, turns = [], itertools.cycle(names)
    for _ in range(_TURNS):
        prompts = [engine.prompt(_CONTEXT) for _ in range(_ROWS)]
        times.append(engine.start(prompts, [next(turns) for _ in prompts]) / _ROWS)
        engine.stop()
    return statistics.median(times)
