"""Numbers of heads, keys, values and windows that differ from a Llama's, as configs say it: MiMo V2, Laguna, MPT."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models.tiny_models import save

from rootgraft.engine.checkpoint.hf_config import model_config
from rootgraft.engine.checkpoint.model_config import ALIBI_DIMS, KvShape
from rootgraft.engine.checkpoint.published_models import published_models
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError, ModelError
from rootgraft.engine.executor.device import choose_kv_dtype
from rootgraft.engine.loading.load_model import load_model

CPU = torch.device("cpu")
MIMO = {key: value for key, value in published_models()["XiaomiMiMo/MiMo-V2-Flash"].items() if "quant" not in key}
BLOOM: dict[str, Any] = {
    "architectures": ["BloomForCausalLM"], "model_type": "bloom", "vocab_size": 100, "n_embed": 64, "n_layer": 2,
    "n_head": 4, "layer_norm_epsilon": 1e-5, "seq_length": 2048,
}  # fmt: skip
ATTENTION = {
    "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0, "attn_type": "multihead_attention",
    "attn_uses_sequence_id": False, "clip_qkv": None, "prefix_lm": False, "qk_ln": False, "softmax_scale": None,
}  # fmt: skip
MPT: dict[str, Any] = {
    "architectures": ["MPTForCausalLM"], "model_type": "mpt", "vocab_size": 100, "d_model": 64, "n_layers": 2,
    "n_heads": 4, "max_seq_len": 2048, "expansion_ratio": 4, "no_bias": True, "attn_config": ATTENTION,
    "auto_map": {"AutoConfig": "configuration_mpt.MPTConfig", "AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM"},
}  # fmt: skip


def test_published_mimo_v2_flash() -> None:
    config = model_config(MIMO)
    assert (config.head_dim, config.value_dim, config.value_scale, config.norm_eps) == (192, 128, 0.707, 1e-5)
    windows = [layer.window for layer in config.layers]
    # The published code sees ``sliding_window_size`` tokens in front of a token.
    assert windows == [None if index == 0 or (index + 1) % 6 == 0 else 129 for index in range(48)]
    assert [layer.mixture is None for layer in config.layers] == [True, *[False] * 47]
    ropes = [config.layers[index].rope for index in (0, 1)]
    assert [(rope.theta, rope.dim) for rope in ropes if rope] == [(5_000_000.0, 64), (10_000.0, 64)]
    assert [config.heads_of(index) for index in (0, 1)] == [KvShape(4, 192), KvShape(8, 192)]
    assert [config.has_sinks(index) for index in (0, 1)] == [False, True]
    assert (config.query_size_of(1), config.value_size_of(1), config.attention_size_of(1)) == (12288, 1024, 8192)


def test_values_as_wide_as_keys_keep_their_factor() -> None:
    wide = MIMO | {"v_head_dim": 192, "swa_v_head_dim": 192}
    assert (model_config(wide).value_dim, model_config(wide).value_scale) == (192, 0.707)
    plain = model_config(wide | {"attention_value_scale": None})
    assert (plain.value_dim, plain.value_scale) == (None, 1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swa_head_dim": 128}, "swa_head_dim must be head_dim, 192, not 128"),
        ({"swa_v_head_dim": 64}, "swa_v_head_dim must be v_head_dim, 128"),
        ({"v_head_dim": 256, "swa_v_head_dim": None}, "v_head_dim must be an integer from 1 to 192"),
        ({"swa_num_attention_heads": 32}, "swa_num_attention_heads must be num_attention_heads, 64"),
        ({"swa_num_key_value_heads": 7}, "swa_num_key_value_heads must be a divisor of num_attention_heads 64"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias = True is not supported"),
        ({"add_swa_attention_sink_bias": False}, "add_swa_attention_sink_bias = False is not supported"),
        ({"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern must be a list of 48 ones and zeros"),
        ({"layer_types": ["full_attention"] * 48}, "hybrid_layer_pattern must be a list with 1 for the layers"),
        ({"moe_layer_freq": [0, 2]}, "moe_layer_freq must be a list of 48 ones and zeros"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported"),
        ({"mlp_layer_types": ["sparse"] * 48}, "moe_layer_freq must be a list with 1 for the layers that mlp_layer"),
        ({"topk_method": "greedy"}, "topk_method must be one of noaux_tc"),
    ],
)
def test_what_mimo_v2_is_not_computed_with(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_config(MIMO | changes)


LAGUNA: dict[str, Any] = {
    "architectures": ["LagunaForCausalLM"], "model_type": "laguna", "num_hidden_layers": 2,
    "layer_types": ["full_attention", "sliding_attention"], "num_attention_heads_per_layer": [48, 64],
}  # fmt: skip


def test_laguna_has_query_heads_by_layer() -> None:
    config = model_config(LAGUNA)
    assert [config.num_heads_of(index) for index in (0, 1)] == [48, 64]
    assert [config.query_size_of(index) for index in (0, 1)] == [48 * 128, 64 * 128]
    assert [config.attention_size_of(index) for index in (0, 1)] == [48 * 128, 64 * 128]
    ropes = [(layer.rope.theta, layer.rope.dim) for layer in config.layers if layer.rope]
    assert ropes == [(500_000.0, 64), (10_000.0, 128)]
    assert [layer.window for layer in config.layers] == [None, 512]
    gates = {key: model_config(LAGUNA | {"gating": key}).gated_attention for key in (True, "per-head", "per-element")}
    assert gates == {True: "head_module", "per-head": "head_module", "per-element": "module"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads_per_layer": [48]}, "per_layer must be a list of 2 multiples of num_key_value_heads 8"),
        ({"num_attention_heads_per_layer": [48, 44]}, "per_layer must be a list of 2 multiples"),
        ({"num_attention_heads_per_layer": [48, 0]}, "per_layer must be a list of 2 multiples"),
        ({"gating": False}, "gating must be true, per-head or per-element, not False"),
        ({"moe_router_logit_softcapping": 5.0}, "moe_router_logit_softcapping = 5.0 is not supported"),
        ({"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input = True is not supported"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "num_attention_heads_per_layer .* supported"),
    ],
)
def test_what_laguna_is_not_computed_with(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_config(LAGUNA | changes)


def test_heads_with_alibi_have_room_for_positions() -> None:
    for config in (model_config(BLOOM), model_config(MPT)):
        assert config.head_dim == 16 + ALIBI_DIMS and config.kv_shapes[0] == KvShape(4, 16 + ALIBI_DIMS)
        assert (config.query_size, config.attention_size_of(0), config.attention_scale) == (64, 64, 0.25)
        assert (config.alibi, config.max_position_embeddings, config.intermediate_size) == (8.0, 2048, 256)
        assert all(layer.rope is None for layer in config.layers)
    assert model_config(MPT | {"attn_config": ATTENTION | {"alibi_bias_max": 16}}).alibi == 16.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BLOOM | {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm = True"),
        (BLOOM | {"seq_length": 65_537}, "max_position_embeddings must be an integer from 1 to 65536"),
        (MPT | {"attn_config": ATTENTION | {"alibi": False}}, "attn_config: alibi must be true, not False"),
        (MPT | {"attn_config": ATTENTION | {"clip_qkv": 6.0}}, "attn_config: clip_qkv must be left out, not 6.0"),
        (MPT | {"attn_config": ATTENTION | {"qk_ln": True}}, "attn_config: qk_ln must be false"),
        (MPT | {"attn_config": ATTENTION | {"kv_n_heads": 2}}, "attn_config: kv_n_heads must be left out"),
        (MPT | {"attn_config": ATTENTION | {"softmax_scale": 0.1}}, "attn_config: softmax_scale must be left out"),
        (MPT | {"no_bias": False}, "no_bias = False is not supported"),
        (MPT | {"logit_scale": "inv_sqrt_d_model"}, "logit_scale = 'inv_sqrt_d_model' is not supported"),
        (MPT | {"expansion_ratio": 2}, "expansion_ratio must be 4"),
    ],
)
def test_what_alibi_is_not_computed_with(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_config(config)


def test_cached_positions_are_not_rounded(tmp_path: Any) -> None:
    """Neither to 8 bits, nor by products that overflow in float16."""
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8 is not supported with ALiBi"):
        choose_kv_dtype(EngineConfig(kv_cache_dtype="int8"), model_config(BLOOM), CPU, torch.bfloat16)
    with pytest.raises(ModelError, match="ALiBi is supported in bfloat16 and float32, not in float16"):
        load_model(save("bloom", tmp_path), dtype=torch.float16, device=CPU)
