"""Make eight random LoRA adapters for the default model, in PEFT's format: a0 .. a7, of ranks 8 to 64.

    python -m benchmarks.serve.make_adapters FOLDER

Even ones are on all linear layers, odd ones on queries and values alone. They change answers and mean nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from rootgraft.engine.checkpoint.locate import resolve_model
from rootgraft.engine.checkpoint.model_config import ModelConfig
from rootgraft.engine.checkpoint.read_config import read_model_config

RANKS = (8, 8, 16, 16, 16, 32, 32, 64)


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    config = read_model_config(resolve_model(None).path)
    for number, rank in enumerate(RANKS):
        write_adapter(Path(sys.argv[1]) / f"a{number}", config, rank, everywhere=number % 2 == 0, seed=number)
    return 0


def write_adapter(folder: Path, config: ModelConfig, rank: int, *, everywhere: bool, seed: int) -> None:
    """Write one; B is small, so that answers stay fluent."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, values = config.query_size, config.kv_size
    shapes = {"self_attn.q_proj": (hidden, queries), "self_attn.v_proj": (hidden, values)}
    if everywhere:
        shapes |= {
            "self_attn.k_proj": (hidden, values),
            "self_attn.o_proj": (queries, hidden),
            "mlp.gate_proj": (hidden, inner),
            "mlp.up_proj": (hidden, inner),
            "mlp.down_proj": (inner, hidden),
        }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config.num_layers):
        for module, (inputs, outputs) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.05 / rank**0.5
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted({module.rpartition(".")[2] for module in shapes}),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields))


if __name__ == "__main__":
    sys.exit(main())
