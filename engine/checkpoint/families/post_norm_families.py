"""Families that norm the outputs of attention and MLP, beside their inputs or instead."""

from __future__ import annotations

from dataclasses import replace

from .family import ATTENTION, QKV, Family
from .mixture import ExpertNames, MixtureFamily
from .norm_layout import POST, LayerNorms

_GEMMA = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_GEMMA_NORMS = LayerNorms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)

_GEMMA4 = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1_000_000.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "bos_token_id": 2,
    "eos_token_id": 1,
}

_GEMMA4_FAMILY = Family(
    name="gemma4",
    models="Gemma 4 E2B, E4B, 31B, 26B-A4B",
    architecture="Gemma4ForCausalLM",
    windows="pattern",
    defaults=_GEMMA4,
    # "vision" means that only images have bidirectional attention.
    harmless={"use_bidirectional_attention": (False, "vision")},
    optional_biases={"attention_bias": ATTENTION},
    norms=_GEMMA_NORMS,
    qk_norm="head",
    scaled_embedding=True,
    unit_scale=True,
    logit_soft_cap=True,
    local_theta="rope_theta",
    sized_layers=True,
    layer_inputs=True,
    layer_scalars=True,
    v_norm=True,
    gguf_name="gemma4",
    mixture=MixtureFamily(
        names=ExpertNames(block="moe", router="router.proj"),
        count_keys=("num_experts",),
        top_k_key="top_k_experts",
        optional=True,
        flag_key="enable_moe_block",
        beside_mlp=True,
        activation="gelu_tanh",
    ),
    tensor_names=((r"(?<=\d)\.(?=(?:experts|router)\.)", ".moe."),),
)

POST_NORM_FAMILIES = (
    Family(
        name="gemma2",
        models="Gemma 2",
        architecture="Gemma2ForCausalLM",
        windows="pattern",
        defaults={
            **_GEMMA,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        optional_biases={"attention_bias": ATTENTION},
        norms=_GEMMA_NORMS,
        norm_offset=1.0,
        scaled_embedding=True,
        query_scalar=True,
        attention_soft_cap=True,
        logit_soft_cap=True,
        gguf_name="gemma2",
        gguf_window=4096,
        wide_layers=46,
    ),
    Family(
        name="vaultgemma",
        models="VaultGemma 1B",
        architecture="VaultGemmaForCausalLM",
        windows="pattern",
        defaults={
            **_GEMMA,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        optional_biases={"attention_bias": ATTENTION},
        norms=LayerNorms("input_layernorm", None, "pre_feedforward_layernorm", None),
        norm_offset=1.0,
        scaled_embedding=True,
        query_scalar=True,
        attention_soft_cap=True,
        logit_soft_cap=True,
    ),
    Family(
        name="gemma3",
        models="Gemma 3 (1B, 270M)",
        architecture="Gemma3ForCausalLM",
        windows="pattern",
        defaults={**_GEMMA, "sliding_window_pattern": 6, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0},
        optional_biases={"attention_bias": ATTENTION},
        norms=_GEMMA_NORMS,
        norm_offset=1.0,
        qk_norm="head",
        scaled_embedding=True,
        query_scalar=True,
        logit_soft_cap=True,
        local_theta="rope_local_base_freq",
        gguf_name="gemma3",
        wide_layers=62,
    ),
    _GEMMA4_FAMILY,
    replace(
        _GEMMA4_FAMILY,
        name="gemma4_unified_text",
        models="Gemma 4 12B",
        architecture="Gemma4UnifiedForCausalLM",
        defaults={
            **{key: value for key, value in _GEMMA4.items() if not key.endswith("_per_layer_input")},
            "max_position_embeddings": 262_144,
            "sliding_window": 1024,
        },
        layer_inputs=False,
        gguf_name=None,  # its files have the architecture "gemma4"
        mixture=None,
        tensor_names=(),
    ),
    Family(
        name="glm4",
        models="GLM-4 and GLM-Z1 of April 2025 (0414)",
        architecture="Glm4ForCausalLM",
        windows="never",
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1.5625e-7,
            "attention_bias": True,
            "eos_token_id": [151329, 151336, 151338],
        },
        optional_biases={"attention_bias": QKV},
        norms=LayerNorms(
            "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
        ),
        mlp_modules=("gate_up_proj", "down_proj"),
        partial_rotary=True,
        interleaved=True,
        gguf_name="glm4",
    ),
    Family(
        name="olmo2",
        models="OLMo 2",
        architecture="Olmo2ForCausalLM",
        windows="never",
        defaults={"rms_norm_eps": 1e-5, "eos_token_id": 50279},
        optional_biases={"attention_bias": ATTENTION},
        norms=POST,
        qk_norm="projection",
        gguf_name="olmo2",
    ),
    Family(
        name="olmo3",
        models="OLMo 3",
        architecture="Olmo3ForCausalLM",
        windows="pattern",
        defaults={
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "rope_theta": 500_000.0,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 50279,
        },
        optional_biases={"attention_bias": ATTENTION},
        norms=POST,
        qk_norm="projection",
        local_theta="rope_theta",
        gguf_name="olmo2",
    ),
    Family(
        name="exaone4",
        models="EXAONE 4",
        architecture="Exaone4ForCausalLM",
        windows="pattern",
        defaults={
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        norms=POST,
        qk_norm="head",
        no_rope="full",
        gguf_name="exaone4",
    ),
)
