"""Indexed attention in a config: its sizes, and which layers share an index, by the published rule."""

from __future__ import annotations

import re
from typing import Any

import pytest
from transformers import GlmMoeDsaConfig, Mistral4Config

from rootgraft.engine.checkpoint.hf_config import model_config
from rootgraft.engine.checkpoint.model_config import TokenIndex
from rootgraft.engine.errors import ModelError

SIZES: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "n_routed_experts": 8,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"index_topk_freq": 4},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_freq": 1, "index_skip_topk_offset": 0},
        {"index_topk_pattern": "FFSSFSSSS", "index_topk_freq": 4},
        {"indexer_types": ["full", *["shared"] * 8], "index_topk_pattern": "F" * 9},
    ],
)
def test_layers_share_an_index_as_in_transformers(changes: dict[str, Any]) -> None:
    found = model_config(SIZES | changes)
    theirs = GlmMoeDsaConfig(**{**SIZES, **changes, "num_key_value_heads": 4}).indexer_types
    assert [layer.shares_index for layer in found.layers] == [kind == "shared" for kind in theirs]
    assert found.index_keys == tuple(None if kind == "shared" else 128 for kind in theirs)


def test_sizes_of_an_index() -> None:
    latent = model_config(SIZES).latent
    assert latent is not None and latent.index == TokenIndex(2048, 32, 128, interleaved=True)
    changes = {"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 512, "n_group": 1, "topk_group": 1}
    latent = model_config(SIZES | changes).latent
    assert latent is not None and latent.index == TokenIndex(512, 64, 128, interleaved=False)


def test_short_sequences_have_no_index() -> None:
    found = model_config(SIZES | {"index_topk_freq": 4})
    assert found.max_position_embeddings == 4096 and found.up_to(2049) is found and found.shares_index
    short = found.up_to(2048)
    assert short.index_keys == (None,) * 9 and not short.shares_index


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indexer_types": ["shared"] * 9}, "indexer_types must be a list of 9 entries, each full or shared"),
        ({"indexer_types": ["full"] * 8}, "indexer_types must be a list of 9 entries, each full or shared"),
        ({"index_topk_pattern": "FX" * 4 + "F"}, "indexer_types must be a list of 9 entries, each full or shared"),
        ({"index_topk_freq": 0}, "index_topk_freq must be an integer from 1"),
        ({"index_topk": 0}, "index_topk must be an integer from 1"),
        ({"index_head_dim": 32}, "index_head_dim must be at least qk_rope_head_dim"),
        ({"q_lora_rank": None}, "q_lora_rank must be"),
    ],
)
def test_what_no_index_can_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        model_config(SIZES | changes)


def test_mistral_4_scales_queries_and_rotates_a_share_of_a_head() -> None:
    config = Mistral4Config(**{**SIZES, "architectures": ["Mistral4ForCausalLM"], "num_key_value_heads": 4}).to_dict()
    [layer, *_] = model_config(config).layers
    assert layer.query_scaling is not None and layer.query_scaling.length == 8192
    assert layer.rope is not None and layer.rope.dim == 64
    with pytest.raises(ModelError, match="n_group = 4 is not supported for Mistral4ForCausalLM"):
        model_config(config | {"n_group": 4})
