"""Ranks on GPUs need as many as there are ranks, which is said before any of them starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.executor.tensor_parallel import plan_ranks

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 48, "intermediate_size": 96,
    "num_hidden_layers": 6, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 4, "vocab_size": 64,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with three GPUs, and a model for two, four or twelve ranks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 4},
        {"pipeline_parallel_size": 4},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    ],
)
def test_too_few_gpus_end_the_start_with_one_line_and_advice_that_holds(options: dict[str, Any], gpus: Path) -> None:
    config = EngineConfig(device="cuda", **options)
    with pytest.raises(ConfigError) as refusal:
        plan_ranks(config, gpus)
    assert str(refusal.value) == (
        f"{config.ranks_option} needs 4 GPUs, but 3 can be seen (CUDA_VISIBLE_DEVICES may hide others). Try: "
        "rootgraft serve --tensor-parallel-size 2"
    )
    _, devices = plan_ranks(EngineConfig(device="cuda", tensor_parallel_size=2), gpus)
    assert [str(device) for device in devices] == ["cuda:0", "cuda:1"]


def test_stages_on_gpus_need_the_size_of_their_kv(gpus: Path) -> None:
    with pytest.raises(ConfigError, match="--pipeline-parallel-size 3 on GPUs needs --kv-cache-memory"):
        plan_ranks(EngineConfig(device="cuda", pipeline_parallel_size=3), gpus)
    found = plan_ranks(EngineConfig(device="cuda", pipeline_parallel_size=3, kv_cache_memory=1.0), gpus)
    assert len(found[1]) == 3


def test_an_index_that_chooses_all_blocks_is_no_reason_against_ranks(tmp_path: Path) -> None:
    """MiniMax M3 with at most as many tokens as its index chooses."""
    model = {
        "architectures": ["MiniMaxM3VLForCausalLM"], "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
        "dense_intermediate_size": 96, "shared_intermediate_size": 96, "num_attention_heads": 12,
        "num_key_value_heads": 4, "head_dim": 4, "num_local_experts": 8, "vocab_size": 64,
        "max_position_embeddings": 4096, "layer_types": ["full_attention", "minimax_m3_sparse"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = EngineConfig(device="cpu", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="an index of blocks cannot be split over ranks"):
        plan_ranks(config, tmp_path)
    _, devices = plan_ranks(EngineConfig(device="cpu", tensor_parallel_size=2, max_model_len=2048), tmp_path)
    assert len(devices) == 2
