"""Configs of hybrid models: what is read, and what is refused by its key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from rootgraft.engine.checkpoint.families.norm_layout import POST, PRE
from rootgraft.engine.checkpoint.families.recurrent import DeltaLayer, KimiDeltaLayer, Mamba2Layer, ShortConvLayer
from rootgraft.engine.checkpoint.hf_config import model_config
from rootgraft.engine.checkpoint.model_config import ParallelScales
from rootgraft.engine.checkpoint.read_config import read_model_config
from rootgraft.engine.errors import ModelError
from rootgraft.engine.loading.load_mtp import prediction_module

_COMMON = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
LFM2 = {**_COMMON, "architectures": ["Lfm2ForCausalLM"], "block_ff_dim": 100, "full_attn_idxs": [1]}
GRANITE = {
    **_COMMON,
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "layer_types": ["mamba", "attention", "mamba"],
    "num_local_experts": 0,
    "shared_intermediate_size": 48,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "rms_norm_eps": 1e-5,
}

DELTA = {
    **_COMMON,
    "architectures": ["Qwen3_5ForCausalLM"],
    "num_hidden_layers": 4,
    "head_dim": 32,
    "intermediate_size": 48,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "mrope_section": [1, 1, 2],
        "mrope_interleaved": True,
    },
}
SEPARATE = {
    **_COMMON,
    "architectures": ["OlmoHybridForCausalLM"],
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "rope_theta": None,
    "linear_use_gate": True,
}
LING = {
    **_COMMON,
    "architectures": ["BailingHybridForCausalLM"],
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "layer_group_size": 3,
    "first_k_dense_replace": 1,
    "num_experts": 16,
    "head_dim": 24,
    "kda_lower_bound": -4,
}
NEXT = {
    **{key: value for key, value in DELTA.items() if key != "rope_parameters"},
    "architectures": ["Qwen3NextForCausalLM"],
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
BAMBA = {
    **_COMMON,
    "architectures": ["BambaForCausalLM"],
    "intermediate_size": 48,
    "attn_layer_indices": [1],
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
}
FALCON = {
    **_COMMON,
    "architectures": ["FalconH1ForCausalLM"],
    "intermediate_size": 48,
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
    "mamba_rms_norm": False,
    "mamba_norm_before_gate": False,
    "attention_in_multiplier": 0.5,
    "attention_out_multiplier": 0.75,
    "key_multiplier": 0.25,
    "ssm_in_multiplier": 2.0,
    "ssm_out_multiplier": 0.9,
    "ssm_multipliers": [0.1, 0.2, 0.3, 0.4, 0.5],
    "mlp_multipliers": [0.7, 0.3],
    "embedding_multiplier": 5.5,
    "lm_head_multiplier": 0.125,
}
ZAMBA = {
    **_COMMON,
    "architectures": ["Zamba2ForCausalLM"],
    "num_hidden_layers": 6,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid", "hybrid"],
    "n_mamba_heads": 8,
    "num_mem_blocks": 2,
    "adapter_rank": 16,
    "use_mem_rope": True,
}
NEMOTRON = {
    **_COMMON,
    "architectures": ["NemotronHForCausalLM"],
    "hybrid_override_pattern": "M-ME*",
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "expand": 2,
    "n_groups": 2,
    "ssm_state_size": 16,
    "intermediate_size": 48,
    "mlp_hidden_act": "relu2",
    "n_routed_experts": 8,
    "moe_latent_size": 32,
}


def test_lfm2_as_published() -> None:
    config = model_config(LFM2)
    conv = ShortConvLayer(3, biased=False)
    assert [layer.recurrent for layer in config.layers] == [conv, None, conv]
    assert [layer.rope is None for layer in config.layers] == [True, False, True]
    assert config.intermediate_size == 256  # two thirds of block_ff_dim, rounded up to a multiple of 256
    assert config.tied_head
    assert config.layers[1].rope is not None and config.layers[1].rope.theta == 1e6
    assert model_config({**LFM2, "block_auto_adjust_ff_dim": False}).intermediate_size == 100
    assert model_config({**LFM2, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.5}).intermediate_size == 112
    assert not model_config({**LFM2, "tie_embedding": False}).tied_head
    assert [model_config({**LFM2, "conv_L_cache": taps}).layers[0].recurrent.taps for taps in (2, 8)] == [2, 8]


def test_granite_as_published() -> None:
    config = model_config(GRANITE)
    mamba = Mamba2Layer(8, 16, 1, 16, 4, conv_biased=True, biased=False)
    assert [layer.recurrent for layer in config.layers] == [mamba, None, mamba]
    assert all(layer.rope is None and layer.mixture is None for layer in config.layers)
    assert config.intermediate_size == 48
    mixed = model_config({**GRANITE, "num_local_experts": 6, "intermediate_size": 32})
    assert all(layer.mixture is not None and layer.mixture.shared_size == 48 for layer in mixed.layers)
    assert model_config({**GRANITE, "position_embedding_type": "rope"}).layers[1].rope is not None
    assert model_config({**GRANITE, "position_embedding_type": "nope"}) == config
    for limit in (float("inf"), 1e308, {"__float__": "Infinity"}):
        assert model_config({**GRANITE, "time_step_limit": [0.0, limit]}) == config
    assert model_config({**GRANITE, "mamba_d_head": 16}) == config


def test_gated_delta_nets_as_published() -> None:
    config = model_config(DELTA)
    delta = DeltaLayer(num_heads=6, head_dim=32, num_key_heads=2, key_dim=16, taps=4, grouped=False)
    assert [layer.recurrent for layer in config.layers] == [delta, delta, delta, None]  # every fourth is attention
    rope = config.layers[3].rope
    assert rope is not None and (rope.theta, rope.dim) == (1e7, 8)  # a quarter of a head
    assert config.gated_attention and config.norm_offset == 1.0 and config.query_size == 2 * 4 * 32
    assert model_config({**DELTA, "layer_types": [*["linear_attention"] * 3, "full_attention"]}) == config
    assert [layer.recurrent is None for layer in model_config({**DELTA, "full_attention_interval": 2}).layers] == [
        False, True, False, True,
    ]  # fmt: skip
    grouped = model_config(NEXT)
    assert grouped.layers[0].recurrent == DeltaLayer(6, 32, 2, 16, 4, grouped=True)
    assert grouped.layers[3].rope == rope
    mixture = grouped.layers[3].mixture
    assert mixture is not None and (mixture.shared_size, mixture.gated_sharing, mixture.renormalises) == (
        512,
        True,
        True,
    )
    assert model_config({**NEXT, "num_experts": 0}).layers[0].mixture is None


def test_olmo_hybrid_as_published() -> None:
    config = model_config(SEPARATE)
    heads, hidden = SEPARATE["num_attention_heads"], SEPARATE["hidden_size"]
    dim = int(0.75 * hidden / heads)
    delta = DeltaLayer(heads, 2 * dim, heads, dim, 4, False, separate=True, rate_factor=2.0, norm_eps=1e-5)
    assert [layer.recurrent for layer in config.layers] == [delta, delta, delta, None]
    assert [config.norms_of(index) for index in range(4)] == [PRE, PRE, PRE, POST]
    assert config.layers[3].rope is None
    tame = model_config({**SEPARATE, "linear_allow_neg_eigval": False, "linear_key_head_dim": 16})
    assert tame.layers[0].recurrent == replace(delta, key_dim=16, head_dim=32, rate_factor=1.0)


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, None),
        ({"rope_parameters": None}, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}, "rope_theta": 5e5}, None),
        ({"rope_theta": 5e5}, 5e5),
    ],
)
def test_olmo_hybrid_rotates_unless_the_base_is_null(changes: dict[str, Any], theta: float | None) -> None:
    """As transformers reads it, for which a base that is only absent is 10,000."""
    rope = model_config(SEPARATE | changes).layers[3].rope
    assert (None if rope is None else rope.theta) == theta
    absent = {key: value for key, value in SEPARATE.items() if key != "rope_theta"}
    found = model_config({**absent, "rope_parameters": None}).layers[3].rope
    assert found is not None and found.theta == 1e4


def test_ling_3() -> None:
    """Delta attention has as many heads as latent attention, in a size of its own; its MTP module is left out."""
    config = model_config(LING | {"num_nextn_predict_layers": 1})
    assert [layer.has_attention for layer in config.layers] == [False, False, True, False, False, True]
    assert config.layers[0].recurrent == KimiDeltaLayer(4, 24, 4, narrow=False, lower_bound=-4.0)
    assert config.latent is not None and config.latent.rotary_dim == 64 and config.gated_attention == "head_module"
    assert config.layers[2].rope is not None and config.layers[2].rope.interleaved
    assert [layer.mixture is None for layer in config.layers] == [True, *[False] * 5]
    with pytest.raises(ModelError, match="the one of BailingHybridForCausalLM is not supported"):
        prediction_module(config)
    unbounded = model_config(LING | {"kda_safe_gate": False, "linear_head_dim": 16}).layers[0].recurrent
    assert unbounded == KimiDeltaLayer(4, 16, 4, narrow=False)


def test_nemotron_h_as_published() -> None:
    config = model_config(NEMOTRON)
    assert [layer.has_attention for layer in config.layers] == [False, False, False, False, True]
    assert [layer.has_mlp for layer in config.layers] == [False, True, False, True, False]
    mamba = Mamba2Layer(6, 16, 2, 16, 4, conv_biased=True, biased=False)  # of a width beside expand * hidden_size
    assert [layer.recurrent for layer in config.layers] == [mamba, None, mamba, None, None]
    assert sum(config.attends) == 1 and config.activation == "relu2"
    mixture = config.layers[3].mixture
    assert mixture is not None and (mixture.latent_size, mixture.gated) == (32, False)
    assert [layer.mixture is None for layer in config.layers] == [True, True, True, False, True]
    listed = {key: value for key, value in NEMOTRON.items() if key != "hybrid_override_pattern"}
    kinds = ["linear_attention", "mlp", "linear_attention", "moe", "full_attention"]
    assert model_config({**listed, "layers_block_type": kinds}) == config


def test_bamba_as_published() -> None:
    config = model_config(BAMBA)
    assert [layer.recurrent is None for layer in config.layers] == [False, True, False]
    assert config.layers[1].rope is not None and config.layers[1].rope.dim == 8  # a half of a head
    of_another = {"mamba_d_ssm": 32, "mamba_rms_norm": False, "mamba_norm_before_gate": True}  # none of which it reads
    assert model_config({**BAMBA, **of_another}) == config


def test_falcon_h1_as_published() -> None:
    config = model_config(FALCON)
    mamba = Mamba2Layer(4, 8, 1, 16, 4, conv_biased=True, biased=False, normed=False)
    assert [layer.recurrent for layer in config.layers] == [mamba] * 3
    assert all(layer.has_attention and layer.has_mlp and layer.rope is not None for layer in config.layers)
    assert config.attention_scale == pytest.approx(16**-0.5 * 0.5**2 * 0.25)  # of queries and keys times 0.5 each
    assert config.parallel_scales == ParallelScales(0.5 * 0.75, 0.9, (0.2, 0.4, 0.6, 0.8, 1.0), 0.7, 0.3)
    assert (config.embedding_scale, config.logit_scale) == (5.5, 0.125)
    normed = model_config({**FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": True}).layers[0].recurrent
    assert isinstance(normed, Mamba2Layer) and normed.normed and normed.is_norm_first


def test_zamba_2_as_published() -> None:
    config = model_config({**ZAMBA, "rms_norm_eps": 1e-6})
    assert [layer.has_attention for layer in config.layers] == [False, True, False, True, True, True]
    mamba = Mamba2Layer(8, 16, 1, 64, 4, conv_biased=True, biased=False, norm_eps=1e-5)
    assert all(layer.recurrent == mamba and not layer.has_mlp for layer in config.layers)
    blocks = [layer.shared_block for layer in config.layers]
    assert [(each.source, each.number) for each in blocks if each is not None] == [(1, 0), (3, 1), (1, 2), (3, 3)]
    assert (config.head_dim, config.attention_scale, config.intermediate_size) == (32, 0.25, 256)
    assert config.layers[1].rope is not None and config.layers[0].rope is None
    assert all(layer.rope is None for layer in model_config({**ZAMBA, "use_mem_rope": False}).layers)
    default = model_config({**ZAMBA, "num_hidden_layers": 54, "layers_block_type": None})
    assert [index for index, has_block in enumerate(default.attends) if has_block] == [
        6,
        12,
        18,
        24,
        30,
        36,
        42,
        47,
        51,
    ]


@pytest.mark.parametrize(
    ("base", "changes", "key"),
    [
        (ZAMBA, {"add_bias_linear": True}, "add_bias_linear"),
        (ZAMBA, {"use_long_context": True}, "use_long_context"),
        (ZAMBA, {"attention_head_dim": 16}, "attention_head_dim"),
        (ZAMBA, {"num_attention_heads": 6}, "num_attention_heads"),
        (ZAMBA, {"num_mem_blocks": 0}, "num_mem_blocks"),
        (ZAMBA, {"use_shared_attention_adapter": True}, "num_key_value_heads"),
        (ZAMBA, {"adapter_rank": None, "num_mem_blocks": 1 << 20}, "num_mem_blocks"),
        (ZAMBA, {"layers_block_type": ["mamba", "attention"] * 3}, "layers_block_type"),
        (FALCON, {"mamba_d_ssm": 33}, "mamba_d_head"),
        (FALCON, {"ssm_multipliers": [1.0]}, "ssm_multipliers"),
        (FALCON, {"mlp_multipliers": 2.0}, "mlp_multipliers"),
        (FALCON, {"key_multiplier": 0}, "key_multiplier"),
        (FALCON, {"projectors_bias": True}, "projectors_bias"),
        (FALCON, {"mamba_proj_bias": True}, "mamba_proj_bias"),
        (FALCON, {"attention_bias": True}, "attention_bias"),
        (FALCON, {"time_step_limit": [0.0, 1.0]}, "time_step_limit"),
        (NEMOTRON, {"hybrid_override_pattern": "MX*"}, "hybrid_override_pattern"),
        (NEMOTRON, {"hybrid_override_pattern": ""}, "hybrid_override_pattern"),
        (NEMOTRON, {"hybrid_override_pattern": "M-M"}, "layers_block_type"),
        (NEMOTRON, {"hybrid_override_pattern": None}, "layers_block_type"),
        (NEMOTRON, {"mlp_hidden_act": "silu"}, "hidden_act"),
        (NEMOTRON, {"mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
        (NEMOTRON, {"use_bias": True}, "use_bias"),
        (NEMOTRON, {"n_shared_experts": 2}, "n_shared_experts"),
        (LFM2, {"conv_L_cache": 1}, "conv_L_cache"),
        (LFM2, {"conv_L_cache": 9}, "conv_L_cache"),
        (LFM2, {"full_attn_idxs": [3]}, "full_attn_idxs"),
        (LFM2, {"full_attn_idxs": []}, "full_attn_idxs"),
        (LFM2, {"full_attn_idxs": 1}, "full_attn_idxs"),
        (LFM2, {"layer_types": ["conv"] * 3}, "layer_types"),
        (LFM2, {"layer_types": ["conv", "full_attention"]}, "layer_types"),
        (LFM2, {"layer_types": ["conv", "full_attention", "mamba"]}, "layer_types"),
        (LFM2, {"num_local_experts": 4}, "num_local_experts"),
        (GRANITE, {"layer_types": ["conv", "attention", "mamba"]}, "layer_types"),
        (GRANITE, {"mamba_n_heads": 7}, "mamba_d_head"),
        (GRANITE, {"mamba_d_head": 32}, "mamba_d_head"),
        (GRANITE, {"mamba_n_groups": 3}, "mamba_n_groups"),
        (GRANITE, {"mamba_n_groups": 9}, "mamba_n_groups"),
        (GRANITE, {"mamba_d_conv": 1}, "mamba_d_conv"),
        (GRANITE, {"mamba_d_state": 0}, "mamba_d_state"),
        (GRANITE, {"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
        (GRANITE, {"time_step_limit": [0.0, 3e38]}, "time_step_limit"),
        (GRANITE, {"time_step_limit": [0.0]}, "time_step_limit"),
        (GRANITE, {"position_embedding_type": "alibi"}, "position_embedding_type"),
        (GRANITE, {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
        (DELTA, {"linear_num_key_heads": 4}, "linear_num_key_heads"),
        (DELTA, {"linear_num_key_heads": 7}, "linear_num_key_heads"),
        (DELTA, {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        (DELTA, {"linear_value_head_dim": 0}, "linear_value_head_dim"),
        (DELTA, {"linear_key_head_dim": 1 << 17}, "linear_key_head_dim"),
        (DELTA, {"full_attention_interval": 0}, "full_attention_interval"),
        (DELTA, {"full_attention_interval": 5}, "full_attention_interval"),
        (DELTA, {"layer_types": ["linear_attention"] * 4}, "layer_types"),
        (DELTA, {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
        (DELTA, {"rope_parameters": {**DELTA["rope_parameters"], "mrope_section": [2, 2, 12]}}, "mrope_section"),
        (SEPARATE, {"linear_use_gate": False}, "linear_use_gate"),
        (SEPARATE, {"linear_num_key_heads": 3}, "linear_num_key_heads"),
        (SEPARATE, {"linear_allow_neg_eigval": "yes"}, "linear_allow_neg_eigval"),
        (SEPARATE, {"layer_types": ["linear_attention"] * 4}, "layer_types"),
        (LING, {"kda_lower_bound": 0}, "kda_lower_bound must be a number below 0"),
        (LING, {"kda_lower_bound": float("-inf")}, "kda_lower_bound"),
        (LING, {"kda_safe_gate": "yes"}, "kda_safe_gate"),
        (LING, {"layer_group_size": 7}, "layer_group_size must be an integer from 1 to 6"),
        (LING, {"num_key_value_heads": 2}, "num_key_value_heads"),
        (NEXT, {"partial_rotary_factor": 0.01}, "partial_rotary_factor"),
        (BAMBA, {"attn_layer_indices": [3]}, "attn_layer_indices"),
        (BAMBA, {"attn_layer_indices": []}, "attn_layer_indices"),
        (BAMBA, {"attn_layer_indices": None}, "layer_types"),
    ],
)
def test_what_is_not_computed_is_refused(base: dict[str, Any], changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelError, match=key):
        model_config({**base, **changes})


@pytest.mark.parametrize("heads", [[0, 0, 0], [0, 2, 4], 2, [0, 2]])
def test_kv_heads_of_a_file_are_those_of_its_layers(heads: list[int] | int, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "lfm2")
    writer.add_context_length(64)
    writer.add_embedding_length(48)
    writer.add_block_count(3)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_shortconv_l_cache(3)
    writer.add_tensor("token_embd.weight", np.asarray(torch.zeros(10, 48)))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    with pytest.raises(ModelError, match=r"attention\.head_count_kv|layer_types"):
        read_model_config(path)
