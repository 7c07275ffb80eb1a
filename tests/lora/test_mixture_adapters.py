"""Adapters on mixtures of experts against peft: attention, routers and shared experts; experts are refused by name."""

from __future__ import annotations

import copy
import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.lora_driver import AdaptedRun
from support.models.tiny_models import VOCAB, save, tiny_model
from torch import Tensor

from rootgraft.engine.loading.base_layout import base_layout
from rootgraft.engine.loading.load_model import load_model
from rootgraft.lora.errors import AdapterError
from rootgraft.lora.lora_step import AdapterBank
from rootgraft.lora.read_adapter import AdapterReader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing it
    from peft import LoraConfig, PeftModel, get_peft_model

CPU = torch.device("cpu")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "mixtral": [
        {"target_modules": ATTENTION, "r": 3},
        {"target_modules": [], "target_parameters": ["mlp.gate.weight"], "r": 2, "lora_alpha": 9},
    ],
    "qwen2_moe": [
        {"target_modules": ["q_proj", "shared_expert.gate_proj", "shared_expert.down_proj"], "r": 4},
        {
            "target_modules": ["o_proj", "up_proj", "shared_expert_gate"],
            "target_parameters": ["mlp.gate.weight"],
            "r": 5,
            "rank_pattern": {"mlp.gate.weight": 3},
        },
    ],
    "qwen3_moe": [{"target_modules": ATTENTION, "use_dora": True, "r": 3}],
    "gpt_oss": [{"target_modules": ATTENTION, "target_parameters": ["mlp.router.weight"], "r": 4}],
}


def make_adapter(name: str, folder: Path, options: dict[str, Any]) -> Path:
    """An adapter with random factors, written by peft."""
    torch.manual_seed(len(str(options)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(copy.deepcopy(tiny_model(name)), LoraConfig(task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key and "magnitude" not in key:
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def theirs(name: str, folder: Path | None, tokens: list[int]) -> Tensor:
    model = tiny_model(name)
    if folder is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()
    return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("name", OPTIONS)
def test_mixed_batches(name: str, tmp_path: Path) -> None:
    """Rows of the base and of adapters share steps that cut their prompts."""
    folders = [make_adapter(name, tmp_path / str(i), options) for i, options in enumerate(OPTIONS[name])]
    base = save(name, tmp_path / "base")
    model = load_model(base, dtype=torch.float32, device=CPU)
    layout = base_layout(model, base, dummy=False)
    adapters = [AdapterReader(layout, 64).read(str(folder)) for folder in folders]
    bank = AdapterBank(layout, len(adapters))
    for slot, adapter in enumerate(adapters):
        bank.install(slot, adapter)
    rng = random.Random(name)
    slots = [-1, *range(len(adapters)), 0]
    rows = [[rng.randrange(VOCAB) for _ in range(rng.randint(5, 20))] for _ in slots]
    run = AdaptedRun(model, bank, slots, [0] * len(slots))
    first, rest = run.extend([row[:4] for row in rows]), run.extend([row[4:] for row in rows])
    for slot, row, *parts in zip(slots, rows, first, rest, strict=True):
        expected = theirs(name, None if slot < 0 else folders[slot], row)
        limit = 1e-4 * expected.abs().max().item()
        torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-4, atol=limit)


def test_adapters_change_what_they_adapt(tmp_path: Path) -> None:
    """Else the test above would compare the base with itself."""
    for name, all_options in OPTIONS.items():
        for i, options in enumerate(all_options):
            folder = make_adapter(name, tmp_path / f"{name}{i}", options)
            change = theirs(name, folder, [1, 5, 9]) - theirs(name, None, [1, 5, 9])
            assert change.abs().max() > 0.01


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("mixtral", ["mlp.experts.gate_up_proj"]), ("gpt_oss", ["experts.down_proj", "experts.gate_up_proj"])],
)
def test_experts_are_refused_by_name(name: str, parameters: list[str], tmp_path: Path) -> None:
    folder = make_adapter(name, tmp_path / "adapter", {"target_modules": ["q_proj"], "target_parameters": parameters})
    base = save(name, tmp_path / "base")
    layout = base_layout(load_model(base, dtype=torch.float32, device=CPU), base, dummy=False)
    with pytest.raises(AdapterError, match=r"target_parameters = .*experts.* is not supported: adapters on"):
        AdapterReader(layout, 64).read(str(folder))
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"target_parameters": None}))
    with pytest.raises(AdapterError, match=r"The tensor .*experts.* is for experts, whose adapters are not computed"):
        AdapterReader(layout, 64).read(str(folder))
