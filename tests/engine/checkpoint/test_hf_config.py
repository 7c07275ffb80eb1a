"""What a config may ask for, and what is refused by name."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootgraft.engine.checkpoint.families.family import Family
from rootgraft.engine.checkpoint.families.family_table import FAMILIES
from rootgraft.engine.checkpoint.hf_config import model_config
from rootgraft.engine.checkpoint.model_config import LinearScaling, Llama3Scaling, QueryScaling, Rope
from rootgraft.engine.checkpoint.read_config import read_model_config
from rootgraft.engine.errors import ModelError, quoted

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def of(architecture: str, **changes: Any) -> dict[str, Any]:
    return LLAMA | {"architectures": [f"{architecture}ForCausalLM"]} | changes


def whole(name: str, **changes: Any) -> dict[str, Any]:
    """A multimodal model around the language model."""
    return {"architectures": [f"{name}ForConditionalGeneration"], "text_config": LLAMA, "vision_config": {}} | changes


def mrope(sections: Any) -> dict[str, Any]:
    return whole("Qwen2_5_VL", text_config=LLAMA | {"rope_scaling": {"type": "mrope", "mrope_section": sections}})


def test_smollm2() -> None:
    """The published config of SmolLM2-135M-Instruct, shortened, with its keys of no effect."""
    config = model_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 576,
            "initializer_range": 0.041666666666666664,
            "intermediate_size": 1536,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "pad_token_id": 2,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
            "use_cache": True,
            "vocab_size": 49152,
        }
    )
    assert (config.num_layers, config.head_dim, config.query_size, config.kv_size) == (30, 64, 576, 192)
    assert {layer.rope for layer in config.layers} == {Rope(100000.0, 64)}
    assert {layer.window for layer in config.layers} == {None}
    assert (config.attention_scale, config.embedding_scale, config.norm_offset) == (1 / 8, 1.0, 0.0)
    assert config.tied_head and not config.qkv_bias and config.qkv_modules == ("q_proj", "k_proj", "v_proj")
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


def test_published_gemma3_1b() -> None:
    """Windows on five layers of six, with a rotary base of their own."""
    config = model_config(
        {
            "architectures": ["Gemma3ForCausalLM"],
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "bos_token_id": 2,
            "eos_token_id": [1, 106],
            "cache_implementation": "hybrid",
            "final_logit_softcapping": None,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "max_position_embeddings": 32768,
            "model_type": "gemma3_text",
            "num_attention_heads": 4,
            "num_hidden_layers": 26,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "vocab_size": 262144,
        }
    )
    windows = [layer.window for layer in config.layers]
    assert windows[:7] == [512, 512, 512, 512, 512, None, 512]
    assert config.layers[0].rope == Rope(10_000.0, 256)
    assert config.layers[5].rope == Rope(1_000_000.0, 256)
    assert config.tied_head and config.norms.after_mlp and config.qk_norm == "head"
    assert config.eos_token_ids == (1, 106)


def test_published_gemma3_4b() -> None:
    """Most of the language model's keys are left out."""
    config = model_config(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "boi_token_index": 255999,
            "eoi_token_index": 256000,
            "eos_token_id": [1, 106],
            "image_token_index": 262144,
            "initializer_range": 0.02,
            "mm_tokens_per_image": 256,
            "model_type": "gemma3",
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "torch_dtype": "bfloat16",
            "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
        }
    )
    assert (config.num_layers, config.hidden_size, config.vocab_size, config.head_dim) == (34, 2560, 262208, 256)
    assert (config.num_heads, config.num_kv_heads, config.max_position_embeddings) == (8, 4, 131072)
    assert [layer.window for layer in config.layers[:7]] == [1024] * 5 + [None, 1024]
    assert config.layers[0].rope == Rope(10_000.0, 256)
    assert config.layers[5].rope == Rope(1_000_000.0, 256, LinearScaling(8.0))
    assert config.tied_head and (config.bos_token_id, config.eos_token_ids) == (2, (1, 106))


