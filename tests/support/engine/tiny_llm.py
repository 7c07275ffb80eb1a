"""A tiny Llama with a tokenizer, a chat template and two adapters, for the offline face over the whole engine."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rootgraft import LLM
from support.models.tiny_models import COMMON
from support.models.tiny_tokenizers import train_byte_level, write_folder

CHAT_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(seed: int = 3, **changes: Any) -> LlamaForCausalLM:
    """The oracle, with changes of its configuration."""
    fields = {"vocab_size": train_byte_level().get_vocab_size(), "max_position_embeddings": 512} | changes
    model = LlamaForCausalLM(LlamaConfig(**COMMON | fields)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.25, generator=generator)
    return model


def write_model(folder: Path, model: LlamaForCausalLM | None = None) -> Path:
    """Write the model, or another one, and its tokenizer."""
    (make_model() if model is None else model).save_pretrained(folder)
    definition = train_byte_level().to_str()
    special = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE}
    return write_folder(folder, definition, **special)


def write_adapter(folder: Path, seed: int, base: LlamaForCausalLM | None = None, **changes: Any) -> Path:
    """Write an adapter of the model, or of another one, by PEFT, whose config has these changes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import LoraConfig, get_peft_model

        fields = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | changes
        model = get_peft_model(make_model() if base is None else base, LoraConfig(**fields))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0.0, 0.5, generator=generator)
                elif "modules_to_save" in name or "trainable_tokens" in name:
                    parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
        model.save_pretrained(folder, save_embedding_layers=False)
    return folder


def open_llm(folder: Path, **options: Any) -> LLM:
    """Make an ``LLM`` of the model."""
    fixed = {
        "dtype": "float32",
        "device": "cpu",
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 200,
        "enable_lora": True,
    }
    return LLM(str(folder), **fixed | options)
