"""Families whose layers are mixtures of experts, all or some of them."""

from __future__ import annotations

from .family import ATTENTION, QKV, Family
from .mixture import ExpertNames, MixtureFamily

_QWEN_COUNTS = ("num_experts", "num_local_experts")

MIXTURE_FAMILIES = (
    Family(
        name="mixtral",
        models="Mixtral",
        architecture="MixtralForCausalLM",
        windows="all",
        defaults={
            "num_key_value_heads": 8,
            "rope_theta": 1_000_000.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_experts_per_tok": 2,
        },
        mixture=MixtureFamily(
            names=ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
            count_keys=("num_local_experts", "num_experts"),
            size_key="intermediate_size",
        ),
        gguf_name="llama",
        permuted_gguf=True,
    ),
    Family(
        name="qwen2_moe",
        models="Qwen 1.5 MoE, Qwen 2 57B-A14B",
        architecture="Qwen2MoeForCausalLM",
        windows="early",
        defaults={
            "num_key_value_heads": 16,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        qkv_bias=True,
        mixture=MixtureFamily(
            names=ExpertNames(shared="shared_expert"),
            count_keys=_QWEN_COUNTS,
            dense_layers="stepped",
            renormalises=None,
            shared_size_key="shared_expert_intermediate_size",
            gated_sharing=True,
        ),
        gguf_name="qwen2moe",
    ),
    Family(
        name="qwen3_moe",
        models="Qwen 3 30B-A3B, 235B-A22B, Qwen 3 Coder",
        architecture="Qwen3MoeForCausalLM",
        windows="asked",
        defaults={
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        optional_biases={"attention_bias": ATTENTION},
        qk_norm="head",
        mixture=MixtureFamily(
            names=ExpertNames(),
            count_keys=_QWEN_COUNTS,
            dense_layers="stepped",
            renormalises=None,
            gguf_renormalises=True,
        ),
        gguf_name="qwen3moe",
    ),
    Family(
        name="olmoe",
        models="OLMoE",
        architecture="OlmoeForCausalLM",
        windows="never",
        defaults={"rms_norm_eps": 1e-5, "eos_token_id": 50279, "num_experts_per_tok": 8},
        optional_biases={"attention_bias": ATTENTION},
        qk_norm="projection",
        mixture=MixtureFamily(
            names=ExpertNames(), count_keys=_QWEN_COUNTS, size_key="intermediate_size", renormalises=None
        ),
        gguf_name="olmoe",
    ),
    Family(
        name="glm4_moe",
        models="GLM-4.5, GLM-4.5-Air, GLM-4.6",
        architecture="Glm4MoeForCausalLM",
        windows="never",
        defaults={
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        optional_biases={"attention_bias": QKV},
        qk_norm="head",
        qk_norm_flag="use_qk_norm",
        partial_rotary=True,
        mixture=MixtureFamily(
            names=ExpertNames(),
            count_keys=("n_routed_experts", "num_local_experts"),
            dense_layers="first",
            scores="sigmoid",
            renormalises=None,
            scaled=True,
            corrected=True,
            grouped=True,
            shared_size_key="moe_intermediate_size",
            shared_count_key="n_shared_experts",
            prediction_layers_key="num_nextn_predict_layers",
        ),
    ),
    Family(
        name="granitemoe",
        models="Granite 3 1B-A400M and 3B-A800M",
        architecture="GraniteMoeForCausalLM",
        windows="never",
        defaults={"bos_token_id": 1, "eos_token_id": 2, "num_experts_per_tok": 2},
        optional_biases={"attention_bias": ATTENTION},
        multipliers=True,
        mixture=MixtureFamily(
            names=ExpertNames(
                block="block_sparse_moe",
                router="router.layer",
                gate="input_linear",
                down="output_linear",
                storage="stacked",
            ),
            count_keys=("num_local_experts", "num_experts"),
            size_key="intermediate_size",
        ),
    ),
    Family(
        name="gpt_oss",
        models="gpt-oss",
        architecture="GptOssForCausalLM",
        windows="pattern",
        defaults={
            "head_dim": 64,
            "num_key_value_heads": 8,
            "attention_bias": True,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "rope_theta": 150_000.0,
            "num_experts_per_tok": 4,
        },
        optional_biases={"attention_bias": ATTENTION},
        attention_sinks=True,
        mixture=MixtureFamily(
            names=ExpertNames(
                router="router", gate="experts.gate_up_proj", down="experts.down_proj", storage="interleaved"
            ),
            count_keys=("num_local_experts", "num_experts"),
            size_key="intermediate_size",
            biased=True,
            clamped=True,
            mxfp4=True,
        ),
    ),
)
