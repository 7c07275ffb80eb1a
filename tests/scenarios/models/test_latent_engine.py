"""An engine on latent attention: greedy answers are those of transformers, by prefix hits too, in a small pool."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engine.greedy_answers import greedy_answers
from support.models.tiny_models import VOCAB, save, tiny_model

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.executor.worker import Worker
from rootgraft.engine.models.kv_pool import KvPool

NAME = "deepseek_v3"
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


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_answers_are_those_of_transformers(folder: Path, enforce_eager: bool) -> None:
    """Two prompts share a beginning that ends inside a page; the pool holds two of three sequences at a time."""
    shared = [(7 * i + 3) % VOCAB for i in range(37)]
    prompts = [[*shared, 5, 9, 11], [*shared, 90], [(11 * i + 1) % VOCAB for i in range(29)]]
    config = EngineConfig(**OPTIONS, max_num_seqs=3, num_gpu_blocks_override=9, enforce_eager=enforce_eager)
    core = EngineCore(config, Worker(config, folder))
    expected = [greedy(prompt, 12) for prompt in prompts]
    for time in range(2):
        said, cached = greedy_answers(core, prompts, 12)
        assert said == expected
        assert time == 0 or max(cached) >= len(shared)
    core.close()


def test_a_page_holds_one_vector_of_each_token(folder: Path) -> None:
    config = EngineConfig(**OPTIONS, max_num_seqs=3, num_gpu_blocks_override=7)
    worker = Worker(config, folder)
    kv = KvPool(worker.model.config, worker.num_pages, 16, torch.float32, worker.model.device)
    assert kv.caches[0].v is None and kv.caches[0].k.shape == (3, 7, 1, 16, 48 + 16)
    assert all(v is k for k, v in zip(kv.k_layers, kv.v_layers, strict=True))
    assert kv.page_bytes * 7 == kv.caches[0].k.nbytes
    assert "6 heads over 1 KV head," in worker.summary[0]


def test_kv_of_8_bits_is_refused_by_name(folder: Path) -> None:
    config = EngineConfig(**OPTIONS, max_num_seqs=3, kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8 is not supported for latent attention"):
        Worker(config, folder)
