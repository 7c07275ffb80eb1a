"""KV of 8 bits in the whole engine: the same answers from the cache, in chunks and with drafts; refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.device import choose_kv_dtype
from engine.errors import ConfigError
from engine.kv_pool import KvPool, bytes_per_page
from engine.loading.hf_config import model_config
from engine.models.config import ModelConfig
from grammar.spec import GrammarSpec
from kernels import kv_int8

CPU = torch.device("cpu")
STEM = "You are a careful assistant. Answer in one or two short sentences, and do not guess. " * 4
PROMPTS = [STEM + end for end in ("What is the capital of France?", "Count: 1, 2, 3, 4,", "Count: 1, 2, 3, 4, 5,")]
SCHEMA = GrammarSpec.json_schema(
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    }
)


@pytest.fixture
def config() -> ModelConfig:
    return model_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 64,
            "intermediate_size": 8,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 10,
            "max_position_embeddings": 32,
            "rms_norm_eps": 1e-6,
        }
    )


def answers(path: Path, **options: Any) -> list[list[int]]:
    """Greedy tokens of each prompt, asked twice, the second time under a grammar too."""
    llm = LLM(str(path), device="cpu", kv_cache_dtype="int8", kv_cache_memory=0.1, max_model_len=512, **options)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    plain = llm.generate(PROMPTS, params, use_tqdm=False) + llm.generate(PROMPTS, params, use_tqdm=False)
    masked = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=40), grammar=SCHEMA, use_tqdm=False)
    llm.close()
    for output in masked:
        assert set(json.loads(output.outputs[0].text)) == {"city"}
    return [list(output.outputs[0].token_ids) for output in (*plain, *masked)]


@pytest.mark.heavy
def test_answers_do_not_depend_on_cache_chunks_drafts_or_company(smollm2_gguf: Path) -> None:
    alone = answers(
        smollm2_gguf, max_num_seqs=1, enable_prefix_caching=False, speculative_config='{"method": "off"}', threads=1
    )
    assert alone[:3] == alone[3:6]
    assert answers(smollm2_gguf) == alone
    assert answers(smollm2_gguf, max_num_seqs=8, max_num_batched_tokens=32, block_size=32, enforce_eager=True) == alone


@pytest.mark.heavy
def test_scores_are_near_those_of_the_model_s_own_type(smollm2_gguf: Path) -> None:
    def surprise(kind: str) -> torch.Tensor:
        llm = LLM(str(smollm2_gguf), device="cpu", kv_cache_dtype=kind, kv_cache_memory=0.1, max_model_len=512)
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        scores = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].prompt_logprobs
        llm.close()
        assert scores is not None
        return torch.tensor([next(iter(each.values())).logprob for each in scores if each])

    exact, rounded = surprise("auto"), surprise("int8")
    assert (exact - rounded).abs().mean() < 0.1
    assert not torch.equal(exact, rounded)


def test_a_page_takes_its_bytes_and_its_scales(config: ModelConfig) -> None:
    pool = KvPool(config, 5, 16, kv_int8.DTYPE, CPU)
    assert pool.k.shape == pool.v.shape == (3, 5, 2, 16, 16 + 4)
    assert bytes_per_page(config, 16, kv_int8.DTYPE) * 5 == pool.k.nbytes + pool.v.nbytes


def test_what_is_not_computed_is_refused_by_name(config: ModelConfig) -> None:
    int8 = EngineConfig(kv_cache_dtype="int8")
    assert choose_kv_dtype(int8, config, CPU, torch.bfloat16) is kv_int8.DTYPE
    assert choose_kv_dtype(replace(int8, block_size=32), config, CPU, torch.bfloat16) is kv_int8.DTYPE
    assert choose_kv_dtype(EngineConfig(), config, CPU, torch.float32) is torch.float32
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8 needs --device cpu; this is cuda"):
        choose_kv_dtype(int8, config, torch.device("cuda"), torch.bfloat16)
    with pytest.raises(ConfigError, match="--block-size of a multiple of 16, not 8"):
        choose_kv_dtype(replace(int8, block_size=8), config, CPU, torch.bfloat16)
    with pytest.raises(ConfigError, match="heads of a multiple of 16 dimensions; this model's have 24"):
        choose_kv_dtype(int8, replace(config, head_dim=24), CPU, torch.bfloat16)
    with pytest.raises(ConfigError, match="kv-cache-dtype"):
        EngineConfig(kv_cache_dtype="fp8")
