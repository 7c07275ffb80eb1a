"""Weights in FP8 with a scale for each block, DeepSeek V3's published form: exact, by torch's own type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.paged_run import CPU, run_whole
from support.models.tiny_models import save
from support.models.tiny_multimodal import save_multimodal
from support.speculation.mtp_models import save_mtp
from torch import Tensor

from rootgraft.engine.errors import ModelError
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.loading.load_mtp import load_mtp

CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
TOKENS = [5, 9, 100, 7, 64, 3]


def quantised(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, factors, and what they mean, block by block."""
    values, meaning = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    scales = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scales[i, j] = weight[block].abs().max() / 448
            values[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
            meaning[block] = values[block].float() * scales[i, j]
    return values, scales, meaning


def folders(tmp_path: Path, *, mtp: bool = False) -> tuple[Path, Path, dict[str, Tensor]]:
    """A model whose projections are in FP8, the same with what they mean, and the former's tensors.

    Args:
        mtp: with an MTP module.
    """
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    if mtp:
        save_mtp("deepseek_v3", plain, shared=True)
    else:
        save("deepseek_v3", plain)
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    for name in list(tensors):
        if name.endswith("proj.weight") or "_proj_with_mqa" in name:
            values, scales, tensors[name] = quantised(tensors[name])
            stored |= {name: values, f"{name}_scale_inv": scales}
    packed.mkdir()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((plain / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(written | {"quantization_config": CONFIG}))
    return plain, packed, stored


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_in_fp8_is_the_model_that_it_means(dtype: torch.dtype, tmp_path: Path) -> None:
    plain, packed, stored = folders(tmp_path)
    assert sum(tensor.dtype is torch.float8_e4m3fn for tensor in stored.values()) > 40
    logits = [run_whole(load_model(folder, dtype=dtype, device=CPU), TOKENS) for folder in (plain, packed)]
    assert torch.equal(*logits)


def stacked_folders(tmp_path: Path) -> tuple[Path, Path, dict[str, Tensor]]:
    """The same of Step 3.7, whose files have the matrices of all experts in one tensor, with one tensor of factors."""
    plain, packed = save_multimodal("step3p7", tmp_path / "plain", "old"), tmp_path / "packed"
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    for name in [each for each in tensors if ".moe." in each and each.endswith("_proj.weight")]:
        values, scales, meaning = map(torch.stack, zip(*map(quantised, tensors[name]), strict=True))
        tensors[name] = meaning
        stored |= {name: values, f"{name}_scale_inv": scales}
    packed.mkdir()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((plain / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(written | {"quantization_config": CONFIG}))
    return plain, packed, stored


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stacked_experts_in_fp8_are_the_experts_that_they_mean(dtype: torch.dtype, tmp_path: Path) -> None:
    plain, packed, stored = stacked_folders(tmp_path)
    stacks = [name for name, each in stored.items() if each.dtype is torch.float8_e4m3fn]
    assert len(stacks) == 6 and all(stored[name].dim() == 3 for name in stacks)
    logits = [run_whole(load_model(folder, dtype=dtype, device=CPU), TOKENS) for folder in (plain, packed)]
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda scales: scales[:3],
            r"weight_scale_inv of model\.layers\.1\.mlp\.experts\.\w+_proj is of 3 experts, not 5",
        ),
        (lambda scales: scales.expand(-1, 2, -1).contiguous(), r"weight_scale_inv is F32 \[2, 1\]"),
        (lambda scales: scales * float("nan"), "weight_scale_inv has numbers that are not finite"),
    ],
)
def test_factors_of_stacked_experts_that_do_not_fit_are_refused(change, message: str, tmp_path: Path) -> None:
    _, packed, stored = stacked_folders(tmp_path)
    name = "model.layers.1.moe.up_proj.weight_scale_inv"
    save_file(stored | {name: change(stored[name])}, packed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load_model(packed, dtype=torch.float32, device=CPU)


def test_an_mtp_module_in_fp8_is_the_module_that_it_means(tmp_path: Path) -> None:
    plain, packed, stored = folders(tmp_path, mtp=True)
    assert "model.layers.2.eh_proj.weight_scale_inv" in stored
    models = [load_model(folder, dtype=torch.float32, device=CPU) for folder in (plain, packed)]
    modules = [load_mtp(folder, model, "plain") for folder, model in zip((plain, packed), models, strict=True)]
    products = [(each.join.product, *each.layer.projections) for each in modules]
    for one, other in zip(*products, strict=True):
        x = torch.randn(3, one.packed.in_features)
        assert torch.equal(one(x), other(x))


def test_factors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    _, packed, stored = folders(tmp_path)
    name = "model.layers.0.self_attn.o_proj.weight"
    for change in (
        {key: tensor for key, tensor in stored.items() if key != f"{name}_scale_inv"},
        {key: tensor for key, tensor in stored.items() if key != name},
        stored | {f"{name}_scale_inv": torch.ones(2, 1)},
    ):
        save_file(change, packed / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=f"The tensor {name} in the layout float8_blocks is malformed"):
            load_model(packed, dtype=torch.float32, device=CPU)