def test_published_mimo_7b() -> None:
    """A Qwen 2 whose checkpoint names code of its own, and has an MTP module."""
    config = model_config(
        {
            "architectures": ["MiMoForCausalLM"],
            "attention_bias": True,
            "attention_dropout": 0.0,
            "auto_map": {
                "AutoConfig": "configuration_mimo.MiMoConfig",
                "AutoModel": "modeling_mimo.MiMoModel",
                "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
            },
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 11008,
            "max_position_embeddings": 32768,
            "max_window_layers": 32,
            "model_type": "mimo",
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1,
            "rms_norm_eps": 1e-05,
            "rope_theta": 640000,
            "sliding_window": 32768,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_mrope": False,
            "use_sliding_window": False,
            "vocab_size": 151680,
        }
    )
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (36, 32, 8, 128)
    assert config.qkv_bias and not config.output_bias and not config.tied_head
    assert {layer.window for layer in config.layers} == {None} and config.layers[0].rope == Rope(640_000.0, 128)
    assert config.prediction_layers == 1


@pytest.mark.parametrize(("outer", "inner", "tied"), [(None, None, False), (None, True, True), (False, True, False)])
def test_what_the_whole_model_says_goes_before_its_language_model(outer: Any, inner: Any, tied: bool) -> None:
    text = LLAMA | {"tie_word_embeddings": inner}
    assert model_config(whole("Mistral3", text_config=text, tie_word_embeddings=outer)).tied_head == tied


def test_published_llama32_rope() -> None:
    scaling = {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    config = model_config(LLAMA | {"rope_theta": 500000.0, "rope_scaling": scaling})
    assert config.layers[0].rope == Rope(500000.0, 16, Llama3Scaling(32.0, 1.0, 4.0, 8192))


def test_linear_scaling_by_its_old_name() -> None:
    config = model_config(LLAMA | {"rope_scaling": {"type": "linear", "factor": 4}})
    assert config.layers[0].rope == Rope(10_000.0, 16, LinearScaling(4.0))


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),  # as Qwen's pages say
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}, 256),
        ({"type": "yarn", "factor": 4.0}, 256),
        ({"type": "linear", "factor": 4.0}, 256),
        (None, 256),
    ],
)
def test_the_longest_sequence(scaling: dict[str, Any] | None, longest: int) -> None:
    assert model_config(LLAMA | {"rope_scaling": scaling}).max_position_embeddings == longest


def test_the_longest_sequence_by_a_length_beside_the_rotary_parameters() -> None:
    beside = LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 128}
    assert model_config(beside).max_position_embeddings == 512


def test_queries_are_scaled_by_a_length_beside_the_rotary_parameters() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "llama_4_scaling_beta": 0.1}
    beside = of("Ministral3", rope_parameters=scaling, original_max_position_embeddings=64)
    assert model_config(beside).layers[0].query_scaling == QueryScaling(0.1, 64)


def test_phi3_names_its_own_code_which_is_not_needed() -> None:
    remote = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    assert model_config(of("Phi3", auto_map=remote)).qkv_modules == ("qkv_proj",)


