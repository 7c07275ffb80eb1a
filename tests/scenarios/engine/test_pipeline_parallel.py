"""Ranks with half of the layers each, or half of the heads of these too, answer as one does, and end together."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from support.engine.mixed_answers import Answered, assert_same, mixed_answers
from support.engine.tiny_llm import open_llm, write_adapter, write_model

from rootgraft import SamplingParams
from rootgraft.engine.errors import EngineDead

pytestmark = pytest.mark.heavy

# A pool in which the requests push one another out.
OPTIONS = {"threads": 1, "num_gpu_blocks_override": 24, "max_num_batched_tokens": 40, "max_loras": 2}
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = ("dora", "head", "own")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    write_model(folder / "model")
    write_adapter(folder / "dora", 2, r=8, target_modules=LINEARS, use_dora=True)
    write_adapter(folder / "head", 3, r=3, target_modules=["o_proj", "lm_head", "embed_tokens"])
    write_adapter(folder / "own", 4, modules_to_save=["lm_head", "embed_tokens", "norm", "post_attention_layernorm"])
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Answered]:
    one = open_llm(folder / "model", lora_dir=str(folder), **OPTIONS)
    try:
        return mixed_answers(one, ADAPTERS)
    finally:
        one.close()


def test_stages_of_two_ranks_give_the_answers_of_one(folder: Path, expected: list[Answered]) -> None:
    sizes = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    llm = open_llm(folder / "model", lora_dir=str(folder), **OPTIONS | sizes)
    try:
        for _ in range(2):
            assert_same(mixed_answers(llm, ADAPTERS), expected)
    finally:
        llm.close()


def test_mixed_requests_get_the_answers_of_one_rank(folder: Path, expected: list[Answered]) -> None:
    """Draws, scores and schemas, with preemption and drafts; twice, so that prefixes are hit. Then a rank is killed."""
    two = open_llm(folder / "model", pipeline_parallel_size=2, lora_dir=str(folder), **OPTIONS)
    try:
        for _ in range(2):
            assert_same(mixed_answers(two, ADAPTERS), expected)
        [follower] = [
            each for each in psutil.Process(os.getpid()).children() if "follower_process" in str(each.cmdline())
        ]
        follower.kill()
        with pytest.raises(EngineDead, match="ending all ranks"):
            while True:
                two.generate(["ab"], SamplingParams(max_tokens=4), use_tqdm=False)
    finally:
        two.close()
    assert not follower.is_running()
