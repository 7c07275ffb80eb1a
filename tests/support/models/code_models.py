"""Checkpoints that name keys and tensors as their own code did, by the tiny models that compute the same."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from support.models.gguf_files import interleaved
from support.models.tiny_models import COMMON, MODELS, save

Names = dict[str, str]


@dataclass(frozen=True)
class CodeModel:
    """A model as its code names keys and tensors, by the tiny model of transformers that computes the same.

    Attributes:
        keys: of the config, by their usual names; ``config`` are others.
        names: parts of tensors' names by the usual ones, replaced one after the other.
        fused: the tensor of q, k and v of a layer, without its prefix; empty where they are apart.
        module: one that an adapter changes.
        grouped: its rows are those of each KV head.
        mlp_parts: 2 where the size of the MLP is of gate and up together.
        dropped: keys that the code does not know.
    """

    base: str
    config: dict[str, Any]
    names: Names
    module: str
    keys: Names = field(default_factory=dict)
    fused: str = ""
    grouped: bool = False
    mlp_parts: int = 1
    dropped: tuple[str, ...] = ()


CODE_MODELS = {
    "glm": CodeModel(
        base="glm",
        config={
            "architectures": ["ChatGLMModel"],
            "model_type": "chatglm",
            "auto_map": {"AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration"},
            "rope_ratio": 0.05,
            "multi_query_attention": True,
            "rmsnorm": True,
        },
        keys={
            "num_hidden_layers": "num_layers",
            "intermediate_size": "ffn_hidden_size",
            "num_key_value_heads": "multi_query_group_num",
            "head_dim": "kv_channels",
            "max_position_embeddings": "seq_length",
            "rms_norm_eps": "layernorm_epsilon",
            "vocab_size": "padded_vocab_size",
            "attention_bias": "add_qkv_bias",
        },
        names={
            "lm_head": "transformer.output_layer",
            "model.embed_tokens": "transformer.embedding.word_embeddings",
            "model.norm": "transformer.encoder.final_layernorm",
            "model.layers.": "transformer.encoder.layers.",
            "self_attn.o_proj": "self_attention.dense",
            "self_attn.": "self_attention.",
            "mlp.gate_up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        },
        module="transformer.encoder.layers.1.self_attention.query_key_value",
        fused="query_key_value",
    ),
    "internlm2": CodeModel(
        base="llama",
        config={
            "architectures": ["InternLM2ForCausalLM"],
            "model_type": "internlm2",
            "auto_map": {"AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM"},
            "bias": False,
            "rope_theta": 10_000.0,
            "rope_scaling": {"type": "dynamic", "factor": 2.0},
        },
        names={
            "lm_head": "output",
            "embed_tokens": "tok_embeddings",
            "self_attn.o_proj": "attention.wo",
            "self_attn.": "attention.",
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
        },
        module="model.layers.1.attention.wqkv",
        fused="wqkv",
        grouped=True,
        dropped=("attention_bias", "mlp_bias", "head_dim"),
    ),
    "qwen": CodeModel(
        base="qwen_as_code",
        config={
            "architectures": ["QWenLMHeadModel"],
            "model_type": "qwen",
            "auto_map": {"AutoModelForCausalLM": "modeling_qwen.QWenLMHeadModel"},
            "seq_length": 96,
            "use_logn_attn": True,
            "use_dynamic_ntk": True,
            "no_bias": True,
            "rotary_pct": 1.0,
            "rotary_emb_base": 500.0,
        },
        keys={"rms_norm_eps": "layer_norm_epsilon", "head_dim": "kv_channels"},
        names={
            "model.embed_tokens": "transformer.wte",
            "model.layers.": "transformer.h.",
            "model.norm": "transformer.ln_f",
            "self_attn.o_proj": "attn.c_proj",
            "self_attn.": "attn.",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
            "mlp.gate_proj": "mlp.w2",
            "mlp.up_proj": "mlp.w1",
            "mlp.down_proj": "mlp.c_proj",
        },
        module="transformer.h.1.attn.c_attn",
        fused="c_attn",
        mlp_parts=2,
        dropped=("num_key_value_heads", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers"),
    ),
    "phi": CodeModel(
        base="phi_as_code",
        config={
            "architectures": ["PhiForCausalLM"],
            "model_type": "phi-msft",
            "auto_map": {"AutoModelForCausalLM": "modeling_phi.PhiForCausalLM"},
            "rotary_dim": 8,
            "n_head_kv": None,
            "n_inner": None,
            "flash_attn": False,
        },
        keys={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "layer_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
        },
        names={
            "lm_head": "lm_head.linear",
            "model.embed_tokens": "transformer.embd.wte",
            "model.final_layernorm": "lm_head.ln",
            "model.layers.": "transformer.h.",
            "input_layernorm": "ln",
            "self_attn.dense": "mixer.out_proj",
            "self_attn.": "mixer.",
        },
        module="transformer.h.1.mixer.Wqkv",
        fused="Wqkv",
        dropped=("num_key_value_heads", "intermediate_size", "partial_rotary_factor", "qk_layernorm"),
    ),
    "ling": CodeModel(
        base="bailing_moe_v2",
        config={
            "model_type": "bailing_moe",
            "auto_map": {"AutoModelForCausalLM": "modeling_bailing_moe_v2.BailingMoeV2ForCausalLM"},
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
            "score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        },
        keys={
            "n_routed_experts": "num_experts",
            "n_shared_experts": "num_shared_experts",
            "attention_bias": "use_qkv_bias",
        },
        names={},
        module="model.layers.1.attention.query_key_value",
    ),
}


def write_code_model(model: CodeModel, folder: Path) -> Path:
    """Save the tiny model, and rename what the code names otherwise."""
    save(model.base, folder)
    config = json.loads((folder / "config.json").read_text())
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    config["intermediate_size"] *= model.mlp_parts
    kv_heads = config["num_key_value_heads"]
    for key in ("rope_parameters", "num_key_value_groups", *model.dropped):
        config.pop(key, None)
    config = {model.keys.get(key, key): value for key, value in config.items()} | model.config
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".q_proj." in name and model.fused]:
        parts = [tensors.pop(name.replace("q_proj", f"{each}_proj")) for each in "qkv"]
        if model.grouped:
            heads = [len(parts[1]) // kv_heads * count for count in (groups, 1, 1)]
            split = [part.split(rows) for part, rows in zip(parts, heads, strict=True)]
            parts = [part for of_head in zip(*split, strict=True) for part in of_head]
        tensors[name.replace("q_proj", model.fused)] = torch.cat(parts)
    for usual, own in model.names.items():
        tensors = {name.replace(usual, own): tensor for name, tensor in tensors.items()}
    assert f"{model.module}.weight" in tensors and not any("self_attn" in name for name in tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_ling_1(folder: Path, **changed: Any) -> PreTrainedModel:
    """Save a Ling 1 and return a Qwen 2 MoE that computes the same, with a head of unit columns.

    Its shared expert counts in whole, not by a gate, which is a half for all tokens in the oracle.
    """
    config_class, model_class, changes = MODELS["qwen2_moe_plain"]
    fields = COMMON | changes | {"shared_expert_intermediate_size": 64, "norm_topk_prob": True} | changed
    oracle = model_class(config_class(**fields, attn_implementation="eager", experts_implementation="eager")).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            parameter.normal_(0.0, 0.0 if "shared_expert_gate" in name else 0.25, generator=generator)
    oracle.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    kept = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    kept += ("intermediate_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob")
    kept += ("max_position_embeddings", "rms_norm_eps")
    config = {key: config[key] for key in kept} | {
        "architectures": ["BailingMoeForCausalLM"],
        "model_type": "bailing_moe",
        "auto_map": {"AutoModelForCausalLM": "modeling_bailing_moe.BailingMoeForCausalLM"},
        "num_shared_experts": 2,
        "use_qkv_bias": True,
        "use_bias": False,
        "norm_head": True,
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "first_k_dense_replace": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if "_gate." not in name}
    for name in [name for name in tensors if ".q_proj." in name]:
        parts = [tensors.pop(name.replace("q_proj", f"{each}_proj")) for each in "qkv"]
        tensors[name.replace("q_proj", "query_key_value")] = torch.cat(parts)
    for name in [name for name in tensors if "shared_expert.down_proj" in name]:
        tensors[name] *= 0.5
    renamed = {"embed_tokens": "word_embeddings", "self_attn.o_proj": "attention.dense", "self_attn.": "attention."}
    for usual, own in (renamed | {"shared_expert.": "shared_experts."}).items():
        tensors = {name.replace(usual, own): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    with torch.no_grad():
        oracle.lm_head.weight /= oracle.lm_head.weight.norm(dim=0) + 1e-7
    return oracle


def write_ling_1_gguf(folder: Path, path: Path) -> Path:
    """Write what llama.cpp's converter makes of a Ling 1: q, k and v apart and permuted, a head of unit columns."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "bailingmoe")
    heads, kv_heads, hidden = config["num_attention_heads"], config["num_key_value_heads"], config["hidden_size"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_expert_weights_scale(1.0)
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_vocab_size(config["vocab_size"])
    tensors = load_file(folder / "model.safetensors")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BAILINGMOE, config["num_hidden_layers"])
    dim = hidden // heads
    for layer in range(config["num_hidden_layers"]):
        for kind in ("weight", "bias"):
            whole = tensors.pop(f"model.layers.{layer}.attention.query_key_value.{kind}")
            parts = whole.split([heads * dim, kv_heads * dim, kv_heads * dim])
            for name, part, count in zip("qkv", parts, (heads, kv_heads, 0), strict=True):
                rows = interleaved(part, count) if count else part
                writer.add_tensor(f"blk.{layer}.attn_{name}.{kind}", rows.contiguous().numpy())
        for module in ("gate_proj", "up_proj", "down_proj"):
            prefix = f"model.layers.{layer}.mlp.experts"
            experts = [tensors.pop(f"{prefix}.{index}.{module}.weight") for index in range(config["num_experts"])]
            stored = module.removesuffix("_proj")
            writer.add_tensor(f"blk.{layer}.ffn_{stored}_exps.weight", torch.stack(experts).numpy())
    tensors["lm_head.weight"] /= tensors["lm_head.weight"].norm(dim=0) + 1e-7
    for name, tensor in tensors.items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
