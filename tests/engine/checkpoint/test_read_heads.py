"""Layers with heads of their own, or that read the K and V of others, as configs say it."""

from __future__ import annotations

from typing import Any

import pytest

from rootgraft.engine.checkpoint.hf_config import model_config
from rootgraft.engine.checkpoint.model_config import KvShape, PerLayerInputs, ProportionalScaling
from rootgraft.engine.errors import ModelError

# What config.json of Gemma 4 E2B says, and that of the 31B where it differs; facts alone.
E2B = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "audio_config": {"model_type": "gemma4_audio"},
    "vision_config": {"model_type": "gemma4_vision"},
    "text_config": {
        "model_type": "gemma4_text",
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1536,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 6144,
        "layer_types": [*[*["sliding_attention"] * 4, "full_attention"] * 7],
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "use_double_wide_mlp": True,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    },
}
SMALL = {
    "architectures": ["Gemma4ForCausalLM"],
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def test_published_gemma_4_e2b() -> None:
    config = model_config(E2B)
    assert config.towers == ("vision_tower", "audio_tower", "embed_vision", "embed_audio")
    assert config.layer_inputs == PerLayerInputs(256, 262144) and config.logit_soft_cap == 30.0
    assert config.kv_sources == (*range(15), *[*[13] * 4, 14] * 4)
    assert set(config.kv_shapes[:15]) == {KvShape(1, 256), KvShape(1, 512)} and set(config.kv_shapes[15:]) == {None}
    assert [config.mlp_size_of(index) for index in (14, 15)] == [6144, 12288]
    full, local = config.layers[4].rope, config.layers[0].rope
    assert full is not None and local is not None and (local.theta, local.dim) == (10_000.0, 256)
    assert (full.theta, full.dim, full.scaling) == (1_000_000.0, 512, ProportionalScaling(64, 1.0))
    assert config.attention_scale == 1.0 and config.layers[0].window == 512 and config.layers[4].window is None


def test_values_that_are_keys_have_heads_of_their_own() -> None:
    same = SMALL | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 32}
    config = model_config(same)
    assert config.kv_shapes == (KvShape(2, 16), KvShape(1, 32)) * 2
    assert [layer.shares_values for layer in config.layers] == [False, True] * 2
    # Without the flag the number of heads has no effect, as in transformers.
    assert model_config(same | {"attention_k_eq_v": False}).kv_shapes == (KvShape(2, 16), KvShape(2, 32)) * 2
    listed = {str(index): {"head_dim": 32, "num_key_value_heads": 1} for index in (1, 3)}
    written = SMALL | {"attention_k_eq_v": True, "per_layer_config": listed}
    assert model_config(written) == config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers must be few enough that an earlier layer has type"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers"),
        (
            {"per_layer_config": {"1": {"head_dim": 32}}},
            "per_layer_config must be an object with one equal entry for each",
        ),
        ({"per_layer_config": {"0": {}, "2": {}}}, "per_layer_config must be an object with one equal entry for each"),
        ({"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 48}}}, "one equal entry for each"),
        ({"per_layer_config": {"1": {"rope": 1}, "3": {"rope": 1}}}, "rope must be absent"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "a divisor of num_attention_heads 4"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 9, "moe_intermediate_size": 8}, "top_k_experts"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        model_config(SMALL | changes)


def test_the_last_layer_has_full_attention_whatever_the_config_says() -> None:
    """As transformers reads it."""
    layers = model_config(SMALL | {"layer_types": ["full_attention", *["sliding_attention"] * 3]}).layers
    assert [layer.window for layer in layers] == [None, 512, 512, None]


def test_experts_that_are_not_asked_for_are_none() -> None:
    sizes = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}
    assert model_config(SMALL | sizes).layers[0].mixture is None
    mixture = model_config(SMALL | sizes | {"enable_moe_block": True}).layers[0].mixture
    assert mixture is not None and mixture.is_beside_mlp and mixture.activation == "gelu_tanh"
