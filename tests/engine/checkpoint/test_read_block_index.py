"""The index of block-sparse attention in a config, as MiniMax M3 is published and as transformers writes it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rootgraft.engine.checkpoint.families.mixture import ClampedGate
from rootgraft.engine.checkpoint.hf_config import model_config
from rootgraft.engine.checkpoint.model_config import BlockIndex
from rootgraft.engine.checkpoint.published_models import published_models
from rootgraft.engine.errors import ModelError

NESTED = "sparse_attention_config"
WRITTEN: dict[str, Any] = {
    "architectures": ["MiniMaxM3VLForCausalLM"],
    "model_type": "minimax_m3_vl_text",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 32,
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "num_local_experts": 8,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "index_n_heads": 2,
}


def test_minimax_m3_as_published() -> None:
    found = model_config(published_models()["MiniMaxAI/MiniMax-M3"])
    index = BlockIndex(most=16, size=128, local=1, dim=128)
    assert [layer.block_index for layer in found.layers] == [None] * 3 + [index] * 57
    assert [layer.mixture is None for layer in found.layers] == [True] * 3 + [False] * 57
    assert found.index_keys == (None,) * 3 + (128,) * 57
    assert (found.intermediate_size, found.mlp_clamp) == (12_288, ClampedGate(1.702, 7.0))
    mixture, rope = found.layers[-1].mixture, found.layers[-1].rope
    assert mixture is not None and (mixture.size, mixture.shared_size, mixture.scale) == (3072, 3072, 2.0)
    assert rope is not None and (rope.dim, rope.theta) == (64, 5e6)
    assert found.norm_offset == 1.0 and found.max_position_embeddings == 1 << 20


def test_short_sequences_have_no_index() -> None:
    found = model_config(WRITTEN)
    assert found.index_keys == (None, 128, 128)
    assert found.up_to(2049) is found and found.up_to(2048).block_index is None
    assert found.up_to(2048).index_keys == (None,) * 3


def test_published_keys_go_before_those_of_transformers() -> None:
    sizes = {"sparse_block_size": 64, "sparse_topk_blocks": 4, "sparse_local_block": 2, "sparse_index_dim": 32}
    assert model_config(WRITTEN | {NESTED: sizes}).block_index == BlockIndex(4, 64, 2, 32)


def test_layers_without_lists() -> None:
    """Every layer has experts, and none an index, as in transformers."""
    found = model_config({key: value for key, value in WRITTEN.items() if not key.endswith("layer_types")})
    assert found.block_index is None and all(layer.mixture is not None for layer in found.layers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({NESTED: {"sparse_init_block": 1}}, "sparse_init_block must be 0, the only supported value, not 1"),
        ({NESTED: {"sparse_score_type": "mean"}}, "sparse_score_type must be 'max', the only supported value"),
        ({NESTED: {"use_sparse_attention": False}}, "use_sparse_attention must be true, the only supported value"),
        ({NESTED: {"sparse_init_tokens": 4}}, "sparse_init_tokens must be absent: the supported keys are"),
        ({NESTED: {"sparse_attention_freq": [0, 1]}}, "sparse_attention_freq must be a list of 3 zeros and ones"),
        (
            {NESTED: {"sparse_attention_freq": [0, 1, 1], "sparse_disable_index_value": [0, 1, 0]}},
            "sparse_disable_index_value must be 1 in each layer where sparse_attention_freq is",
        ),
        ({"moe_layer_freq": [0, 2, 1], "mlp_layer_types": None}, "a list of 3 zeros and ones"),
        ({"index_n_heads": 4}, "index_n_heads must be num_key_value_heads"),
        ({"index_local_blocks": 17}, "index_local_blocks must be an integer from 0 to 16"),
        ({"index_head_dim": 4}, "index_head_dim must be at least 8, the number of rotated dimensions"),
        ({"rotary_dim": 16}, "rotary_dim must be partial_rotary_factor 0.5 of head_dim 16"),
        ({"attention_output_gate": True}, "attention_output_gate = True is not supported"),
        ({"use_gemma_norm": False}, "use_gemma_norm = False is not supported"),
        ({"qk_norm_type": "per_layer"}, "qk_norm_type = 'per_layer' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act must be one of silu"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types is not supported"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        model_config(WRITTEN | changes)
