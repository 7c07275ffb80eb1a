"""The engine's steps, scheduling and sampling included, each as a share of what memory and arithmetic allow.

What the engine or a grammar library needs and this machine lacks is said in the results, and left out.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.measure import Ceilings, Line, Machine

if TYPE_CHECKING:
    from benchmarks.gpu.engine_runs import Engine, Shape, StepTime

NEEDS = ("numpy", "msgpack", "psutil", "safetensors", "tqdm")  # Packages that the engine needs beside torch.
STEPS = 16  # decode steps that a median is taken of
RANK = 16
DEFAULT_RANK_LIMIT = 64  # Largest rank of a server whose options do not set it.
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 60, "maxLength": 80},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}, "minItems": 8, "maxItems": 12},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


def run(machine: Machine, ceilings: Ceilings) -> Iterator[Line]:
    """Milliseconds of steps and prompts."""
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        yield Line("end_to_end", "engine", 0.0, "ms", note=f"left out: no {', '.join(missing)} here")
        return
    from benchmarks.gpu.engine_runs import LLAMA_8B, TINY, engine

    shape = TINY if machine.tiny else LLAMA_8B
    with tempfile.TemporaryDirectory() as name:
        folder = shape.write(Path(name))
        limits = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 256, "kv_cache_memory": 0.01}
        # A CPU's recordings are not those of a GPU, and interpreted they take minutes.
        limits["enforce_eager"] = True
        if not machine.tiny:
            # No chunk of a prompt is made smaller for the others' latency: what is measured comes after them all.
            limits = {"max_num_seqs": 128, "max_num_batched_tokens": 8192, "max_model_len": 16384, "target_itl_ms": 0}
        with engine(machine, shape, folder, **limits) as base:
            yield from _plain(base, machine, ceilings)
            yield from _prompts(base, machine, ceilings)
            yield from _sharing(base, machine, ceilings)
            yield from _structured(base, machine, ceilings)
        yield from _eight_bits(machine, ceilings, shape, folder, limits)
        for rank_limit in (RANK, DEFAULT_RANK_LIMIT):
            yield from _adapters(machine, ceilings, shape, folder, limits, rank_limit)


def _steps(machine: Machine) -> int:
    return 2 if machine.tiny else STEPS


def _line(name: str, took: float, floor: float) -> Line:
    return Line("end_to_end", name, took * 1e3, "ms", floor * 1e3)


def _decode_lines(
    engine: Engine, ceilings: Ceilings, name: str, took: StepTime, kv_tokens: int, rows: int
) -> Iterator[Line]:
    floor = engine.shape.step_floor(ceilings, kv_tokens, engine.machine.dtype.itemsize, rows)
    yield from _step_lines(name, took, floor)


def _step_lines(name: str, took: StepTime, floor: float) -> Iterator[Line]:
    """A step's time, and how much of it the device spends waiting for the host."""
    yield _line(name, took.seconds, floor)
    share = took.waiting / took.seconds
    yield Line("end_to_end", f"{name}: host not hidden", took.waiting * 1e3, "ms", note=f"{share:.1%} of the step")


def _plain(engine: Engine, machine: Machine, ceilings: Ceilings) -> Iterator[Line]:
    """A decode step at several batch sizes and contexts, as far as the pool holds them."""
    sizes = [(2, 20)] if machine.tiny else [(b, c) for c in (1024, 4096) for b in (1, 8, 32, 64, 128)]
    for rows, context in sizes:
        name = f"decode step, {rows} rows of {context}"
        if rows * (context + engine.longest_answer(rows, context, STEPS) + 16) > engine.kv_tokens:
            yield Line("end_to_end", name, 0.0, "ms", note=f"left out: the pool holds {engine.kv_tokens} tokens")
            continue
        took = engine.decode_step([engine.tokens(context) for _ in range(rows)], _steps(machine))
        yield from _decode_lines(engine, ceilings, name, took, rows * context, rows)


def _prompts(engine: Engine, machine: Machine, ceilings: Ceilings) -> Iterator[Line]:
    for tokens in (40,) if machine.tiny else (2048, 8192):
        took = min(engine.first_token(engine.tokens(tokens)) for _ in range(1 if machine.tiny else 3))
        yield _line(f"prompt of {tokens} to first token", took, engine.shape.prefill_floor(ceilings, tokens))


