"""Tiny random multimodal models from transformers, and their files as they were published before and since."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    Llama4Config,
    Llama4ForCausalLM,
    Llama4ForConditionalGeneration,
    MiniMaxM3SparseForConditionalGeneration,
    MiniMaxM3VLConfig,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Step3p7Config,
    Step3p7ForConditionalGeneration,
)

from support.models.step_model import published_step
from support.models.tiny_models import COMMON

_TEXT = {key: value for key, value in COMMON.items() if key != "tie_word_embeddings"}
_SIGLIP = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_QWEN = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 48, "patch_size": 14,
}  # fmt: skip
_OUT_OF_SIGHT = {"image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123}

_DELTA = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2],
        "mrope_interleaved": True,
    },
}  # fmt: skip

Kind = tuple[type[Any], type[Any], dict[str, Any]]
MULTIMODAL: dict[str, Kind] = {
    "gemma3": (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        {
            "text_config": {
                **_TEXT,
                "model_type": "gemma3_text",
                "num_hidden_layers": 7,
                "head_dim": 12,
                "sliding_window": 5,
                "query_pre_attn_scalar": 20,
            },
            "vision_config": {**_SIGLIP, "model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
            "image_token_index": 120,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4": (
        Gemma4Config,
        Gemma4ForConditionalGeneration,
        {
            "text_config": {
                **_TEXT,
                "model_type": "gemma4_text",
                "head_dim": 16,
                "global_head_dim": 32,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
                "num_kv_shared_layers": 1,
                "hidden_size_per_layer_input": 16,
                "vocab_size_per_layer_input": _TEXT["vocab_size"],
            },
            "vision_config": {**_SIGLIP, "model_type": "gemma4_vision", "head_dim": 8, "position_embedding_size": 16},
            "image_token_id": 120,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4_unified": (
        Gemma4UnifiedConfig,
        Gemma4UnifiedForConditionalGeneration,
        {
            "text_config": {
                **_TEXT,
                "model_type": "gemma4_unified_text",
                "head_dim": 16,
                "global_head_dim": 32,
                "num_global_key_value_heads": 1,
                "attention_k_eq_v": True,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "final_logit_softcapping": 3.0,
            },
            "vision_config": {
                "model_type": "gemma4_unified_vision", "patch_size": 4, "pooling_kernel_size": 1, "mm_embed_dim": 16,
                "mm_posemb_size": 8, "output_proj_dims": 16,
            },
            "audio_config": {"model_type": "gemma4_unified_audio", "output_proj_dims": 16},
            "image_token_id": 120,
            "tie_word_embeddings": True,
        },
    ),
    "mistral3": (
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        {
            "text_config": {**_TEXT, "model_type": "mistral", "head_dim": 16, "sliding_window": None},
            "vision_config": {**_SIGLIP, "model_type": "pixtral", "head_dim": 8},
            "image_token_index": 120,
            "tie_word_embeddings": False,
        },
    ),
    "ministral3": (
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        {
            "text_config": {
                **_TEXT,
                "model_type": "ministral3",
                "head_dim": 16,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 500.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 9,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.9,
                },
            },
            "vision_config": {**_SIGLIP, "model_type": "pixtral", "head_dim": 8},
            "image_token_index": 120,
            "tie_word_embeddings": False,
        },
    ),
    "llama4": (
        Llama4Config,
        Llama4ForConditionalGeneration,
        {
            "text_config": {
                **_TEXT,
                "head_dim": 16,
                "intermediate_size_mlp": 88,
                "num_local_experts": 4,
                "interleave_moe_layer_step": 2,
                "no_rope_layer_interval": 2,
                "attention_chunk_size": 10,
                "floor_scale": 6,
                "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            },
            "vision_config": {
                **_SIGLIP, "vision_output_dim": 48, "projector_input_dim": 64, "projector_output_dim": 48,
            },
            "image_token_index": 120,
            "boi_token_index": 121,
            "eoi_token_index": 122,
        },
    ),
    "kimi_k25": (
        Kimi_K25Config,
        Kimi_K25ForConditionalGeneration,
        {
            "text_config": {
                **_TEXT,
                "model_type": "deepseek_v3",
                "num_key_value_heads": 6,
                "q_lora_rank": None,
                "kv_lora_rank": 48,
                "qk_nope_head_dim": 24,
                "qk_rope_head_dim": 16,
                "v_head_dim": 20,
                "first_k_dense_replace": 1,
                "n_routed_experts": 6,
                "num_experts_per_tok": 2,
                "n_group": 1,
                "topk_group": 1,
                "moe_intermediate_size": 14,
                "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            },
            "vision_config": {
                **{key: value for key, value in _SIGLIP.items() if key != "image_size"},
                "pos_emb_height": 4,
                "pos_emb_width": 4,
            },
            "projection_hidden_size": 16,
            "image_token_id": 120,
            "tie_word_embeddings": False,
        },
    ),
    "qwen2_5_vl": (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        {
            "text_config": {
                **_TEXT,
                "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [1, 1, 2]},
            },
            "vision_config": {**_QWEN, "fullatt_block_indexes": [0]},
            "tie_word_embeddings": False,
            **_OUT_OF_SIGHT,
        },
    ),
    "qwen3_vl": (
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        {
            "text_config": {
                **_TEXT,
                "head_dim": 16,
                "rope_parameters": {
                    "rope_type": "default", "rope_theta": 500.0, "mrope_section": [3, 3, 2], "mrope_interleaved": True,
                },
            },
            "vision_config": {**_QWEN, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            "tie_word_embeddings": True,
            **_OUT_OF_SIGHT,
        },
    ),
    "qwen3_vl_moe": (
        Qwen3VLMoeConfig,
        Qwen3VLMoeForConditionalGeneration,
        {
            "text_config": {
                **_TEXT,
                "head_dim": 16,
                "num_experts": 5,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 26,
                "rope_parameters": {
                    "rope_type": "default", "rope_theta": 500.0, "mrope_section": [3, 3, 2], "mrope_interleaved": True,
                },
            },
            "vision_config": {**_QWEN, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            "tie_word_embeddings": True,
            **_OUT_OF_SIGHT,
        },
    ),
    "qwen3_5": (
        Qwen3_5Config,
        Qwen3_5ForConditionalGeneration,
        {
            "text_config": {**_TEXT, **_DELTA},
            "vision_config": {**_QWEN, "num_position_embeddings": 16},
            "tie_word_embeddings": True,
            **_OUT_OF_SIGHT,
        },
    ),
    "minimax_m3": (
        MiniMaxM3VLConfig,
        MiniMaxM3SparseForConditionalGeneration,
        {
            "text_config": {
                **_TEXT,
                "model_type": "minimax_m3_vl_text",
                "head_dim": 16,
                "rotary_dim": 8,
                "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
                "num_local_experts": 5,
                "num_experts_per_tok": 2,
                "dense_intermediate_size": 80,
                "shared_intermediate_size": 40,
                "mlp_layer_types": ["dense", "sparse", "sparse"],
                "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
                "index_n_heads": 2,
                "index_head_dim": 16,
                "index_block_size": 4,
                "index_topk_blocks": 3,
            },
            "vision_config": {
                "model_type": "minimax_m3_vl_vision", "hidden_size": 24, "intermediate_size": 24,
                "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14, "image_size": 28,
            },
            "projector_hidden_size": 48,
            "image_token_index": 120,
            "video_token_index": 121,
        },
    ),
    "step3p7": (
        Step3p7Config,
        Step3p7ForConditionalGeneration,
        {
            "text_config": {
                **_TEXT,
                "model_type": "step3p5",
                "head_dim": 16,
                "num_attention_heads": 4,
                "num_sliding_attention_heads": 6,
                "sliding_window": 5,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
                "mlp_layer_types": ["dense", "sparse", "sparse"],
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 5e2, "partial_rotary_factor": 0.5},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
                },
                "n_routed_experts": 5,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 26,
                "share_expert_dim": 20,
                "swiglu_limits": [0.0, 0.0, 0.4],
                "swiglu_limits_shared": [0.3, 0.5, 0.0],
                "moe_router_scaling_factor": 3.0,
            },
            "vision_config": {**_SIGLIP, "model_type": "step3p5_vision"},
            "image_token_id": 120,
        },
    ),
    "qwen3_5_moe": (
        Qwen3_5MoeConfig,
        Qwen3_5MoeForConditionalGeneration,
        {
            "text_config": {
                **_TEXT,
                **_DELTA,
                "num_experts": 5,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 26,
                "shared_expert_intermediate_size": 20,
            },
            "vision_config": {**_QWEN, "num_position_embeddings": 16},
            **_OUT_OF_SIGHT,
        },
    ),
}  # fmt: skip

PUBLISHED = {"kimi_k25": "KimiK25ForConditionalGeneration"}
"""Names of classes in published files that transformers' own files do not have."""


