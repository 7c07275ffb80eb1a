"""The ``config.json`` of published mixtures of experts, key by key as their repositories have them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rootgraft.engine.checkpoint.families.mixture import ClampedGate
from rootgraft.engine.checkpoint.hf_config import model_config
from rootgraft.engine.checkpoint.model_config import LatentConfig
from rootgraft.engine.errors import ModelError

_COMMON = {"attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "use_cache": True,
           "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "tie_word_embeddings": False}  # fmt: skip
_ROUTER = {"output_router_logits": False, "router_aux_loss_coef": 0.001}

PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "MiniMax-M2": (
        {"architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "head_dim": 128, "hidden_size": 3072,
         "intermediate_size": 1536, "max_position_embeddings": 196608, "num_attention_heads": 48,
         "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256,
         "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64,
         "scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064,
         "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"}},
        {"num_experts": 256, "top_k": 8, "size": 1536, "scores": "sigmoid", "corrected": True, "renormalises": True},
        62,
    ),
    "ERNIE-4.5-21B-A3B": (
        {"architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "hidden_size": 2560,
         "intermediate_size": 12288, "max_position_embeddings": 131072, "moe_intermediate_size": 1536, "moe_k": 6,
         "moe_layer_end_index": 27, "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64,
         "moe_num_shared_experts": 2, "num_attention_heads": 20, "num_hidden_layers": 28, "num_key_value_heads": 4,
         "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "use_bias": False, "vocab_size": 103424,
         "tie_word_embeddings": True},
        {"num_experts": 64, "top_k": 6, "size": 1536, "shared_size": 3072, "corrected": True},
        27,
    ),
    "Hunyuan-A13B": (
        {"architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe", "attention_bias": False,
         "head_dim": 128, "hidden_size": 4096, "intermediate_size": 3072, "max_position_embeddings": 32768,
         "moe_topk": [8] * 32, "num_attention_heads": 32, "num_experts": 64, "num_hidden_layers": 32,
         "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "use_qk_norm": True,
         "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
                          "mscale_all_dim": 1.0, "type": "dynamic"}, "vocab_size": 128167},
        {"num_experts": 64, "top_k": 8, "size": 3072, "shared_size": 3072},
        32,
    ),
    "Mixtral-8x7B-v0.1": (
        {"architectures": ["MixtralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 4096,
         "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
         "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
         "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
         "vocab_size": 32000},
        {"num_experts": 8, "top_k": 2, "size": 14336, "renormalises": True},
        32,
    ),
    "Qwen1.5-MoE-A2.7B": (
        {"architectures": ["Qwen2MoeForCausalLM"], "bos_token_id": 151643, "eos_token_id": 151643,
         "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 8192,
         "max_window_layers": 21, "model_type": "qwen2_moe", "moe_intermediate_size": 1408, "norm_topk_prob": False,
         "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24,
         "num_key_value_heads": 16, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
         "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "use_sliding_window": False,
         "vocab_size": 151936},
        {"num_experts": 60, "top_k": 4, "shared_size": 5632, "gated_sharing": True, "renormalises": False},
        24,
    ),
    "Qwen3-30B-A3B": (
        {"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "bos_token_id": 151643,
         "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_size": 2048,
         "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
         "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
         "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
         "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None,
         "use_sliding_window": False, "vocab_size": 151936},
        {"num_experts": 128, "top_k": 8, "size": 768, "renormalises": True, "shared_size": 0},
        48,
    ),
    "OLMoE-1B-7B-0924": (
        {"architectures": ["OlmoeForCausalLM"], "attention_bias": False, "clip_qkv": None, "eos_token_id": 50279,
         "hidden_size": 2048, "intermediate_size": 1024, "max_position_embeddings": 4096, "model_type": "olmoe",
         "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
         "num_hidden_layers": 16, "num_key_value_heads": 16, "pad_token_id": 1, "rms_norm_eps": 1e-05,
         "rope_scaling": None, "rope_theta": 10000.0, "vocab_size": 50304},
        {"num_experts": 64, "top_k": 8, "size": 1024, "renormalises": False},
        16,
    ),
    "GLM-4.5-Air": (
        {"architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "pad_token_id": 151329,
         "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "partial_rotary_factor": 0.5, "hidden_size": 4096,
         "intermediate_size": 10944, "max_position_embeddings": 131072, "model_type": "glm4_moe",
         "moe_intermediate_size": 1408, "norm_topk_prob": True, "num_attention_heads": 96, "n_group": 1,
         "topk_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "routed_scaling_factor": 1.0,
         "num_experts_per_tok": 8, "first_k_dense_replace": 1, "num_hidden_layers": 46, "num_key_value_heads": 8,
         "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "num_nextn_predict_layers": 1,
         "use_qk_norm": False, "vocab_size": 151552},
        {"num_experts": 128, "top_k": 8, "shared_size": 1408, "scores": "sigmoid", "corrected": True, "groups": 1},
        45,
    ),
    "granite-3.0-1b-a400m-base": (
        {"architectures": ["GraniteMoeForCausalLM"], "attention_bias": False, "attention_multiplier": 0.015625,
         "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_size": 1024,
         "intermediate_size": 512, "logits_scaling": 6.0, "max_position_embeddings": 4096, "model_type": "granitemoe",
         "num_attention_heads": 16, "num_experts_per_tok": 8, "num_hidden_layers": 24, "num_key_value_heads": 8,
         "num_local_experts": 32, "pad_token_id": 0, "residual_multiplier": 0.22, "rms_norm_eps": 1e-06,
         "rope_scaling": None, "rope_theta": 10000, "tie_word_embeddings": True, "vocab_size": 49155},
        {"num_experts": 32, "top_k": 8, "size": 512, "renormalises": True},
        24,
    ),
    "gpt-oss-20b": (
        {"architectures": ["GptOssForCausalLM"], "attention_bias": True, "eos_token_id": 200002,
         "experts_per_token": 4, "head_dim": 64, "hidden_size": 2880, "initial_context_length": 4096,
         "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
         "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
         "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
         "pad_token_id": 199999, "rms_norm_eps": 1e-05,
         "quantization_config": {
             "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
             "quant_method": "mxfp4",
         },
         "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False,
                          "original_max_position_embeddings": 4096},
         "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "vocab_size": 201088},
        {"num_experts": 32, "top_k": 4, "size": 2880, "biased": True, "clamp": ClampedGate(1.702, 7.0)},
        24,
    ),
    "Llama-4-Scout-17B-16E": (
        {"architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080, "eoi_token_index": 200081,
         "image_token_index": 200092, "max_position_embeddings": 10485760, "model_type": "llama4",
         "text_config": {
             "attention_bias": False, "attention_chunk_size": 8192, "attn_scale": 0.1, "attn_temperature_tuning": True,
             "bos_token_id": 200000, "eos_token_id": [200001, 200007, 200008], "floor_scale": 8192,
             "for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
             "interleave_moe_layer_step": 1, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
             "max_position_embeddings": 10485760, "model_type": "llama4_text", "moe_layers": list(range(48)),
             "no_rope_layers": [1, 1, 1, 0] * 12, "num_attention_heads": 40, "num_experts_per_tok": 1,
             "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16, "rms_norm_eps": 1e-05,
             "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "rope_type": "llama3",
                              "original_max_position_embeddings": 8192},
             "rope_theta": 500000.0, "router_jitter_noise": 0.0, "use_qk_norm": True, "vocab_size": 202048,
         },
         "vision_config": {"model_type": "llama4_vision_model"}},
        {"num_experts": 16, "top_k": 1, "size": 8192, "shared_size": 8192, "weighs_input": True},
        48,
    ),
}  # fmt: skip

_YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
_LATENT = {"attention_bias": False, "ep_size": 1, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
           "v_head_dim": 128, "max_position_embeddings": 163840, "moe_layer_freq": 1, "pretraining_tp": 1,
           "rms_norm_eps": 1e-06, "rope_theta": 10000, "aux_loss_alpha": 0.001, "seq_aux": True}  # fmt: skip
_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


def _code(version: str) -> dict[str, str]:
    return {
        "AutoConfig": f"configuration_deepseek.Deepseek{version}Config",
        "AutoModel": f"modeling_deepseek.Deepseek{version}Model",
        "AutoModelForCausalLM": f"modeling_deepseek.Deepseek{version}ForCausalLM",
    }


LATENT: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "DeepSeek-V2-Lite": (
        {"architectures": ["DeepseekV2ForCausalLM"], "auto_map": _code("V2"), "bos_token_id": 100000,
         "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10944,
         "model_type": "deepseek_v2", "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64,
         "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6,
         "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None, "routed_scaling_factor": 1.0,
         "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, "scoring_func": "softmax",
         "topk_group": 1, "topk_method": "greedy", "vocab_size": 102400},
        {"num_experts": 64, "top_k": 6, "shared_size": 2816, "groups": 1, "renormalises": False},
        26,
    ),
    "DeepSeek-V2": (
        {"architectures": ["DeepseekV2ForCausalLM"], "auto_map": _code("V2"), "bos_token_id": 100000,
         "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_size": 5120, "intermediate_size": 12288,
         "model_type": "deepseek_v2", "moe_intermediate_size": 1536, "n_group": 8, "n_routed_experts": 160,
         "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 128, "num_experts_per_tok": 6,
         "num_hidden_layers": 60, "num_key_value_heads": 128, "q_lora_rank": 1536, "routed_scaling_factor": 16.0,
         "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, "scoring_func": "softmax",
         "topk_group": 3, "topk_method": "group_limited_greedy", "vocab_size": 102400},
        {"num_experts": 160, "scale": 16.0, "groups": 8, "top_groups": 3, "best_of_group": 1, "scores": "softmax"},
        59,
    ),
    "DeepSeek-R1": (
        {"architectures": ["DeepseekV3ForCausalLM"], "auto_map": _code("V3"), "bos_token_id": 0, "eos_token_id": 1,
         "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432, "model_type": "deepseek_v3",
         "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
         "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
         "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
         "quantization_config": _FP8, "routed_scaling_factor": 2.5,
         "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "scoring_func": "sigmoid",
         "topk_group": 4, "topk_method": "noaux_tc", "vocab_size": 129280},
        {"num_experts": 256, "scores": "sigmoid", "corrected": True, "groups": 8, "best_of_group": 2},
        58,
    ),
    "Kimi-K2-Instruct": (
        {"architectures": ["DeepseekV3ForCausalLM"], "auto_map": _code("V3"), "bos_token_id": 163584,
         "eos_token_id": 163586, "first_k_dense_replace": 1, "hidden_size": 7168, "intermediate_size": 18432,
         "max_position_embeddings": 131072, "model_type": "kimi_k2", "moe_intermediate_size": 2048, "n_group": 1,
         "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
         "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
         "q_lora_rank": 1536, "quantization_config": _FP8, "routed_scaling_factor": 2.827, "rope_theta": 50000.0,
         "rope_scaling": {**_YARN, "beta_fast": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
         "scoring_func": "sigmoid", "topk_group": 1, "topk_method": "noaux_tc", "vocab_size": 163840},
        {"num_experts": 384, "top_k": 8, "groups": 1, "scale": 2.827, "best_of_group": 1},
        60,
    ),
}  # fmt: skip
PUBLISHED |= {name: ({**_LATENT, **published}, *rest) for name, (published, *rest) in LATENT.items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read(name: str) -> None:
    published, expected, sparse = PUBLISHED[name]
    config = model_config({**_COMMON, **_ROUTER, **published})
    mixtures = [layer.mixture for layer in config.layers if layer.mixture is not None]
    assert len(mixtures) == sparse
    assert {key: getattr(mixtures[-1], key) for key in expected} == expected
    assert config.max_position_embeddings == published["max_position_embeddings"]


def test_the_latent_attention_of_published_configs() -> None:
    lite, large = (model_config({**_COMMON, **PUBLISHED[name][0]}) for name in ("DeepSeek-V2-Lite", "DeepSeek-R1"))
    assert lite.latent == LatentConfig(None, 512, 128, 64, 128)
    assert large.latent == LatentConfig(1536, 512, 128, 64, 128)
    for config, heads in ((lite, 16), (large, 128)):
        assert (config.num_heads, config.num_kv_heads, config.head_dim) == (heads, 1, 576)
        assert config.layers[0].rope is not None and config.layers[0].rope.dim == 64
    # 0.1 * mscale_all_dim * ln(40) + 1, squared
    assert lite.attention_scale == pytest.approx(192**-0.5 * 1.2608**2, rel=1e-4)
    assert large.attention_scale == pytest.approx(192**-0.5 * 1.3689**2, rel=1e-4)
    assert large.prediction_layers == 1


def test_layers_by_type_or_behind_the_first() -> None:
    config = {
        **_COMMON,
        **PUBLISHED["ERNIE-4.5-21B-A3B"][0],
        "architectures": ["ExaoneMoeForCausalLM"],
        "use_bias": None,
    }
    config |= {"num_experts": 8, "num_hidden_layers": 4, "moe_num_experts": None, "head_dim": 128}
    assert [layer.mixture is None for layer in model_config(config).layers] == [True, False, False, False]
    typed = {**config, "mlp_layer_types": ["sparse", "dense", "dense", "sparse"]}
    assert [layer.mixture is None for layer in model_config(typed).layers] == [False, True, True, False]
    for wrong in (["sparse"], ["sparse", "dense", "dense", "x"], "sparse"):
        with pytest.raises(ModelError, match="mlp_layer_types must be a list of 4 entries, each dense or sparse"):
            model_config({**config, "mlp_layer_types": wrong})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("DeepSeek-V2", {"topk_method": "noaux_tc"}, "topk_method must be one of greedy, group_limited_greedy"),
        ("DeepSeek-V2", {"norm_topk_prob": True}, "norm_topk_prob = True is not supported"),
        ("DeepSeek-V2", {"scoring_func": "sigmoid"}, "scoring_func must be 'softmax', not 'sigmoid'"),
        ("DeepSeek-V2", {"n_group": 7}, "n_group must be a number that divides the"),
        ("DeepSeek-R1", {"topk_method": "greedy"}, "topk_method must be one of noaux_tc"),
        ("DeepSeek-R1", {"num_key_value_heads": 8}, "num_key_value_heads must be num_attention_heads 128"),
        ("DeepSeek-R1", {"rope_interleave": False}, "rope_interleave = False is not supported"),
        ("DeepSeek-R1", {"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported"),
        ("Hunyuan-A13B", {"moe_topk": [8] * 31 + [4]}, "moe_topk must be the same in all layers"),
        ("Hunyuan-A13B", {"moe_topk": []}, "moe_topk must be the same in all layers"),
        ("Hunyuan-A13B", {"moe_topk": [65] * 32}, "moe_topk must be an integer from 1 to 64"),
        ("ERNIE-4.5-21B-A3B", {"moe_layer_interval": 0}, "moe_layer_interval must be an integer from 1 to 28"),
        ("ERNIE-4.5-21B-A3B", {"moe_layer_end_index": 29}, "moe_layer_end_index must be an integer from -1 to 28"),
        ("ERNIE-4.5-21B-A3B", {"use_bias": True}, "use_bias = True is not supported"),
        ("MiniMax-M2", {"rotary_dim": 0}, "rotary_dim must be an integer from 1"),
        ("MiniMax-M2", {"rotary_dim": 129}, "partial_rotary_factor must be a number above 0 and at most 1"),
        ("MiniMax-M2", {"scoring_func": "softmax"}, "scoring_func must be 'sigmoid'"),
        ("DeepSeek-R1", {"kv_lora_rank": 0}, "kv_lora_rank must be an integer from 1 to 65536"),
        ("DeepSeek-R1", {"q_lora_rank": 0}, "q_lora_rank must be an integer from 1"),
        ("DeepSeek-R1", {"v_head_dim": "128"}, "v_head_dim must be an integer"),
        ("DeepSeek-R1", {"qk_rope_head_dim": 63}, "rotates 63 of 63 dimensions"),
        ("DeepSeek-R1", {"auto_map": {"AutoModel": "other.Model"}, "model_type": "x"}, "auto_map asks for code"),
        (
            "DeepSeek-R1",
            {"quantization_config": {**_FP8, "weight_block_size": [64, 64]}},
            "weight_block_size must be [128, 128]",
        ),
        ("DeepSeek-R1", {"quantization_config": {**_FP8, "activation_scheme": "mixed"}}, "activation_scheme must be"),
        ("DeepSeek-R1", {"quantization_config": {**_FP8, "fmt": "e5m2"}}, "fmt must be 'e4m3'"),
        ("DeepSeek-R1", {"quantization_config": {"quant_method": "awq", "bits": 3}}, "bits must be 4"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        model_config({**_COMMON, **PUBLISHED[name][0], **changes})


COHERE: dict[str, Any] = {
    "architectures": ["Cohere2MoeForCausalLM"], "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 6,
    "num_attention_heads": 4, "head_dim": 16, "vocab_size": 100, "first_k_dense_replace": 2, "num_experts": 8,
    "num_experts_per_tok": 2, "num_shared_experts": 2, "sliding_window": 32, "sliding_window_pattern": 2,
    "prefix_dense_intermediate_size": 96,
}  # fmt: skip


def test_layers_of_cohere_2_moe() -> None:
    """Dense layers in front have a pattern of windows, a rotation and a size of their own."""
    config = model_config(COHERE)
    assert [layer.window for layer in config.layers] == [None, None, 32, None, 32, None]
    assert [layer.rope is not None for layer in config.layers] == [True, True, True, False, True, False]
    assert [layer.mixture is None for layer in config.layers] == [True, True, False, False, False, False]
    assert (config.intermediate_size, config.norm, config.norm_eps) == (96, "layer", 1e-5)
    mixture = config.layers[2].mixture
    assert mixture is not None and (mixture.size, mixture.shared_size) == (48, 96)
    assert (mixture.scores, mixture.renormalises, mixture.scale, mixture.shared_scale) == ("softmax", True, 0.5, 0.5)
    other = model_config(
        COHERE
        | {"expert_selection_fn": "sigmoid", "norm_topk_prob": False, "shared_expert_combination_strategy": "sum"}
        | {"prefix_dense_sliding_window_pattern": 2, "prefix_dense_intermediate_size": None, "rms_norm_eps": 1e-6}
    )
    assert [layer.window for layer in other.layers] == [32, None, 32, None, 32, None]
    assert [layer.rope is not None for layer in other.layers] == [True, False, True, False, True, False]
    assert (other.intermediate_size, other.norm, other.norm_eps) == (48, "rms", 1e-6)
    mixture = other.layers[2].mixture
    assert mixture is not None
    assert (mixture.scores, mixture.renormalises, mixture.scale, mixture.shared_scale) == ("sigmoid", False, 1.0, 1.0)


def test_a_mean_of_one_result_is_that_result() -> None:
    mixture = model_config(COHERE | {"num_shared_experts": 0}).layers[2].mixture
    assert mixture is not None and (mixture.scale, mixture.shared_size) == (1.0, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_selection_fn": "topk"}, "expert_selection_fn must be softmax or sigmoid, not 'topk'"),
        ({"shared_expert_combination_strategy": "max"}, "shared_expert_combination_strategy must be sum or average"),
        ({"first_k_dense_replace": 7}, "first_k_dense_replace must be an integer from 0 to 6"),
        ({"use_qk_norm": True}, "use_qk_norm = True is not supported"),
    ],
)
def test_what_cohere_2_moe_is_not_computed_with(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_config(COHERE | changes)
