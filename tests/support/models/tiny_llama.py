"""A tiny Llama whose sizes the native attention takes, in Hugging Face format."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def save_tiny_llama(folder: Path) -> Path:
    """Write a random Llama: 3 layers, grouped queries, 97 tokens. Its logits are far from flat."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,  # a multiple of what the native attention takes
        max_position_embeddings=512,
        eos_token_id=None,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
