"""Random LoRA adapters on all linear modules, as PEFT saves them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.gpu.engine_runs import Shape
from benchmarks.gpu.measure import Machine


def write_adapter(folder: Path, shape: Shape, rank: int, *, seed: int, machine: Machine, spread: float = 0.01) -> Path:
    """Write one in the machine's type, with factors of this standard deviation. Returns its folder."""
    folder.mkdir()
    generator = torch.Generator(machine.device).manual_seed(seed)
    tensors = {}
    for layer in range(shape.layers):
        for module, (inputs, outputs) in shape.projections.items():
            for part, size in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = torch.randn(size, generator=generator, device=machine.device) * spread
                name = f"base_model.model.model.layers.{layer}.{module}.lora_{part}.weight"
                tensors[name] = values.to(machine.dtype).cpu()
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted({module.rpartition(".")[2] for module in shape.projections}),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder
