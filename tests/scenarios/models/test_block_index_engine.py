"""An engine on block-sparse attention: greedy answers are those of transformers, by prefix hits and preemption too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engine.greedy_answers import greedy_answers
from support.models.tiny_models import VOCAB, save, tiny_model

from rootgraft.engine.batch import PageCopy, PageLoad
from rootgraft.engine.checkpoint.read_config import read_model_config
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.executor.device import check_index
from rootgraft.engine.executor.worker import Worker
from rootgraft.engine.models.kv_pool import KvPool

NAME = "minimax_m3_chosen"  # three blocks of four tokens
OPTIONS = {"dtype": "float32", "device": "cpu", "threads": 1, "block_size": 16, "max_num_batched_tokens": 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(NAME, tmp_path_factory.mktemp(NAME))


@torch.no_grad()
def greedy(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(tiny_model(NAME)(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_an_index_chooses_what_it_chooses_in_transformers(folder: Path) -> None:
    """In chunks, behind prefixes that end inside a page, after preemption: index keys are where the prefix is."""
    shared = [(7 * i + 3) % VOCAB for i in range(37)]
    prompts = [[*shared, 5, 9, 11], [*shared, 90], [(11 * i + 1) % VOCAB for i in range(29)], shared[:9]]
    config = EngineConfig(**OPTIONS, max_num_seqs=3, num_gpu_blocks_override=16)
    core = EngineCore(config, Worker(config, folder))
    expected = [greedy(prompt, 12) for prompt in prompts]
    said, _ = greedy_answers(core, prompts, 12)
    assert said == expected
    said, cached = greedy_answers(core, prompts, 12, preempt_every=3)
    assert said == expected
    assert max(cached) >= len(shared)
    core.close()


def test_index_keys_are_part_of_a_page(folder: Path) -> None:
    """They are copied, read and loaded with it; layers without an index have none."""
    worker = Worker(EngineConfig(**OPTIONS, max_num_seqs=3, num_gpu_blocks_override=7), folder)
    pools = [KvPool(worker.model.config, 7, 16, torch.float32, worker.model.device) for _ in range(2)]
    of_heads, keys = pools[0].caches
    assert keys.v is None and keys.k.shape == (2, 7, 1, 16, 24) and list(pools[0].beside) == [1, 2]
    assert of_heads.v is not None
    assert pools[0].page_bytes * 7 == of_heads.k.nbytes + of_heads.v.nbytes + keys.k.nbytes
    keys.k[:, 3] = torch.randn(2, 1, 16, 24)
    pools[0].copy([PageCopy(3, 5, 9)])
    assert torch.equal(keys.k[:, 5, :, :9], keys.k[:, 3, :, :9]) and not keys.k[:, 5, :, 9:].any()
    pools[1].copy([PageLoad(4, pools[0].read_page(3))])
    assert torch.equal(pools[1].beside[2][0][4], keys.k[1, 3])
    assert pools[0].form != KvPool(worker.model.config.up_to(12), 7, 16, torch.float32, worker.model.device).form


def test_short_sequences_need_no_index(folder: Path) -> None:
    """Up to so many tokens the index chooses all: there is none, and a GPU takes the model."""
    config = EngineConfig(**OPTIONS, max_num_seqs=3, num_gpu_blocks_override=7, max_model_len=12)
    worker = Worker(config, folder)
    assert worker.model.config.index_keys == (None,) * 3 and len(worker.kv_pages.form.split("+")) == 1
    prompt = [5, 9, 11, 2, 7]
    core = EngineCore(config, worker)
    assert greedy_answers(core, [prompt], 6)[0] == [greedy(prompt, 6)]
    core.close()
    gpu = torch.device("cuda")
    check_index(read_model_config(folder).up_to(12), gpu)
    with pytest.raises(ConfigError, match=r"not supported on a GPU beyond 12 tokens.* --max-model-len 12"):
        check_index(read_model_config(folder), gpu)


def test_kv_of_8_bits_is_refused_by_name(folder: Path) -> None:
    config = EngineConfig(**OPTIONS, max_num_seqs=3, kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match="int8 is not supported for attention whose index chooses blocks"):
        Worker(config, folder)
