"""Adapters: a decode step and the load of one more by how many are registered, and a step by how many are active."""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks.growth.curve import Curve
from benchmarks.growth.random_engine import SHAPE, SMALL, RandomEngine, random_engine
from benchmarks.serve.make_adapters import random_factors, write_adapter

REGISTERED = (8, 16, 32, 64, 128, 256, 512, 1000)
ACTIVE = (1, 2, 4, 8, 16, 32, 64)
_RANK, _CONTEXT, _STEPS = 8, 64, 15


def measure(quick: bool) -> list[Curve]:
    """Measure the curves of adapters."""
    return [*_registered((2, 4, 8) if quick else REGISTERED), _active((1, 2, 4) if quick else ACTIVE, quick)]


def _registered(counts: tuple[int, ...]) -> list[Curve]:
    """Measure on a small model, whose steps hide the least of what names cost."""
    steps, loads = [], []
    with tempfile.TemporaryDirectory() as folder, _engine(SMALL, counts[0], counts[0]) as engine:
        done = 0
        for count in counts:
            for number in range(done, count):
                _write(engine, Path(folder) / f"a{number}", number)
            times = []
            for number in range(done, count):
                begin = time.perf_counter()
                engine.load_adapter(f"a{number}", Path(folder) / f"a{number}")
                times.append(time.perf_counter() - begin)
            done = count
            loads.append(1e3 * statistics.median(times))
            steps.append(1e3 * _step(engine, counts[0], counts[0]))
    reason = "a sequence holds its adapter, and names are looked up by hash"
    return [
        Curve("adapters-registered", "Decode step, ms", "adapters registered", counts, steps, 0.0, reason),
        Curve("adapters-load", "Load of one more, ms", "adapters registered", counts, loads, 0.0, "it reads one file"),
    ]


def _active(counts: tuple[int, ...], quick: bool) -> Curve:
    rows, times = counts[-1], []
    with tempfile.TemporaryDirectory() as folder, _engine(SMALL if quick else SHAPE, rows, rows) as engine:
        for number in range(rows):
            _write(engine, Path(folder) / f"a{number}", number)
            engine.load_adapter(f"a{number}", Path(folder) / f"a{number}")
        times = [1e3 * _step(engine, rows, count) for count in counts]
    title, reason = f"Decode step of {rows} rows, ms", "the factors of every active adapter are read once"
    return Curve("adapters-active", title, "adapters active", counts, times, 1.0, reason)


def _engine(shape: dict[str, Any], rows: int, slots: int) -> AbstractContextManager[RandomEngine]:
    return random_engine(
        shape,
        max_num_seqs=rows,
        max_model_len=1024,
        kv_cache_memory=1.0,
        enable_lora=True,
        max_loras=slots,
        max_lora_rank=_RANK,
    )


def _write(engine: RandomEngine, folder: Path, seed: int) -> None:
    write_adapter(folder, random_factors(engine.model, _RANK, everywhere=True, seed=seed), _RANK)


def _step(engine: RandomEngine, rows: int, adapters: int) -> float:
    """Return the seconds of a step of rows over so many adapters in turn."""
    engine.start([engine.prompt(_CONTEXT) for _ in range(rows)], [f"a{number}" for number in range(adapters)])
    seconds = engine.step_seconds(_STEPS)
    engine.stop()
    return seconds
