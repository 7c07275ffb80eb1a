"""Weights in FP8 with a scale for each block, DeepSeek V3's published form: exact, by torch's own type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.paged_run import CPU, run_whole
from support.models.tiny_models import save
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
