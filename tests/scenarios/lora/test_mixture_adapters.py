"""Adapters on mixtures of experts against peft: attention, routers, shared experts, experts together and one by one."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.lora_driver import AdaptedRun
from support.models.tiny_models import VOCAB, save, tiny_model
from torch import Tensor

from rootgraft.engine.loading.base_layout import base_layout
from rootgraft.engine.loading.load_model import load_model
from rootgraft.lora.base_projections import BaseLayout
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
        {
            "target_modules": ["v_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "r": 3,
            "rank_pattern": {"experts.down_proj": 2},
            "use_rslora": True,
        },
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
    "qwen3_moe": [
        {"target_modules": ATTENTION, "use_dora": True, "r": 3},
        {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"], "r": 4},
        {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.gate.weight"], "r": 1},
    ],
    "olmoe": [{"target_modules": ATTENTION, "target_parameters": ["experts.down_proj", "gate.weight"], "r": 3}],
    "glm4_moe": [
        {"target_modules": ["k_proj", "o_proj"], "r": 3},
        {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "r": 2},
    ],
    "deepseek_v2": [
        {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"], "r": 3},
        {
            "target_modules": ["kv_b_proj", "shared_experts.down_proj"],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
            "r": 5,
            "rank_pattern": {"experts.down_proj": 2},
            "lora_alpha": 9,
        },
    ],
    "deepseek_v3": [
        {"target_modules": ["kv_b_proj"], "r": 4, "lora_bias": True},
        {"target_modules": ["kv_b_proj", "q_b_proj"], "target_parameters": ["mlp.gate.weight"], "r": 2},
        {"target_modules": ["q_a_proj", "kv_a_proj_with_mqa", "o_proj"], "r": 3, "use_dora": True},
    ],
    "granite_moe": [
        {"target_modules": ["v_proj"], "target_parameters": ["router.weight", "experts.gate_up_proj"], "r": 3},
        {"target_modules": [], "target_parameters": ["experts.down_proj"], "r": 2},
    ],
    "llama4": [
        {"target_modules": ATTENTION, "r": 3},
        {
            "target_modules": ["shared_expert.up_proj", "feed_forward.down_proj"],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
            "r": 2,
            "rank_pattern": {"experts.down_proj": 3},
        },
    ],
    "gpt_oss": [
        {"target_modules": ATTENTION, "target_parameters": ["mlp.router.weight"], "r": 4},
        {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "r": 2},
    ],
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it takes a bias of B for a factor cut short
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


def layout_of(name: str, folder: Path) -> BaseLayout:
    base = save(name, folder)
    return base_layout(load_model(base, dtype=torch.float32, device=CPU), base, dummy=False)


def stored(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def refused(folder: Path, layout: BaseLayout, message: str, tensors: dict[str, Tensor], **config: Any) -> None:
    save_file(tensors, folder / "adapter_model.safetensors")
    file = folder / "adapter_config.json"
    before = file.read_text()
    file.write_text(json.dumps(json.loads(before) | config))
    with pytest.raises(AdapterError, match=message):
        AdapterReader(layout, 64).read(str(folder))
    file.write_text(before)


def test_what_does_not_fit_the_experts_is_refused(tmp_path: Path) -> None:
    options = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"], "r": 2}
    folder = make_adapter("mixtral", tmp_path / "adapter", options)
    layout = layout_of("mixtral", tmp_path / "base")
    tensors = stored(folder)
    a = min(tensors)
    assert AdapterReader(layout, 64).read(str(folder)).rank == 2
    refused(folder, layout, "must have lora_A and lora_B, not lora_A", {a: tensors[a]})
    refused(
        folder, layout, "which fit neither gate_up_proj nor down_proj", tensors | {a: tensors[a][:, 1:].contiguous()}
    )
    refused(folder, layout, "rank 2 and 5 experts, 10 rows and columns", tensors | {a: tensors[a][1:].contiguous()})
    refused(folder, layout, "rank 3 and 5 experts, 15 rows and columns", tensors, r=3)
    refused(folder, layout, "has rank 65; the limit is 64", tensors, r=65)
    refused(folder, layout, "which target_parameters does not name", tensors, target_parameters=["mlp.gate.weight"])
    refused(folder, layout, "use_dora is set", tensors, use_dora=True)
    refused(folder, layout, "alora_invocation_tokens is set", tensors, alora_invocation_tokens=[3])
    refused(folder, layout, "target_parameters must be a list of names", tensors, target_parameters="experts")


def test_steps_with_adapters_on_experts_are_told_apart(tmp_path: Path) -> None:
    """And their factors leave the slot with the adapter."""
    options = [{"target_modules": ["q_proj"]}, {"target_modules": [], "target_parameters": ["experts.down_proj"]}]
    folders = [make_adapter("mixtral", tmp_path / str(i), each) for i, each in enumerate(options)]
    layout = layout_of("mixtral", tmp_path / "base")
    adapters = [AdapterReader(layout, 64).read(str(folder)) for folder in folders]
    bank = AdapterBank(layout, 2)
    bank.install(0, adapters[0])
    bank.install(1, adapters[1])
    found = [bank.adapts_products(np.array(slots, np.int32)) for slots in ([0, -1], [1, 0], [-1])]
    assert found == [False, True, False]
    name = "model.layers.0.block_sparse_moe.experts.down_proj"
    assert bank._tables[name].rows[5:].any(1).all() and not bank._tables[name].rows[:5].any()
    bank.install(1, adapters[0])
    assert not bank.adapts_products(np.array([1], np.int32)) and not bank._tables[name].rows.any()
    assert name in bank.products & bank.reserve(8)


def test_experts_that_the_base_does_not_have_are_refused_by_name(tmp_path: Path) -> None:
    options = {"target_modules": [], "target_parameters": ["experts.down_proj"]}
    folder = make_adapter("mixtral", tmp_path / "adapter", options)
    layout = layout_of("mixtral", tmp_path / "base")
    plain = tuple(shape for shape in layout.projections if shape.place is None)
    layout = dataclasses.replace(layout, experts={}, projections=plain)
    message = "target_parameters names experts, which this base model does not have"
    refused(folder, layout, message, stored(folder))
    one = {f"base_model.model.model.layers.0.mlp.experts.3.w1.lora_{part}.weight": torch.ones(8, 8) for part in "AB"}
    refused(folder, layout, "is for experts, which this base model does not have", one, target_parameters=None)


def test_what_latent_attention_does_not_compute_of_an_adapter_is_refused(tmp_path: Path) -> None:
    layout = layout_of("deepseek_v2_lite", tmp_path / "base")
    folder = make_adapter("deepseek_v2_lite", tmp_path / "adapter", {"target_modules": ["kv_b_proj"], "r": 2})
    tensors = stored(folder)
    adapter = AdapterReader(layout, 64).read(str(folder))
    heads, rank, (plain, value, latent) = 6, 2, (24, 20, 48)
    assert len(adapter.factors) == 3 * 2 * heads
    # A and its transpose once for all heads; scales and rounding to cache lines come on top.
    assert adapter.num_bytes < 3 * (4 * rank * (2 * latent + heads * (plain + value)) + 2 * heads * 3 * 64)
    refused(folder, layout, "in latent attention it would change the keys", tensors, alora_invocation_tokens=[3])
    norms = {
        name.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(heads * (plain + value))
        for name in tensors
        if "lora_A" in name
    }
    refused(folder, layout, "use_dora is set and .*kv_b_proj is adapted", tensors | norms, use_dora=True)
    large = {name: tensor * 1e30 for name, tensor in tensors.items()}
    narrow = dataclasses.replace(layout, dtype=torch.float16)
    refused(folder, narrow, "beyond the range of torch.float16", large)
    norm = {"base_model.model.model.layers.1.self_attn.kv_a_layernorm.weight": torch.ones(latent)}
    refused(folder, layout, "layers.1.self_attn.kv_a_layernorm", tensors | norm, modules_to_save=["kv_a_layernorm"])
    assert len({name for name in AdapterBank(layout, 1).products if "kv_b_proj" in name}) == 3 * 2


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_experts_one_by_one(name: str, tmp_path: Path) -> None:
    """Adapters trained before transformers 5, on each expert's own modules, against the weights that they add up to.

    peft 0.21 converts them when it loads them on Mixtral, and leaves them out on Qwen2-MoE.
    """
    modules = {"mixtral": ("w1", "w3", "w2"), "qwen2_moe": ("gate_proj", "up_proj", "down_proj")}[name]
    layout = layout_of(name, tmp_path / "base")
    folder = make_adapter(name, tmp_path / "adapter", {"target_modules": ["q_proj"], "r": 2, "lora_alpha": 3})
    tensors: dict[str, Tensor] = {}
    merged = copy.deepcopy(tiny_model(name))
    for shape in layout.projections:
        if (place := shape.place) is None:
            continue
        deltas = []
        for module, size in zip(shape.modules, shape.sizes, strict=True):
            a, b = 0.3 * torch.randn(2, shape.width), 0.3 * torch.randn(size, 2)
            tensors[f"base_model.model.{module}.lora_A.weight"] = a
            tensors[f"base_model.model.{module}.lora_B.weight"] = b
            deltas.append(1.5 * b @ a)
        weight = merged.get_parameter(place.product.replace("block_sparse_moe", "mlp"))
        weight.data[place.expert] += torch.cat(deltas)
    save_file(tensors, folder / "adapter_model.safetensors")
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": list(modules)}))
    tokens = [7, 30, 4, 99, 12, 55]
    model = load_model(tmp_path / "base", dtype=torch.float32, device=CPU)
    bank = AdapterBank(layout, 1)
    bank.install(0, AdapterReader(layout, 64).read(str(folder)))
    ours = AdaptedRun(model, bank, [0]).extend([tokens])[0]
    with torch.no_grad():
        expected = merged(torch.tensor([tokens])).logits[0]
    limit = 1e-4 * expected.abs().max().item()
    assert (expected - theirs(name, None, tokens)).abs().max() > 0.01
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=limit)
    if name == "mixtral":
        torch.testing.assert_close(theirs(name, folder, tokens), expected, rtol=1e-4, atol=limit)
