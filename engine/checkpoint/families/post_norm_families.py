"""Families that norm the outputs of attention and MLP, beside their inputs or instead."""

from __future__ import annotations

from .family import ATTENTION, QKV, Family
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
