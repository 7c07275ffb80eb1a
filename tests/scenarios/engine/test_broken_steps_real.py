"""On a real model an exception inside a step leaves a core with the same tokens as before, in both orders of calls."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engine.injected_faults import Fault

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.executor.cpu_graphs import CpuGraphs
from rootgraft.engine.executor.input_builder import InputBuilder
from rootgraft.engine.executor.model_runner import ModelRunner
from rootgraft.engine.executor.worker import Worker
from rootgraft.engine.messages import Done, Failed, LoadAdapter, Submit, TokenOut
from rootgraft.engine.models.decoder import DecoderModel
from rootgraft.engine.models.kv_pool import KvPool
from rootgraft.engine.sampling.sampler import Sampler
from rootgraft.engine.types import SamplingParams
from rootgraft.lora.lora_step import AdapterBank

POINTS: tuple[tuple[type[Any], str], ...] = (
    (KvPool, "copy"),
    (InputBuilder, "build"),
    (CpuGraphs, "_record"),
    (CpuGraphs, "_replay"),
    (DecoderModel, "extend"),
    (ModelRunner, "launch"),
    (ModelRunner, "forward"),
    (ModelRunner, "begin_draw"),
    (Sampler, "start"),
    (Sampler, "draw"),
    (Sampler, "collect"),
    (ModelRunner, "collect"),
    (AdapterBank, "install"),
)
PARAMS = (
    SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True, frequency_penalty=0.5),
)


def make_core(folder: Path, overlaps: bool) -> EngineCore:
    config = EngineConfig(
        dtype="float32", device="cpu", threads=1, max_num_seqs=4, block_size=4, max_num_batched_tokens=24,
        num_gpu_blocks_override=60, enable_lora=True, max_loras=1,
    )  # fmt: skip
    worker = Worker(config, folder / "llama")
    worker.overlaps = overlaps
    core = EngineCore(config, worker)
    core.handle([LoadAdapter(1000 + i, name, str(folder / name)) for i, name in enumerate(("small", "large"))])
    while core.has_work:
        core.step()
    return core


def answers(core: EngineCore, first: int) -> dict[int, list[int]]:
    """Tokens of some requests with and without adapters. Raises what a step raises."""
    tokens: dict[int, list[int]] = {}
    for number, adapter in enumerate((None, "small", "large", None)):
        for params in PARAMS:
            prompt = array("i", [5, 6, 7, 8, 9, 10, number, 3])
            core.handle([Submit(first + len(tokens), prompt, params, adapter)])
            tokens[first + len(tokens)] = []
    while core.has_work:
        for message in core.step():
            assert isinstance(message, (TokenOut, Done)) or message.id < first
            if isinstance(message, TokenOut):
                tokens[message.id] += message.tokens
        core.check()
    return {number - first: said for number, said in tokens.items()}


@pytest.fixture(scope="module", params=[False, True], ids=["in order", "overlapped"])
def core(adapted_llama: Path, request: pytest.FixtureRequest) -> Iterator[EngineCore]:
    core = make_core(adapted_llama, request.param)
    yield core
    core.close()


def test_a_step_that_raises_changes_no_later_token(core: EngineCore) -> None:
    expected, first = answers(core, 0), 100
    raised = 0
    for point in POINTS:
        for calls, late in ((0, False), (3, True)):
            fault = Fault(point, calls, RuntimeError("a bug"), late=late)
            with fault.injected():
                try:
                    answers(core, first)
                except RuntimeError as error:
                    assert error is fault.error
            raised += fault.was_raised
            ends = [message for message in core.step() if isinstance(message, Failed)]
            assert bool(ends) == fault.was_raised
            assert answers(core, first + 50) == expected, (point, calls, late)
            first += 100
    assert raised > len(POINTS)
