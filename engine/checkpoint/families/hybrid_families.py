"""Families with layers that have a recurrent state in place of attention."""

from __future__ import annotations

from dataclasses import replace

from .family import ATTENTION, MLP, Family
from .mixture import ExpertNames, MixtureFamily
from .norm_layout import LayerNorms

_DELTA = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN_MIXTURE = MixtureFamily(
    names=ExpertNames(shared="shared_expert"),
    count_keys=("num_experts", "num_local_experts"),
    shared_size_key="shared_expert_intermediate_size",
    gated_sharing=True,
)

_MAMBA2 = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}

_SHORT_CONV = {
    "num_key_value_heads": 8,
    "rope_theta": 1_000_000.0,
    "norm_eps": 1e-5,
    "max_position_embeddings": 128_000,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LFM2 = Family(
    name="lfm2",
    models="LFM2 350M, 700M, 1.2B, 2.6B",
    architecture="Lfm2ForCausalLM",
    windows="never",
    defaults={
        **_SHORT_CONV,
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
    },
    norms=LayerNorms("operator_norm", None, "ffn_norm", None),
    eps_key="norm_eps",
    qk_norm="head",
    head_norms=("q_layernorm", "k_layernorm"),
    output_module="out_proj",
    mlp_modules=("w1", "w3", "w2"),
    mlp_block="feed_forward",
    final_norm="embedding_norm",
    recurrent="short_conv",
    gguf_name="lfm2",
)
_QWEN35 = Family(
    name="qwen3_5_text",
    models="Qwen 3.5, Qwen 3.6 (dense)",
    architecture="Qwen3_5ForCausalLM",
    windows="never",
    defaults={**_DELTA, "num_key_value_heads": 4},
    optional_biases={"attention_bias": ATTENTION},
    norm_offset=1.0,
    qk_norm="head",
    partial_rotary=True,
    mrope=True,
    gated_attention=True,
    ignored=("mtp",),
    recurrent="delta",
)

HYBRID_FAMILIES = (
    _LFM2,
    replace(
        _LFM2,
        name="lfm2_moe",
        models="LFM2 8B-A1B, LFM2 24B-A2B",
        architecture="Lfm2MoeForCausalLM",
        defaults={
            **_SHORT_CONV,
            "block_auto_adjust_ff_dim": False,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "num_experts_per_tok": 4,
            "use_expert_bias": True,
            "norm_topk_prob": True,
        },
        mixture=MixtureFamily(
            names=ExpertNames(block="feed_forward", gate="w1", up="w3", down="w2", correction="expert_bias"),
            count_keys=("num_experts", "num_local_experts"),
            dense_layers="first",
            first_key="num_dense_layers",
            scores="sigmoid",
            renormalises=None,
            scaled=True,
            corrected=True,
            corrected_key="use_expert_bias",
        ),
        gguf_name=None,
    ),
    Family(
        name="bamba",
        models="Bamba 9B",
        architecture="BambaForCausalLM",
        windows="never",
        defaults={
            **_MAMBA2,
            "num_key_value_heads": 8,
            "max_position_embeddings": 262_144,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        optional_biases={"attention_bias": ATTENTION, "mlp_bias": MLP},
        norms=LayerNorms("input_layernorm", None, "pre_ff_layernorm", None),
        mlp_block="feed_forward",
        final_norm="final_layernorm",
        partial_rotary=True,
        recurrent="mamba2",
    ),
    Family(
        name="granitemoehybrid",
        models="Granite 4.0 H 350M, 1B, Micro, Tiny, Small",
        architecture="GraniteMoeHybridForCausalLM",
        windows="never",
        defaults={
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
            **_MAMBA2,
        },
        optional_biases={"attention_bias": ATTENTION},
        multipliers=True,
        mlp_modules=("input_linear", "output_linear"),
        mlp_block="shared_mlp",
        no_rope="asked",
        mixture=MixtureFamily(
            names=ExpertNames(
                block="block_sparse_moe",
                router="router.layer",
                gate="input_linear",
                down="output_linear",
                storage="stacked",
                shared="shared_mlp",
                shared_modules=("input_linear", "output_linear"),
                shared_in_layer=True,
            ),
            count_keys=("num_local_experts", "num_experts"),
            size_key="intermediate_size",
            shared_size_key="shared_intermediate_size",
            optional=True,
        ),
        recurrent="mamba2",
    ),
    replace(
        _QWEN35,
        name="qwen3_next",
        models="Qwen3-Next 80B-A3B, Qwen3-Coder-Next",
        architecture="Qwen3NextForCausalLM",
        defaults={
            **_DELTA,
            "num_key_value_heads": 2,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
        },
        mrope=False,
        mixture=replace(_QWEN_MIXTURE, dense_layers="stepped", renormalises=None, optional=True),
        recurrent="grouped_delta",
    ),
    _QWEN35,
    replace(
        _QWEN35,
        name="qwen3_5_moe_text",
        models="Qwen 3.5, Qwen 3.6 (mixtures of experts)",
        architecture="Qwen3_5MoeForCausalLM",
        defaults={
            **_DELTA,
            "num_key_value_heads": 2,
            "intermediate_size": 512,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        mixture=_QWEN_MIXTURE,
    ),
)
