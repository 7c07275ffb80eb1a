"""Families with layers that have a recurrent state in place of attention."""

from __future__ import annotations

from .family import ATTENTION, Family
from .mixture import ExpertNames, MixtureFamily
from .norm_layout import LayerNorms

HYBRID_FAMILIES = (
    Family(
        name="lfm2",
        models="LFM2 350M, 700M, 1.2B, 2.6B",
        architecture="Lfm2ForCausalLM",
        windows="never",
        defaults={
            "num_key_value_heads": 8,
            "rope_theta": 1_000_000.0,
            "norm_eps": 1e-5,
            "max_position_embeddings": 128_000,
            "tie_word_embeddings": True,
            "conv_L_cache": 3,
            "conv_bias": False,
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
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
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
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
)