HUNYUAN_ROPE = {
    "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0,
    "type": "dynamic",
}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Granite 3.3": (
        of(
            "Granite",
            attention_multiplier=0.0078125,
            embedding_multiplier=12.0,
            logits_scaling=16.0,
            residual_multiplier=0.22,
            rope_theta=10000000.0,
            mlp_bias=False,
        ),
        {"attention_scale": 0.0078125, "embedding_scale": 12.0, "logit_scale": 0.0625, "residual_scale": 0.22},
    ),
    "Command R": (
        of("Cohere", model_max_length=131072, layer_norm_eps=1e-05, logit_scale=0.0625, use_qk_norm=False),
        {"max_position_embeddings": 131072, "qk_norm": None, "norm": "layer", "parallel_block": True},
    ),
    "Command R7B": (
        of(
            "Cohere2",
            cache_implementation="hybrid",
            head_dim=16,
            layer_switch=4,
            logit_scale=0.25,
            order_of_interleaved_layers="local_attn_first",
            position_embedding_type="rope_gptj",
            rope_theta=50000,
            rotary_pct=1.0,
            sliding_window=4096,
            sliding_window_pattern=4,
            use_embedding_sharing=True,
            use_gated_activation=True,
            use_parallel_block=True,
        ),
        {"tied_head": True, "logit_scale": 0.25},
    ),
    "EXAONE 4": (
        of("Exaone4", sliding_window_pattern="LLLG", layer_types=["sliding_attention", "full_attention"]),
        {"qk_norm": "head"},
    ),
    "HunYuan": (
        of(
            "HunYuanDenseV1",
            attention_head_dim=16,
            head_dim=16,
            num_experts=1,
            use_qk_norm=True,
            use_cla=False,
            enable_lm_head_fp32=True,
            rope_scaling=HUNYUAN_ROPE,
        ),
        {"is_qk_normed_last": True},
    ),
    "InternLM 3": (
        of(
            "InternLM3",
            auto_map={
                "AutoConfig": "configuration_internlm3.InternLM3Config",
                "AutoModel": "modeling_internlm3.InternLM3Model",
                "AutoModelForCausalLM": "modeling_internlm3.InternLM3ForCausalLM",
            },
            bias=False,
            qkv_bias=False,
            rope_scaling={"factor": 6.0, "rope_type": "dynamic"},
        ),
        {"qkv_bias": False, "mlp_bias": False, "max_position_embeddings": 256},
    ),
    "Phi-4-mini": (
        of(
            "Phi3",
            auto_map={
                "AutoConfig": "configuration_phi3.Phi3Config",
                "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
                "AutoTokenizer": "Xenova/gpt-4o",
            },
            attention_bias=False,
            mlp_bias=False,
            lm_head_bias=False,
            original_max_position_embeddings=64,
            partial_rotary_factor=0.75,
            rope_scaling={"long_factor": [2.0] * 6, "short_factor": [1.0] * 6, "type": "longrope"},
            sliding_window=262144,
        ),
        {"rope_switch": 64, "max_position_embeddings": 256},
    ),
    "Minitron": (of("Nemotron", head_dim=16, partial_rotary_factor=0.5, norm_eps=1e-05), {"gated_mlp": False}),
    "StarCoder 2": (
        of("Starcoder2", norm_type="layer_norm", mlp_type="default", use_bias=True, sliding_window=4096),
        {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "norm_bias": True},
    ),
    "OLMo 3": (
        of(
            "Olmo3",
            rope_scaling={
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "rope_type": "yarn",
            },
            rope_theta=500000,
            layer_types=["sliding_attention", "full_attention"],
        ),
        {"qk_norm": "projection", "max_position_embeddings": 256},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_of_other_families(name: str) -> None:
    """Their keys in a small size; what transformers computes by them is compared in ``tests/scenarios/models``."""
    config, expected = PUBLISHED[name]
    found = model_config(config)
    assert {key: getattr(found, key) for key in expected} == expected


def test_only_the_full_layers_of_olmo_3_are_scaled() -> None:
    sliding, full = model_config(PUBLISHED["OLMo 3"][0]).layers
    assert sliding.rope == Rope(500_000.0, 16) and full.rope is not None and full.rope.scaling is not None


def test_layers_without_window_are_not_rotated_where_there_are_windows() -> None:
    for name in ("Command R7B", "EXAONE 4"):
        for layer in model_config(PUBLISHED[name][0]).layers:
            assert (layer.window is None) == (layer.rope is None)


def test_an_unknown_class_is_refused_with_the_nearest() -> None:
    with pytest.raises(ModelError) as caught:
        model_config(LLAMA | {"architectures": ["Olmo4ForCausalLM"]})
    assert "The nearest that is: OlmoeForCausalLM and Olmo3ForCausalLM. All that are: docs/reference/models.md." in str(
        caught.value
    )


def test_layer_types_go_before_the_pattern() -> None:
    config = of("Gemma2", head_dim=16, layer_types=["full_attention", "sliding_attention"])
    assert [layer.window for layer in model_config(config).layers] == [None, 4096]


def test_every_family_has_a_config() -> None:
    for family in FAMILIES:
        config = LLAMA | {"architectures": [family.architecture], "model_type": family.name}
        if (mixture := family.mixture) is not None:
            counts = filter(None, (mixture.count_keys[0], mixture.shared_count_key))
            config |= dict.fromkeys(counts, 8) | {"num_experts_per_tok": 2}
        if "n_group" in family.defaults:
            config |= {"n_group": 1, "topk_group": 1}
        if "rotary_dim" in family.defaults:
            config |= {"rotary_dim": 8}
        if "full_attention_interval" in family.defaults:
            config |= {"full_attention_interval": 2}
        if family.blocks == "single":
            config |= {"layers_block_type": ["mamba", "attention", "moe"]}
        elif family.blocks == "shared":
            config |= {"layers_block_type": ["hybrid"] * LLAMA["num_hidden_layers"]}
        elif family.recurrent == "mamba2" and family.blocks == "both":
            config |= {"layer_types": ["attention", *["mamba"] * (LLAMA["num_hidden_layers"] - 1)]}
        if family.windows == "listed" and family.recurrent is not None:
            config |= {"layer_types": ["conv", *["full_attention"] * (LLAMA["num_hidden_layers"] - 1)]}
        if family.recurrent == "wide_kimi_delta":
            config |= {"layer_group_size": 2}
        if family.recurrent == "kimi_delta":
            count = LLAMA["num_hidden_layers"]
            config |= {"linear_attn_config": {"full_attn_layers": [1], "kda_layers": list(range(2, count + 1))}}
        if family.latent:
            config |= {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
        found = model_config(config)
        assert found.family == family.name


QWEN3_MOE = LLAMA | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "moe_intermediate_size": 16}


def test_layers_of_mixtures() -> None:
    changes = {"num_hidden_layers": 6, "mlp_only_layers": [3], "decoder_sparse_step": 2, "norm_topk_prob": True}
    layers = model_config(QWEN3_MOE | changes).layers
    assert [layer.mixture is not None for layer in layers] == [False, True, False, False, False, True]
    mixture = layers[1].mixture
    assert mixture is not None
    assert (mixture.num_experts, mixture.top_k, mixture.size, mixture.renormalises) == (8, 8, 16, True)


def test_both_keys_of_the_number_of_experts() -> None:
    renamed = {key: value for key, value in QWEN3_MOE.items() if key != "num_experts"} | {"num_local_experts": 8}
    assert model_config(renamed) == model_config(QWEN3_MOE) == model_config(QWEN3_MOE | {"num_local_experts": 8})
    with pytest.raises(ModelError, match="num_local_experts must be the same as num_experts, 8, not 9"):
        model_config(QWEN3_MOE | {"num_local_experts": 9})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "num_experts must be an integer from 1 to 4096, not 0"),
        ({"num_experts": 4097}, "num_experts must be an integer from 1 to 4096, not 4097"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be an integer from 1 to 8, not 9"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be an integer from 1 to 8, not 0"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size must be an integer"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act must be one of silu, swish in experts"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must be a list of layers, not 3"),
        ({"mlp_only_layers": ["3"]}, "mlp_only_layers must be a list of layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be an integer from 1"),
        ({"n_routed_experts": 8}, "n_routed_experts = 8 is not supported for Qwen3MoeForCausalLM"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config: mxfp4 is not supported"),
    ],
)
def test_wrong_mixtures_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_config(QWEN3_MOE | changes)