def _sharing(engine: Engine, machine: Machine, ceilings: Ceilings) -> Iterator[Line]:
    """Requests that have most of their context in common; the floor reads it once."""
    rows, common, own = (3, 40, 4) if machine.tiny else (64, 4096, 32)
    prefix = engine.tokens(common)
    engine.first_token(prefix)
    took = engine.decode_step([prefix + engine.tokens(own) for _ in range(rows)], _steps(machine))
    name = f"decode step, {rows} rows that share {common}"
    yield from _decode_lines(engine, ceilings, name, took, common + rows * own, rows)


def _structured(engine: Engine, machine: Machine, ceilings: Ceilings) -> Iterator[Line]:
    """Rows that follow a JSON schema, against rows of free text: the time of each token, forced ones included."""
    rows, context, most = (2, 20, 8) if machine.tiny else (32, 1024, 200)
    name = f"token of {rows} rows of {context}"
    if importlib.util.find_spec("llguidance") is None:
        yield Line("end_to_end", f"{name}, with a JSON schema", 0.0, "ms", note="left out: no llguidance here")
        return
    engine.learn_bytes()
    requests = [(engine.tokens(context), None, 1.0) for _ in range(rows)]
    engine.answers(requests, 1)  # prompts and their cache
    floor = engine.shape.step_floor(ceilings, rows * context, machine.dtype.itemsize, rows)
    took: list[float] = []
    for kind, grammar in (("free text", None), ("with a JSON schema", ("json_schema", json.dumps(SCHEMA).encode()))):
        begin = time.perf_counter()
        answers = engine.answers(requests, most, grammar)
        longest = max(len(answer.tokens) for answer in answers)
        took.append((time.perf_counter() - begin) / longest)
        yield _line(f"{name}, {kind}", took[-1], floor)
    yield Line("end_to_end", f"{name}, with a JSON schema: against free text", took[1] / took[0], "times")


def _eight_bits(
    machine: Machine, ceilings: Ceilings, shape: Shape, folder: Path, limits: dict[str, float]
) -> Iterator[Line]:
    """A step of many rows with long contexts, where KV is most of what is read, with KV in FP8."""
    from benchmarks.gpu.engine_runs import engine

    rows, context = (2, 20) if machine.tiny else (128, 4096)
    with engine(machine, shape, folder, kv_cache_dtype="int8" if machine.tiny else "fp8", **limits) as narrow:
        took = narrow.decode_step([narrow.tokens(context) for _ in range(rows)], _steps(machine))
    # Half of the KV's bytes.
    floor = shape.step_floor(ceilings, rows * context // 2, machine.dtype.itemsize, rows)
    yield from _step_lines(f"decode step, {rows} rows of {context}, KV of 8 bits", took, floor)


def _adapters(
    machine: Machine, ceilings: Ceilings, shape: Shape, folder: Path, limits: dict[str, float], rank_limit: int
) -> Iterator[Line]:
    """Rows of different adapters on all linear modules; the floor also reads the factors of each adapter once."""
    from benchmarks.gpu.adapter_files import write_adapter
    from benchmarks.gpu.engine_runs import engine

    rows, context = (3, 20) if machine.tiny else (64, 1024)
    most = 3 if machine.tiny else 32
    modules = tuple(
        f"adapter-{i}={write_adapter(folder / f'{rank_limit}-adapter-{i}', shape, RANK, seed=i, machine=machine)}"
        for i in range(most)
    )
    options = {"enable_lora": True, "lora_modules": modules, "max_loras": most, "max_lora_rank": rank_limit, **limits}
    end = "" if rank_limit == RANK else f", rank limit {rank_limit}"
    with engine(machine, shape, folder, **options) as adapted:
        base = 0.0
        for number in (0, most) if machine.tiny else (0, 1, 8, most):
            prompts = [adapted.tokens(context) for _ in range(rows)]
            names: list[str | None] = [f"adapter-{i}" for i in range(number)] or [None]
            took = adapted.decode_step(prompts, _steps(machine), adapters=names)
            factors = number * RANK * shape.layers * sum(a + b for a, b in shape.projections.values())
            floor = shape.step_floor(ceilings, rows * context, machine.dtype.itemsize, rows)
            floor += ceilings.seconds(read=factors * machine.dtype.itemsize)
            name = f"decode step, {rows} rows of {context}, {number} adapters{end}"
            yield from _step_lines(name, took, floor)
            if not number:
                base = took.seconds
            else:
                yield Line("end_to_end", f"{name}: against none", took.seconds / base, "times")
