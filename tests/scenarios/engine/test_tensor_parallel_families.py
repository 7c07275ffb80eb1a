"""Two ranks over gloo answer as one does for experts, latent attention and recurrent mixers, with drafts by a model."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.mixed_answers import assert_same, mixed_answers
from support.engine.tiny_llm import open_llm, write_model
from support.models.tiny_models import COMMON, MODELS
from support.models.tiny_tokenizers import train_byte_level, write_folder
from transformers import PreTrainedModel

pytestmark = pytest.mark.heavy

# A pool in which the requests push one another out.
OPTIONS = {"threads": 1, "num_gpu_blocks_override": 24, "max_num_batched_tokens": 40, "max_loras": 2}


def write_family(folder: Path, name: str, modules: list[str]) -> None:
    """Write a tiny model of a family with a tokenizer, and an adapter of some of its modules."""
    config_class, model_class, changes = MODELS[name]
    tokenizer = train_byte_level()
    config = config_class(
        **COMMON | changes | {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 512}
    )
    model: PreTrainedModel = model_class(config)
    fill(model, seed=1)
    model.save_pretrained(folder / "model")
    write_folder(folder / "model", tokenizer.to_str(), eos_token="<|im_end|>")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import LoraConfig, get_peft_model

        adapted = get_peft_model(model, LoraConfig(r=4, target_modules=modules, task_type="CAUSAL_LM"))
    fill(adapted, seed=2, only="lora_")
    adapted.save_pretrained(folder / "small")


def fill(model: torch.nn.Module, seed: int, only: str = "") -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if only in name:
                parameter.normal_(0.0, 0.25, generator=generator)


@pytest.mark.parametrize(
    ("name", "modules", "options"),
    [
        # Latent attention and experts, for which a small dense model drafts.
        ("deepseek_v3", ["o_proj", "q_b_proj", "kv_b_proj"], {"speculative_config": "draft"}),
        # An index that each rank has whole, beside its own heads.
        ("glm_moe_dsa_shared", ["o_proj", "wq_b", "wk", "weights_proj"], {}),
        # Latent attention in stages of two ranks: the first layer has a plain MLP, the second one experts.
        ("deepseek_v3", ["o_proj", "down_proj"], {"pipeline_parallel_size": 2}),
        # States beside KV of 8 bits, and experts.
        ("qwen3_next", ["o_proj", "q_proj", "out_proj"], {"kv_cache_dtype": "int8", "num_gpu_blocks_override": 60}),
    ],
)
def test_two_ranks_answer_as_one(name: str, modules: list[str], options: dict[str, Any], tmp_path: Path) -> None:
    """With an adapter, schemas, scores, lookups, preemption; a second time, so that prefixes are hit."""
    write_family(tmp_path, name, modules)
    if "speculative_config" in options:
        write_model(tmp_path / "draft")
        options = options | {"speculative_config": json.dumps({"model": str(tmp_path / "draft")})}
    found, stages = [], options.get("pipeline_parallel_size", 1)
    for size in (1, 2):
        ranks = {"tensor_parallel_size": size, "pipeline_parallel_size": 1 if size == 1 else stages}
        llm = open_llm(tmp_path / "model", lora_dir=str(tmp_path), **OPTIONS | options | ranks)
        try:
            found.append([mixed_answers(llm, ["small"], count=16) for _ in range(2)])
        finally:
            llm.close()
    for one, two in zip(*found, strict=True):
        assert_same(two, one)
