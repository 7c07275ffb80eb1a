"""Sequences and tokens of a step by device: what a GPU's memory serves, and what an option names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.machine.thoroughness import repeats

from rootgraft.engine.checkpoint.model_config import ModelConfig
from rootgraft.engine.checkpoint.read_config import read_model_config
from rootgraft.engine.config import DEFAULT_SEQS, DEFAULT_TOKENS, MOST_GPU_SEQS, EngineConfig
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.executor import cuda_graphs
from rootgraft.engine.executor.device_defaults import with_device_defaults
from rootgraft.engine.models.kv_pool import bytes_per_page
from rootgraft.kernels import ops

GIB = 2**30
SIZES = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


class Card:
    """A CUDA device of so much memory, of which so much is free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total, self.free, self.has_kernels = 0, 0, True
        fakes: dict[str, Any] = {
            "is_available": lambda: True,
            "is_bf16_supported": lambda including_emulation=True: True,
            "mem_get_info": lambda _: (self.free, self.total),
            "memory_reserved": lambda _: 0,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(ops, "on_triton", lambda _: self.has_kernels)

    def hold(self, gib: float) -> None:
        self.total = self.free = int(gib * GIB)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


@pytest.fixture
def llama(tmp_path: Path, tiny_llama: Path) -> Path:
    """The configuration of Llama 3.1 8B, without weights."""
    import json

    config = json.loads((tiny_llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **SIZES, "max_position_embeddings": 131_072}))
    return tmp_path


def test_a_large_gpu_serves_more_than_a_cpu(card: Card, llama: Path) -> None:
    found = {}
    for gib in (139, 80, 48, 24, 20):
        card.hold(gib)
        config = with_device_defaults(EngineConfig(), llama)
        found[gib] = config.max_num_seqs, config.max_num_batched_tokens
    assert found == {139: (256, 2048), 80: (256, 2048), 48: (256, 2048), 24: (104, 2048), 20: (48, 2048)}
    card.hold(16)  # the weights do not fit: their check says so, whatever is chosen
    assert with_device_defaults(EngineConfig(), llama).max_num_seqs == 16
    assert with_device_defaults(EngineConfig(load_format="dummy"), llama).most_tokens == 1024


def test_what_is_named_is_taken(card: Card, llama: Path) -> None:
    card.hold(80)
    both = EngineConfig(max_num_seqs=7, max_num_batched_tokens=100)
    assert with_device_defaults(both, llama) is both
    assert with_device_defaults(EngineConfig(max_num_seqs=7), llama).max_num_batched_tokens == 2048
    assert with_device_defaults(EngineConfig(max_num_seqs=4000), llama).max_num_batched_tokens == 4000
    assert with_device_defaults(EngineConfig(max_num_batched_tokens=100), llama).max_num_seqs == 100
    assert with_device_defaults(EngineConfig(max_num_batched_tokens=8192), llama).max_num_seqs == 256


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"native_kernels": False}, {"dtype": "float32"}])
def test_what_runs_in_plain_torch_keeps_the_defaults(card: Card, llama: Path, options: dict[str, Any]) -> None:
    card.hold(80)
    config = EngineConfig(**options)
    assert with_device_defaults(config, llama) is config
    assert (config.most_seqs, config.most_tokens) == (DEFAULT_SEQS, DEFAULT_TOKENS)
    card.has_kernels = False
    assert with_device_defaults(EngineConfig(), llama) == EngineConfig()


@settings(max_examples=repeats(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    gib=st.floats(2, 200),
    used=st.floats(0, 1),
    utilization=st.floats(0.05, 1),
    seqs=st.none() | st.integers(1, 4096),
    tokens=st.none() | st.integers(1, 20_000),
    pool=st.none() | st.floats(0.01, 100),
)
def test_any_gpu_gets_options_that_hold_together(
    card: Card, llama: Path, gib: float, used: float, utilization: float, seqs: int | None, tokens: int | None,
    pool: float | None,
) -> None:  # fmt: skip
    card.hold(gib)
    card.free = int(card.total * (1 - used))
    try:
        config = EngineConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            gpu_memory_utilization=utilization,
            kv_cache_memory=pool,
        )
    except ConfigError:
        return
    found = with_device_defaults(config, llama)
    assert found.most_tokens >= found.most_seqs >= 1
    assert (seqs or found.most_seqs, tokens or found.most_tokens) == (found.most_seqs, found.most_tokens)
    assert seqs is not None or found.most_seqs <= MOST_GPU_SEQS
    assert with_device_defaults(found, llama) is found
    assert replace(found, max_num_seqs=seqs, max_num_batched_tokens=tokens) == config, "and nothing else changes"


def test_sequences_of_a_small_pool_do_not_push_one_another_out(card: Card, llama: Path) -> None:
    card.hold(80)
    model: ModelConfig = read_model_config(llama)
    page = bytes_per_page(model, 16, torch.bfloat16)
    pages = 100 * 512 // 16
    for options in ({"num_gpu_blocks_override": pages}, {"kv_cache_memory": pages * page / GIB}):
        assert with_device_defaults(EngineConfig(**options), llama).max_num_seqs == 96


def test_every_step_of_a_default_gpu_has_a_captured_size(card: Card, llama: Path) -> None:
    for gib in (8, 12, 16, 24, 139):
        card.hold(gib)
        config = with_device_defaults(EngineConfig(), llama)
        assert config.most_tokens <= cuda_graphs.MOST_TOKENS
