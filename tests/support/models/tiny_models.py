"""Tiny random models of every family, made with transformers, which is the oracle: its configs, weights and logits."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AfmoeConfig,
    AfmoeForCausalLM,
    ApertusConfig,
    ApertusForCausalLM,
    ArceeConfig,
    ArceeForCausalLM,
    AXK1Config,
    AXK1ForCausalLM,
    BailingHybridConfig,
    BailingHybridForCausalLM,
    BambaConfig,
    BambaForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    Cohere2MoeConfig,
    Cohere2MoeForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    CwmConfig,
    CwmForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Dots1Config,
    Dots1ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    ExaoneConfig,
    ExaoneMoeConfig,
    ExaoneMoeForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    FalconMambaConfig,
    FalconMambaForCausalLM,
    FlexOlmoConfig,
    FlexOlmoForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedTextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
    GraniteMoeSWAConfig,
    GraniteMoeSWAForCausalLM,
    GraniteSWAConfig,
    GraniteSWAForCausalLM,
    HeliumConfig,
    HeliumForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
    HYV3Config,
    HYV3ForCausalLM,
    InternLM3Config,
    IQuestCoderConfig,
    Jais2Config,
    Jais2ForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    LagunaConfig,
    LagunaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    Lfm3Config,
    Lfm3ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MellumConfig,
    MellumForCausalLM,
    MiMoV2FlashConfig,
    MiMoV2FlashForCausalLM,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MiniMaxM3VLForCausalLM,
    MiniMaxM3VLTextConfig,
    Ministral3Config,
    Ministral3ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    MptConfig,
    MptForCausalLM,
    NanoChatConfig,
    NanoChatForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SarvamMoEConfig,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    SolarOpenConfig,
    SolarOpenForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
    Step3p7TextConfig,
    VaultGemmaConfig,
    VaultGemmaForCausalLM,
    YoutuConfig,
    YoutuForCausalLM,
    Zamba2Config,
    Zamba2ForCausalLM,
)

from support.models.step_model import Step3p5ForCausalLM

VOCAB = 131

# Odd sizes, grouped heads, and (below) windows, scalings and caps that matter for prompts of a few dozen tokens.
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 300.0, "factor": 3.0}

_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 24}

_GEMMA = {"num_hidden_layers": 4, "head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 20}

# Both kinds of layers, with heads of 16 and of 32 dimensions, in front of those that read the K and V of others.
_GEMMA4 = {
    "hidden_size": 96,
    "num_hidden_layers": 5,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 6,
    "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
    "tie_word_embeddings": True,
}

# In sizes that the native kernels take, so that passes are recorded: heads of 16 dimensions.
_NATIVE = {"hidden_size": 96, "num_hidden_layers": 2}
_INTERLEAVED = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
_COHERE = {**_NATIVE, "logit_scale": 0.3, "layer_norm_eps": 1e-4, "tie_word_embeddings": True}

_COHERE_MOE = {
    **_COHERE,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": 6,
    "sliding_window_pattern": 2,
    "first_k_dense_replace": 1,
    "prefix_dense_intermediate_size": 80,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "rms_norm_eps": None,
}

_LFM2 = {
    **_NATIVE,
    "num_hidden_layers": 3,
    "norm_eps": 1e-5,
    "full_attn_idxs": [1],
    "block_multiple_of": 16,
    "tie_word_embeddings": True,
}

_GRANITE_SWA = {
    **_NATIVE,
    "num_hidden_layers": 6,
    "sliding_window": 6,
    "layer_rope_theta": [500.0, 0, 60.0, 500.0, 0, 500.0],
    "embedding_multiplier": 3.3,
    "attention_multiplier": 0.11,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.5,
    "tie_word_embeddings": True,
}

_GRANITE_HYBRID = {
    **_NATIVE,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_local_experts": 0,
    "shared_intermediate_size": 80,
    "embedding_multiplier": 3.3,
    "attention_multiplier": 0.11,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.5,
    "mamba_n_heads": 12,
    "mamba_d_state": 24,
    "mamba_chunk_size": 8,
    "tie_word_embeddings": True,
}

_NEMOTRON_H = {
    **_NATIVE,
    "head_dim": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 24,
    "chunk_size": 8,
    # The library bounds steps from below in prompts, and not behind them; neither training nor its kernels do.
    "time_step_min": 1e-30,
}

_ZAMBA2 = {
    **_NATIVE,
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "n_mamba_heads": 6,
    "mamba_d_state": 24,
    "chunk_size": 8,
    "adapter_rank": 8,
    "tie_word_embeddings": True,
    "time_step_min": 1e-30,  # as in Nemotron-H
}

_MAMBA = {
    "num_hidden_layers": 3,
    "hidden_size": 96,
    "intermediate_size": 112,
    "state_size": 24,
    "time_step_rank": 10,
    "tie_word_embeddings": True,
}

_FALCON_H1 = {
    **_NATIVE,
    "head_dim": 16,
    "mamba_d_ssm": 80,
    "mamba_n_heads": 5,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_chunk_size": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}

_GPT2 = {
    "hidden_size": 96,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
    "layer_norm_epsilon": 1e-4,
}
_MINIMAX_M3 = {
    **_NATIVE,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "rotary_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "dense_intermediate_size": 80,
    "shared_intermediate_size": 40,
    "routed_scaling_factor": 1.7,
    "swiglu_alpha": 1.3,
    "swiglu_limit": 2.0,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "index_n_heads": 2,
    "index_head_dim": 24,
}
_CORRECTED = {
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 14,
    "routed_scaling_factor": 1.7,
}

_DELTA = {
    **_NATIVE,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
}
_SEPARATE_DELTA = {
    **_NATIVE,
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "rms_norm_eps": 1e-3,
}
_DELTA_MIXTURE = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}

_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.2, 2.0, 5.0, 9.0],
}

# A score is 0 where no head scores a token, and of equal ones transformers chooses any: with so many heads none is.
_INDEX = {"index_topk": 64, "index_head_dim": 24, "index_n_heads": 16}
_LATENT = {
    "num_key_value_heads": 6,
    "q_lora_rank": 40,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "moe_intermediate_size": 14,
    "n_shared_experts": 2,
}

_MIMO_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e2, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e2, "partial_rotary_factor": 0.5},
}
_LAGUNA = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 6,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 14,
    "shared_expert_intermediate_size": 24,
    "moe_routed_scaling_factor": 1.7,
}

_LING = {
    **_LATENT,
    "q_lora_rank": None,
    "v_head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "layer_group_size": 2,
    "first_k_dense_replace": 1,
    "head_dim": 32,
    "num_local_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "rope_theta": 500.0,
}

MODELS: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama_tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "llama_scaled": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": _LLAMA3, "num_key_value_heads": 1}),
    "llama_linear": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": _LINEAR, "head_dim": 10}),
    "llama_yarn": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": _YARN}),
    "llama_biased": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 7, "head_dim": 16}),
    "ministral3": (
        Ministral3Config,
        Ministral3ForCausalLM,
        {
            **_NATIVE,
            "head_dim": 16,
            "sliding_window": None,
            "rope_parameters": _YARN
            | {
                "original_max_position_embeddings": 9,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.9,
            },
        },
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "mimo": (Qwen2Config, Qwen2ForCausalLM, {**_NATIVE, "architectures": ["MiMoForCausalLM"]}),
    "qwen2_window": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen_as_code": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {**_NATIVE, "num_key_value_heads": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 14}),
    "smollm3": (
        SmolLM3Config,
        SmolLM3ForCausalLM,
        {"num_hidden_layers": 5, "tie_word_embeddings": True},
    ),
    "smollm3_window": (
        SmolLM3Config,
        SmolLM3ForCausalLM,
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 9, "attention_bias": True},
    ),
    "gemma": (GemmaConfig, GemmaForCausalLM, {**_NATIVE, "head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {**_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0, "tie_word_embeddings": True},
    ),
    "vaultgemma": (
        VaultGemmaConfig,
        VaultGemmaForCausalLM,
        {
            **_NATIVE,
            "head_dim": 16,
            "sliding_window": 5,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            **_GEMMA,
            "num_hidden_layers": 7,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": _LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "gemma4": (
        Gemma4TextConfig,
        Gemma4ForCausalLM,
        {
            **_GEMMA4,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma4_same_values": (
        Gemma4TextConfig,
        Gemma4ForCausalLM,
        {
            **_GEMMA4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 3,
            "use_bidirectional_attention": "vision",
        },
    ),
    "gemma4_unified": (
        Gemma4UnifiedTextConfig,
        Gemma4UnifiedForCausalLM,
        {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 2, "final_logit_softcapping": 2.0},
    ),
    "gemma4_mixture": (
        Gemma4TextConfig,
        Gemma4ForCausalLM,
        {
            **_GEMMA4,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 16,
        },
    ),
    # What a GGUF file can say of a Gemma: no query scale, no period of the windows but the usual one.
    "gemma2_plain": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {
            **_GEMMA,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3_plain": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            **_GEMMA,
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 12,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": _LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "phi3": (Phi3Config, Phi3ForCausalLM, {"sliding_window": 11}),
    "phi3_partial": (
        Phi3Config,
        Phi3ForCausalLM,
        {
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 5, "sliding_window": 9}),
    "qwen2_moe": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        {
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 44,
            "mlp_only_layers": [1],
        },
    ),
    "qwen2_moe_window": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        {
            "num_experts": 4,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 24,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 2,
        },
    ),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "num_hidden_layers": 4,
            "head_dim": 14,
            "num_experts": 9,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 26,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
        },
    ),
    # What a GGUF file can say of a mixture: every layer has experts, and the family says whether weights sum to one.
    "mixtral_plain": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 5, "num_experts_per_tok": 3}),
    "qwen2_moe_plain": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "qwen3_moe_plain": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "head_dim": 14,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM, {"num_experts": 6, "num_experts_per_tok": 3}),
    "glm4_moe": (
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        {
            "head_dim": 16,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 14,
            "routed_scaling_factor": 1.7,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    # Ling 2, whose code is that of Sarvam 30B: partial rotary embeddings, and groups of experts.
    "bailing_moe_v2": (
        SarvamMoEConfig,
        Glm4MoeForCausalLM,
        {
            **_NATIVE,
            **_CORRECTED,
            "architectures": ["BailingMoeV2ForCausalLM"],
            "head_dim": 16,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "sarvam_moe": (
        SarvamMoEConfig,
        Glm4MoeForCausalLM,
        {"head_dim": 16, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 14},
    ),
    "deepseek_v2": (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        {
            **_LATENT,
            "first_k_dense_replace": 1,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.7,
            "attention_bias": True,
        },
    ),
    "deepseek_v2_lite": (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        {
            **_LATENT,
            "q_lora_rank": None,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.9, "beta_fast": 8.0},
        },
    ),
    # What a GGUF file can say: no biases, and the two factors of YaRN are the same.
    "deepseek_v2_plain": (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        {
            **_LATENT,
            "q_lora_rank": None,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7, "beta_fast": 8.0},
        },
    ),
    "deepseek_v3": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        {
            **_LATENT,
            "first_k_dense_replace": 1,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.75,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 1.0},
        },
    ),
    # As many tokens as the index chooses, which are all.
    "deepseek_v32": (
        DeepseekV32Config,
        DeepseekV32ForCausalLM,
        {
            **_LATENT,
            **_INDEX,
            "first_k_dense_replace": 1,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 1.0},
        },
    ),
    "glm_moe_dsa": (
        GlmMoeDsaConfig,
        GlmMoeDsaForCausalLM,
        {**_LATENT, **_INDEX, "n_routed_experts": 6, "num_experts_per_tok": 2, "first_k_dense_replace": 2},
    ),
    "deepseek_v32_chosen": (
        DeepseekV32Config,
        DeepseekV32ForCausalLM,
        {
            **_LATENT,
            **_INDEX,
            "index_topk": 12,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 2,
        },
    ),
    # The last layer shares an index, too: the rows that a step keeps are among those that it chose for.
    "glm_moe_dsa_shared": (
        GlmMoeDsaConfig,
        GlmMoeDsaForCausalLM,
        {
            **_LATENT,
            **_INDEX,
            "index_topk": 12,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 2,
            "indexer_types": ["full", "full", "shared"],
        },
    ),
    "mistral4": (
        Mistral4Config,
        Mistral4ForCausalLM,
        {
            **_LATENT,
            "first_k_dense_replace": 1,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                **_YARN,
                "beta_fast": 1.0,
                "original_max_position_embeddings": 9,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.9,
            },
        },
    ),
    "glm4_moe_lite": (
        Glm4MoeLiteConfig,
        Glm4MoeLiteForCausalLM,
        {
            **_LATENT,
            "first_k_dense_replace": 1,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
    "youtu": (YoutuConfig, YoutuForCausalLM, {**_LATENT, "tie_word_embeddings": True}),
    "minicpm3": (
        MiniCPM3Config,
        MiniCPM3ForCausalLM,
        {**_LATENT, "scale_emb": 3.3, "scale_depth": 0.9, "dim_model_base": 20, "tie_word_embeddings": True},
    ),
    "mellum": (
        MellumConfig,
        MellumForCausalLM,
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 14,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "rope_parameters": {
                "full_attention": _YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "jais2": (Jais2Config, Jais2ForCausalLM, {**_NATIVE, "head_dim": 16, "layer_norm_eps": 1e-4}),
    "granite_moe": (
        GraniteMoeConfig,
        GraniteMoeForCausalLM,
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 3.3,
            "attention_multiplier": 0.11,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_oss": (
        GptOssConfig,
        GptOssForCausalLM,
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 8,
            "swiglu_limit": 0.9,
            "rope_parameters": _YARN | {"truncate": False},
        },
    ),
    "llama4": (
        Llama4TextConfig,
        Llama4ForCausalLM,
        {
            **_NATIVE,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size_mlp": 88,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 3,
            "attention_chunk_size": 10,
            "floor_scale": 6,
            "attn_scale": 0.7,
            "rope_parameters": _LLAMA3,
        },
    ),
    # What a GGUF file can say of them: no sizes of chunks and steps but the published ones, no bound of the activation.
    "llama4_published": (
        Llama4TextConfig,
        Llama4ForCausalLM,
        {
            **_NATIVE,
            "num_hidden_layers": 5,
            "head_dim": 16,
            "intermediate_size_mlp": 88,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
        },
    ),
    "gpt_oss_plain": (
        GptOssConfig,
        GptOssForCausalLM,
        {
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": 8,
            "rope_parameters": _YARN | {"truncate": False},
        },
    ),
    "llama4_plain": (
        Llama4TextConfig,
        Llama4ForCausalLM,
        {
            **_NATIVE,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "no_rope_layer_interval": 2,
            "attention_chunk_size": None,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
        },
    ),
    "granite": (
        GraniteConfig,
        GraniteForCausalLM,
        {
            **_NATIVE,
            "embedding_multiplier": 3.3,
            "attention_multiplier": 0.11,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {**_NATIVE}),
    "olmo3": (
        Olmo3Config,
        Olmo3ForCausalLM,
        {
            **_NATIVE,
            "num_hidden_layers": 4,
            "sliding_window": 7,
            "rope_parameters": {
                "full_attention": {**_YARN, "attention_factor": 1.2},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "glm": (GlmConfig, GlmForCausalLM, {**_NATIVE, "head_dim": 32, "rope_parameters": _INTERLEAVED}),
    "glm4": (Glm4Config, Glm4ForCausalLM, {**_NATIVE, "head_dim": 16, "rope_parameters": _INTERLEAVED}),
    "cohere": (CohereConfig, CohereForCausalLM, _COHERE),
    "cohere_normed": (CohereConfig, CohereForCausalLM, {**_COHERE, "use_qk_norm": True, "attention_bias": True}),
    "cohere2": (Cohere2Config, Cohere2ForCausalLM, {**_COHERE, "num_hidden_layers": 4, "sliding_window": 6}),
    "exaone4": (
        Exaone4Config,
        Exaone4ForCausalLM,
        {**_NATIVE, "num_hidden_layers": 4, "sliding_window": 6, "sliding_window_pattern": 4},
    ),
    "exaone4_full": (
        Exaone4Config,
        Exaone4ForCausalLM,
        {
            **_NATIVE,
            "sliding_window": None,
            "layer_types": ["full_attention"] * 2,
            "rope_parameters": _LLAMA3,
            "tie_word_embeddings": True,
        },
    ),
    "seed_oss": (SeedOssConfig, SeedOssForCausalLM, {**_NATIVE, "head_dim": 16}),
    "seed_oss_biased": (
        SeedOssConfig,
        SeedOssForCausalLM,
        {**_NATIVE, "head_dim": 16, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "starcoder2": (
        Starcoder2Config,
        Starcoder2ForCausalLM,
        {**_NATIVE, "norm_epsilon": 1e-4, "sliding_window": 9, "tie_word_embeddings": True},
    ),
    "internlm3": (
        InternLM3Config,
        LlamaForCausalLM,
        {
            **_NATIVE,
            "head_dim": 16,
            "architectures": ["InternLM3ForCausalLM"],
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 6.0},
        },
    ),
    "ernie4_5": (
        Ernie4_5Config,
        Ernie4_5ForCausalLM,
        {**_NATIVE, "head_dim": 16, "use_bias": True, "tie_word_embeddings": True},
    ),
    "hunyuan": (
        HunYuanDenseV1Config,
        HunYuanDenseV1ForCausalLM,
        {
            **_NATIVE,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "alpha": 50.0, "factor": 1.0},
        },
    ),
    "nemotron": (
        NemotronConfig,
        NemotronForCausalLM,
        {**_NATIVE, "head_dim": 16, "norm_eps": 1e-4, "rope_parameters": _INTERLEAVED},
    ),
    "exaone": (ExaoneConfig, LlamaForCausalLM, {**_NATIVE, "head_dim": 16}),
    "helium": (HeliumConfig, HeliumForCausalLM, {**_NATIVE, "head_dim": 16, "attention_bias": True}),
    "iquestcoder": (
        IQuestCoderConfig,
        LlamaForCausalLM,
        {**_NATIVE, "head_dim": 16, "architectures": ["IQuestCoderForCausalLM"]},
    ),
    "ministral": (
        MinistralConfig,
        MinistralForCausalLM,
        {"head_dim": 16, "sliding_window": 7, "layer_types": ["sliding_attention"] * 3},
    ),
    "ministral_mixed": (
        MinistralConfig,
        MinistralForCausalLM,
        {
            "head_dim": 16,
            "sliding_window": 7,
            "sliding_window_pattern": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "cwm": (
        CwmConfig,
        CwmForCausalLM,
        {**_NATIVE, "num_hidden_layers": 5, "head_dim": 16, "sliding_window": 6, "rope_parameters": _LLAMA3},
    ),
    "flex_olmo": (FlexOlmoConfig, FlexOlmoForCausalLM, {**_NATIVE, "num_experts": 5, "num_experts_per_tok": 2}),
    "dots1": (
        Dots1Config,
        Dots1ForCausalLM,
        {
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 14,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.7,
            "norm_topk_prob": True,
            "sliding_window": 6,
            "max_window_layers": 2,
        },
    ),
    "solar_open": (
        SolarOpenConfig,
        SolarOpenForCausalLM,
        {
            **_NATIVE,
            **_CORRECTED,
            "head_dim": 16,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "afmoe": (
        AfmoeConfig,
        AfmoeForCausalLM,
        {
            **_NATIVE,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 6,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "moe_intermediate_size": 14,
            "route_scale": 1.7,
            "mup_enabled": True,
        },
    ),
    "minimax_m2": (
        MiniMaxM2Config,
        MiniMaxM2ForCausalLM,
        {
            **_NATIVE,
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "minimax_m3": (MiniMaxM3VLTextConfig, MiniMaxM3VLForCausalLM, _MINIMAX_M3),
    # Blocks that are smaller than a page of the tests, as large, and larger; one or two of them are always seen.
    "minimax_m3_chosen": (
        MiniMaxM3VLTextConfig,
        MiniMaxM3VLForCausalLM,
        {**_MINIMAX_M3, "index_block_size": 4, "index_topk_blocks": 3, "index_local_blocks": 2},
    ),
    "minimax_m3_wide_blocks": (
        MiniMaxM3VLTextConfig,
        MiniMaxM3VLForCausalLM,
        {**_MINIMAX_M3, "index_block_size": 24, "index_topk_blocks": 1},
    ),
    "exaone_moe": (
        ExaoneMoeConfig,
        ExaoneMoeForCausalLM,
        {
            **_NATIVE,
            **_CORRECTED,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_experts": 8,
            "num_shared_experts": 2,
            "sliding_window": 6,
        },
    ),
    "ernie4_5_moe": (
        Ernie4_5_MoeConfig,
        Ernie4_5_MoeForCausalLM,
        {
            **_NATIVE,
            "num_hidden_layers": 4,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": 14,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
            "tie_word_embeddings": True,
        },
    ),
    "hunyuan_moe": (
        HunYuanMoEV1Config,
        HunYuanMoEV1ForCausalLM,
        {
            **_NATIVE,
            "head_dim": 16,
            "num_experts": 6,
            "moe_topk": 3,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "alpha": 50.0, "factor": 1.0},
        },
    ),
    # What a GGUF file can say: YaRN without a factor of its own, and the usual window.
    "olmo3_plain": (
        Olmo3Config,
        Olmo3ForCausalLM,
        {
            **_NATIVE,
            "num_hidden_layers": 4,
            "sliding_window": 7,
            "rope_parameters": {
                "full_attention": _YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "starcoder2_plain": (Starcoder2Config, Starcoder2ForCausalLM, {**_NATIVE, "sliding_window": 4096}),
    "lfm2": (Lfm2Config, Lfm2ForCausalLM, _LFM2),
    "lfm2_biased": (
        Lfm2Config,
        Lfm2ForCausalLM,
        {**_LFM2, "conv_L_cache": 4, "conv_bias": True, "full_attn_idxs": [0, 2]},
    ),
    "lfm3": (
        Lfm3Config,
        Lfm3ForCausalLM,
        {
            **_NATIVE,
            "num_hidden_layers": 5,
            "head_dim": 16,
            "sliding_window": 7,
            "norm_eps": 1e-4,
            "tie_word_embeddings": True,
        },
    ),
    "lfm3_biased": (
        Lfm3Config,
        Lfm3ForCausalLM,
        {
            "num_hidden_layers": 5,
            "head_dim": 12,
            "sliding_window": 5,
            "attention_bias": True,
            "conv_bias": True,
            "conv_L_cache": 3,
        },
    ),
    "lfm2_moe": (
        Lfm2MoeConfig,
        Lfm2MoeForCausalLM,
        {
            **_NATIVE,
            "num_hidden_layers": 3,
            "norm_eps": 1e-5,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "routed_scaling_factor": 1.3,
        },
    ),
    "bamba": (
        BambaConfig,
        BambaForCausalLM,
        {
            **_NATIVE,
            "num_hidden_layers": 3,
            "attn_layer_indices": [1],
            "mamba_n_heads": 12,
            "mamba_n_groups": 2,
            "mamba_d_state": 24,
            "mamba_chunk_size": 8,
            "mamba_proj_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "nemotron_h": (
        NemotronHConfig,
        NemotronHForCausalLM,
        {
            **_NEMOTRON_H,
            "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
        },
    ),
    "nemotron_h_mixture": (
        NemotronHConfig,
        NemotronHForCausalLM,
        {
            **_NEMOTRON_H,
            **_CORRECTED,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
            "n_routed_experts": 8,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 48,
            "use_conv_bias": False,
        },
    ),
    "falcon_h1": (
        FalconH1Config,
        FalconH1ForCausalLM,
        {
            **_FALCON_H1,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.7,
            "key_multiplier": 0.6,
            "ssm_in_multiplier": 1.4,
            "ssm_out_multiplier": 0.8,
            "ssm_multipliers": [0.7, 0.9, 1.2, 1.1, 0.6],
            "mlp_multipliers": [0.8, 0.7],
            "embedding_multiplier": 1.7,
            "lm_head_multiplier": 0.9,
        },
    ),
    "falcon_h1_normed": (FalconH1Config, FalconH1ForCausalLM, {**_FALCON_H1, "mamba_rms_norm": True}),
    "mamba": (MambaConfig, MambaForCausalLM, {**_MAMBA, "use_bias": True}),
    "falcon_mamba": (FalconMambaConfig, FalconMambaForCausalLM, {**_MAMBA, "expand": 1, "conv_kernel": 3}),
    "jamba": (
        JambaConfig,
        JambaForCausalLM,
        {
            **_NATIVE,
            "num_hidden_layers": 4,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "mamba_d_state": 24,
        },
    ),
    "mamba2": (
        Mamba2Config,
        Mamba2ForCausalLM,
        {
            "num_hidden_layers": 3,
            "hidden_size": 96,
            "num_heads": 12,
            "head_dim": 16,
            "n_groups": 2,
            "state_size": 24,
            "chunk_size": 8,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    # The first two blocks have weights of their own, and the other two repeat them.
    "zamba2": (
        Zamba2Config,
        Zamba2ForCausalLM,
        {
            **_ZAMBA2,
            "num_hidden_layers": 6,
            "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid", "hybrid"],
            "num_mem_blocks": 2,
            "num_key_value_heads": 6,
            "mamba_ngroups": 2,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "zamba2_plain": (
        Zamba2Config,
        Zamba2ForCausalLM,
        {**_ZAMBA2, "layers_block_type": ["linear_attention", "hybrid", "linear_attention"]},
    ),
    "granite_moe_shared": (
        GraniteMoeSharedConfig,
        GraniteMoeSharedForCausalLM,
        {**_NATIVE, "num_local_experts": 4, "num_experts_per_tok": 4, "shared_intermediate_size": 40},
    ),
    "granite_swa": (GraniteSWAConfig, GraniteSWAForCausalLM, _GRANITE_SWA),
    "granite_moe_swa": (
        GraniteMoeSWAConfig,
        GraniteMoeSWAForCausalLM,
        {
            **_GRANITE_SWA,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 40,
            "layer_rope_theta": None,
        },
    ),
    "granite_hybrid": (GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, _GRANITE_HYBRID),
    "granite_hybrid_mixture": (
        GraniteMoeHybridConfig,
        GraniteMoeHybridForCausalLM,
        {
            **_GRANITE_HYBRID,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "position_embedding_type": "rope",
            "mamba_n_groups": 2,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "qwen3_next": (
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
        {**_DELTA, **_DELTA_MIXTURE, "norm_topk_prob": True, "decoder_sparse_step": 2},
    ),
    # What a GGUF file can say of it: every layer has experts.
    "qwen3_next_plain": (
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
        {**_DELTA, **_DELTA_MIXTURE, "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "kimi_linear": (
        KimiLinearConfig,
        KimiLinearForCausalLM,
        {
            **_LATENT,
            "q_lora_rank": None,
            "num_hidden_layers": 4,
            "num_key_value_heads": 6,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
            "linear_num_heads": 4,
            "linear_head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "n_group": 3,
            "topk_group": 2,
        },
    ),
    "bailing_hybrid": (BailingHybridConfig, BailingHybridForCausalLM, _LING),
    "bailing_hybrid_unbounded": (
        BailingHybridConfig,
        BailingHybridForCausalLM,
        {**_LING, "q_lora_rank": 24, "kda_safe_gate": False, "short_conv_kernel_size": 3},
    ),
    "olmo_hybrid": (
        OlmoHybridConfig,
        OlmoHybridForCausalLM,
        {**_SEPARATE_DELTA, "linear_num_value_heads": 6, "num_key_value_heads": 2, "rope_theta": None},
    ),
    "olmo_hybrid_rotated": (
        OlmoHybridConfig,
        OlmoHybridForCausalLM,
        {
            **_SEPARATE_DELTA,
            "linear_conv_kernel_dim": 3,
            "linear_allow_neg_eigval": False,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, {**_DELTA, "tie_word_embeddings": True}),
    "qwen3_5_biased": (
        Qwen3_5TextConfig,
        Qwen3_5ForCausalLM,
        {
            **_DELTA,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
        },
    ),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, {**_DELTA, **_DELTA_MIXTURE}),
    "apertus": (ApertusConfig, ApertusForCausalLM, {"num_key_value_heads": 2, "head_dim": 16, "attention_bias": True}),
    "phi": (
        PhiConfig,
        PhiForCausalLM,
        {"hidden_size": 96, "num_hidden_layers": 2, "layer_norm_eps": 1e-4, "rope_parameters": _INTERLEAVED},
    ),
    "phi_normed": (
        PhiConfig,
        PhiForCausalLM,
        {"hidden_size": 96, "num_hidden_layers": 2, "qk_layernorm": True, "rope_parameters": _INTERLEAVED},
    ),
    "phi_as_code": (
        PhiConfig,
        PhiForCausalLM,
        {"hidden_size": 96, "num_key_value_heads": 6, "intermediate_size": 384},
    ),
    "nanochat": (NanoChatConfig, NanoChatForCausalLM, {**_NATIVE, "final_logit_softcapping": 2.0}),
    "gpt2": (GPT2Config, GPT2LMHeadModel, _GPT2),
    "gpt_bigcode": (GPTBigCodeConfig, GPTBigCodeForCausalLM, _GPT2),
    "gpt_bigcode_heads": (
        GPTBigCodeConfig,
        GPTBigCodeForCausalLM,
        {**_GPT2, "multi_query": False, "n_inner": 80, "intermediate_size": 80},
    ),
    "gpt_neox": (
        GPTNeoXConfig,
        GPTNeoXForCausalLM,
        {**_NATIVE, "num_key_value_heads": 6, "layer_norm_eps": 1e-4, "rope_parameters": _INTERLEAVED},
    ),
    "gpt_neox_serial": (
        GPTNeoXConfig,
        GPTNeoXForCausalLM,
        {
            "num_key_value_heads": 6,
            "hidden_size": 96,
            "hidden_act": "gelu_fast",
            "use_parallel_residual": False,
            "attention_bias": False,
        },
    ),
    "gptj": (
        GPTJConfig,
        GPTJForCausalLM,
        {**_NATIVE, "num_key_value_heads": 6, "rotary_dim": 8, "layer_norm_epsilon": 1e-4},
    ),
    "stablelm": (
        StableLmConfig,
        StableLmForCausalLM,
        {**_NATIVE, "use_qkv_bias": True, "layer_norm_eps": 1e-4, "rope_parameters": _INTERLEAVED},
    ),
    "stablelm_parallel": (
        StableLmConfig,
        StableLmForCausalLM,
        {**_NATIVE, "use_parallel_residual": True, "qk_layernorm": True},
    ),
    "axk1": (
        AXK1Config,
        AXK1ForCausalLM,
        {
            **_LATENT,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.75,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 1.0},
        },
    ),
    "hy_v3": (
        HYV3Config,
        HYV3ForCausalLM,
        {
            **_NATIVE,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 14,
            "num_shared_experts": 2,
            "attention_bias": True,
        },
    ),
    "cohere2_moe": (Cohere2MoeConfig, Cohere2MoeForCausalLM, {**_COHERE_MOE, "expert_selection_fn": "sigmoid"}),
    "cohere2_moe_summed": (
        Cohere2MoeConfig,
        Cohere2MoeForCausalLM,
        {
            **_COHERE_MOE,
            "expert_selection_fn": "softmax",
            "shared_expert_combination_strategy": "sum",
            "prefix_dense_intermediate_size": None,
            "prefix_dense_sliding_window_pattern": 2,
            "attention_bias": True,
            "rms_norm_eps": 1e-4,
        },
    ),
    "mimo_v2_flash": (
        MiMoV2FlashConfig,
        MiMoV2FlashForCausalLM,
        {
            **_NATIVE,
            **_CORRECTED,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "head_dim": 32,
            "v_head_dim": 16,
            "sliding_window": 6,
            "n_routed_experts": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": _MIMO_ROPES,
        },
    ),
    "laguna": (
        LagunaConfig,
        LagunaForCausalLM,
        {
            **_NATIVE,
            **_LAGUNA,
            "num_hidden_layers": 3,
            "num_attention_heads_per_layer": [6, 4, 2],
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {
                **_MIMO_ROPES,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
            },
        },
    ),
    "step3p5": (
        Step3p7TextConfig,
        Step3p5ForCausalLM,
        {
            **_NATIVE,
            "num_attention_heads": 4,
            "num_sliding_attention_heads": 6,
            "head_dim": 16,
            "sliding_window": 6,
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "llama3",
                    "rope_theta": 5e2,
                    "partial_rotary_factor": 0.5,
                    "factor": 4.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
            },
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "share_expert_dim": 32,
            "swiglu_limits": [0.0, 0.0, 0.0, 0.375],
            "swiglu_limits_shared": [0.5, 0.0, 0.75, 0.0],
            "moe_router_scaling_factor": 1.7,
        },
    ),
    "laguna_elements": (
        LagunaConfig,
        LagunaForCausalLM,
        {**_NATIVE, **_LAGUNA, "gating": "per-element", "mlp_layer_types": ["sparse", "dense"]},
    ),
    "mimo_v2_flash_even": (
        MiMoV2FlashConfig,
        MiMoV2FlashForCausalLM,
        {
            **_NATIVE,
            "head_dim": 16,
            "v_head_dim": 16,
            "sliding_window": 6,
            "num_key_value_heads": 3,
            "attention_value_scale": 0.5,
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "dense"],
            "rope_parameters": _MIMO_ROPES,
        },
    ),
    "bloom": (
        BloomConfig,
        BloomForCausalLM,
        {**_NATIVE, "num_key_value_heads": 6, "layer_norm_epsilon": 1e-4, "tie_word_embeddings": True},
    ),
    "mpt": (
        MptConfig,
        MptForCausalLM,
        {**_NATIVE, "num_key_value_heads": 6, "max_seq_len": 128, "tie_word_embeddings": True},
    ),
    "falcon": (
        FalconConfig,
        FalconForCausalLM,
        {"hidden_size": 96, "num_hidden_layers": 2, "tie_word_embeddings": True},
    ),
    "falcon_new": (
        FalconConfig,
        FalconForCausalLM,
        {**_NATIVE, "new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 80, "bias": True},
    ),
    "falcon_new_one_norm": (
        FalconConfig,
        FalconForCausalLM,
        {**_NATIVE, "new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1},
    ),
    "arcee": (ArceeConfig, ArceeForCausalLM, {**_NATIVE, "head_dim": 16, "attention_bias": True}),
}

# Not among the models of the other tests: its rotary embedding depends on the length of the sequence.
LONGROPE = {
    "phi3_longrope": (
        Phi3Config,
        Phi3ForCausalLM,
        {**_NATIVE, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 24, "tie_word_embeddings": True},
    )
}


@functools.cache
def tiny_model(name: str) -> PreTrainedModel:
    """The oracle: random weights large enough that every part of the model shows in its logits."""
    config_class, model_class, changes = (MODELS | LONGROPE)[name]
    # A copy of every value, for transformers writes its defaults into nested ones.
    config = config_class(**COMMON | _copied(changes), attn_implementation="eager", experts_implementation="eager")
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.25, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.25, generator=generator)
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.4, 0.9, generator=generator)
    return model


def adaptable(name: str) -> PreTrainedModel:
    """A copy for PEFT, which refuses ``out_proj`` by these names: a kernel for training reads its weight itself."""
    model = copy.deepcopy(tiny_model(name))
    if model.config.model_type in ("nemotron_h", "mamba", "mamba2", "falcon_h1", "falcon_mamba", "jamba", "zamba2"):
        model.config.model_type = "tiny"
    return model


def _copied(value: Any) -> Any:
    return {key: _copied(item) for key, item in value.items()} if isinstance(value, dict) else value


def save(name: str, folder: Path, *, max_shard_size: str = "1GB") -> Path:
    """Write the model as transformers does."""
    tiny_model(name).save_pretrained(folder, max_shard_size=max_shard_size)
    if (named := (MODELS | LONGROPE)[name][2].get("architectures")) is not None:  # transformers writes its own class
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": named}))
    return folder


def oracle_logits(name: str, tokens: list[int]) -> Tensor:
    """[T, V] fp32, to be read alone: computed once in a process, as tests ask for the same prompts in many ways."""
    return _logits(name, tuple(tokens))


@functools.cache
@torch.no_grad()
def _logits(name: str, tokens: tuple[int, ...]) -> Tensor:
    return tiny_model(name)(torch.tensor([tokens])).logits[0]
