"""GGUF files of the tiny models, named, permuted and shifted as llama.cpp's converter does it."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from support.models.tiny_models import tiny_model

_ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "smollm3": "smollm3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "phi3": "phi3",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "granite": "granite",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "glm4": "glm4",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "exaone": "exaone",
    "exaone4": "exaone4",
    "seed_oss": "seed_oss",
    "starcoder2": "starcoder2",
    "ernie4_5": "ernie4_5",
    "hunyuan_v1_dense": "hunyuan-dense",
    "nemotron": "nemotron",
    "phi": "phi2",
    "arcee": "arcee",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "ministral3": "mistral3",
    "glm": "chatglm",
    "glm4_moe": "glm4moe",
    "sarvam_moe": "bailingmoe2",
    "granitemoe": "granitemoe",
    "granitemoehybrid": "granitehybrid",
    "gpt_oss": "gpt-oss",
    "llama4_text": "llama4",
    "lfm2": "lfm2",
    "qwen3_5_text": "qwen35",
    "qwen3_next": "qwen3next",
    "qwen3_5_moe_text": "qwen35moe",
    "falcon": "falcon",
    "bloom": "bloom",
    "mpt": "mpt",
    "laguna": "laguna",
    "cohere2_moe": "cohere2moe",
    "step3p5": "step35",
}
_LISTED = ("laguna", "step35", "cohere2moe")  # with lists of what differs between layers
_FUSED = ("chatglm", "bailingmoe2", "qwen")  # with one tensor for q, k and v
_DELTA = ("qwen35", "qwen35moe", "qwen3next")
_PERMUTED = ("llama", "smollm3", "granite", "arcee", "mistral3", "granitemoe", "granitehybrid")
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    **{
        f"{block}.{name}": "ffn_gate_inp"
        for block in ("mlp", "block_sparse_moe", "feed_forward")
        for name in ("router",)
    },
    **{f"feed_forward.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    **{f"feed_forward.shared_expert.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
    "self_attn.g_proj": "attn_gate",
    "self_attn.dense": "attn_output",
    "self_attn.query_key_value": "attn_qkv",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
    "model.word_embeddings_layernorm": "token_embd_norm",
    "norm_1": "attn_norm",
    "norm_2": "ffn_norm",
    "self_attn.Wqkv": "attn_qkv",
    "ln_mlp": "attn_norm",
    "ln_attn": "attn_norm_2",
    "model.final_layernorm": "output_norm",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.out_proj": "attn_output",
    "model.embedding_norm": "token_embd_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
}
_WHOLE = {
    "sinks": "attn_sinks.weight",
    "e_score_correction_bias": "exp_probs_b.bias",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "dt_bias": "ssm_dt.bias",
    "layer_scalar": "layer_output_scale.weight",
}
_GEMMA_NAMES = _NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GEMMA_NAMES |= {
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
_POST_NAMES = _NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_ARCHITECTURE_NAMES = {
    "gemma2": _GEMMA_NAMES,
    "gemma3": _GEMMA_NAMES,
    "gemma4": _GEMMA_NAMES,
    "olmo2": _POST_NAMES,
    "exaone4": _POST_NAMES,
    "seed_oss": _POST_NAMES,
    "gpt-oss": _POST_NAMES,
    "glm4moe": _POST_NAMES,
    "qwen35": _POST_NAMES,
    "qwen3next": _POST_NAMES,
    "qwen35moe": _POST_NAMES,
    "glm4": _NAMES | {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
}


def write_gguf(name: str, path: Path, *, name_as: str | None = None, extra: dict[str, Any] | None = None) -> Path:
    """All tensors in F32, the metadata of the architecture, under another name and with more keys if given."""
    model = tiny_model(name)
    architecture = gguf_architecture(model)
    # Of layers of several sizes transformers refuses to say one.
    is_sized = architecture in ("gemma4", "step35")
    config = SimpleNamespace(**model.config.to_dict()) if is_sized else model.config
    is_fused = (name_as or architecture) in _FUSED
    if name_as == "qwen":  # the rows of gate and up together
        config = SimpleNamespace(**config.to_dict() | {"intermediate_size": 2 * config.intermediate_size})
    writer = gguf.GGUFWriter(path, name_as or architecture)
    for key, value in (extra or {}).items():
        add = writer.add_array if isinstance(value, list) else writer.add_uint32
        add(f"{name_as or architecture}.{key}", value)
    _add_metadata(writer, architecture, config)
    for key, value in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensor = value
        if architecture in _PERMUTED and (".q_proj." in key or ".k_proj." in key):
            heads = config.num_attention_heads if ".q_proj." in key else config.num_key_value_heads
            tensor = interleaved(tensor, heads)
        if architecture in ("gemma", "gemma2", "gemma3", "nemotron", "step35") and key.endswith("norm.weight"):
            tensor = tensor + 1
        if key.endswith(("conv.conv.weight", "conv1d.weight")):
            tensor = tensor.squeeze(1)
        if architecture in _DELTA:
            tensor = _of_delta(key, tensor, config)
        if "query_key_value" in key:
            tensor = _of_falcon(tensor, config)
        if "in_proj_qkvz" in key:
            _add_grouped(writer, key, tensor, config)
            continue
        if architecture == "granitehybrid" and _add_of_granite(writer, key, tensor, config):
            continue
        if ".experts." in key:
            _add_experts(writer, key, tensor, architecture)
            continue
        if is_fused and (".k_proj." in key or ".v_proj." in key):
            continue  # one tensor with q
        if is_fused and ".q_proj." in key:
            parts = [model.state_dict()[key.replace("q_proj", f"{name}_proj")] for name in "qkv"]
            writer.add_tensor(f"blk.{key.split('.')[2]}.attn_qkv.{key.rpartition('.')[2]}", torch.cat(parts).numpy())
            continue
        if key.endswith("kv_b_proj.weight"):
            _add_latent(writer, key, tensor, config)
            continue
        if key.endswith("shared_expert_gate.weight"):
            tensor = tensor.squeeze(0)
        writer.add_tensor(gguf_name(key, architecture), tensor.numpy())
    if config.model_type in ("llama", "exaone4", "llama4_text") and config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _frequency_factors(model))
    for kind in ("long", "short"):
        if f"{kind}_factor" in (getattr(config, "rope_parameters", None) or {}):
            factors = np.array(config.rope_parameters[f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_of_granite(writer: gguf.GGUFWriter, key: str, tensor: Tensor, config: Any) -> bool:
    """What files of Granite 4 have in another shape: parts of the state space, and gate and up apart."""
    parts = key.split(".")
    kind, layer = parts[-1], f"blk.{parts[2]}" if len(parts) > 3 else ""
    ending = "_shexp" if config.num_local_experts else ""
    if kind in ("A_log", "D", "dt_bias"):
        value = -torch.exp(tensor) if kind == "A_log" else tensor
        writer.add_tensor(gguf_name(key, "granitehybrid"), (value if kind == "dt_bias" else value[:, None]).numpy())
    elif key.endswith("mamba.norm.weight"):
        writer.add_tensor(f"{layer}.ssm_norm.weight", tensor.view(config.mamba_n_groups, -1).numpy())
    elif "shared_mlp.input_linear" in key:
        for name, part in zip(("gate", "up"), tensor.chunk(2), strict=True):
            writer.add_tensor(f"{layer}.ffn_{name}{ending}.weight", part.contiguous().numpy())
    elif "shared_mlp.output_linear" in key:
        writer.add_tensor(f"{layer}.ffn_down{ending}.weight", tensor.numpy())
    else:
        return False
    return True


def _usual(key: str) -> str:
    """A name of Falcon's, BLOOM's or MPT's as other models have it."""
    modules = {"word_embeddings.": "embed_tokens.", "wte": "embed_tokens", "ln_f": "norm", "norm_f": "norm"}
    blocks = {".h.": ".layers.", ".blocks.": ".layers.", ".self_attention.": ".self_attn.", ".attn.": ".self_attn."}
    for own, usual in (modules | blocks | {".ffn.": ".mlp.", "transformer.": "model."}).items():
        key = key.replace(own, usual)
    return key


def _of_falcon(rows: Tensor, config: Any) -> Tensor:
    """All q, all k and all v, from the q, the k and the v of each KV head."""
    heads = config.num_attention_heads
    has_many = config.model_type == "bloom" or config.new_decoder_architecture
    kv_heads = getattr(config, "num_kv_heads", heads) if has_many else 1
    groups = rows.reshape(kv_heads, heads // kv_heads + 2, config.hidden_size // heads, *rows.shape[1:])
    parts = groups[:, :-2], groups[:, -2:-1], groups[:, -1:]
    return torch.cat([part.reshape(-1, *rows.shape[1:]) for part in parts])


def _of_delta(key: str, tensor: Tensor, config: Any) -> Tensor:
    """What files of Qwen 3.5 change: norms around 1, decays, and heads of values from groups to tiles."""
    if key.endswith("norm.weight") and "linear_attn" not in key:
        return tensor + 1
    if key.endswith("A_log"):
        tensor = -torch.exp(tensor)
    groups, heads = config.linear_num_key_heads, config.linear_num_value_heads
    part = key.split(".")[4] if "linear_attn" in key else ""
    if groups == heads or config.model_type == "qwen3_next" or part in ("", "norm"):
        return tensor

    def tiled(rows: Tensor) -> Tensor:
        return rows.reshape(groups, heads // groups, -1).transpose(0, 1).reshape(rows.shape)

    if part == "out_proj":
        return tiled(tensor.t()).t().contiguous()
    first = 2 * groups * config.linear_key_head_dim if part in ("in_proj_qkv", "conv1d") else 0
    return torch.cat((tensor[:first], tiled(tensor[first:])))


def _add_grouped(writer: gguf.GGUFWriter, key: str, tensor: Tensor, config: Any) -> None:
    """Of each key head its q, k, v and gates: all of the first three in one tensor, the gates in another."""
    of_values = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
    heads = tensor.view(config.linear_num_key_heads, -1, tensor.shape[1])
    parts = heads.split([config.linear_key_head_dim] * 2 + [of_values] * 2, dim=1)
    *qkv, gates = (part.reshape(-1, tensor.shape[1]) for part in parts)
    writer.add_tensor(f"blk.{key.split('.')[2]}.attn_qkv.weight", torch.cat(qkv).numpy())
    writer.add_tensor(f"blk.{key.split('.')[2]}.attn_gate.weight", gates.contiguous().numpy())


def _add_delta_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    architecture = _ARCHITECTURES[config.model_type]
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    if architecture == "qwen3next":
        writer.add_uint32(f"{architecture}.full_attention_interval", config.layer_types.index("full_attention") + 1)
        return
    flags = [kind == "linear_attention" for kind in config.layer_types]
    writer.add_array(f"{architecture}.attention.recurrent_layers", [*flags, False])
    writer.add_uint32(f"{architecture}.full_attention_interval", 4)
    writer.add_rope_dimension_sections([2, 1, 1, 0])
    writer.add_nextn_predict_layers(1)
    writer.add_tensor(f"blk.{config.num_hidden_layers}.nextn.eh_proj.weight", np.ones((2, 4), np.float32))
    writer.add_tensor(f"blk.{config.num_hidden_layers}.attn_norm.weight", np.ones(4, np.float32))


def _add_experts(writer: gguf.GGUFWriter, key: str, tensor: Tensor, architecture: str) -> None:
    """The weights of a layer's experts, or their biases, stacked by module."""
    block, kind = f"blk.{key.split('.')[2]}", "bias" if key.endswith("_bias") else "weight"
    if architecture in ("gpt-oss", "llama4") and kind == "weight":
        tensor = tensor.transpose(1, 2)
    if "down_proj" in key:
        writer.add_tensor(f"{block}.ffn_down_exps.{kind}", tensor.contiguous().numpy())
        return
    parts = (tensor[:, 0::2], tensor[:, 1::2]) if architecture == "gpt-oss" else tensor.chunk(2, dim=1)
    for name, part in zip(("gate", "up"), parts, strict=True):
        writer.add_tensor(f"{block}.ffn_{name}_exps.{kind}", part.contiguous().numpy())


def _add_latent(writer: gguf.GGUFWriter, key: str, tensor: Tensor, config: Any) -> None:
    """Of each head the rows of keys, transposed, and those of values."""
    block, plain = f"blk.{key.split('.')[2]}", config.qk_nope_head_dim
    heads = tensor.view(config.num_attention_heads, plain + config.v_head_dim, -1)
    writer.add_tensor(f"{block}.attn_k_b.weight", heads[:, :plain].transpose(1, 2).contiguous().numpy())
    writer.add_tensor(f"{block}.attn_v_b.weight", heads[:, plain:].contiguous().numpy())


def _add_sized_layers(writer: gguf.GGUFWriter, config: Any) -> None:
    """What files of Gemma 4 say of heads, MLPs, shared K and V and rotary embeddings."""
    own = next(iter(config.per_layer_config.values()))
    is_local = [kind == "sliding_attention" for kind in config.layer_types]
    full, local, size = own["head_dim"], config.head_dim, config.intermediate_size
    kv_heads = config.num_key_value_heads, own.get("num_key_value_heads", config.num_key_value_heads)
    writer.add_head_count_kv([kv_heads[not each] for each in is_local] if len(set(kv_heads)) > 1 else kv_heads[0])
    first = config.num_hidden_layers - config.num_kv_shared_layers
    wide = [size if index < first else 2 * size for index in range(config.num_hidden_layers)]
    writer.add_feed_forward_length(wide if config.use_double_wide_mlp else size)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(is_local)
    for each in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        each(full)
    for each in (writer.add_key_length_swa, writer.add_value_length_swa, writer.add_rope_dimension_count_swa):
        each(local)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    ropes = config.rope_parameters
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    turned = int(full * ropes["full_attention"]["partial_rotary_factor"] / 2)
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * turned + [1e30] * (full // 2 - turned), np.float32))


def _add_listed_layers(writer: gguf.GGUFWriter, architecture: str, config: Any) -> None:
    """What files of Laguna and of Step 3.5 say of each layer, and the rotary embeddings of both kinds."""
    is_local, dim = [kind == "sliding_attention" for kind in config.layer_types], config.head_dim
    nested = {kind: rope for kind, rope in config.rope_parameters.items() if isinstance(rope, dict)}
    ropes = {kind: int(dim * rope.get("partial_rotary_factor", 1.0)) for kind, rope in nested.items()}
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    writer.add_expert_weights_norm(True)
    writer.add_leading_dense_block_count([*config.mlp_layer_types, "sparse"].index("sparse"))
    if architecture == "cohere2moe":
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern(is_local)
        writer.add_expert_shared_count(config.num_shared_experts)
        writer.add_expert_shared_feed_forward_length(config.intermediate_size * config.num_shared_experts)
        writer.add_rope_dimension_count(dim)
        return
    if any(is_local):
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if architecture == "step35":
        behind, of_local = 1, config.num_sliding_attention_heads
        writer.add_head_count([*(of_local if each else config.num_attention_heads for each in is_local), of_local])
        writer.add_head_count_kv([config.num_key_value_heads] * (len(is_local) + behind))
        writer.add_sliding_window_pattern([*is_local, True])
        writer.add_expert_shared_feed_forward_length(config.share_expert_dim)
        writer.add_expert_weights_scale(config.moe_router_scaling_factor)
        writer.add_moe_every_n_layers(1)
        writer.add_array(f"{architecture}.swiglu_clamp_exp", [*config.swiglu_limits, 0.0])
        writer.add_array(f"{architecture}.swiglu_clamp_shexp", [*config.swiglu_limits_shared, 0.0])
        rope = config.rope_parameters["full_attention"]
        if rope["rope_type"] == "llama3":
            writer.add_tensor("rope_freqs.weight", _padded_factors(rope, ropes["full_attention"], dim))
        writer.add_nextn_predict_layers(behind)
        writer.add_tensor(f"blk.{len(is_local)}.nextn.eh_proj.weight", np.ones((2, 4), np.float32))
        writer.add_tensor(f"blk.{len(is_local)}.attn_norm.weight", np.ones(4, np.float32))
        return
    writer.add_head_count(config.num_attention_heads_per_layer or [config.num_attention_heads] * len(is_local))
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_expert_weights_scale(config.moe_routed_scaling_factor)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_rope_dimension_count(ropes["full_attention"])
    if any(is_local):
        writer.add_uint32(f"{architecture}.rope.dimension_count_swa", ropes["sliding_attention"])


def _add_state_space(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")


def _add_latent_metadata(writer: gguf.GGUFWriter, config: Any, rope: dict[str, Any]) -> None:
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_vocab_size(config.vocab_size)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.norm_topk_prob:
        writer.add_expert_weights_norm(True)
    gating = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(gating.SOFTMAX if config.model_type == "deepseek_v2" else gating.SIGMOID)
    if config.n_group is not None:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])


def gguf_architecture(model: Any) -> str:
    """The name of a transformers model's architecture in a GGUF file."""
    return _ARCHITECTURES[model.config.model_type]


def gguf_name(key: str, architecture: str) -> str:
    """The name in a GGUF file of a tensor of a transformers model."""
    names = _ARCHITECTURE_NAMES.get(architecture, _NAMES)
    key = _usual(key) if architecture in ("falcon", "bloom", "mpt") else key
    module, _, kind = key.rpartition(".")
    if kind in _WHOLE:  # names of tensors without a module of their own
        return f"blk.{key.split('.')[2]}.{_WHOLE[kind]}"
    if not module.startswith("model.layers."):
        return f"{names[module]}.{kind}"
    _, _, index, inner = module.split(".", 3)
    return f"blk.{index}.{names[inner]}.{kind}"


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """From [first half, second half] in each head to pairs side by side."""
    return rows.view(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _frequency_factors(model: Any) -> np.ndarray[Any, Any]:
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    theta = config.rope_parameters["rope_theta"]
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return (plain / model.model.rotary_emb.inv_freq).numpy()


def _padded_factors(rope: dict[str, Any], turned: int, head_dim: int) -> np.ndarray[Any, Any]:
    """The divisors of Step's frequencies, by transformers, with ones behind them for the rest of a head."""
    config = LlamaConfig(head_dim=turned, rope_parameters=rope | {"partial_rotary_factor": 1.0})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, turned, 2, dtype=torch.float32) / turned)
    return torch.cat((plain / scaled, torch.ones((head_dim - turned) // 2))).numpy()


def _add_metadata(writer: gguf.GGUFWriter, architecture: str, config: Any) -> None:
    has_alibi = architecture in ("bloom", "mpt")
    rope = {"rope_type": "none"}
    if not has_alibi:
        rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(getattr(config, "max_seq_len", None) or config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(
        config.num_hidden_layers + (architecture in ("glm4moe", "qwen35", "qwen35moe", "step35"))
    )  # with the one that predicts further
    if architecture in _LISTED:
        _add_listed_layers(writer, architecture, config)
    else:
        writer.add_head_count(config.num_attention_heads)
    is_latent = architecture == "deepseek2"
    if architecture == "lfm2":
        writer.add_feed_forward_length(-(-int(2 * config.intermediate_size / 3) // 16) * 16)
        kinds = config.layer_types
        writer.add_head_count_kv([config.num_key_value_heads * (kind == "full_attention") for kind in kinds])
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_vocab_size(config.vocab_size)
        writer.add_layer_norm_rms_eps(config.norm_eps)
    else:
        size = getattr(config, "intermediate_size_mlp", getattr(config, "intermediate_size", None))
        size = config.ffn_hidden_size if architecture == "falcon" else size
        size = config.prefix_dense_intermediate_size if architecture == "cohere2moe" else size
        size = 4 * config.hidden_size if architecture in ("bloom", "mpt") else size
        if architecture == "gemma4":
            _add_sized_layers(writer, config)
        elif size is not None:
            writer.add_feed_forward_length(size)
        kinds = getattr(config, "layer_types", None) or []
        of_layers = [config.num_key_value_heads * (kind == "full_attention") for kind in kinds]
        is_hybrid = architecture == "granitehybrid"
        if architecture not in ("gemma4", *_LISTED):
            single = is_latent or (architecture == "falcon" and not config.new_decoder_architecture)
            kv_heads = config.num_kv_heads if architecture == "falcon" else config.num_key_value_heads
            writer.add_head_count_kv(of_layers if is_hybrid else 1 if single else kv_heads)
        if is_hybrid:
            _add_state_space(writer, config)
        if architecture in _DELTA:
            _add_delta_metadata(writer, config)
    if is_latent:
        _add_latent_metadata(writer, config, rope)
    own_eps = ("layer_norm_epsilon",) if architecture in ("falcon", "bloom", "mpt") else ()
    for key in ("layer_norm_eps", "norm_epsilon", "norm_eps", *own_eps):
        if architecture != "lfm2" and hasattr(config, key):
            writer.add_layer_norm_eps(getattr(config, key))
            break
    else:
        if architecture != "lfm2":
            writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    says_size = is_latent or architecture in ("gemma4", *_LISTED)
    if head_dim * config.num_attention_heads != config.hidden_size and not says_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if rope["rope_type"] == "dynamic" and "alpha" in rope:
        writer.add_rope_freq_base(rope["rope_theta"] * rope["alpha"] ** (head_dim / (head_dim - 2)))
    elif architecture not in ("gemma", "gemma2") and not has_alibi:
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if architecture == "mistral3":
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast", 32.0))
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow", 1.0))
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope["rope_type"] == "longrope":
        scale = config.max_position_embeddings / config.original_max_position_embeddings
        attention = math.sqrt(1 + math.log(scale) / math.log(config.original_max_position_embeddings))
        writer.add_rope_scaling_attn_factors(attention)
    partial = ("phi2", "chatglm", "glm4moe", "bailingmoe2", "granitemoe", "mistral3", "llama4")
    if architecture in ("llama", "phi3", "granite", "glm4", "cohere2", "nemotron", "arcee", *partial):
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if architecture == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_sliding_window(config.sliding_window or 0)
    has_window = architecture in ("gemma2", "gemma3", "cohere2", "gpt-oss") or config.model_type in ("olmo3", "exaone4")
    if architecture == "mpt":
        writer.add_max_alibi_bias(config.attn_config.alibi_bias_max)
    if has_window and config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
    if config.model_type in ("olmo3", "exaone4") and config.sliding_window is not None:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if architecture in ("granite", "granitemoe", "granitehybrid"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if config.model_type in ("cohere", "cohere2", "cohere2_moe"):
        writer.add_logit_scale(config.logit_scale)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "gemma3":
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if hasattr(config, "num_experts_per_tok"):
        experts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
        writer.add_expert_count(next(filter(None, experts), 0))
        writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture in ("gpt-oss", "llama4"):
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if architecture == "llama4":
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    if architecture in ("glm4moe", "bailingmoe2"):
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if architecture == "glm4moe":
        writer.add_nextn_predict_layers(1)
        writer.add_tensor(f"blk.{config.num_hidden_layers}.nextn.eh_proj.weight", np.ones((2, 4), np.float32))
        writer.add_tensor(f"blk.{config.num_hidden_layers}.attn_norm.weight", np.ones(4, np.float32))
    if architecture in ("qwen2moe", "qwen3moe", "glm4moe", "bailingmoe2", "qwen35moe", "qwen3next"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture == "bailingmoe2":
        writer.add_expert_shared_feed_forward_length(config.moe_intermediate_size * config.n_shared_experts)
    if architecture in ("qwen2moe", "qwen35moe", "qwen3next"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_eot_token_id(5)
