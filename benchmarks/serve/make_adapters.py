"""Make eight random LoRA adapters for the default model, a0 to a7 of ranks 8 to 64, in PEFT's format and as GGUF files.

    python -m benchmarks.serve.make_adapters FOLDER

Even ones are on all linear layers, odd ones on queries and values alone. They change answers and mean nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import torch
from safetensors.torch import save_file
from torch import Tensor

from rootgraft.engine.checkpoint.locate import resolve_model
from rootgraft.engine.checkpoint.model_config import ModelConfig
from rootgraft.engine.checkpoint.read_config import read_model_config

RANKS = (8, 8, 16, 16, 16, 32, 32, 64)
_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    write_adapters(Path(sys.argv[1]))
    return 0


def write_adapters(folder: Path) -> None:
    """Write all eight, each as a folder and as a GGUF file beside it."""
    config = read_model_config(resolve_model(None).path)
    for number, rank in enumerate(RANKS):
        factors = random_factors(config, rank, everywhere=number % 2 == 0, seed=number)
        write_adapter(folder / f"a{number}", factors, rank)
        write_gguf_adapter(folder / f"a{number}.gguf", factors, rank, config)


Factors = dict[tuple[int, str], tuple[Tensor, Tensor]]
"""Of a layer's module: A [rank, inputs] and B [outputs, rank]."""


def random_factors(config: ModelConfig, rank: int, *, everywhere: bool, seed: int) -> Factors:
    """Return random factors; B is small, so that answers stay fluent."""
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
    return {
        (layer, module): (
            torch.randn(rank, inputs, generator=generator) / inputs**0.5,
            torch.randn(outputs, rank, generator=generator) * 0.05 / rank**0.5,
        )
        for layer in range(config.num_layers)
        for module, (inputs, outputs) in shapes.items()
    }


def write_adapter(folder: Path, factors: Factors, rank: int) -> None:
    """Write an adapter in PEFT's format."""
    tensors = {}
    for (layer, module), pair in factors.items():
        for name, factor in zip("AB", pair, strict=True):
            tensors[f"base_model.model.model.layers.{layer}.{module}.lora_{name}.weight"] = factor
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted({module.rpartition(".")[2] for _, module in factors}),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields))


def write_gguf_adapter(path: Path, factors: Factors, rank: int, config: ModelConfig) -> None:
    """Write the same adapter of a Llama for llama.cpp, which has the rows of queries and keys in another order."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 2.0 * rank)
    heads = {"self_attn.q_proj": config.num_heads, "self_attn.k_proj": config.num_kv_heads}
    for (layer, module), (a, b) in factors.items():
        if module in heads:
            b = b.view(heads[module], 2, -1, rank).transpose(1, 2).reshape(-1, rank)
        name = f"blk.{layer}.{_GGUF_NAMES[module]}.weight"
        writer.add_tensor(f"{name}.lora_a", a.numpy())
        writer.add_tensor(f"{name}.lora_b", b.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    sys.exit(main())
