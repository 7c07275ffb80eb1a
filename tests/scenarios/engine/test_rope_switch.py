"""LongRoPE: a sequence that outgrows the original length is computed anew, and shares KV only with its like."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.core_hooks import worker_of
from support.engine.fake_worker import FakeWorker, expected_past_switch
from support.models.tiny_models import VOCAB, save, tiny_model

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.executor.worker import Worker
from rootgraft.engine.messages import Done, Submit, TokenOut
from rootgraft.engine.types import SamplingParams

SWITCH = 24  # of the tiny model


def run(core: EngineCore, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy answers of ``count`` tokens to prompts that come together."""
    said: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    core.handle([Submit(number, array("i", prompt), params) for number, prompt in enumerate(prompts)])
    while core.has_work:
        for message in core.step():
            assert isinstance(message, (TokenOut, Done)), message
            if isinstance(message, TokenOut):
                said[message.id] += message.tokens
        core.check()
    return list(said.values())


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=5),
    count=st.integers(1, 12),
    switch=st.integers(2, 16),
    overlaps=st.booleans(),
    method=st.sampled_from(["off", "auto"]),
    num_pages=st.sampled_from([14, 60]),
)
def test_tokens_are_those_of_a_sequence_computed_anew_at_the_switch(
    prompts, count, switch, overlaps, method, num_pages
):
    config = EngineConfig(
        block_size=4, max_num_seqs=3, max_num_batched_tokens=16, speculative_config=f'{{"method": "{method}"}}'
    )
    core = EngineCore(config, FakeWorker(num_pages, 4, eos=(7,), overlaps=overlaps, rope_switch=switch))
    for _ in range(2):  # the second time by prefix hits
        expected = [expected_past_switch(prompt, count, 11, switch) for prompt in prompts]
        assert run(core, prompts, count) == expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("phi3_longrope", tmp_path_factory.mktemp("phi3_longrope"))


@torch.no_grad()
def greedy(prompt: list[int], count: int) -> list[int]:
    """By transformers, each token from the whole text, which is rotated by the factors of its length."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(tiny_model("phi3_longrope")(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_greedy_answers_across_the_switch_are_those_of_transformers(folder: Path, enforce_eager: bool) -> None:
    config = EngineConfig(
        dtype="float32", device="cpu", threads=1, max_num_seqs=3, block_size=4, max_num_batched_tokens=16,
        num_gpu_blocks_override=80, enforce_eager=enforce_eager,
    )  # fmt: skip
    core = EngineCore(config, Worker(config, folder))
    assert worker_of(core).rope_switch == SWITCH
    common = [(17 * index + index * index) % VOCAB for index in range(20)]
    prompts = [common[:18], [*common, 5, 6, 7, 8, 9], common[:3], common]
    for _ in range(2):
        assert run(core, prompts, 12) == [greedy(prompt, 12) for prompt in prompts]
    core.close()


def test_short_factors_alone_where_no_sequence_is_longer(folder: Path) -> None:
    config = EngineConfig(dtype="float32", device="cpu", threads=1, max_model_len=SWITCH, num_gpu_blocks_override=80)
    core = EngineCore(config, Worker(config, folder))
    assert worker_of(core).rope_switch > SWITCH and worker_of(core).model.long_offset == 0
    assert run(core, [[5, 4, 3]], 12) == [greedy([5, 4, 3], 12)]
    core.close()
