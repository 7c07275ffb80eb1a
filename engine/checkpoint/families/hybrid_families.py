"""Families with layers that have a recurrent state in place of attention."""

from __future__ import annotations

from .family import Family
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
        short_conv=True,
    ),
)
