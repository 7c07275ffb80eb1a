"""Tiny random models of classes that our decoder lacks, and that are served through the transformers library."""

from __future__ import annotations

import copy
import functools
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.pytorch_utils import Conv1D

VOCAB = 131

# Heads of 16 dimensions, which the native kernels take; windows that matter for prompts of a few dozen tokens.
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_OF_16 = {**_GROUPED, "head_dim": 16}
_GPT = {
    "vocab_size": VOCAB,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT = {
    **_SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
_WINDOWS = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
_MULTIPLIERS = {
    "embedding_multiplier": 3.3,
    "attention_multiplier": 0.11,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.5,
}

MODELS: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {**_OF_16, **_EXPERTS, **_WINDOWS, "num_experts": 6},
    "Apertus1p5TextForCausalLM": _GROUPED,
    "ApertusForCausalLM": _GROUPED,
    "AriaTextForCausalLM": {**_GROUPED, "moe_num_experts": 6, "moe_num_shared_experts": 1},
    "BeamForCausalLM": {
        **_OF_16,
        **_EXPERTS,
        **_WINDOWS,
        "num_experts": 6,
        "n_group": 1,
        "topk_group": 1,
        "mlp_layer_types": ["dense", "sparse"],
        "final_logit_softcapping": 5.0,
    },
    "FlintForCausalLM": {
        **_OF_16,
        **_EXPERTS,
        **_WINDOWS,
        "num_experts": 6,
        "shared_expert_intermediate_size": 24,
    },
    "GraniteSWAForCausalLM": {**_GROUPED, **_WINDOWS, **_MULTIPLIERS, "layer_rope_theta": [10000.0, 500.0]},
    "Kolibri1ForCausalLM": {
        **_OF_16,
        **_EXPERTS,
        **_WINDOWS,
        "num_local_experts": 6,
        "shared_expert_intermediate_size": 24,
    },
    "BioGptForCausalLM": {**_SIZES, "tie_word_embeddings": True},
    "BitNetForCausalLM": _GROUPED,
    "CodeGenForCausalLM": {**_GPT, "rotary_dim": 8},
    "Cohere2MoeForCausalLM": {
        **_OF_16,
        **_WINDOWS,
        "first_k_dense_replace": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "prefix_dense_intermediate_size": 40,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "CwmForCausalLM": {**_OF_16, **_WINDOWS},
    "Dots1ForCausalLM": {**_GROUPED, **_EXPERTS, "n_routed_experts": 6, "n_shared_experts": 1},
    "Ernie4_5_MoeForCausalLM": {**_GROUPED, "moe_k": 2, "moe_num_experts": 6, "moe_intermediate_size": 20},
    "ExaoneMoeForCausalLM": {**_GROUPED, **_EXPERTS, **_WINDOWS, "num_experts": 6},
    "FlexOlmoForCausalLM": {**_GROUPED, "num_experts": 6, "num_experts_per_tok": 2},
    "GPT2LMHeadModel": _GPT,
    "GPTBigCodeForCausalLM": _GPT,
    "GPTJForCausalLM": {**_GPT, "rotary_dim": 8},
    "GPTNeoXForCausalLM": {**_SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 1e3}},
    "Gemma3nForCausalLM": {
        **_OF_16,
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "layer_types": [*_WINDOWS["layer_types"], "sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 7,
        "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.0],
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": VOCAB,
        "laurel_rank": 5,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "GemmaForCausalLM": {**_OF_16, "tie_word_embeddings": True},
    "GraniteMoeSWAForCausalLM": {**_GROUPED, **_WINDOWS, **_MULTIPLIERS, "num_local_experts": 6},
    "GraniteMoeSharedForCausalLM": {**_GROUPED, **_MULTIPLIERS, "shared_intermediate_size": 24},
    "HeliumForCausalLM": _OF_16,
    "HYV3ForCausalLM": {
        **_OF_16,
        **_EXPERTS,
        "num_experts": 6,
        "num_hidden_layers": 3,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "HunYuanMoEV1ForCausalLM": {**_OF_16, "num_experts": 6, "moe_topk": 2},
    "HyperCLOVAXForCausalLM": {**_GROUPED, **_MULTIPLIERS},
    "JetMoeForCausalLM": {
        **{key: value for key, value in _SIZES.items() if key != "num_attention_heads"},
        "num_key_value_heads": 2,
        "kv_channels": 16,
        "num_local_experts": 4,
    },
    "LagunaForCausalLM": {**_OF_16, **_EXPERTS, **_WINDOWS, "num_experts": 6, "shared_expert_intermediate_size": 24},
    "MiMoV2FlashForCausalLM": {
        **_OF_16,
        **_EXPERTS,
        **_WINDOWS,
        "v_head_dim": 8,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "n_routed_experts": 6,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    },
    "MiniCPM3ForCausalLM": {**_LATENT, "dim_model_base": 32},
    "MiniMaxM2ForCausalLM": {**_OF_16, "num_local_experts": 6, "num_experts_per_tok": 2},
    "MinistralForCausalLM": {**_OF_16, **_WINDOWS},
    "NanoChatForCausalLM": _GROUPED,
    "OPTForCausalLM": {
        **{key: value for key, value in _SIZES.items() if key != "intermediate_size"},
        "ffn_dim": 72,
        "word_embed_proj_dim": 40,
        "tie_word_embeddings": True,
    },
    "OlmoForCausalLM": {**_GROUPED, "clip_qkv": 2.0},
    "PersimmonForCausalLM": _SIZES,
    "PhiForCausalLM": {**_GROUPED, "qk_layernorm": True},
    "PhimoeForCausalLM": {**_GROUPED, "num_local_experts": 6, "sliding_window": 9},
    "StableLmForCausalLM": {**_GROUPED, "use_parallel_residual": True, "use_qkv_bias": True},
    "VaultGemmaForCausalLM": {
        **_OF_16,
        **_WINDOWS,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 2.0,
        "tie_word_embeddings": True,
    },
}
"""By name of the class, fields of its configuration."""


@functools.cache
def library_model(name: str, vocab: int = VOCAB) -> Any:
    """The oracle: random weights large enough that every part of the model shows in its logits."""
    model_class = getattr(transformers, name)
    fields = copy.deepcopy(MODELS[name]) | {"vocab_size": vocab}
    config = model_class.config_class(**fields, attn_implementation="eager")
    generator = torch.Generator().manual_seed(len(name))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = model_class(config).eval()
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.25, generator=generator)
    return model


def save_library_model(name: str, folder: Path, vocab: int = VOCAB) -> Path:
    """Write the model as transformers does."""
    library_model(name, vocab).save_pretrained(folder)
    return folder


@torch.no_grad()
def library_logits(name: str, tokens: list[int], adapter: Path | None = None, vocab: int = VOCAB) -> Tensor:
    """[T, V] fp32 by transformers, or by PEFT with an adapter from its folder."""
    model = library_model(name, vocab)
    if adapter is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from peft import PeftModel

            model = PeftModel.from_pretrained(copy.deepcopy(model), adapter).eval()
    logits: Tensor = model(input_ids=torch.tensor([tokens])).logits[0].float()
    return logits


def linears(name: str, vocab: int = VOCAB) -> list[str]:
    """Names of a model's linear modules, all but the head, and but routers that return more than their logits.

    In a mixture of experts without those of MLPs, in whose place PEFT adapts the experts' weights as well.
    """
    model = library_model(name, vocab)
    head, has_experts = model.get_output_embeddings(), any(".experts." in key for key, _ in model.named_parameters())
    return [
        key
        for key, module in model.named_modules()
        if type(module) in (torch.nn.Linear, Conv1D)
        and module is not head
        and not (has_experts and key.endswith(("gate_proj", "up_proj", "down_proj")))
    ]


def make_library_adapter(name: str, folder: Path, seed: int, vocab: int = VOCAB, **options: Any) -> Path:
    """Let PEFT make and save a random adapter on every linear module of the decoder, whose every tensor matters."""
    torch.manual_seed(seed)
    fields: dict[str, Any] = {
        "r": 3,
        "lora_alpha": 9,
        "target_modules": linears(name, vocab),
        "init_lora_weights": False,
        "task_type": "CAUSAL_LM",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(copy.deepcopy(library_model(name, vocab)), LoraConfig(**fields | options))
        model.save_pretrained(folder)
    return folder
