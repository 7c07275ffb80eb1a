"""Random EAGLE-3 heads of a Llama, as they are published."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

HEADS, KV_HEADS, DIM, EPS, THETA = 4, 2, 16, 1e-5, 5000.0


def save_head(folder: Path, target: Path, *, own_vocab: bool = True, normed: bool = False, named: bool = True) -> Path:
    """Write a random head of a Llama: with an embedding and vocabulary of its own, or with the target's."""
    shape = json.loads((target / "config.json").read_text())
    hidden, vocab = shape["hidden_size"], shape["vocab_size"]
    size, mlp = (vocab - 40 if own_vocab else vocab), 24
    generator = torch.Generator().manual_seed(5)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator) / math.sqrt(sizes[-1])

    prefix = "midlayer" if named else "layers.0"
    tensors = {
        f"{prefix}.self_attn.q_proj.weight": random(HEADS * DIM, 2 * hidden),
        f"{prefix}.self_attn.k_proj.weight": random(KV_HEADS * DIM, 2 * hidden),
        f"{prefix}.self_attn.v_proj.weight": random(KV_HEADS * DIM, 2 * hidden),
        f"{prefix}.self_attn.o_proj.weight": random(hidden, HEADS * DIM),
        f"{prefix}.mlp.gate_proj.weight": random(mlp, hidden),
        f"{prefix}.mlp.up_proj.weight": random(mlp, hidden),
        f"{prefix}.mlp.down_proj.weight": random(hidden, mlp),
        "fc.weight": random(hidden, 2 * hidden),
        "lm_head.weight": 4 * random(size, hidden),
    }
    for name in (f"{prefix}.{each}" for each in ("input_layernorm", "hidden_norm", "post_attention_layernorm")):
        tensors[f"{name}.weight"] = 1 + 0.3 * random(hidden)
    tensors["norm.weight"] = 1 + 0.3 * random(hidden)
    if own_vocab:
        tensors["embed_tokens.weight"] = 3 * random(vocab, hidden)
        ids = torch.arange(vocab)[torch.randperm(vocab, generator=generator)[:size].sort().values]
        tensors["d2t"] = ids - torch.arange(size)
        tensors["t2d"] = torch.isin(torch.arange(vocab), ids)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3" if named else "LlamaForCausalLM"],
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM, "vocab_size": vocab,
        "draft_vocab_size": size, "rms_norm_eps": EPS, "rope_theta": THETA, "hidden_act": "silu",
        "max_position_embeddings": 64, "norm_before_residual": normed,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder
