"""An engine on latent attention: greedy answers are those of transformers, by prefix hits too, in a small pool."""

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

NAME, INDEXED = "deepseek_v3", "glm_moe_dsa_shared"
OPTIONS = {"dtype": "float32", "device": "cpu", "threads": 1, "block_size": 16, "max_num_batched_tokens": 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(NAME, tmp_path_factory.mktemp(NAME))


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(INDEXED, tmp_path_factory.mktemp(INDEXED))


@torch.no_grad()
def greedy(prompt: list[int], count: int, name: str = NAME) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(tiny_model(name)(torch.tensor([tokens])).logits[0, -1].argmax()))
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


def test_an_index_chooses_what_it_chooses_in_transformers(indexed: Path) -> None:
    """In chunks, behind prefixes that end inside a page, after preemption: index keys are where the prefix is."""
    shared = [(7 * i + 3) % VOCAB for i in range(37)]
    prompts = [[*shared, 5, 9, 11], [*shared, 90], [(11 * i + 1) % VOCAB for i in range(29)], shared[:9]]
    config = EngineConfig(**OPTIONS, max_num_seqs=3, num_gpu_blocks_override=16)
    core = EngineCore(config, Worker(config, indexed))
    expected = [greedy(prompt, 12, INDEXED) for prompt in prompts]
    said, _ = greedy_answers(core, prompts, 12)
    assert said == expected
    said, cached = greedy_answers(core, prompts, 12, preempt_every=3)
    assert said == expected
    assert max(cached) >= len(shared)
    core.close()


def test_index_keys_are_part_of_a_page(indexed: Path) -> None:
    """They are copied, read and loaded with it; layers that share an index have none."""
    worker = Worker(EngineConfig(**OPTIONS, max_num_seqs=3, num_gpu_blocks_override=7), indexed)
    pools = [KvPool(worker.model.config, 7, 16, torch.float32, worker.model.device) for _ in range(2)]
    latent, keys = pools[0].caches
    assert keys.v is None and keys.k.shape == (2, 7, 1, 16, 24)
    assert pools[0].page_bytes * 7 == latent.k.nbytes + keys.k.nbytes
    assert [each.shape[-1] for each in pools[0].v_layers] == [24, 24, 64]
    keys.k[:, 3] = torch.randn(2, 1, 16, 24)
    pools[0].copy([PageCopy(3, 5, 9)])
    assert torch.equal(keys.k[:, 5, :, :9], keys.k[:, 3, :, :9]) and not keys.k[:, 5, :, 9:].any()
    pools[1].copy([PageLoad(4, pools[0].read_page(3))])
    assert torch.equal(pools[1].caches[1].k[:, 4], keys.k[:, 3])
    assert pools[0].form != KvPool(worker.model.config.up_to(12), 7, 16, torch.float32, worker.model.device).form


def test_short_sequences_need_no_index(indexed: Path) -> None:
    """Up to so many tokens the index chooses all: there is none, and a GPU takes the model."""
    config = EngineConfig(**OPTIONS, max_num_seqs=3, num_gpu_blocks_override=7, max_model_len=12)
    worker = Worker(config, indexed)
    assert worker.model.config.index_keys == (None,) * 3 and len(worker.kv_pages.form.split("+")) == 1
    prompt = [5, 9, 11, 2, 7]
    core = EngineCore(config, worker)
    assert greedy_answers(core, [prompt], 6)[0] == [greedy(prompt, 6, INDEXED)]
    core.close()
    gpu = torch.device("cuda")
    check_index(read_model_config(indexed).up_to(12), gpu)
    with pytest.raises(ConfigError, match=r"not supported on a GPU beyond 12 tokens.* --max-model-len 12"):
        check_index(read_model_config(indexed), gpu)


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
