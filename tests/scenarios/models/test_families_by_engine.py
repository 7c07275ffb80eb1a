"""Families through the engine: prefix hits, chunked prefill and eviction change no token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engine.greedy_answers import greedy_answers
from support.models.code_models import CODE_MODELS, write_code_model, write_ling_1
from support.models.library_models import MODELS as LIBRARY
from support.models.library_models import library_model, save_library_model
from support.models.tiny_models import VOCAB, save, tiny_model
from transformers import PreTrainedModel

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.executor.worker import Worker
from rootgraft.radix.tree import RadixTree

COUNT = 8
# Layers of the library's that read the keys of others, and layers of several numbers of KV heads.
BY_LIBRARY = ("Gemma3nForCausalLM", "MiMoV2FlashForCausalLM")
GEMMA4 = ("gemma4", "gemma4_same_values", "gemma4_mixture")
COMMON = [(17 * index + index * index) % VOCAB for index in range(40)]
PROMPTS = [[*COMMON[:37], 5], [*COMMON[:21], 9, 1, 2, 8], COMMON[:3], [4, *COMMON], COMMON[:37]]


def greedy(name: str, prompt: list[int]) -> list[int]:
    """By transformers, each token from the whole text."""
    return greedy_of(library_model(name) if name in LIBRARY else tiny_model(name), prompt)


@torch.no_grad()
def greedy_of(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(COUNT):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


ENGINE_FAMILIES = [
    *("qwen2_moe", "gpt_oss", "llama4", "ministral3", "gpt2", "mimo_v2_flash", "bloom", "step3p5"),
    *GEMMA4,
]


@pytest.mark.parametrize("name", ENGINE_FAMILIES)
def test_answers_are_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evicted: list[int] = []
    evict = RadixTree.evict

    def counted(tree: RadixTree, num_pages: int) -> list[int]:
        evicted.extend(freed := evict(tree, num_pages))
        return freed

    monkeypatch.setattr(RadixTree, "evict", counted)
    config = EngineConfig(
        dtype="float32", device="cpu", threads=1, max_num_seqs=2, block_size=4, max_num_batched_tokens=16,
        max_model_len=64, num_gpu_blocks_override=32,
    )  # fmt: skip
    core = EngineCore(config, Worker(config, save(name, tmp_path)))
    expected = [greedy(name, prompt) for prompt in PROMPTS]
    hits = 0
    for _ in range(2):
        answers, cached = greedy_answers(core, PROMPTS, COUNT)
        assert answers == expected
        hits += sum(cached)
    assert hits > 20 and evicted
    core.close()


@pytest.mark.parametrize("name", [*GEMMA4, *BY_LIBRARY, "mimo_v2_flash", "bloom"])
def test_preemption_changes_no_token(name: str, tmp_path: Path) -> None:
    """Sequences that come back as prefix hits, beside others, read keys that another layer's pages hold."""
    config = EngineConfig(
        dtype="float32", device="cpu", threads=1, max_num_seqs=3, block_size=4, max_num_batched_tokens=16,
        max_model_len=64, num_gpu_blocks_override=64,
        model_impl="transformers" if name in LIBRARY else "rootgraft",
    )  # fmt: skip
    folder = save_library_model(name, tmp_path) if name in LIBRARY else save(name, tmp_path)
    core = EngineCore(config, Worker(config, folder))
    answers, _ = greedy_answers(core, PROMPTS, COUNT, preempt_every=3)
    assert answers == [greedy(name, prompt) for prompt in PROMPTS]
    assert core.stats()["preemptions"] > 3
    core.close()


@pytest.mark.parametrize("name", [*CODE_MODELS, "ling_1"])
def test_models_that_were_code(name: str, tmp_path: Path) -> None:
    """In chunks, beside others, preempted, and behind prefixes of others."""
    if name in CODE_MODELS:
        oracle = tiny_model(CODE_MODELS[name].base)
        write_code_model(CODE_MODELS[name], tmp_path)
    else:
        oracle = write_ling_1(tmp_path)
    config = EngineConfig(
        dtype="float32", device="cpu", threads=1, max_num_seqs=3, block_size=4, max_num_batched_tokens=16,
        max_model_len=64, num_gpu_blocks_override=64,
    )  # fmt: skip
    core = EngineCore(config, Worker(config, tmp_path))
    expected = [greedy_of(oracle, prompt) for prompt in PROMPTS]
    assert greedy_answers(core, PROMPTS, COUNT, preempt_every=3)[0] == expected
    assert core.stats()["preemptions"] > 2
    answers, cached = greedy_answers(core, PROMPTS, COUNT)
    assert answers == expected and sum(cached) > 20
    core.close()
