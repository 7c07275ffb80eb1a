"""Adapters of a module that transformers computes at once, where the checkpoint has two (MiniMax M3's gate and up)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.models.tiny_models import save

from rootgraft.engine.loading.base_layout import planned_layout
from rootgraft.lora.errors import AdapterError
from rootgraft.lora.read_adapter import AdapterReader

FUSED = "model.layers.0.mlp.gate_up_proj"
GATE = "model.layers.0.mlp.gate_proj"


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> AdapterReader:
    folder = save("minimax_m3", tmp_path_factory.mktemp("minimax_m3"))
    return AdapterReader(planned_layout(folder, torch.float32, torch.device("cpu"), dummy=False), max_rank=8)


def written(folder: Path, factors: dict[str, torch.Tensor]) -> str:
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": sorted({"gate_up_proj", "gate_proj"})}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({f"base_model.model.{name}.weight": part for name, part in factors.items()}, folder / _FILE)
    return str(folder)


_FILE = "adapter_model.safetensors"


def test_both_modules_have_a_and_their_rows_of_b(reader: AdapterReader, tmp_path: Path) -> None:
    a, b = torch.randn(3, 96), torch.randn(160, 3)
    fused = written(tmp_path, {f"{FUSED}.lora_A": a, f"{FUSED}.lora_B": b})
    factors = reader.read(fused).factors[GATE]
    assert factors.ranks == (3, 3)
    assert torch.equal(factors.a, torch.cat((a, a)))


def test_rows_that_do_not_fit_are_refused(reader: AdapterReader, tmp_path: Path) -> None:
    folder = written(tmp_path, {f"{FUSED}.lora_A": torch.zeros(3, 96), f"{FUSED}.lora_B": torch.zeros(80, 3)})
    with pytest.raises(AdapterError, match=rf"has shape \[80, 3\]; {FUSED} has 160 outputs"):
        reader.check(folder)


def test_a_module_that_is_adapted_by_both_names_is_refused(reader: AdapterReader, tmp_path: Path) -> None:
    factors = {f"{FUSED}.lora_A": torch.zeros(3, 96), f"{FUSED}.lora_B": torch.zeros(160, 3)}
    factors |= {f"{GATE}.lora_A": torch.zeros(3, 96), f"{GATE}.lora_B": torch.zeros(80, 3)}
    with pytest.raises(AdapterError, match="appears twice"):
        reader.check(written(tmp_path, factors))
