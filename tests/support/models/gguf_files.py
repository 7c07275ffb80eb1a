"""GGUF files of the tiny models, named, permuted and shifted as llama.cpp's converter does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from support.models.tiny_models import tiny_model

_ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "smollm3": "smollm3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
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
}
_GEMMA_NAMES = _NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(name: str, path: Path) -> Path:
    """All tensors in F32, the metadata of the architecture."""
    model = tiny_model(name)
    config = model.config
    architecture = gguf_architecture(model)
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer, architecture, config)
    for key, value in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensor = value
        if architecture in ("llama", "smollm3") and (".q_proj." in key or ".k_proj." in key):
            heads = config.num_attention_heads if ".q_proj." in key else config.num_key_value_heads
            tensor = _interleaved(tensor, heads)
        if architecture.startswith("gemma") and key.endswith("norm.weight"):
            tensor = tensor + 1
        if ".experts." in key:
            _add_experts(writer, key, tensor)
            continue
        if key.endswith("shared_expert_gate.weight"):
            tensor = tensor.squeeze(0)
        writer.add_tensor(gguf_name(key, architecture), tensor.numpy())
    if config.model_type == "llama" and config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _frequency_factors(model))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_experts(writer: gguf.GGUFWriter, key: str, tensor: Tensor) -> None:
    """The weights of a layer's experts, stacked by module."""
    block = f"blk.{key.split('.')[2]}"
    if key.endswith("down_proj"):
        writer.add_tensor(f"{block}.ffn_down_exps.weight", tensor.numpy())
        return
    for name, part in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
        writer.add_tensor(f"{block}.ffn_{name}_exps.weight", part.contiguous().numpy())


def gguf_architecture(model: Any) -> str:
    """The name of a transformers model's architecture in a GGUF file."""
    return _ARCHITECTURES[model.config.model_type]


def gguf_name(key: str, architecture: str) -> str:
    """The name in a GGUF file of a tensor of a transformers model."""
    names = _GEMMA_NAMES if architecture.startswith("gemma") else _NAMES
    module, _, kind = key.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{names[module]}.{kind}"
    _, _, index, inner = module.split(".", 3)
    return f"blk.{index}.{names[inner]}.{kind}"


def _interleaved(rows: Tensor, heads: int) -> Tensor:
    """From [first half, second half] in each head to pairs side by side."""
    return rows.view(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _frequency_factors(model: Any) -> np.ndarray[Any, Any]:
    head_dim, theta = model.config.head_dim, model.config.rope_parameters["rope_theta"]
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return (plain / model.model.rotary_emb.inv_freq).numpy()


def _add_metadata(writer: gguf.GGUFWriter, architecture: str, config: Any) -> None:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    if head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if architecture != "gemma2":
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if architecture in ("llama", "phi3"):
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if architecture == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_sliding_window(config.sliding_window or 0)
    if architecture.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "gemma3":
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if hasattr(config, "num_experts_per_tok"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture.endswith("moe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_eot_token_id(5)
