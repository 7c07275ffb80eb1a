"""Two ranks over gloo answer as one does, and end together."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.engine.draft_engine import always_drafting
from support.engine.mixed_answers import assert_same, mixed_answers
from support.engine.tiny_llm import open_llm, write_adapter, write_model
from support.speculation.eagle_heads import save_head

from rootgraft import LLM, SamplingParams
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError, EngineDead, EngineError
from rootgraft.engine.executor.followers import Followers
from rootgraft.engine.executor.tensor_parallel import identity
from rootgraft.engine.speculation.model_drafter import ModelDrafter

pytestmark = pytest.mark.heavy

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = ("small", "dora", "head", "own", "rows")
# A pool in which the requests push one another out.
OPTIONS = {"threads": 1, "num_gpu_blocks_override": 24, "max_num_batched_tokens": 40, "max_loras": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_model(folder / "model")
    write_adapter(folder / "small", 1)
    write_adapter(folder / "dora", 2, r=8, target_modules=LINEARS, use_dora=True)
    write_adapter(folder / "head", 3, r=3, target_modules=["o_proj", "lm_head", "embed_tokens"])
    write_adapter(folder / "own", 4, modules_to_save=["lm_head", "embed_tokens", "norm"])
    write_adapter(folder / "rows", 5, trainable_token_indices={"embed_tokens": [5, 30], "lm_head": [7, 40]})
    return folder


def start(folder: Path, size: int, **options: object) -> LLM:
    return open_llm(folder / "model", tensor_parallel_size=size, lora_dir=str(folder), **OPTIONS | options)


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[LLM]:
    """Two ranks, whose drafts are of an EAGLE-3 head too."""
    save_head(folder / "eagle", folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        always_drafting(patch, 2)
        llm = start(folder, 2, speculative_config=json.dumps({"method": "eagle3", "model": str(folder / "eagle")}))
        yield llm
        llm.close()


def test_mixed_requests_get_the_answers_of_one_rank(ranks: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled ones too, with preemption and drafts; twice, so that the second time prefixes are hit."""
    drafted = []
    draft = ModelDrafter.draft

    def counted(self: ModelDrafter, wanted: Any) -> dict[int, list[int]]:
        found = draft(self, wanted)
        drafted.extend(found)
        return found

    monkeypatch.setattr(ModelDrafter, "draft", counted)
    one = start(folder, 1)
    try:
        expected = mixed_answers(one, ADAPTERS)
    finally:
        one.close()
    for _ in range(2):
        assert_same(mixed_answers(ranks, ADAPTERS), expected)
    assert drafted


@pytest.mark.parametrize("place", [0, -1])
def test_another_program_or_other_files_end_the_start_with_one_line(place: int, folder: Path) -> None:
    config = EngineConfig(device="cpu", dtype="float32", tensor_parallel_size=2)
    ours = identity(config, folder / "model")
    theirs = [f"{each}0" if each is ours[place] else each for each in ours]
    with pytest.raises(ConfigError) as refusal:
        Followers(config, folder / "model", theirs, [torch.device("cpu")] * 2)
    assert str(refusal.value) == f"--tensor-parallel-size: rank 1 has {ours[place]} where rank 0 has {theirs[place]}."


def test_a_silent_follower_fails_the_requests_and_nothing_is_left(ranks: LLM) -> None:
    """It is stopped while requests run. No later step is computed: the last test of these ranks."""
    [follower] = followers_of(os.getpid())
    running = ranks.begin([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True))
    ranks.step()
    follower.suspend()
    with pytest.raises(EngineError, match=r"step of the engine failed|Rank 1 of 2 has been silent"):
        while not running.is_done:
            ranks.step()
        running.check()
    with pytest.raises(EngineDead, match="ending all ranks"):
        ranks.generate(["ab"], use_tqdm=False)
    ranks.close()
    assert not followers_of(os.getpid())
    assert not torch.distributed.is_initialized(), "what else computes here would take itself for one of two ranks"


def followers_of(number: int) -> list[psutil.Process]:
    """The living followers of a process."""
    children = psutil.Process(number).children()
    return [each for each in children if any("follower_process" in word for word in each.cmdline())]