REFUSED = {
    "unknown architecture": ({"architectures": ["RwkvForCausalLM"]}, "RwkvForCausalLM is not supported"),
    "unknown multimodal model": (
        {"architectures": ["LlavaForConditionalGeneration"], "text_config": {}},
        "LlavaForConditionalGeneration is not supported",
    ),
    "text_config in Llama": ({"text_config": {"hidden_size": 64}}, "text_config"),
    "no text_config": (
        whole("Gemma3", text_config=None),
        "text_config must be the language model's config in Gemma3ForConditionalGeneration, not None",
    ),
    "text_config as list": (whole("Gemma3", text_config=[1]), "text_config must be an object"),
    "another language model": (
        whole("Mistral3", text_config=LLAMA | {"model_type": "mistral9"}),
        "text_config: model_type must be mistral or ministral3 or mistral4 in Mistral3ForConditionalGeneration, not",
    ),
    "quantised multimodal model": (whole("Mistral3", quantization_config={"bits": 4}), "quantization_config"),
    "quantised language model": (whole("Mistral3", text_config=LLAMA | {"quantization_config": {"bits": 4}}), "quant"),
    "audio": (whole("Gemma3", audio_config={}), "audio_config = {} is not supported"),
    "two sections": (
        mrope([4, 4]),
        "mrope_section must be three sizes that add up to half of a head's rotated dimensions, 8, not [4, 4]",
    ),
    "sections too large": (mrope([4, 4, 1]), "mrope_section must be three sizes"),
    "sections as text": (mrope("8"), "mrope_section must be three sizes"),
    "a negative section": (mrope([9, -1, 0]), "mrope_section must be three sizes"),
    "sections in Llama": ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, "rope type 'mrope'"),
    "no architecture": ({"architectures": None, "model_type": "x"}, "architectures must name one class"),
    "two architectures": ({"architectures": ["A", "B"]}, "architectures must name one class"),
    "remote code": (
        {"auto_map": {"AutoModelForCausalLM": "modeling_x.LlamaForCausalLM"}, "model_type": "x"},
        "model_type 'x' is not that of LlamaForCausalLM",
    ),
    "auto_map of another kind": ({"auto_map": "x", "model_type": None}, "auto_map"),
    "quantised": ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config"),
    "experts": ({"num_experts": 8}, "num_experts = 8"),
    "interleaved rope": ({"rope_interleaved": True}, "rope_interleaved"),
    "bidirectional": (of("Gemma3", head_dim=16, use_bidirectional_attention=True), "use_bidirectional_attention"),
    "bias in Mistral": (of("Mistral", attention_bias=True), "attention_bias = True"),
    "MLP bias in Qwen3": (of("Qwen3", mlp_bias=True), "mlp_bias = True"),
    "attention cap in Gemma 3": (of("Gemma3", head_dim=16, attn_logit_softcapping=50.0), "attn_logit_softcapping"),
    "logit cap in Llama": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    "window in Llama": ({"sliding_window": 4096}, "sliding_window = 4096"),
    "layer types in Mistral": (of("Mistral", layer_types=["full_attention"] * 2), "layer_types"),
    "window without its flag": (
        of("Qwen2", layer_types=["full_attention", "sliding_attention"]),
        "use_sliding_window is not set",
    ),
    "unknown layer type": (of("Qwen2", layer_types=["full_attention", "linear_attention"]), "layer_types must be"),
    "activation": ({"hidden_act": "quick_gelu"}, "hidden_act must be one of"),
    "YaRN without factor": ({"rope_scaling": {"type": "yarn"}}, "factor must be a number above 0, not None"),
    "YaRN with crossed betas": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 2}},
        "beta_fast must be at least beta_slow 2.0",
    ),
    "YaRN with theta 1": (
        {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        "rope_theta must be above 1 with rope type yarn",
    ),
    "YaRN with mscale 0": ({"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 0}}, "mscale must be a number"),
    "dynamic without factor": ({"rope_scaling": {"type": "dynamic"}}, "factor must be a number above 0"),
    "alpha in Llama": ({"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 50.0}}, "alpha is not supported"),
    "longrope without factors": (of("Phi3", rope_parameters={"rope_type": "longrope"}), "short_factor must be a list"),
    "su of another length": (
        of("Phi3", rope_scaling={"type": "su", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7}),
        "long_factor must be a list of 8 numbers above 0",
    ),
    "longrope below 0": (
        of("Phi3", rope_scaling={"type": "longrope", "short_factor": [-1.0] * 8, "long_factor": [1.0] * 8}),
        "short_factor must be a list of 8 numbers above 0",
    ),
    "rope type of the future": ({"rope_scaling": {"type": "proportional"}}, "rope type 'proportional'"),
    "multipliers in Llama": ({"residual_multiplier": 0.2}, "residual_multiplier = 0.2"),
    "logit scale in Llama": ({"logit_scale": 0.5}, "logit_scale = 0.5"),
    "no logit scale in Cohere": (of("Cohere", logit_scale=0), "logit_scale must be a number above 0"),
    "head norms in Llama": ({"use_qk_norm": True}, "use_qk_norm = True"),
    "no head norms in HunYuan": (of("HunYuanDenseV1", use_qk_norm=False), "use_qk_norm = False"),
    "biases everywhere in Llama": ({"use_bias": True}, "use_bias = True"),
    "a zero layer norm": (of("Starcoder2", norm_epsilon=0), "norm_epsilon must be a number above 0"),
    "chunks in Llama": ({"attention_chunk_size": 8}, "attention_chunk_size = 8 is not supported"),
    "a temperature in Llama": ({"attn_temperature_tuning": True}, "attn_temperature_tuning = True is not supported"),
    "empty chunks": (of("Llama4", attention_chunk_size=0), "attention_chunk_size must be an integer from 1"),
    "windows in Llama 4": (of("Llama4", sliding_window=8), "sliding_window = 8 is not supported"),
    "windows among chunks": (
        of("Llama4", layer_types=["sliding_attention"] * LLAMA["num_hidden_layers"]),
        "layer_types must be a list of 2 entries, each full_attention or chunked_attention",
    ),
    "no attention scale": (of("Llama4", attn_scale=0), "attn_scale must be a number above 0"),
    "no floor scale": (of("Llama4", floor_scale=0), "floor_scale must be an integer from 1"),
    "expert layers that are no list": (of("Llama4", moe_layers=3), "moe_layers must be a list of layers"),
    "query scaling in Mistral": (
        of("Mistral", rope_parameters={"rope_type": "default", "llama_4_scaling_beta": 0.1}),
        "llama_4_scaling_beta is not supported",
    ),
    "no query scaling": (
        of("Ministral3", rope_parameters={"rope_type": "default", "llama_4_scaling_beta": 0}),
        "llama_4_scaling_beta must be a number above 0",
    ),
    "query scaling without a length": (
        of("Ministral3", rope_parameters={"rope_type": "default", "llama_4_scaling_beta": 0.1}),
        "original_max_position_embeddings must be an integer",
    ),
    "two rope types": ({"rope_scaling": {"type": "linear", "rope_type": "llama3"}}, "rope type 'llama3'"),
    "unknown rope parameter": (
        {"rope_scaling": {"type": "linear", "factor": 2, "mrope_section": [1]}},
        "mrope_section",
    ),
    "no factor": ({"rope_scaling": {"type": "linear"}}, "factor must be a number above 0, not None"),
    "llama3 frequencies": (
        {"rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 3.9}},
        "high_freq_factor must be at least low_freq_factor",
    ),
    "old and new rope": (
        {"rope_parameters": {"rope_theta": 5.0, "factor": 2}, "rope_scaling": {"type": "linear", "factor": 4}},
        "disagree on factor",
    ),
    "flat rope in Gemma 3": (of("Gemma3", rope_parameters={"rope_theta": 5.0}), "full_attention and sliding_attention"),
    "partial rotary in Llama": ({"partial_rotary_factor": 0.5}, "rotates 8 of 16"),
    "odd rotary": (of("Phi3", partial_rotary_factor=0.2), "rotates 3 of 16"),
    "missing size": ({"hidden_size": None}, "hidden_size must be an integer from 1 to"),
    "size as text": ({"hidden_size": "64"}, "hidden_size must be an integer from 1 to 16777216, not '64'"),
    "flag as number": ({"vocab_size": True}, "vocab_size must be an integer"),
    "negative": ({"intermediate_size": -1}, "intermediate_size must be an integer"),
    "absurd number of layers": ({"num_hidden_layers": 10**12}, "num_hidden_layers must be an integer from 1 to 2048"),
    "heads do not divide": ({"num_key_value_heads": 3}, "num_key_value_heads must be a divisor"),
    "hidden does not divide": ({"hidden_size": 66}, "hidden_size must be a multiple"),
    "norm": ({"rms_norm_eps": 0}, "rms_norm_eps must be a number above 0"),
    "end token": ({"eos_token_id": [2, "3"]}, "eos_token_id must be a token id or a list of token ids"),
    "flag": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    "rope as list": ({"rope_scaling": [1]}, "rope_scaling must be an object"),
    "rotary share as text": (of("Phi3", partial_rotary_factor="x"), "partial_rotary_factor must be a number"),
    "NoPE list": (of("SmolLM3", no_rope_layers=[1]), "no_rope_layers must be a list of 2"),
    "NoPE in Llama": ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(ModelError) as caught:
        model_config(LLAMA | changes)
    assert message in str(caught.value)


LONG = "x" * 1_000_000
LONG_VALUES: dict[str, dict[str, Any]] = {
    "class": {"architectures": [LONG]},
    "classes": {"architectures": [LONG, LONG]},
    "number": {"hidden_size": LONG},
    "list": {"eos_token_id": [LONG] * 10},
    "object": {"quantization_config": {"quant_method": {LONG: LONG}}},
    "activation": {"hidden_act": LONG},
    "rope type": {"rope_scaling": {"rope_type": LONG}},
    "rope parameter": {"rope_scaling": {"rope_type": "default", LONG: 1}},
    "rope contradiction": {"rope_scaling": {LONG: 1}, "rope_parameters": {LONG: LONG}},
    "rotary share": of("Phi3", partial_rotary_factor=LONG),
}


@pytest.mark.parametrize("case", LONG_VALUES)
def test_a_long_value_is_quoted_shortened(case: str) -> None:
    with pytest.raises(ModelError) as caught:
        model_config(LLAMA | LONG_VALUES[case])
    assert "xxxxx" in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("length", [1, 1_999, 2_000, 2_001, 10_000])
def test_no_message_of_an_error_is_longer_than_2000_characters(length: int) -> None:
    message = "a" * (length // 2) + "z" * (length - length // 2)
    shown = str(ModelError(message))
    assert len(shown) == min(length, 2_000) and shown[-1] == "z"
    assert (shown == message) == (length <= 2_000) and ("a...z" in shown) == (length > 2_000)


def test_a_name_that_is_no_text_can_be_printed() -> None:
    with pytest.raises(ModelError, match=r"the architecture a\\ud800 is not supported") as caught:
        model_config(LLAMA | {"architectures": json.loads('["a\\ud800"]')})
    assert str(caught.value).encode()


@pytest.mark.parametrize("length", [0, 78, 79, 1_000_000])
def test_a_quoted_value_has_at_most_80_characters(length: int) -> None:
    shown = quoted("y" * length)
    assert len(shown) == min(length + 2, 80)
    assert (shown == "'" + "y" * length + "'") == (length <= 78)


def test_end_tokens_of_the_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_model_config(tmp_path).eos_token_ids == (2,)
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [7, 5, 7]}))
    assert read_model_config(tmp_path).eos_token_ids == (7, 5)
    generation.write_text(json.dumps({"temperature": 0.6}))
    assert read_model_config(tmp_path).eos_token_ids == (2,)
    generation.write_text(json.dumps({"eos_token_id": [100, -1, 7, 99]}))
    assert read_model_config(tmp_path).eos_token_ids == (7, 99)
    generation.write_text(json.dumps({"eos_token_id": "100"}))
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(("content", "message"), [("[1]", "must be a JSON object"), ("{", "is not JSON")])
def test_malformed_json(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        read_model_config(tmp_path)


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_model_config(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = [
    *LLAMA,
    "rope_parameters",
    "rope_scaling",
    "layer_types",
    "auto_map",
    "head_dim",
    "sliding_window",
    "hidden_act",
]
KEYS += ["no_rope_layers", "partial_rotary_factor", "query_pre_attn_scalar", "tie_word_embeddings", "num_experts"]


@given(
    family=st.sampled_from(FAMILIES),
    changes=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3),
    rope=st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "rope_theta", "low_freq_factor"]), JSON),
)
def test_any_value_gives_a_config_or_a_model_error(family: Family, changes: Any, rope: Any) -> None:
    for config in (changes, {"rope_scaling": rope}):
        with contextlib.suppress(ModelError):
            model_config(LLAMA | {"architectures": [family.architecture]} | config)
