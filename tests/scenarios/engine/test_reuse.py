"""Reuse is right: cache, chunks, neighbours and preemption change neither tokens nor logprobs."""

from __future__ import annotations

import random
from array import array
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.machine.thoroughness import repeats

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.messages import Abort, Submit, TokenOut
from rootgraft.engine.types import Logprob, SamplingParams
from rootgraft.kernels import ops

GREEDY = {"temperature": 0.0, "logprobs": 2, "ignore_eos": True}


pytestmark = pytest.mark.usefixtures("native_kernels_again")


@pytest.fixture(scope="module")
def cores(tiny_llama):
    """Engines on the tiny model by their options, made once."""

    @cache
    def make(page_size: int, budget: int, pages: int, sharing: bool, native: bool) -> EngineCore:
        config = EngineConfig(
            dtype="float32",
            device="cpu",
            block_size=page_size,
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            num_gpu_blocks_override=pages,
            enable_prefix_caching=sharing,
            native_kernels=native,
            threads=1,
        )
        return EngineCore.load(config, tiny_llama)

    return make


@pytest.fixture(scope="module")
def alone(tiny_llama):
    """Tokens and logprobs of a prompt by itself on an engine without cache and chunks, through plain torch."""
    config = EngineConfig(
        dtype="float32", device="cpu", max_num_batched_tokens=512, num_gpu_blocks_override=64,
        enable_prefix_caching=False, native_kernels=False, threads=1,
    )  # fmt: skip
    core = EngineCore.load(config, tiny_llama)

    @cache
    def run(prompt: tuple[int, ...], count: int) -> tuple[list[int], list[Logprob]]:
        ops.use_native(False)
        core.handle([Submit(0, array("i", prompt), SamplingParams(max_tokens=count, **GREEDY))])
        got: dict[int, tuple[list[int], list[Logprob]]] = {}
        while core.has_work:
            step(core, got)
        return got[0]

    return run


def step(core: EngineCore, got: dict[int, tuple[list[int], list[Logprob]]]) -> None:
    """One step; its tokens and logprobs are added by sequence, and all equations checked."""
    for message in core.step():
        if isinstance(message, TokenOut):
            tokens, logprobs = got.setdefault(message.id, ([], []))
            tokens += message.tokens
            logprobs += message.logprobs
    core.check()


def assert_same(got: tuple[list[int], list[Logprob]], wanted: tuple[list[int], list[Logprob]]) -> None:
    assert got[0] == wanted[0]
    for ours, theirs in zip(got[1], wanted[1], strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@settings(max_examples=repeats(20), deadline=None)
@given(
    page_size=st.sampled_from([1, 16]),
    budget=st.sampled_from([4, 7, 33, 256]),
    pages=st.sampled_from(["few", "many"]),
    sharing=st.booleans(),
    native=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_tokens_and_logprobs_are_those_of_the_prompt_alone(
    cores, alone, page_size, budget, pages, sharing, native, seed
):
    """Over chunk size, cache state, page size, mates in the batch and preemption points (few pages force them)."""
    core = cores(page_size, budget, {"few": 130, "many": 600}[pages] // page_size, sharing, native)
    ops.use_native(native)
    rng = random.Random(seed)
    stem = [rng.randrange(97) for _ in range(60)]
    prompts: list[tuple[tuple[int, ...], int]] = []
    got: dict[int, tuple[list[int], list[Logprob]]] = {}
    for i in range(6):
        prompt = tuple(stem[: rng.randint(0, 60)] + [rng.randrange(97) for _ in range(rng.randint(1, 9))])
        prompts.append((prompt, rng.randint(1, 12)))
        core.handle([Submit(i, array("i", prompt), SamplingParams(max_tokens=prompts[i][1], **GREEDY))])
        for _ in range(rng.choice([0, 0, 1, 3, 40])):
            step(core, got)
    core.handle([Submit(6, array("i", stem), SamplingParams(max_tokens=20, **GREEDY))])
    step(core, got)
    core.handle([Abort((6,))])
    while core.has_work:
        step(core, got)
    for i, (prompt, count) in enumerate(prompts):
        assert_same(got[i], alone(prompt, count))
    assert core.stats()["pages_private"] == 0


def test_few_pages_do_preempt(cores):
    """The property above covers preemption only if its small pool causes some."""
    core = cores(16, 256, 8, True, True)
    for i in range(4):
        core.handle([Submit(i, array("i", [i, *range(20)]), SamplingParams(max_tokens=60, **GREEDY))])
    got: dict[int, tuple[list[int], list[Logprob]]] = {}
    while core.has_work:
        step(core, got)
    assert core.stats()["preemptions"] > 0