@functools.cache
def multimodal_model(name: str) -> PreTrainedModel:
    """The oracle, with weights large enough that every part of the language model shows in its logits."""
    config_class, model_class, options = MULTIMODAL[name]
    model = model_class(
        config_class(**json.loads(json.dumps(options)), attn_implementation="eager", experts_implementation="eager")
    ).eval()
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.25, generator=generator)
    return model


@torch.no_grad()
def multimodal_logits(model: torch.nn.Module, tokens: list[int]) -> Tensor:
    """[T, V] fp32 of text. transformers 5.24 runs the whole of Llama 4 with images only."""
    model = next((each for each in model.modules() if isinstance(each, Llama4ForCausalLM)), model)
    return model(input_ids=torch.tensor([tokens])).logits[0]


def save_multimodal(name: str, folder: Path, spelling: str) -> Path:
    """Write the files with today's names, or with those that the models were first published with ("old")."""
    multimodal_model(name).save_pretrained(folder)
    file = folder / "model.safetensors"
    # transformers 5.24 writes Kimi's layers as blocks of its vision tower.
    stored = dict(multimodal_model(name).state_dict()) if name == "kimi_k25" else load_file(file)
    tensors = stored if name == "step3p7" else {_today(key): value for key, value in stored.items()}
    if name == "qwen3_vl_moe":  # the published files, which transformers turns when it loads them
        tensors |= {key: value.mT.contiguous() for key, value in tensors.items() if ".experts." in key}
    if name.startswith("qwen3_5"):  # with the layer that predicts further tokens, which is no part of the model
        tensors |= {"mtp.fc.weight": torch.zeros(3), "mtp.layers.0.input_layernorm.weight": torch.zeros(3)}
    if name == "qwen3_5_moe" and spelling == "today":
        tensors = _stacked(tensors)
    if spelling == "old" and name == "step3p7":  # as published, with an MTP module
        tensors |= {
            f"model.layers.3.{part}.weight": torch.zeros(3) for part in ("enorm", "transformer.shared_head.norm")
        }
        config = json.loads((folder / "config.json").read_text())
        config["text_config"] = published_step(config["text_config"])
        (folder / "config.json").write_text(json.dumps(config))
    elif spelling == "old":
        qwen = name.startswith("qwen")
        if not name.startswith(("qwen3_vl", "qwen3_5")):
            tensors = {(_old_qwen if qwen else _old_llava)(key): value for key, value in tensors.items()}
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(_old_config(name, config)))
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def _stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack the matrices of experts as Qwen 3.5 is published: [E, 2 I, H] and [E, H, I]."""
    found = {key: value for key, value in tensors.items() if ".experts." not in key}
    experts = [re.fullmatch(r"(.*\.experts\.)(\d+)\.gate_proj\.weight", key) for key in tensors]
    count = 1 + max(int(match[2]) for match in experts if match)
    for prefix in {match[1] for match in experts if match}:
        gate, up, down = (
            [tensors[f"{prefix}{expert}.{part}_proj.weight"] for expert in range(count)]
            for part in ("gate", "up", "down")
        )
        pairs = [torch.cat(pair) for pair in zip(gate, up, strict=True)]
        found |= {f"{prefix}gate_up_proj": torch.stack(pairs), f"{prefix}down_proj": torch.stack(down)}
    return found


def _today(key: str) -> str:
    key = re.sub(r"^language_model\.model\.|^model\.(?=layers\.|embed_tokens\.|norm\.)", "model.language_model.", key)
    key = key.removeprefix("language_model.") if key.startswith("language_model.lm_head") else key
    return re.sub(r"^(visual|vision_tower|multi_modal_projector)\.", r"model.\1.", key)


def _old_qwen(key: str) -> str:
    return key.removeprefix("model.") if key.startswith("model.visual.") else key.replace(".language_model.", ".")


def _old_llava(key: str) -> str:
    if key.startswith("lm_head"):
        return f"language_model.{key}"
    return key.removeprefix("model.").replace("language_model.", "language_model.model.")


def _old_config(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Rotary keys as before transformers 5, and Qwen2.5-VL's language model in the outer object."""
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    if name.startswith("gemma4"):
        text["rope_parameters"] = rope
        own = next(iter(text.pop("per_layer_config").values()))
        text["global_head_dim"] = own["head_dim"]
        text["num_global_key_value_heads"] = own.get("num_key_value_heads")
    elif name == "gemma3":
        text["rope_theta"] = rope["full_attention"]["rope_theta"]
        text["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        text.pop("layer_types")
    else:
        text["rope_theta"] = rope.pop("rope_theta")
    if name.startswith(("qwen3_5", "minimax_m3")):
        text["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if name == "minimax_m3":
        is_sparse = [int(kind != "full_attention") for kind in text.pop("layer_types")]
        names = {
            "n_heads": "num_index_heads", "head_dim": "index_dim", "block_size": "block_size",
            "topk_blocks": "topk_blocks", "local_blocks": "local_block",
        }  # fmt: skip
        text["sparse_attention_config"] = {
            **{f"sparse_{old}": text.pop(f"index_{new}") for new, old in names.items()},
            "use_sparse_attention": True,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_attention_freq": is_sparse,
            "sparse_disable_index_value": is_sparse,
        }
        text["moe_layer_freq"] = [int(kind == "sparse") for kind in text.pop("mlp_layer_types")]
        text |= {"hidden_act": "swigluoai", "model_type": None, "n_shared_experts": 1, "use_routing_bias": True}
        text |= {"use_gemma_norm": True, "qk_norm_type": "per_head", "attention_output_gate": False}
        return config
    if name.startswith("qwen3_5"):
        text["full_attention_interval"] = 2
        text.pop("layer_types")
    if name in ("qwen3_vl", "qwen3_vl_moe", "ministral3", "qwen3_5", "qwen3_5_moe"):
        text["rope_scaling"] = rope
    if name == "qwen2_5_vl":
        text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        return text | {key: value for key, value in config.items() if key != "text_config"}
    if name in PUBLISHED:
        config["architectures"] = [PUBLISHED[name]]
    return config
