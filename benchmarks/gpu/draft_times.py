"""Drafts on the device: what an answer takes with each kind of drafts, against the same without drafts.

Lookups and a draft model of 1B for a model of 8B; an EAGLE-3 head and an MTP module for a model of 1B, whose steps are
so short that what drafts cost shows. Weights are random, so that a draft model is hardly ever right: the engine has to
find out that it does not pay, and an answer must not take longer than without.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.end_to_end import NEEDS
from benchmarks.gpu.measure import Line, Machine

if TYPE_CHECKING:
    from benchmarks.gpu.engine_runs import Engine, Shape

KINDS = ("lookups", "draft model", "EAGLE-3 head", "MTP module")
OFF = {"method": "off"}
PERIOD = 24  # tokens after which a prompt repeats itself


def run(machine: Machine) -> Iterator[Line]:
    """Milliseconds of each token of an answer, and how many times as long it takes as without drafts."""
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        yield Line("drafts", "engine", 0.0, "ms", note=f"left out: no {', '.join(missing)} here")
        return
    from benchmarks.gpu.checkpoint_files import write_draft_head, write_mtp_model
    from benchmarks.gpu.engine_runs import LLAMA_1B, LLAMA_8B, TINY

    large, small = (TINY, TINY) if machine.tiny else (LLAMA_8B, LLAMA_1B)
    lookups, model, head, module = KINDS
    with tempfile.TemporaryDirectory() as name:
        folder, draft = Path(name) / "target", Path(name) / "draft"
        for path, each in ((folder, large), (draft, small)):
            path.mkdir()
            each.write(path)
        kinds = {"without drafts": OFF, lookups: {"method": "auto"}, model: {"model": str(draft)}}
        yield from _times(machine, large, folder, kinds)
        stored = write_mtp_model(Path(name) / "mtp", small, machine)
        eagle = write_draft_head(Path(name) / "head", small, machine)
        kinds = {
            "without drafts, of 1B": OFF,
            head: {"method": "eagle3", "model": str(eagle)},
            module: {"method": "mtp"},
        }
        yield from _times(machine, small, stored, kinds, load_format="auto")


def _times(
    machine: Machine, shape: Shape, folder: Path, kinds: Mapping[str, Mapping[str, str]], **options: Any
) -> Iterator[Line]:
    """Yield the lines of some kinds of drafts for a model. The first kind is decoding without drafts."""
    from benchmarks.gpu.engine_runs import engine

    sizes, context, most = ((2, 3), 12, 4) if machine.tiny else ((1, 8, 32), 1024, 256)
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "max_model_len": 128, "kv_cache_memory": 0.01}
    if not machine.tiny:
        limits = {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "max_model_len": 4096}
    limits |= {"enforce_eager": machine.tiny}  # a CPU's recordings are not those of a GPU
    plain: dict[int, float] = {}
    for kind, config in kinds.items():
        with engine(machine, shape, folder, speculative_config=json.dumps(config), **limits, **options) as made:
            for rows in sizes:
                yield from _lines(made, kind, rows, context, most, plain)


def _lines(engine: Engine, kind: str, rows: int, context: int, most: int, plain: dict[int, float]) -> Iterator[Line]:
    prompts = [_repetitive(engine, context) for _ in range(rows)]
    engine.answer_seconds(prompts, 1)  # prompts and their cache
    took = engine.answer_seconds(prompts, most)
    yield Line("drafts", f"token of {rows} rows of {context}, {kind}", took / most * 1e3, "ms")
    if kind not in KINDS:
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
