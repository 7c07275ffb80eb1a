"""Drafts on the device: what an answer takes with lookups and with a draft model, against the same without drafts.

Weights are random, so that a draft model is hardly ever right: the engine has to find out that it does not pay, and an
answer must not take longer than without. What a draft model's own step takes is measured beside.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.end_to_end import NEEDS
from benchmarks.gpu.measure import Line, Machine

if TYPE_CHECKING:
    from benchmarks.gpu.engine_runs import Engine

KINDS = ("without drafts", "lookups", "draft model")
PERIOD = 24  # tokens after which a prompt repeats itself


def run(machine: Machine) -> Iterator[Line]:
    """Milliseconds of each token of an answer, and how many times as long it takes as without drafts."""
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        yield Line("drafts", "engine", 0.0, "ms", note=f"left out: no {', '.join(missing)} here")
        return
    from benchmarks.gpu.engine_runs import LLAMA_1B, LLAMA_8B, TINY, engine

    shape, small = (TINY, TINY) if machine.tiny else (LLAMA_8B, LLAMA_1B)
    sizes, context, most = ((2, 3), 12, 4) if machine.tiny else ((1, 8, 32), 1024, 256)
    plain: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, draft = Path(name) / "target", Path(name) / "draft"
        for path, each in ((folder, shape), (draft, small)):
            path.mkdir()
            each.write(path)
        configs = ({"method": "off"}, {"method": "auto"}, {"model": str(draft)})
        limits = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "max_model_len": 128, "kv_cache_memory": 0.01}
        if not machine.tiny:
            limits = {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "max_model_len": 4096}
        limits |= {"enforce_eager": machine.tiny}  # a CPU's recordings are not those of a GPU
        for kind, config in zip(KINDS, configs, strict=True):
            with engine(machine, shape, folder, speculative_config=json.dumps(config), **limits) as made:
                for rows in sizes:
                    yield from _lines(made, kind, rows, context, most, plain)


def _lines(engine: Engine, kind: str, rows: int, context: int, most: int, plain: dict[int, float]) -> Iterator[Line]:
    prompts = [_repetitive(engine, context) for _ in range(rows)]
    engine.answer_seconds(prompts, 1)  # prompts and their cache
    took = engine.answer_seconds(prompts, most)
    yield Line("drafts", f"token of {rows} rows of {context}, {kind}", took / most * 1e3, "ms")
    if kind == KINDS[0]:
        plain[rows] = took
        return
    counted = engine.core.stats()
    drafted = sum(value for key, value in counted.items() if key.startswith("drafted_"))
    accepted = sum(value for key, value in counted.items() if key.startswith("drafts_accepted_"))
    note = f"{accepted:.0f} of {drafted:.0f} drafts accepted so far"
    yield Line("drafts", f"{rows} rows, {kind}: time against none", took / plain[rows], "times", note=note)


def _repetitive(engine: Engine, context: int) -> array[int]:
    """A prompt that repeats itself, so that there is something to look up."""
    return (engine.tokens(min(PERIOD, context)) * (context // PERIOD + 1))[:context]
