"""Structured answers by the number of distinct schemas among them: the first time, and when all are known."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.growth.curve import Curve
from rootgraft.engine.offline.llm import LLM
from rootgraft.engine.offline.running_request import RunningRequest
from rootgraft.engine.types import SamplingParams
from rootgraft.grammar.spec import GrammarSpec

SCHEMAS = (1, 16, 64, 256, 1000)
_AT_ONCE = 16
_LEAST = 64  # requests at each size, once all schemas are known


def measure(quick: bool) -> list[Curve]:
    """Measure the curves of schemas, with the default model."""
    counts = (1, 2, 4) if quick else SCHEMAS
    llm = LLM(max_num_seqs=_AT_ONCE, kv_cache_memory=0.5, max_model_len=1024)
    try:
        llm.generate("Warm.", SamplingParams(max_tokens=8), use_tqdm=False)
        first, again = [], []
        for count in counts:
            specs = [GrammarSpec.json_schema(_schema(count, number)) for number in range(count)]
            first.append(1e3 * _seconds(llm, specs) / count)
            requests = specs * max(1, (4 if quick else _LEAST) // count)
            again.append(1e3 * _seconds(llm, requests) / len(requests))
    finally:
        llm.close()
    label = "distinct schemas"
    cold, warm = "a schema is compiled once", "compiled grammars are looked up by hash"
    return [
        Curve("schemas-first", "Request, compiled, ms", label, counts[1:], first[1:], 0.0, cold),
        Curve("schemas-again", "Request, known schema, ms", label, counts, again, 0.0, warm),
    ]


def _schema(size: int, number: int) -> dict[str, Any]:
    """Return a schema that no other number and size has."""
    names = [f"field_{size}_{number}_{part}" for part in "ab"]
    properties = {names[0]: {"type": "boolean"}, names[1]: {"type": "integer", "minimum": 0, "maximum": 9}}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def _seconds(llm: LLM, specs: list[GrammarSpec]) -> float:
    """Return the seconds in which one answer for each schema is made, so many at once."""
    params = SamplingParams(max_tokens=64, temperature=0.0)
    prompt = llm.tokenizer.encode("Fill in the form as JSON: ", add_special_tokens=False)
    begin, waiting = time.perf_counter(), specs[::-1]
    running: list[RunningRequest] = []
    while waiting or running:
        while waiting and len(running) < _AT_ONCE:
            running.append(llm.begin(prompt, params, grammar=waiting.pop()))
        llm.step()
        running = [each for each in running if not each.is_done]
    return time.perf_counter() - begin
